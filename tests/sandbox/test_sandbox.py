"""Hostile programs: none passes a test that it does not solve, and none reaches anything outside of its process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from roll.sandbox.client import Job, Limits, Sandbox, available_isolation
from roll.sandbox.values import NotPlain, decode, encode

pytestmark = pytest.mark.slow

LIMITS = Limits(test_s=300.0, total_s=900.0, memory_bytes=256 * 2**20, output_bytes=2**16)
SHORT = replace(LIMITS, test_s=0.1, total_s=0.5)
"""For programs that would not end on their own."""

ISOLATIONS = [
    pytest.param(
        "namespaces",
        marks=pytest.mark.skipif(available_isolation()[0] != "namespaces", reason="the kernel allows no namespaces"),
    ),
    "processes",
]


class Sandboxes:
    """A sandbox for each isolation, in one event loop, kept between tests."""

    def __init__(self) -> None:
        self.loop = asyncio.Runner()
        self._kept: dict[str, Sandbox] = {}

    def of(self, isolation: Any) -> Sandbox:
        """The sandbox of an isolation; its server starts with its first job."""
        if isolation not in self._kept:
            self._kept[isolation] = Sandbox(isolation)
        return self._kept[isolation]

    def close(self) -> None:
        """Ends the servers."""
        for sandbox in self._kept.values():
            sandbox.close()
        self.loop.close()


SANDBOXES: list[Sandboxes] = []


@pytest.fixture(scope="module", autouse=True)
def _sandboxes() -> Iterator[None]:
    SANDBOXES.append(Sandboxes())
    yield
    SANDBOXES.pop().close()


def ran(job: Job, isolation: Any = None, limits: Limits = LIMITS) -> list[dict[str, Any]]:
    """Results of a job; the same server answers the next job, and nothing that the job started is left."""
    isolation = isolation or available_isolation()[0]
    sandbox = SANDBOXES[0].of(isolation)

    async def run() -> list[dict[str, Any]]:
        results = await sandbox.run(job, limits)
        assert sandbox._server is not None
        server = psutil.Process(sandbox._server.pid)
        [after] = await sandbox.run(Job("print('alive')", "stdio", inputs=[""]), Limits())
        assert after == {"state": "ended", "text": "alive\n"}
        assert sandbox._server.pid == server.pid
        assert len(server.children(recursive=True)) == (isolation != "processes")
        return results

    return SANDBOXES[0].loop.run(run())


def output(code: str, isolation: Any = None, limits: Limits = LIMITS) -> dict[str, Any]:
    [result] = ran(Job(code, "stdio", inputs=[""]), isolation, limits)
    return result


STDIO = {
    "raises": ("raise ValueError('no')", "failed"),
    "syntax error": ("def (", "failed"),
    "null byte": ("print(1)\0", "failed"),
    "infinite loop": ("while True: pass", "timeout"),
    "sleep": ("import time\ntime.sleep(60)", "timeout"),
    "waits for input that never comes": ("import os\nr, w = os.pipe()\nos.read(r, 1)", "timeout"),
    "fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "timeout"),
    "floods stdout": ("while True: print('x' * 10000)", "output"),
    "floods stdout without Python": ("import os\nwhile True: os.write(1, b'x' * 100000)", "output"),
    "floods stderr": ("import sys\nfor _ in range(3000): sys.stderr.write('x' * 10000)\nprint(1)", "ended"),
    "eats memory": ("a = []\nwhile True: a.append(bytearray(10**7))", "failed timeout"),
    "one large block": ("a = bytearray(10**9)", "failed"),
    "fills its folder": ("f = open('big', 'wb')\nwhile True: f.write(b'x' * 10**6); f.flush()", "failed"),
    "opens files": ("a = []\nwhile True: a.append(open('/dev/null'))", "failed"),
    "ignores SIGTERM": (
        "import signal\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except OSError: pass\nwhile True: pass",
        "timeout",
    ),
    "closes stdout": ("import os\nos.close(1)\nwhile True: pass", "timeout"),
    "exits early": ("import os\nos._exit(0)", "ended"),
    "SystemExit(0)": ("raise SystemExit(0)", "ended"),
    "SystemExit(3)": ("raise SystemExit(3)", "failed"),
    "SystemExit of another value": ("class E(BaseException): pass\nraise SystemExit(E())", "failed"),
    "patches os._exit": ("import os\nos._exit = lambda status: None\nraise ValueError", "ended failed"),
    "patches builtins": ("import builtins\nbuiltins.__dict__.clear()", "failed"),
    "removes modules": ("import sys\nsys.modules.clear()\nsys.stdout = None", "ended failed"),
    "threads that never end": (
        "import threading\nthreading.Thread(target=lambda: threading.Event().wait()).start()",
        "timeout",
    ),
    "recursion": ("f = lambda n: f(n + 1)\nf(0)", "failed"),
    "deep recursion in C": (
        "import sys\nsys.setrecursionlimit(10**9)\nclass A:\n    def __getattr__(self, n): return getattr(self, n)\n"
        "A().x",
        "failed timeout",
    ),
    "huge number": ("print(10 ** 100000)", "failed"),
    "huge power": ("x = 9 ** (9 ** 9)", "timeout failed"),
    "kills itself": ("import os\nos.kill(os.getpid(), 9)", "failed ended"),
    "kills its parent": ("import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(0.1)", "ended failed"),
    "kills everything": (
        "import os\ntry: os.kill(-1, 9)\nexcept OSError: pass\nprint('left')",
        "ended failed",
    ),
    "double fork": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(60)\n"
        "    os._exit(0)\nprint('parent')",
        "ended",
    ),
    "crashes the interpreter": ("import ctypes\nctypes.string_at(0)", "failed"),
    "raises its limits": (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "failed",
    ),
}


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize(("code", "states"), STDIO.values(), ids=STDIO.keys())
def test_a_hostile_program_ends_in_time_and_the_next_one_runs(code: str, states: str, isolation: str) -> None:
    result = output(code, isolation, SHORT if "timeout" in states else LIMITS)
    assert result["state"] in states.split()


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize(
    "code",
    [
        "import socket\ns = socket.create_connection(('127.0.0.1', {port}), 1)\nprint('out')",
        "import socket\nsocket.getaddrinfo('localhost.example.com', 80)\nprint('out')",
        "import socket\nsocket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))\nprint('out')",
        "import socket\ns = socket.socket(socket.AF_UNIX)\ns.bind('\\0roll')\nprint('out')",
        "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{port}', timeout=1)\nprint('out')",
    ],
)
def test_no_socket_is_opened(code: str, isolation: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        result = output(code.replace("{port}", str(server.getsockname()[1])), isolation)
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert (result["state"], result["text"]) == ("failed", "")


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give programs another user where there are no namespaces")
@pytest.mark.parametrize("action", ["os.remove(path)", "open(path, 'w').write('x')", "os.rename(path, '/tmp/x')"])
def test_files_of_others_cannot_be_changed(action: str, isolation: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    file = tmp_path / "file"
    file.write_text("kept")
    assert output(f"import os\npath = {str(file)!r}\n{action}\nprint('done')", isolation)["state"] == "failed"
    assert file.read_text() == "kept"


NAMESPACED = {
    "a file outside": ("print(open({secret!r}).read())", "failed"),
    "/proc of the parent": ("print(open('/proc/%d/environ' % __import__('os').getppid(), 'rb').read())", "failed"),
    "/proc/1": ("print(open('/proc/1/environ', 'rb').read())", "failed"),
    "writes Python": ("import os\nopen(os.__file__, 'a').write('x')", "failed"),
    "deletes the root": (
        "import os\nfor path in (os.__file__, '/usr', '/tmp'):\n    try: os.rename(path, '/tmp/x')\n"
        "    except OSError: pass\nprint(os.path.exists(os.__file__))",
        "ended",
    ),
    "mounts": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nassert libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0",
        "failed",
    ),
    "new namespaces": ("import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0", "failed"),
    "traces its keeper": ("import ctypes, os\nassert ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0", "failed"),
    "sees no other process": (
        "import os\nfor pid in range(3, 5000):\n    try: os.kill(pid, 0)\n    except ProcessLookupError: continue\n"
        "    print(pid)",
        "ended",
    ),
}


@pytest.mark.parametrize(("code", "state"), NAMESPACED.values(), ids=NAMESPACED.keys())
@pytest.mark.skipif(available_isolation()[0] != "namespaces", reason="the kernel allows no namespaces")
def test_nothing_outside_of_the_namespaces_is_seen(code: str, state: str, tmp_path: Path) -> None:
    secret = tmp_path / "expected.txt"
    secret.write_text("42")
    secret.chmod(0o644)
    result = output(code.replace("{secret!r}", repr(str(secret))), "namespaces")
    assert result["state"] == state and "42" not in result["text"] and result["text"].strip() in ("", "True")


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_programs_inherit_neither_environment_nor_files(isolation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "hidden")
    code = (
        "import os\nopened = []\nfor number in range(3, 4096):\n    try: os.fstat(number); opened.append(number)\n"
        "    except OSError: pass\nprint(sorted(os.environ), opened, os.listdir('.'))"
    )
    with contextlib.closing(Sandbox(isolation)) as sandbox:  # type: ignore[arg-type]  # started with the secret set
        [result] = asyncio.run(sandbox.run(Job(code, "stdio", inputs=[""]), LIMITS))
    assert result["text"] == "['HOME', 'LANG', 'OPENBLAS_NUM_THREADS', 'PATH'] [] []\n"


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_what_one_test_leaves_does_not_outlive_its_job(isolation: str) -> None:
    code = "import os\nprint(os.listdir('.'))\nopen('left', 'w').write('x')"

    async def run() -> list[str]:
        sandbox = Sandbox(isolation)  # type: ignore[arg-type]
        try:
            return [(await sandbox.run(Job(code, "stdio", inputs=[""]), LIMITS))[0]["text"] for _ in range(2)]
        finally:
            sandbox.close()

    assert asyncio.run(run()) == ["[]\n", "[]\n"]


CALLS = {
    "NaN": "float('nan')",
    "a function": "lambda: 42",
    "an object equal to everything": "type('E', (), {'__eq__': lambda *a: True, '__repr__': lambda s: '42'})()",
    "a subclass of int": "type('I', (int,), {'__eq__': lambda *a: True})(7)",
    "a hostile __class__": "type('I', (), {'__class__': property(lambda s: int), '__eq__': lambda *a: True})()",
    "a nested list": "__import__('functools').reduce(lambda a, _: [a], range(100000), [])",
    "a list that contains itself": "(lambda a: (a.append(a), a)[1])([])",
    "an endless generator": "iter(int, 1)",
    "a huge number": "10 ** 5000",
    "a huge text": "'x' * 10 ** 6",
    "surrogates": "'\\ud800'",
    "an exit": "__import__('os')._exit(0)",
    "SystemExit": "exec('raise SystemExit(0)')",
    "a forged message": "__import__('os').write(3, b'\\x7f\\xff\\xff\\xff') and 0",
    "a forged reference": '__import__(\'os\').write(3, b\'\\0\\0\\0\\x1e{"type": "object", "items": 0}\') and 0',
    "a patched encoder": "exec('import json; json.dumps = lambda *a, **k: chr(123)') or 7",
    "a killed parent": "__import__('os').kill(__import__('os').getppid(), 9) or 7",
}


@pytest.mark.parametrize("result", CALLS.values(), ids=CALLS.keys())
def test_no_result_but_the_right_one_is_decoded_as_expected(result: str) -> None:
    code = f"def f(x):\n    return {result}"
    results = ran(Job(code, "calls", stop=False, name="f", arguments=["[1]", "[2]"]))
    for each in results:
        if each["state"] == "ended":
            try:
                assert decode(each["text"]) != 42
            except NotPlain:
                pass
    assert len(results) <= 2


FORGERIES = {
    "exits before the tests": "import os\nos._exit(0)",
    "SystemExit before the tests": "raise SystemExit(0)",
    "an exit in the function": "import os\ndef f(x): os._exit(0)",
    "an equal object": "class E:\n    def __eq__(self, other): return True\n    __hash__ = None\ndef f(x): return E()",
    "an object with every method": (
        "class E:\n    def __getattr__(self, name): return lambda *a: True\n    def __eq__(self, other): return True\n"
        "    def __ne__(self, other): return False\n    def __lt__(self, other): return True\n"
        "    def __sub__(self, other): return 0\n    def __rsub__(self, other): return 0\n"
        "    def __abs__(self): return 0\n"
        "def f(x): return E()"
    ),
    "patched builtins": "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.len = lambda x: 42\ndef f(x): return 7",
    "redefined builtins": (
        "abs = lambda x: 0\ndef all(x): return True\ndef sorted(x): return [42]\n"
        "def __import__(*a): return None\nclass AssertionError(ValueError): pass\ndef f(x): return 7.0"
    ),
    "a module of its own": (
        "class M:\n    def isclose(self, *a): return True\nmath = M()\nabs = lambda x: 0\ndef f(x): return 7"
    ),
    "a module of its own and no function": "class M:\n    def isclose(self, *a): return True\nmath, all = M(), any",
    "patched AssertionError": "import builtins\nbuiltins.AssertionError = ValueError\ndef f(x): return 7",
    "a search for the tests in memory": (
        "import gc\ndef f(x):\n    for each in gc.get_objects():\n"
        "        if type(each) is dict and 'units' in each:\n            return 42\n    return 7"
    ),
    "a message to the tests": (
        "import os\ndef f(x):\n    os.write(3, b'\\0\\0\\0\\x0f{\"passed\": true}')\n    return 7"
    ),
    "a write to every file": (
        "import os\ndef f(x):\n    for n in range(64):\n"
        "        try: os.write(n, b'\\0\\0\\0\\x10{\"passed\": true }')\n        except OSError: pass\n    return 7"
    ),
    "a file for the tests to import": "open('math.py', 'w').write('isclose = lambda *a: True')\ndef f(x): return 7",
    "an AssertionError that is caught": "def f(x): raise AssertionError",
    "kills the tests": "import os\ndef f(x):\n    for n in range(2, 20):\n        os.kill(n, 9)\n    return 42",
    "never answers": "def f(x):\n    while True: pass",
}


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("code", FORGERIES.values(), ids=FORGERIES.keys())
def test_no_verdict_can_be_forged(code: str, isolation: str) -> None:
    tests = [
        "assert f(1) == 42",
        "assert abs(f(1) - 42) < 1e-6",
        "import math\nassert math.isclose(f(2), 42)",
        "def test_f():\n    assert not f(1) != 42",
        "assert all(f(x) == 42 for x in (1, 2))",
        "assert math.isclose(f(2), 42)",
    ]
    passed = []
    for test in tests:
        results = ran(Job(code, "asserts", units=[test]), isolation, SHORT if "while True" in code else LIMITS)
        verdicts = [each["passed"] for each in results if "passed" in each]
        passed.append(results[-1]["state"] == "ended" and bool(verdicts) and all(verdicts))
    assert passed == [False] * 6


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        ("def sum(a, b): return a * b", "assert sum(3, 4) == 12\nassert sum(0, 1) == 0"),
        ("def sum(a, b): return a * b", "from solution import sum\ndef test_sum():\n    assert sum(3, abs(-4)) == 12"),
        ("def product(a): return a\ndef f(x): return x", "assert f(list(product([1], [2]))) == [(1, 2)]"),
    ],
)
def test_a_program_may_define_a_builtin_name(code: str, tests: str) -> None:
    results = ran(Job(code, "asserts", units=[tests]))
    verdicts = [each["passed"] for each in results if "passed" in each]
    assert verdicts and all(verdicts)


def test_check_of_an_entry_point_may_have_a_builtin_name() -> None:
    check = "def check(f):\n    assert f(3, 4) == 12"
    job = Job("def sum(a, b): return a * b", "asserts", units=[check], entry_point="sum")
    assert {"passed": True} in ran(job)


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        ("async def test_f():\n    assert f(1) == 7", "test_f is a coroutine function"),
        ("def test_f(tmp_path):\n    assert f(1) == 7", "test_f has parameters"),
        ("class TestF:\n    async def test_g(self): pass", "test_g is a coroutine function"),
        ("class TestF:\n    def test_g(self, x): pass", "test_g has parameters"),
    ],
)
def test_tests_that_cannot_be_run_are_invalid(tests: str, reason: str) -> None:
    results = ran(Job("def f(x): return 42", "asserts", units=[tests]))
    (invalid,) = [each["invalid"] for each in results if "invalid" in each]
    assert reason in invalid and {"passed": True} not in results


@pytest.mark.parametrize("base", ["unittest.TestCase", "object"])
def test_methods_of_classes_run_between_set_up_and_tear_down(base: str) -> None:
    tests = (
        "import unittest\ndone = []\n"
        f"class TestF({base}):\n"
        "    def setUp(self): self.x = 1\n"
        "    def tearDown(self): done.append(1)\n"
        "    def test_a(self, default=3): assert f(self.x) == 42\n"
        "    def test_b(self): assert len(done) == 1 and f(self.x) == 42\n"
    )
    results = ran(Job("def f(x): return 42", "asserts", units=[tests]))
    assert results == [{"total": 2}, {"passed": True}, {"passed": True}, {"state": "ended"}]


@pytest.mark.parametrize("error", ["StopIteration", "StopAsyncIteration", "GeneratorExit", "SystemExit", "Own"])
def test_no_exception_of_a_program_ends_a_loop_of_its_tests(error: str) -> None:
    code = f"class Own(StopIteration): pass\ndef f(x): raise {error}\ndef g(x):\n    yield x\n    yield 2"
    tests = ["assert all(map(lambda n: f(n) == n, [1, 2]))", "assert list(iter(lambda: f(1), 1)) == []"]
    results = ran(Job(code, "asserts", False, units=[*tests, "assert list(g(1)) == [1, 2]"]))
    assert [each["passed"] for each in results if "passed" in each] == [False, False, True]


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_memory_that_no_limit_counts_is_refused(isolation: str) -> None:
    code = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "try: os.memfd_create('x')\nexcept OSError as error: print(error.errno)\n"
        "print(libc.syscall(447, 0), ctypes.get_errno() in (1, 38))\n"  # memfd_secret
    )
    assert output(code, isolation) == {"state": "ended", "text": "1\n-1 True\n"}


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_memory_shared_by_number_is_refused(isolation: str) -> None:
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "for call in (lambda: libc.shmget(7, 4096, 0o1666), lambda: libc.semget(7, 1, 0o1666),\n"
        "             lambda: libc.msgget(7, 0o1666)):\n"
        "    print(call(), ctypes.get_errno() in (1, 38))\n"
    )
    assert output(code, isolation) == {"state": "ended", "text": "-1 True\n" * 3}


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_honest_programs_pass_the_same_tests(isolation: str) -> None:
    tests = ["assert f(1) == 42\nassert abs(f(1) - 42) < 1e-6", "def test_f():\n    assert not f(1) != 42"]
    results = ran(Job("def f(x): return 42", "asserts", units=tests), isolation)
    assert results == [{"total": 3}, *[{"passed": True}] * 3, {"state": "ended"}]


def test_the_server_ends_with_its_process_and_leaves_no_folder(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\nfrom roll.sandbox.client import Job, Limits, Sandbox\n"
        "async def run():\n    sandbox = Sandbox()\n"
        "    await sandbox.run(Job('print()', 'stdio', inputs=['']), Limits())\n"
        "    print(sandbox._server.pid, flush=True)\n"
        "    await sandbox.run(Job('while True: pass', 'stdio', inputs=['']), Limits(10_000, 10_000))\n"
        "asyncio.run(run())"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    server = psutil.Process(int(process.stdout.readline()))
    while len(descendants := [server, *server.children(recursive=True)]) < 3:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(descendants, timeout=120)
    assert alive == []
    if available_isolation()[0] == "namespaces":
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "value",
    [None, True, -(10**30), 1.5, "text", b"\0", 1j, [1, [2]], (1, (2,)), {1, 2}, frozenset({1}), {(1, 2): {"a": None}}],
)
def test_plain_values_are_the_same_after_decoding(value: Any) -> None:
    assert decode(encode(value)) == value and type(decode(encode(value))) is type(value)


@pytest.mark.parametrize(
    "text", ["", "{", '{"type": "object"}', '{"type": "set", "items": [[1]]}', "[" * 10**6, "9" * 5000]
)
def test_what_is_no_encoded_value_is_refused(text: str) -> None:
    with pytest.raises(NotPlain):
        decode(text)
