"""`roll watch`: serves the page of a run on loopback, and tells an open page what the run wrote since."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import sys
import threading
from base64 import b64encode
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from hmac import compare_digest
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import monotonic, thread_time
from typing import Any
from zlib import crc32

from roll.base.errors import ConfigError
from roll.report.history import histograms, lanes
from roll.report.page import LIVE_SCRIPTS, RUN_PARTS, make_page, run_curves
from roll.report.read import DIED, ENDED, WAITING, Run, of_policy, read_run
from roll.report.samples import step_groups, token_pieces
from roll.report.text import static_text, text
from roll.tools.terminal import integer, option_error
from roll.trackers.files import RUN_FILE

LOOPBACK = "127.0.0.1"

OWN_NAMES = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?", re.IGNORECASE)
"""`Host` of a request to this machine; a tunnel may have another port. A site whose name was made to point here (DNS
rebinding) sends that name."""

LIVE_SPANS = 3_000
"""Spans that are sent with each step, the newest."""

CHANGED_BY_RESUMING = {"resume_from_checkpoint", "max_steps", "source"}
"""Keys that may change when a run continues."""

WORDS = "live_running live_ended f_died live_waiting live_gone live_replaced live_reload live_lost".split()
"""Texts that the script of the page shows; most are states that `changes` returns."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `roll watch`."""
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="output_dir of a run, which may not exist yet")
    parser.add_argument("--policy", metavar="NAME", help="of several policies, the one that is shown")
    parser.add_argument("--port", type=integer(0), default=0, metavar="PORT", help="on loopback (default: a free one)")


def run(arguments: argparse.Namespace) -> int:
    """Serves until Ctrl-C.

    Raises:
        ConfigError: the port cannot be used, or the run has no such policy.
    """
    if arguments.policy and (arguments.run / RUN_FILE).is_file():  # it may be started before the run
        of_policy(read_run(arguments.run), arguments.policy)
    try:
        server = WatchServer(arguments.run, arguments.port, arguments.policy)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or "is not a port"
        raise option_error("--port", f"{arguments.port}: {reason}; leave it out to get a free one") from None
    waits = "" if arguments.run.is_dir() else ", which does not exist yet"
    with server, suppress(KeyboardInterrupt):
        print(f"watching {arguments.run}{waits}: {server.url}", flush=True)
        server.serve_forever()
    return 0


