"""SGLang's entry points to the CPU platform, and to what engines on any platform get.

setup.py declares them in the groups `sglang.srt.platforms` and `sglang.srt.plugins`.

This module must not import sglang: sglang resolves its platform while it is itself being imported, and on a circular
import it only logs a line and continues without the plug-in.
"""

from __future__ import annotations

import importlib
import socket
from typing import Any

import torch

from roll.platforms.gloo_device import share_gloo_device
from roll.platforms.platform import LOOPBACK, never_compile

PLATFORM_CLASS = "roll.platforms.cpu.sglang_platform:SglangCpuPlatform"


def activate() -> str | None:
    """Name of the platform class on a machine without GPUs; None on a machine with GPUs."""
    if torch.cuda.is_available():
        return None
    never_compile()
    return PLATFORM_CLASS


def sleep_while_paused() -> None:
    """Lets a paused engine wait for its next message, as `sleep_on_idle` does for an idle one.

    SGLang's scheduler polls for messages while it is paused. On a CPU that takes a core from the training
    ranks, which compute while engines that share their devices are paused.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    paused = "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine"
    HookRegistry.register(paused, _wait_for_message, HookType.AFTER)


def serve_on_loopback() -> None:
    """Lets stores that torch serves at the loopback address in this process listen there only.

    `init_process_group` with an address, which every scheduler of an engine calls, would listen on all interfaces.
    """
    module: Any = importlib.import_module("torch.distributed.rendezvous")  # the name there is also a function's
    store_cls = module.TCPStore

    def serve(host_name: str, port: int, *arguments: Any, is_master: bool = False, **options: Any) -> Any:
        if is_master and host_name == LOOPBACK:
            options["master_listen_fd"] = socket.create_server((LOOPBACK, port)).detach()
        return store_cls(host_name, port, *arguments, is_master=is_master, **options)

    module.TCPStore = serve


def use_one_gloo_device() -> None:
    """Lets the gloo groups of one rank share a network thread in an engine on a machine without GPUs."""
    if not torch.cuda.is_available():
        share_gloo_device()


def _wait_for_message(result: None, scheduler: Any) -> None:
    scheduler.maybe_sleep_on_idle()
