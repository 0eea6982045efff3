"""What the server of `roll watch` answers, to whom, and what it says of a run that goes on, ends, or is replaced."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from roll.cli import main
from roll.report import watch
from roll.report.read import Run, read_run
from roll.report.text import TEXTS
from roll.report.watch import WatchedRun, WatchServer
from tests.report.runs import append, row, sample, write_run
from tests.report.test_page import HOSTILE, of_policies, payload


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WatchServer]:
    with WatchServer(write_run(tmp_path / "run", steps=3, samples=[sample(0, 1.0, 1.0, [1, 2])])) as started:
        thread = threading.Thread(target=started.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield started
        started.shutdown()
        thread.join()


def ask(
    server: WatchServer, path: str, method: str = "GET", host: str | None = None
) -> tuple[int, http.client.HTTPMessage, str]:
    """Status, headers and body; `TOKEN` in the path is the server's."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    connection.request(
        method, path.replace("TOKEN", server.token), headers={"Host": host or f"127.0.0.1:{server.server_port}"}
    )
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read().decode()


@pytest.mark.parametrize(
    ("path", "method", "host", "status"),
    [
        ("/TOKEN/", "GET", None, 200),
        ("/TOKEN/", "GET", "localhost:9000", 200),
        ("/TOKEN/", "GET", "evil.example", 403),
        ("/TOKEN/", "GET", "127.0.0.1.evil.example", 403),
        ("/TOKEN/", "POST", None, 501),
        ("/TOKEN/", "HEAD", None, 501),
        ("/TOKEN", "GET", None, 404),
        ("/TOKEN/run.json", "GET", None, 404),
        ("/TOKEN/../run.json", "GET", None, 404),
        ("/TOKEN/samples/x", "GET", None, 404),
        ("/TOKEN/changes/1/0/3", "GET", None, 404),
        ("/", "GET", None, 403),
        ("/favicon.ico", "GET", None, 403),
        ("/wrong/changes/0/0/-1/0", "GET", None, 403),
        ("/wrong/", "POST", None, 403),
        ("/%C3%A9/", "GET", None, 403),
    ],
)
def test_only_a_get_with_the_token_and_a_name_of_this_machine_is_answered(
    server: WatchServer, path: str, method: str, host: str | None, status: int
) -> None:
    assert ask(server, path, method, host)[0] == status
    assert server.server_address[0] == "127.0.0.1"


def test_the_page_is_that_of_the_report_and_may_run_only_its_own_scripts(server: WatchServer) -> None:
    _, headers, page = ask(server, "/TOKEN/")
    assert "3 steps" in page and "0.2 → 0.2" in page
    assert payload(page)["runs"][0]["step"] == [0, 1, 2, 3]
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "script-src 'sha256-" in policy and "connect-src 'self'" in policy
    assert headers["Cache-Control"] == "no-store"


def test_samples_of_a_step_are_loaded_when_asked_for(server: WatchServer) -> None:
    assert payload(ask(server, "/TOKEN/")[2])["samples"] == [[]]
    step = json.loads(ask(server, "/TOKEN/samples/3")[2])
    assert [group["id"] for group in step["groups"]] == ["p0"]
    assert json.loads(ask(server, "/TOKEN/samples/2")[2])["groups"] == []


def test_an_open_page_gets_what_it_lacks_and_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path, steps=3, status=None)
    watched = unpaced(folder, monkeypatch)
    first = watched.changes(1, 0, 2, 0)
    assert first["state"] == "live_running" and first["series"]["step"] == [3]
    assert "3 steps" in first["parts"]["head"] and set(first["parts"]) == {*watch.RUN_PARTS}
    nothing = watched.changes(1, 0, 3, first["version"])
    assert nothing["series"]["step"] == [] and "parts" not in nothing
    append(folder, row(4) | {"reward/new": 0.5})
    (folder / "events.jsonl").write_text(json.dumps({"component": "x", "message": HOSTILE}) + "\n")
    news = watched.changes(1, 0, 3, first["version"])
    assert news["series"]["step"] == [4] and news["series"]["data"]["reward/new"] == [0.5]
    assert "4 steps" in news["parts"]["head"]
    assert "&lt;/script&gt;" in news["parts"]["findings"] and "<script>" not in news["parts"]["findings"]


def unpaced(folder: Path, monkeypatch: pytest.MonkeyPatch, policy: str | None = None) -> WatchedRun:
    """A run, or a policy of it, that is read at once when its files have changed."""
    for name in ("monotonic", "thread_time"):
        monkeypatch.setattr(watch, name, lambda: 0.0)
    return WatchedRun(folder, policy)


