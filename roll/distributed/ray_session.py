"""Starts Ray for a run, or joins the Ray that RAY_ADDRESS names; Ray's files of a run are in a folder of its own."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray._private import auto_init_hook, services
from ray._private import utils as ray_utils
from ray._private import worker as ray_worker
from ray.job_config import JobConfig

from roll.configs.devices.system_envs import joins_ray
from roll.distributed.calls.remote_errors import RAY_GUESSES
from roll.distributed.leftovers import make_session_folder, remove_leftovers, remove_session
from roll.distributed.processes import ProcessGroup, has_ended, import_path
from roll.platforms.platform import LOOPBACK

if TYPE_CHECKING:
    from roll.configs.run_options import ProcessOptions

CPU_SLOT = "cpu_slot"
"""Ray resource that is one device on platform cpu; a node joined by hand declares it with `ray start --resources`."""

OBJECT_STORE_BYTES = 1 << 29
"""Enough for the batches of a step; the store spills to disk beyond it."""

PROBE_TIMEOUT_S = 5.0
"""A running Ray answers at once."""

AUTHENTICATION = TOKEN, TOKEN_FILE, _ = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"
"""Environment variables with the token that a process needs to call Ray, its file, and whether Ray wants one."""


_raylet: Any = ray._raylet

RAY_PROCESSES = ("gcs_server", "raylet")
"""Processes without which Ray ends; the first takes the second along within a minute."""

OPTIONS: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}

HTTP2_SETTINGS = b"\4"
"""Type of the first frame that each side of a gRPC connection sends."""

HTTP2_START = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + HTTP2_SETTINGS + bytes(5)
"""Beginning of a gRPC connection: the preface of HTTP/2 and settings without entries."""

UNSET = "unset RAY_ADDRESS to start Ray on this machine"


class RayStartError(RuntimeError):
    """Ray could not be started or joined; the message names the reason and the remedy."""


class RunRay:
    """What the Ray of a run has outside Ray: a group of processes, a folder that is closed to other users, a token."""

    def __init__(self) -> None:
        self._folder = make_session_folder()
        self.folder = self._folder / "ray"
        self.group = ProcessGroup()
        self.processes: dict[str, psutil.Process] = {}
        self._environment = {name: os.environ.get(name) for name in AUTHENTICATION}
        if not any(map(os.environ.get, (TOKEN, TOKEN_FILE))):
            token = self._folder / "token"
            token.touch(mode=0o600)
            token.write_text(secrets.token_hex(32))
            os.environ[TOKEN_FILE] = str(token)
        _raylet.AuthenticationTokenLoader.instance().reset_cache()

    def watch(self) -> None:
        """Remembers the processes without which Ray ends."""
        if ray_worker._global_node is not None:
            running = ray_worker._global_node.all_processes
            self.processes = {name: psutil.Process(running[name][0].process.pid) for name in RAY_PROCESSES}

    def end(self) -> None:
        """Kills Ray's processes and removes its files."""
        self.group.end()
        remove_session(self._folder)
        for name, value in self._environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        _raylet.Config.initialize("")  # with that environment
        _raylet.AuthenticationTokenLoader.instance().reset_cache()


_own: RunRay | None = None
"""The Ray that this process has started."""


class DriverPath(JobConfig):
    """Workers search modules where the driver does, in its order.

    Ray would let them search the current folder first, where a file may have the name of a standard module.
    """

    def _runtime_env_has_working_dir(self) -> bool:
        return True  # Ray then adds neither the current folder nor that of the driver's script


def start_ray(config: ProcessOptions, platform_name: str, num_devices: int) -> None:
    """Starts Ray on this machine, which offers `num_devices` slots or GPUs, or joins the one that RAY_ADDRESS names.

    Raises:
        RayStartError: with the reason, at once.
    """
    if ray.is_initialized():
        return
    remove_leftovers()
    _close_token_file()
    auto_init_hook.enable_auto_connect = False  # a thread that calls Ray after its end would start another one
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default of 15 yields to every other process
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")  # gcs_server keeps 4 KB for each call otherwise
    address = ray_address() if joins_ray() else None
    if address is not None:
        probe_address(address)
    with (
        replaced(ray_utils, "set_sigterm_handler", lambda handler: None),  # Ray's handler would end the process
        replaced(_raylet, "CoreWorker", functools.partial(_make_core_worker, _raylet.CoreWorker)),
    ):
        try:
            options = {**OPTIONS, "job_config": DriverPath(runtime_env={"env_vars": {"PYTHONPATH": import_path()}})}
            if address is not None:
                ray.init(address=address, **options)
            else:
                _start_own(platform_name, num_devices, options)
        except Exception as error:  # Ray raises Exception itself where a process of its own does not start in time
            stop_ray()
            where = "start Ray on this machine" if address is None else f"join the Ray at RAY_ADDRESS={address}"
            advice = "; the machine may be too busy: try again" if "timed out" in str(error) else ""
            cause = f"{type(error).__name__}: {error}{advice}"
            raise RayStartError(f"cannot {where} for run {config.exp_name!r}: {cause}") from error
    _print_no_guesses()


