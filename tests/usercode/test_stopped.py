"""How long a process may be stopped by a signal, and what does not count."""

from __future__ import annotations

import signal
import subprocess

from roll.usercode.stopped import StopTimes, is_stopped


def test_a_process_is_overdue_once_it_was_stopped_for_the_grace_without_a_pause() -> None:
    stopped = {"a"}
    times = StopTimes(stopped.__contains__, grace_s=10.0, gap_s=5.0)
    assert [times.overdue(now, "ab") for now in range(100, 110)] == [[]] * 10
    stopped.add("b")
    assert times.overdue(110, "ab") == ["a"]
    stopped.remove("a")
    assert times.overdue(111, "ab") == [], "it runs again"
    stopped.add("a")
    assert [times.overdue(now, "ab") for now in range(112, 120)] == [[]] * 8
    assert times.overdue(120, "ab") == ["b"]


def test_time_in_which_the_driver_was_stopped_too_does_not_count() -> None:
    """Ctrl-Z stops a whole run; when it goes on, the driver may look before the others run."""
    times = StopTimes("a".__contains__, grace_s=10.0, gap_s=5.0)
    times.overdue(100, "a")
    assert times.overdue(700, "a") == []
    assert [times.overdue(700 + seconds, "a") for seconds in (4, 8, 12)] == [[], [], ["a"]]


def test_a_process_is_stopped_between_the_signals_that_stop_and_continue_it() -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        assert not is_stopped(child.pid)
        for number, stopped in ((signal.SIGSTOP, True), (signal.SIGCONT, False)):
            child.send_signal(number)
            while is_stopped(child.pid) != stopped:
                pass
    finally:
        child.kill()
        child.wait()
    assert not is_stopped(child.pid)
