"""Health is reported during a run and at its end, also for components that do not answer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from roll.base.errors import ConfigError, RunInterrupted
from roll.configs.pipeline import RLVRConfig
from roll.pipeline.health import HealthFile, lock_folders, watched
from roll.trackers.files import free_bytes
from tests.pipeline.my_parts import Listening


def test_a_run_keeps_others_out_of_its_folder_until_it_ends(tmp_path):
    config = RLVRConfig(output_dir=str(tmp_path / "run"))
    with lock_folders(config):
        message = rf"output_dir: .*run is that of a run which is alive, process {os.getpid()}; wait until it ends"
        with pytest.raises(ConfigError, match=message), lock_folders(config):
            pass
    with lock_folders(config):
        holder = subprocess.run([sys.executable, "-c", HOLD, str(tmp_path / "other")], capture_output=True, text=True)
    assert holder.returncode == -signal.SIGKILL
    with lock_folders(RLVRConfig(output_dir=str(tmp_path / "other"))):
        pass


def test_a_run_keeps_others_out_of_the_folder_of_its_checkpoints(tmp_path):
    shared = str(tmp_path / "shared")
    first, second = (RLVRConfig(output_dir=str(tmp_path / name), checkpoint_dir=shared) for name in ("a", "b"))
    with lock_folders(first):
        message = rf"checkpoint_dir: {shared} is that of a run which is alive, process {os.getpid()}; .* checkpoint_dir"
        with pytest.raises(ConfigError, match=message), lock_folders(second):
            pass
    with lock_folders(second):
        pass
    with lock_folders(RLVRConfig(output_dir=str(tmp_path / "c"))):
        other = RLVRConfig(output_dir=str(tmp_path / "d"), checkpoint_dir=str(tmp_path / "c" / "checkpoints"))
        with pytest.raises(ConfigError, match="checkpoint_dir: .*/c/checkpoints is that of a run"), lock_folders(other):
            pass


def test_checkpoints_may_be_in_output_dir_itself(tmp_path):
    (tmp_path / "linked").symlink_to(tmp_path)
    with lock_folders(RLVRConfig(output_dir=str(tmp_path), checkpoint_dir=str(tmp_path / "linked"))):
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["linked"]


HOLD = """
import os, sys
from roll.configs.pipeline import RLVRConfig
from roll.pipeline.health import lock_folders
with lock_folders(RLVRConfig(output_dir=sys.argv[1])):
    os.kill(os.getpid(), 9)
"""
"""A run that is killed."""


async def well() -> dict[str, Any]:
    return {"driver": {"step": 3}}


def watch(read: Any, monitor: Any, seconds: float = 0.05, error: BaseException | None = None) -> None:
    async def run() -> None:
        async with watched(read, monitor, interval_s=0.01):
            await asyncio.sleep(seconds)
            if error:
                raise error

    asyncio.run(run())


def test_health_is_reported_during_a_run_and_at_its_end():
    monitor = Listening(None)
    watch(well, monitor)
    assert [health["status"] for health in monitor.heard[:2]] == ["running", "running"]
    assert monitor.heard[0]["driver"] == {"step": 3} and monitor.heard[0]["time"] > 1e9
    assert (monitor.heard[-1]["status"], monitor.heard[-1]["driver"]) == ("finished", {"step": 3})


def test_a_failed_run_is_reported_as_failed_and_raises_its_error():
    monitor = Listening(None)
    with pytest.raises(ValueError, match="broken"):
        watch(well, monitor, error=ValueError("broken"))
    assert monitor.heard[-1]["status"] == "failed"


def test_a_component_that_does_not_answer_is_reported_and_read_again():
    monitor, calls = Listening(None), []

    async def silent() -> dict[str, Any]:
        calls.append(1)
        await asyncio.sleep(60)
        return {}

    watch(silent, monitor, seconds=0.1)
    assert monitor.heard[0]["error"] == "no answer within 0.01 s"
    assert len(calls) > 1


def test_a_component_that_fails_is_reported_with_its_error():
    async def broken() -> dict[str, Any]:
        raise RuntimeError("the process died")

    monitor = Listening(None)
    watch(broken, monitor)
    assert monitor.heard[0]["error"] == monitor.heard[-1]["error"] == "RuntimeError: the process died"


def test_a_monitor_that_raises_does_not_end_the_run(caplog):
    class Broken:
        def report(self, health: Any) -> None:
            raise OSError("no space left")

    watch(well, Broken())
    assert "the monitor failed" in caplog.text and "no space left" in caplog.text


def test_the_file_holds_the_last_report(tmp_path):
    config = RLVRConfig(output_dir=str(tmp_path / "run"))
    watch(well, HealthFile(config))
    assert json.loads((tmp_path / "run" / "health.json").read_text())["status"] == "finished"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["health.json"]


def test_a_report_of_a_running_run_is_valid_for_half_a_minute(tmp_path):
    health, before = HealthFile(RLVRConfig(output_dir=str(tmp_path))), time.time()
    health.begin("importing")
    report = json.loads((tmp_path / "health.json").read_text())
    assert report["valid_until"] - report["time"] == 30 and before - 1 <= report["time"] <= time.time()
    health.end("failed")
    assert "valid_until" not in json.loads((tmp_path / "health.json").read_text())


def test_on_a_full_disk_the_last_report_is_written_over_the_one_before(small_disk):
    health = HealthFile(RLVRConfig(output_dir=str(small_disk)))
    health.begin("importing")
    (small_disk / "filler").write_bytes(bytes(free_bytes(small_disk)))
    health.report({"status": "failed", "time": 1.0})
    assert json.loads((small_disk / "health.json").read_text()) == {"status": "failed", "time": 1.0}


def test_a_run_that_ended_before_its_own_last_report_gets_one(tmp_path):
    health = HealthFile(RLVRConfig(output_dir=str(tmp_path)))
    health.begin("importing")
    health.end("interrupted")
    health.end("failed")
    assert json.loads((tmp_path / "health.json").read_text())["status"] == "interrupted"


@pytest.mark.parametrize("error", [RunInterrupted(None), asyncio.CancelledError()])
def test_an_interrupted_run_is_reported_as_such(error):
    monitor = Listening(None)
    with pytest.raises(type(error)):
        watch(well, monitor, error=error)
    assert monitor.heard[-1]["status"] == "interrupted"


def test_a_forked_process_counts_with_the_memory_that_it_has_of_its_own():
    code = (
        "import os, time; from roll.pipeline.health import resident_bytes; kept = bytearray(2**28); "
        "before = resident_bytes(); pid = os.fork() or time.sleep(60); time.sleep(0.2); "
        "print(resident_bytes() - before); os.kill(pid, 9)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert abs(int(found)) < 2**25
