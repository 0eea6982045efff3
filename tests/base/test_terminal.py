"""The log of a command, tables in a pipe, and Ctrl-C before a run has started anything."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.tiny_math.problems import write_problems
from roll.base.terminal import configure_logging, end_now, handle_interrupt, make_console
from tests.configs.samples import SFT, write

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def restored_log() -> Iterator[None]:
    root = logging.getLogger("roll")
    before = root.handlers
    yield
    root.handlers = before


def test_a_pipe_gets_lines_of_any_length() -> None:
    stream = io.StringIO()
    make_console(stream).print("word " * 200)
    assert stream.getvalue().count("\n") == 1


def test_messages_have_the_seconds_since_the_start_and_a_level_where_it_matters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging(tmp_path / "logs")
    logging.getLogger("roll.test").info("starting %s", "a very long name " * 20)
    logging.getLogger("roll.test").warning("careful")
    first, second = capsys.readouterr().out.splitlines()
    seconds, _, message = first.strip().partition(" s  ")
    assert float(seconds) >= 0 and message.startswith("starting a very long") and len(message) > 300
    assert second.endswith(" s  warning: careful")
    assert "WARNING roll.test: careful" in (tmp_path / "logs" / "driver.log").read_text()


def test_a_log_file_on_a_full_disk_ends_with_one_line(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(small_disk / "logs")
    fill(small_disk)
    for _ in range(3):
        logging.getLogger("roll.test").info("step " + "x" * 5000)
    captured = capsys.readouterr()
    assert captured.out.count("driver.log ends here: [Errno 28] No space left on device") == 1
    assert captured.out.count("step xxx") == 3 and captured.err == ""


def fill(folder: Path) -> None:
    """Leaves no space on the disk of a folder."""
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def test_ctrl_c_calls_the_handler_and_raises_nothing_until_the_block_ends() -> None:
    calls: list[int] = []
    with handle_interrupt(lambda: calls.append(1)):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    assert len(calls) == 2
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


def test_a_process_that_ignores_ctrl_c_goes_on_ignoring_it() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with handle_interrupt(end_now):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_ending_now_ends_the_processes_below_too() -> None:
    code = (
        "import subprocess, sys; from roll.base.terminal import end_now; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(10_000)']); "
        "print(child.pid, flush=True); end_now('over')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 130 and run.stderr == "\nover\n"
    status = Path(f"/proc/{int(run.stdout)}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"


def test_ctrl_c_during_imports_ends_a_run_at_once_and_without_a_traceback(tmp_path: Path, tiny_model_dir: Path) -> None:
    write_problems(tmp_path, seed=3, train=8, val=8, levels=(1,))
    keys = ["platform=cpu", "num_devices_per_node=2", f"pretrain={tiny_model_dir}", f"output_dir={tmp_path}/run"]
    keys.append(f"actor_train.data_args.file_name={tmp_path}/train.jsonl")
    run = subprocess.Popen(
        [sys.executable, "-m", "roll", "run", str(write(tmp_path, SFT)), *keys],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert run.stdout is not None
    printed = ""
    for line in run.stdout:
        printed += line
        if "importing torch" in line:
            break
    time.sleep(0.2)
    os.killpg(run.pid, signal.SIGINT)
    rest, errors = run.communicate()
    assert run.returncode == 130, printed + rest + errors
    assert errors == "\ninterrupted before anything was started\n"
    assert json.loads((tmp_path / "run" / "health.json").read_text())["status"] == "interrupted"