def _start_own(platform_name: str, num_devices: int, options: dict[str, Any]) -> None:
    global _own
    _own = own = RunRay()
    options.update(address="local")  # without it Ray would join any Ray that runs on this machine
    options.update(include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, _temp_dir=str(own.folder))
    options.update(num_cpus=len(os.sched_getaffinity(0)), _node_ip_address=LOOPBACK)
    options.update({"num_gpus": num_devices} if platform_name == "cuda" else {"resources": {CPU_SLOT: num_devices}})

    class InGroup(services.ConsolePopen):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, process_group=own.group.id, **kwargs)

    with (
        replaced(services, "resolve_ip_for_localhost", lambda host: host),  # no port of the run is open to others
        replaced(services, "ConsolePopen", InGroup),
    ):
        ray.init(**options)
    own.watch()


def ray_processes() -> dict[str, psutil.Process]:
    """The processes of the Ray that this process has started, without which it ends, by name."""
    return {} if _own is None else _own.processes


def dead_ray_process() -> str | None:
    """Name of one of them that has died: without it most calls of Ray block until Ray ends this process."""
    return next((name for name, process in ray_processes().items() if has_ended(process)), None)


def _make_core_worker(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Makes Ray's client, and replaces its handler of SIGTERM, which aborts the process, before a signal arrives."""
    handler, before = signal.getsignal(signal.SIGTERM), signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        return make(*args, **kwargs)
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def replaced(module: ModuleType, name: str, value: object) -> Iterator[None]:
    """Replaces a function or class of Ray that decides what Ray has no option for."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _print_no_guesses() -> None:
    """Keeps Ray from printing what may have killed a process: the run says which process died, and where its log is."""
    printed = ray_worker.print_to_stdstream
    if hasattr(printed, "__wrapped__"):  # by an earlier start in this process
        return

    @functools.wraps(printed)
    def print_others(data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if not any(RAY_GUESSES.search(line) for line in data.get("lines", [])):
            printed(data, *args, **kwargs)

    ray_worker.print_to_stdstream = print_others


def _close_token_file() -> None:
    """Closes the token of this user, which Ray writes with the mode of any file, to others."""
    token = Path(os.path.expanduser("~/.ray/auth_token"))
    with contextlib.suppress(OSError):
        if token.stat().st_mode & 0o077:
            token.chmod(0o600)


def stop_ray() -> None:
    """Ends the processes that `start_ray` started, if any, and removes the files of their session."""
    global _own
    ray.shutdown()
    own, _own = _own, None
    if own is not None:
        own.end()
        remove_leftovers(wait=True)


def ray_address() -> str:
    """The address, as host:port, of the Ray that RAY_ADDRESS names.

    Raises:
        RayStartError: it names none.
    """
    given = os.environ["RAY_ADDRESS"].strip()
    address = services.find_bootstrap_address(None) if given == "auto" else given
    if address is None:
        raise RayStartError(f"RAY_ADDRESS=auto: no Ray was started with `ray start` on this machine; {UNSET}")
    parts = re.fullmatch(r"(\[[\w:.%]+\]|[\w.-]+):([0-9]{1,5})", address)
    if parts is None or not 0 < int(parts[2]) < 1 << 16:
        raise RayStartError(
            f"RAY_ADDRESS={given!r} is not HOST:PORT of a `ray start --head`, with an IPv6 address in brackets; {UNSET}"
        )
    return address


def probe_address(address: str) -> None:
    """Checks that a Ray answers at `host:port`; Ray itself would retry for minutes.

    Raises:
        RayStartError: none does within PROBE_TIMEOUT_S.
    """
    host, _, port = address.rpartition(":")
    problem = f"no answer within {PROBE_TIMEOUT_S:g} s"

    def connect() -> None:
        nonlocal problem
        try:
            with socket.create_connection((host.strip("[]"), int(port)), PROBE_TIMEOUT_S) as connection:
                connection.sendall(HTTP2_START)
                answers = connection.recv(4)[3:] == HTTP2_SETTINGS or os.environ.get("RAY_USE_TLS", "0") != "0"
                problem = "" if answers else "another program listens there"
        except TimeoutError:
            pass
        except OSError as error:
            problem = error.strerror or str(error)

    thread = threading.Thread(target=connect, daemon=True)  # looking up a name cannot be interrupted
    thread.start()
    thread.join(PROBE_TIMEOUT_S)
    if problem:
        raise RayStartError(
            f"no Ray answers at RAY_ADDRESS={address} ({problem}); start one there with `ray start --head`, or {UNSET}"
        )