class WatchedRun:
    """The run in a folder, or a policy of it, read again when its files changed; usable from several threads.

    A page names the run that it shows by `_number`, which counts the runs that were seen here, from 1. `_rewinds`
    counts how often a run took lines back, as it does when it continues from a checkpoint.
    """

    def __init__(self, folder: Path, policy: str | None = None) -> None:
        self._folder, self._policy, self._lock = folder, policy, threading.Lock()
        self._now: Run | None = None
        self._last: Run | None = None
        self._parts: Mapping[str, str] = {}
        self._number = self._rewinds = 0
        self._stamp: object = None
        self._due = 0.0

    def page(self) -> str:
        """The page as a whole; it loads samples when they are looked at."""
        with self._lock:
            found = self._read() or Run(self._folder, status=WAITING)
            number = 0 if self._now is None else self._number
            live = {"number": number, "rewinds": self._rewinds, "version": 0}
        return make_page([found], {**live, "words": {key: text(key).html() for key in WORDS}})

    def changes(self, number: int, rewinds: int, after: int, version: int) -> Mapping[str, Any]:
        """What a page of run `number` lacks that has the values up to step `after` and a `version` of RUN_PARTS."""
        with self._lock:
            found = self._read()
            if found is None:
                return {"state": "live_gone" if number else "live_waiting"}
            if number != self._number:
                return {"state": "live_replaced"}
            since = after if rewinds == self._rewinds else -1
            newer = replace(found, rows=[row for row in found.rows if row["step"] > since])
            state = "live_ended" if found.status in ENDED else "f_died" if found.status == DIED else "live_running"
            changed = {"state": state, "rewinds": self._rewinds, "since": since, "series": run_curves(newer)}
            made = crc32(json.dumps([self._parts, found.dumped]).encode())
            if made == version:
                return changed
            history = {"lanes": lanes(found, LIVE_SPANS), "histograms": histograms(found)}
            return changed | {"version": made, "parts": self._parts, "kept": found.dumped} | history

    def samples(self, step: int) -> Mapping[str, Any]:
        """The groups of any step whose samples were kept."""
        with self._lock:
            found = self._read() or Run(self._folder)
        return step_groups(found, step, token_pieces(found))

    def _read(self) -> Run | None:
        """The run as it is now; it may be older, so that reading takes at most a tenth of a core."""
        start, used, ended = monotonic(), thread_time(), self._now is not None and self._now.status in ENDED
        stamp: list[object] = [0 if ended else start // 10]  # the status of a run that writes nothing changes too
        with suppress(OSError):
            stamp += [(file.name, (stat := file.stat()).st_mtime_ns, stat.st_size) for file in os.scandir(self._folder)]
        if stamp != self._stamp and start >= self._due:
            self._stamp = stamp
            try:
                found = read_run(self._folder)
                self._now = self._take(of_policy(found, self._policy) if self._policy else found)
            except (ConfigError, OSError):
                self._now = None
            self._due = monotonic() + 9 * (thread_time() - used)
        return self._now

    def _take(self, found: Run) -> Run:
        before, self._last = self._last, found
        if before is None or not _continues(before, found):
            self._number += 1
        elif list(found.rows[: len(before.rows)]) != list(before.rows):
            self._rewinds += 1
        self._parts = {name: make(found) for name, make in RUN_PARTS.items()}
        return found


def _continues(before: Run, after: Run) -> bool:
    """Whether the files are of the same run: the same settings, and the same first line of metrics."""
    settings = [{key: run.config[key] for key in run.config.keys() - CHANGED_BY_RESUMING} for run in (before, after)]
    return settings[0] == settings[1] and (not before.rows or before.rows[:1] == after.rows[:1])


class WatchServer(ThreadingHTTPServer):
    """Serves a run on this machine; the URL holds a random token, without which every request is refused."""

    def __init__(self, folder: Path, port: int = 0, policy: str | None = None) -> None:
        super().__init__((LOOPBACK, port), _Handler)
        self.watched, self.token = WatchedRun(folder, policy), secrets.token_urlsafe(16)
        self.url = f"http://{LOOPBACK}:{self.server_port}/{self.token}/"
        hashes = [b64encode(sha256(static_text(name).encode()).digest()).decode() for name in LIVE_SCRIPTS]
        scripts = " ".join(f"'sha256-{each}'" for each in hashes)
        self.policy = f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; connect-src 'self'"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closes its connection is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET; a request without the token, or by the name of another host, is refused whatever it asks."""

    server: WatchServer
    timeout = 30.0

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        token = self.path[1:].partition("/")[0]
        own = OWN_NAMES.fullmatch(self.headers.get("Host", ""))
        if own and compare_digest(token.encode(), self.server.token.encode()):
            return True
        self.send_error(HTTPStatus.FORBIDDEN)
        return False

    def do_GET(self) -> None:  # noqa: N802  (http.server's name)
        watched, path = self.server.watched, self.path.removeprefix(f"/{self.server.token}")
        if path == "/":
            self._send("text/html", watched.page())
        elif known := re.fullmatch(r"/changes/(\d{1,9})/(\d{1,9})/(-?\d{1,15})/(\d{1,10})", path):
            self._send("application/json", json.dumps(watched.changes(*map(int, known.groups()))))
        elif known := re.fullmatch(r"/samples/(\d{1,9})", path):
            self._send("application/json", json.dumps(watched.samples(int(known[1]))))
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send(self, kind: str, body: str) -> None:
        content = body.encode(errors="replace")
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", self.server.policy)
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """A request prints nothing."""