def test_one_of_several_policies_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    policies = {"policies": {"code": {"tags": ["code"]}, "math": {"tags": ["math"]}}}
    folder = write_run(tmp_path, steps=3, spoil=of_policies, status=None, config=policies)
    watched = unpaced(folder, monkeypatch, "math")
    assert payload(watched.page())["runs"][0]["name"] == "small: math"
    append(folder, row(4) | {"code/rollout/reward_mean": 0.25, "math/rollout/reward_mean": 0.5})
    news = watched.changes(1, 0, 3, 0)["series"]
    assert news["step"] == [4] and news["data"]["rollout/reward_mean"] == [0.5]
    assert main(["watch", str(folder), "--policy", "art"]) == 2
    assert "--policy: art: the policies are code, math" in " ".join(capsys.readouterr().err.split())


def test_a_policy_is_watched_before_its_run_has_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WatchServer, "serve_forever", lambda _: None)
    assert main(["watch", str(tmp_path), "--policy", "math"]) == 0


EVENTS: dict[str, tuple[Callable[[Path], object], str, list[int] | None]] = {
    "finishes": (lambda run: write_run(run, steps=3), "live_ended", []),
    "dies": (lambda run: (run / "health.json").write_text('{"status": "running", "valid_until": 1.0}'), "f_died", []),
    "vanishes": (shutil.rmtree, "live_gone", None),
    "has other settings": (lambda run: write_run(run, 3, status=None, config={"seed": 8}), "live_replaced", None),
    "starts over": (
        lambda run: write_run(run, 3, lambda row, _: row.update({"time/step": 2.0}), status=None),
        "live_replaced",
        None,
    ),
    "resumes before step 1": (
        lambda run: write_run(run, 2, status=None, config={"resume_from_checkpoint": True, "max_steps": 9}),
        "live_running",
        [0, 1, 2],
    ),
}


@pytest.mark.parametrize(("happens", "state", "steps"), EVENTS.values(), ids=EVENTS)
def test_what_a_page_is_told_when_something_happens_to_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    happens: Callable[[Path], None],
    state: str,
    steps: list[int] | None,
) -> None:
    folder = write_run(tmp_path / "run", steps=3, status=None)
    watched = unpaced(folder, monkeypatch)
    assert watched.changes(1, 0, 3, 0)["state"] == "live_running"
    happens(folder)
    told = watched.changes(1, 0, 3, 0)
    assert told["state"] == state
    assert told.get("series", {}).get("step") == steps


def test_a_page_waits_for_a_run_that_has_written_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "later"
    watched = unpaced(folder, monkeypatch)
    page = watched.page()
    assert payload(page)["live"]["number"] == 0 and TEXTS["waiting"][0] in page and TEXTS["no_steps"][0] in page
    assert watched.changes(0, 0, -1, 0) == {"state": "live_waiting"}
    write_run(folder, steps=1, status=None)
    (folder / "metrics.jsonl").unlink()
    assert watched.changes(0, 0, -1, 0) == {"state": "live_replaced"}
    assert payload(watched.page())["live"]["number"] == 1
    append(folder, row(1))
    assert watched.changes(1, 0, -1, 0)["series"]["step"] == [1]


def test_reading_takes_at_most_a_tenth_of_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def takes_a_second(folder: Path) -> Run:
        clock[0] += 1
        return read_run(folder)

    for name in ("monotonic", "thread_time"):
        monkeypatch.setattr(watch, name, lambda: clock[0])
    monkeypatch.setattr(watch, "read_run", takes_a_second)
    watched = WatchedRun(write_run(tmp_path, steps=3, status=None))
    watched.page()
    append(tmp_path, row(4))
    for clock[0], steps in ((9.9, []), (10.0, [4])):
        assert watched.changes(1, 0, 3, 0)["series"]["step"] == steps


def test_the_command_prints_its_url_and_ends_quietly_at_ctrl_c(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3)
    code = (
        "import sys; from roll.cli import main; "
        f"print(main(['watch', {str(tmp_path)!r}]), sorted({{'torch', 'ray'}} & {{*sys.modules}}))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        url = process.stdout.readline().split()[-1]
        with urllib.request.urlopen(url) as answer:
            assert "3 steps" in answer.read().decode()
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "0 []\n"
        assert process.stderr.read() == ""


@pytest.mark.parametrize(("port", "reason"), [(None, "Address already in use"), (70_000, "is not a port")])
def test_a_port_that_cannot_be_used_is_explained(
    server: WatchServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], port: int | None, reason: str
) -> None:
    port = port or server.server_port
    assert main(["watch", str(tmp_path), "--port", str(port)]) == 2
    assert capsys.readouterr().err == f"--port: {port}: {reason}; leave it out to get a free one\n"
