"""Tests of a program, in a process of their own: assertions that call it through a socket and see plain values only."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import itertools
import json
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from roll.sandbox.programs import PRELUDE, read_frame, write_frame
from roll.sandbox.values import NotPlain, decode, encode


class Unsupported(Exception):
    """Tests pass a value to a program that cannot be sent, such as a function."""


class Link:
    """The side of the tests: performs actions on objects of the program."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._objects: dict[int, Remote] = {}
        self.exceptions: dict[str, type[BaseException]] = {}

    def object_of(self, item: dict[str, Any]) -> Remote:
        """The proxy of a reference."""
        number = item["items"]
        if item.get("type") != "object" or not isinstance(number, int):
            raise NotPlain("no reference")
        return self._objects.setdefault(number, Remote(self, number))

    def perform(self, number: int, action: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """The result of an action in the process of the program; lists that it changed are changed here too."""
        try:
            request = {
                "target": number,
                "action": action,
                "arguments": encode(list(arguments), _reference_of),
                "keywords": encode(keywords, _reference_of),
            }
        except NotPlain as error:
            raise Unsupported(str(error)) from None
        write_frame(self._fd, json.dumps(request).encode())
        answer = json.loads(read_frame(self._fd))
        if "raised" in answer:
            raised = self._exception(*json.loads(answer["raised"]))
            if isinstance(raised, StopIteration | StopAsyncIteration) and action != "__next__":
                raised = RuntimeError(f"{type(raised).__name__}: {raised}")  # it would end a `map` of the tests early
            raise raised
        if "arguments" in answer:
            for mine, changed in zip(arguments, decode(answer["arguments"], self.object_of), strict=True):
                _replace_content(mine, changed)
        return decode(answer["value"], self.object_of)

    def _exception(self, bases: list[str], text: str) -> BaseException:
        """The exception of a program: one of its own classes, or the nearest one that Python has."""
        for name in bases:
            known = self.exceptions.get(name) or getattr(builtins, name, None)
            if isinstance(known, type) and issubclass(known, Exception):
                return known(text)
        return RuntimeError(f"{bases[0]}: {text}")


def _reference_of(value: Any) -> dict[str, Any]:
    if type(value) is Remote:
        return {"type": "object", "items": object.__getattribute__(value, "_number")}
    raise NotPlain(f"a {type(value).__name__} cannot be sent to the program")


def _replace_content(mine: Any, changed: Any) -> None:
    if type(mine) is not type(changed) or mine == changed:
        return
    if isinstance(mine, list):
        mine[:] = changed
    elif isinstance(mine, dict | set):
        mine.clear()
        mine.update(changed)


class Remote:
    """An object of the program. Compared with plain values it is always different, whatever its own methods say."""

    def __init__(self, link: Link, number: int) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    def _perform(self, action: str, *arguments: Any, **keywords: Any) -> Any:
        link, number = object.__getattribute__(self, "_link"), object.__getattribute__(self, "_number")
        return link.perform(number, action, arguments, keywords)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._perform("call", *arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        return self._perform("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._perform("set", name, value)

    def __bool__(self) -> bool:
        return self._perform("bool") is True

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and self._perform("isinstance", value) is True

    def __iter__(self) -> Iterator[Any]:
        made = self._perform("__iter__")
        return made if isinstance(made, Remote) else iter(made)

    def __next__(self) -> Any:
        return self._perform("__next__")

    def __hash__(self) -> int:
        return int(object.__getattribute__(self, "_number"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self._perform("__eq__", other) is True

    def __str__(self) -> str:
        return str(self._perform("__str__"))

    def __repr__(self) -> str:
        return str(self._perform("__repr__"))


def _forwarded(name: str, between_objects: bool) -> Callable[..., Any]:
    def method(self: Remote, *arguments: Any) -> Any:
        if between_objects and not all(isinstance(item, Remote) for item in arguments):
            return NotImplemented
        return self._perform(name, *arguments)

    return method


for _name in ("len", "getitem", "setitem", "delitem", "contains", "enter", "exit", "abs", "neg"):
    setattr(Remote, f"__{_name}__", _forwarded(f"__{_name}__", between_objects=False))
for _name in ("lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "and", "or", "xor"):
    setattr(Remote, f"__{_name}__", _forwarded(f"__{_name}__", between_objects=True))


def run_tests(units: list[str], prefix: str, entry_point: str, link: int, results: int) -> int:
    """Runs tests against the program at the other end of `link`.

    Every `assert` at the top level and every function `test...` is a test, as is `check` of an entry point; code
    without any is one test. Messages to `results`: first `{"total": n}`, then `{"passed": bool}` of each test, or
    `{"invalid": text}` if the tests themselves are wrong.

    Args:
        units: code of the tests; each has the names of the program and a module `solution`.
        prefix: code before the tests, such as imports.
        entry_point: expression that `check` is called with, or an empty text.
        link: socket to `answer_calls`.
        results: file descriptor.
    """

    def report(**message: Any) -> None:
        write_frame(results, json.dumps(message).encode())

    try:
        trees = [ast.parse(unit) for unit in units]
        prepared = compile(prefix, "<prefix>", "exec")
    except (SyntaxError, ValueError, RecursionError) as error:
        report(invalid=f"{type(error).__name__}: {error}")
        return 1
    report(total=sum(_count(tree, entry_point) for tree in trees))
    connection = Link(link)
    names = dict(PRELUDE)
    try:
        told = json.loads(read_frame(link))
        known = {name: _known(name, item, connection) for name, item in told.items()}
    except (EOFError, ValueError, TypeError, KeyError, AttributeError):
        return 1  # the program ended while it was loaded
    tested = _tested([ast.parse(prefix), *trees], entry_point)
    names |= {name: value for name, value in known.items() if _is_given(name) or name == tested}
    sys.modules["solution"] = types.ModuleType("solution")
    sys.modules["solution"].__dict__.update(names | known)
    try:
        exec(prepared, names)
        for tree in trees:
            _run_unit(tree, names, entry_point, lambda passed: report(passed=passed))
    except Unsupported as error:
        report(invalid=f"the tests pass a value that cannot be sent to the program: {error}")
    except Unrunnable as error:
        report(invalid=str(error))
    return 0


class Unrunnable(Exception):
    """A test needs more than this runner has."""


def _is_given(name: str) -> bool:
    """Whether tests find a name of the program without importing it.

    Names that the tests themselves may use, such as `abs` or `math`, keep their own meaning: a program that redefined
    them could decide about its tests. Such a name is found by `from solution import`, or if it is the one tested.
    """
    return not (name.startswith("__") or name in vars(builtins) or name in PRELUDE)


def _tested(trees: list[ast.Module], entry_point: str) -> str:
    """The name of the program that the tests are about: of the entry point, or the only one that they use."""
    if entry_point:
        return re.split(r"\W", entry_point, maxsplit=1)[0]
    alone = free_names(trees)
    return alone.pop() if len(alone) == 1 else ""


def free_names(trees: list[ast.Module]) -> set[str]:
    """The names that tests use and do not define."""
    used: set[str] = set()
    bound: set[str] = set()
    for node in itertools.chain.from_iterable(map(ast.walk, trees)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
    return used - bound


def _known(name: str, item: dict[str, Any], link: Link) -> Any:
    if "module" in item:
        head = str(item["module"]).partition(".")[0]
        return __import__(head) if head in sys.stdlib_module_names else None
    if "exception" in item:
        bases = (getattr(builtins, base, None) for base in item["exception"])
        base = next(each for each in bases if isinstance(each, type) and issubclass(each, Exception))
        link.exceptions[name] = type(name, (base,), {})
        return link.exceptions[name]
    return decode(item["value"], link.object_of)


def _tests_in(names: dict[str, Any], before: set[str]) -> Iterator[Callable[[], Any]]:
    """Functions `test...` and methods of classes `Test...` that a unit has defined.

    Raises:
        Unrunnable: one is a coroutine function, or has parameters, such as fixtures.
    """
    for name, value in list(names.items()):
        if name in before:
            continue
        if name.startswith("test") and isinstance(value, types.FunctionType):
            _require_plain(value, 0)
            yield value
        elif name.startswith("Test") and isinstance(value, type):
            for method in [key for key in vars(value) if key.startswith("test")]:
                _require_plain(vars(value)[method], 1)
                yield functools.partial(_run_method, value, method)


def _require_plain(test: Any, own: int) -> None:
    """Refuses tests that a call without arguments does not run; `own` counts `self`."""
    name = getattr(test, "__name__", "test")
    if inspect.iscoroutinefunction(test):
        raise Unrunnable(f"the test {name} is a coroutine function, which is not run here")
    parameters = inspect.signature(test).parameters.values()
    if sum(each.default is each.empty and each.kind in (0, 1) for each in parameters) > own:
        raise Unrunnable(f"the test {name} has parameters, and there are no fixtures here")


def _run_method(cls: type, method: str) -> None:
    """A method of a class of tests, between its `setUp` and `tearDown`; of unittest or of pytest."""
    test = cls(method) if hasattr(cls, "assertEqual") else cls()
    for name in ("setUp", "setup_method", method, "tearDown", "teardown_method"):
        if hasattr(test, name):
            getattr(test, name)()


def _count(tree: ast.Module, entry_point: str) -> int:
    count = 0
    for node in tree.body:
        is_test = isinstance(node, ast.Assert) or isinstance(node, ast.FunctionDef) and node.name.startswith("test")
        is_check = isinstance(node, ast.FunctionDef) and node.name == "check" and bool(entry_point)
        count += is_test or is_check
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            count += sum(isinstance(each, ast.FunctionDef) and each.name.startswith("test") for each in node.body)
    return max(count, 1)


def _run_unit(tree: ast.Module, names: dict[str, Any], entry_point: str, report: Callable[[bool], None]) -> None:
    """Runs the statements of a unit one by one, then the tests that it defines."""
    before, reported = set(names), 0

    def attempt(test: Callable[[], Any], is_test: bool) -> bool:
        nonlocal reported
        try:
            test()
            passed = True
        except (Unsupported, Unrunnable):
            raise
        except Exception:
            passed = False
        if is_test or not passed:
            report(passed)
            reported += 1
        return passed

    for node in tree.body:
        code = compile(ast.Module([node], []), "<tests>", "exec")
        is_test = isinstance(node, ast.Assert)
        if not attempt(functools.partial(exec, code, names), is_test) and not is_test:
            return
    for test in _tests_in(names, before):
        attempt(test, True)
    if entry_point and isinstance(names.get("check"), types.FunctionType):
        attempt(lambda: names["check"](eval(entry_point, names)), True)
    if not reported:
        report(True)
