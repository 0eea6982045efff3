"""Reward of programs: takes a program from a response, runs it against the tests of its prompt, and compares results.

Expected results stay in this process: programs get inputs only. See `roll.sandbox` for how they are run.
"""

from __future__ import annotations

import ast
import builtins
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from typing import Any

from roll.configs.scoring.rewards import RewardConfig
from roll.rewards.calling import SelfTest, without_reasoning
from roll.sandbox.assertions import free_names
from roll.sandbox.client import Job, Limits, idle_sandbox
from roll.sandbox.values import NotPlain, decode, encode

FENCE = re.compile(r"([ \t]*+)(`{3,}+|~{3,}+)[ \t]*+[{.]*+([\w.+-]*+)([^`]*+)$")
"""The line before or after a block of code: indentation, marks, language and more."""

CLOSING = re.compile(r"[ \t]*(`{3,}|~{3,})(?=\s|$)(.*)")
"""The line after a block: marks, and words that do not belong to them."""

ONE_LINE = re.compile(r"[ \t]*(`{3,})[ \t]*(?:((?i:i?py|i?python|tool_code)[\d.]*)[ \t])?([^`\n]+)\1[ \t]*$")
"""A block in one line: marks, language and code."""

TRIPLE_QUOTES = re.compile(r"\"\"\"|'''")

PYTHON = re.compile(r"(?i)(?:i?py|i?python|tool_code|code|starlark)[\d.]*")
"""The language of a block in Python."""

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

INPUTS, TESTING = {"input", "stdin", "open", "fileinput"}, {"unittest", "pytest", "doctest"}
"""Names by which a program reads its input, and modules that a program for tests imports."""

TIME_OF_OTHERS_S = 5.0
"""Part of `timeout_s` that is left for the rest of a call after all tests have used their time."""

COLUMNS = ("test_cases", "input_output", "public_test_cases", "test_list", "test")
"""Columns that may hold the tests, the first that a row has; without any they are the ground truth."""

TOLERANCE = 1e-6
"""Relative difference of two numbers with decimals that counts as equal."""

DECIMALS = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?\d+[eE]-\d+")
"""A number that may have been rounded."""

NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")


@dataclass(frozen=True)
class Tests:
    """The tests of a prompt.

    Attributes:
        kind: as of `Job`.
        expected: for `stdio` the texts, for `calls` the values, in the order of inputs or arguments.
        inputs: as of `Job`; so are the others.
    """

    kind: str
    expected: list[Any] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    name: str = ""
    arguments: list[str] = field(default_factory=list)
    units: list[str] = field(default_factory=list)
    prefix: str = ""
    entry_point: str = ""

    def job(self, program: str, stop: bool) -> Job:
        """The job that runs a program against the tests; it contains nothing that is expected, except for asserts."""
        own = {key: value for key, value in vars(self).items() if key not in ("kind", "expected")}
        return Job(f"{self.prefix}\n{program}" if self.prefix else program, self.kind, stop, **own)


async def code_reward(
    response: str, ground_truth: Any, row: Mapping[str, Any], config: RewardConfig
) -> dict[str, float]:
    """Score between `wrong_score` and `correct_score`, and the metrics `passed`, a share of tests, and `has_code`.

    With `reward_type: strict` a program is right if it passes every test; with `soft` the score is the share. A program
    that does not end, uses more than its limits or raises fails the test. A response without a program is wrong.

    Args:
        response: the decoded response.
        ground_truth: tests in any of the formats of `read_tests`. Unused if the row has one of COLUMNS.
        row: the columns of the data.
        config: `code_from`, `reward_type`, `test_timeout_s`, `memory_limit_mb`, `output_limit_kb`, `timeout_s`,
            `correct_score` and `wrong_score` are used.

    Raises:
        ValueError: the tests cannot be read, or cannot be run against any program.
        SandboxError: the sandbox failed.
    """
    tests = read_tests(ground_truth, row)
    program = program_in(response, config, tests)
    if program is None:
        return {"score": config.wrong_score, "passed": 0.0, "has_code": 0.0}
    strict = config.reward_type == "strict"
    limits = Limits(
        config.test_timeout_s,
        max(config.timeout_s - TIME_OF_OTHERS_S, config.timeout_s / 2),
        config.memory_limit_mb * 2**20,
        config.output_limit_kb * 2**10,
    )
    async with idle_sandbox() as sandbox:
        results = await sandbox.run(tests.job(program, stop=strict), limits)
    passed, total = _counted(tests, results)
    share = passed / total
    score = config.share_score(float(passed == total) if strict else share)
    return {"score": score, "passed": share, "has_code": 1.0}


def program_in(response: str, config: RewardConfig, tests: Tests | None = None) -> str | None:
    """The program of a response; None if there is none.

    It is the last block of code that is marked as Python, else the last that is not marked. If the tests use names, a
    block that defines one comes before others, and a stub or an import after those; else blocks that read input, and
    then others that call something, come first. With `code_from: whole` the program is the whole response. What
    precedes `</think>` does not count.
    """
    text = without_reasoning(response)
    if config.code_from == "whole":
        return text if text.strip() else None
    names = _names_in(tests) if tests is not None else set()
    chosen: tuple[int, bool, int, str] | None = None
    for whole_strings in (True, False) if TRIPLE_QUOTES.search(text) else (False,):  # one in a comment opens no string
        blocks = [
            (language, code) for language, code in _blocks(text, whole_strings) if not language or _python(language)
        ]
        ranked = [(_rank(code, names), bool(language), at, code) for at, (language, code) in enumerate(blocks)]
        chosen = max(ranked, default=None)
        if chosen and chosen[0]:
            break
    return chosen and chosen[3]


def _python(language: str) -> bool:
    return PYTHON.fullmatch(language) is not None


def _blocks(text: str, whole_strings: bool) -> Iterator[tuple[str, str]]:
    """Language and code, without the indentation of the marks, of the blocks between marks.

    The last block may be open, and a block may be one line, if it is Python. With `whole_strings` marks in a string
    with triple quotes end no block.
    """
    opening: re.Match[str] | None = None
    code: list[str] = []
    quotes = ""
    for line in text.splitlines(keepends=True):
        if opening is None:
            opening, code, quotes = FENCE.match(line), [], ""
            single = None if opening else ONE_LINE.match(line)
            if single and _parsed(single[3]):
                yield single[2] or "", single[3]
            continue
        closing = CLOSING.match(line)
        if closing and closing[1].startswith(opening[2]) and not (_python(closing[2].strip()) or quotes):
            yield opening[3], "".join(code)
            opening = None
            continue
        indented = len(line) - len(line.lstrip(" \t"))
        code.append(line[min(indented, len(opening[1])) :])
        for found in TRIPLE_QUOTES.findall(line) if whole_strings else ():
            quotes = "" if found == quotes else quotes or found
    if opening and _parsed("".join(code)):
        yield opening[3], "".join(code)


def _parsed(code: str) -> list[ast.stmt]:
    try:
        return ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _rank(code: str, names: set[str]) -> int:
    """How likely code is the program: by the names that it defines, or without names by what it does."""
    body = _parsed(code)
    if names:
        return max((strength for name, strength in _bound(body) if name in names), default=0)
    nodes = [node for statement in body for node in ast.walk(statement)]
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    reads = any(isinstance(node, ast.Name | ast.Attribute) and _read_name(node) in INPUTS for node in nodes)
    calls = any(isinstance(node, ast.Call) for node in nodes)
    return 0 if not calls or imported & TESTING else 2 if reads else 1


def _read_name(node: ast.Name | ast.Attribute) -> str:
    name = node.id if isinstance(node, ast.Name) else node.attr
    return name if isinstance(node.ctx, ast.Load) else ""


def _bound(body: list[ast.stmt]) -> Iterator[tuple[str, int]]:
    """Names that code binds outside of functions: 2, or 1 for a stub, an import or a constant."""
    for node in _outside_functions(body):
        if isinstance(node, DEFINITIONS):
            yield node.name, 1 if _is_stub(node) else 2
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0], 1
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            used = {each.id for each in _outside_functions([node.value]) if isinstance(each, ast.Name)}
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            stored = {each.id for each in _outside_functions(targets) if isinstance(each, ast.Name)}
            yield from ((name, 1 if isinstance(node.value, ast.Constant) else 2) for name in stored - used)


def _outside_functions(roots: Sequence[ast.AST]) -> Iterator[ast.AST]:
    pending = list(roots)
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending += ast.iter_child_nodes(node)


def _is_stub(node: ast.stmt) -> bool:
    if isinstance(node, DEFINITIONS):
        return all(map(_is_stub, node.body))
    if isinstance(node, ast.Raise):
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        return "NotImplementedError" in names
    return isinstance(node, ast.Pass) or isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _names_in(tests: Tests) -> set[str]:
    """The names of a program that its tests use; none for standard input."""
    found = {part for name in (tests.name, tests.entry_point) for part in re.findall(r"\w+", name)}
    for unit in tests.units:
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            found |= free_names([ast.parse(unit)])
    return found - vars(builtins).keys()


def _counted(tests: Tests, results: list[dict[str, Any]]) -> tuple[int, int]:
    """Tests that were passed, and tests.

    Raises:
        ValueError: the tests themselves are wrong.
    """
    if tests.kind == "asserts":
        invalid = next((each["invalid"] for each in results if "invalid" in each), None)
        if invalid is not None:
            raise ValueError(f"the tests cannot be run: {invalid}")
        total = next((each["total"] for each in results if "total" in each), 1)
        verdicts = [each["passed"] for each in results if "passed" in each]
        is_complete = all(verdicts) and results[-1].get("state") == "ended"
        return min(verdicts.count(True), total if is_complete else total - 1), total
    same = same_output if tests.kind == "stdio" else _same_result
    passed = sum(
        each["state"] == "ended" and same(each["text"], expected)
        for each, expected in zip(results, tests.expected, strict=False)
    )
    return passed, len(tests.expected)


def same_output(printed: str, expected: str) -> bool:
    """Whether two outputs have the same lines.

    Spaces at the ends of lines and empty lines at both ends do not count. A number that is expected with decimals may
    differ by TOLERANCE, and an expected integer may be printed with decimals that are zero.
    """
    ours, theirs = ([line.strip() for line in text.strip().splitlines()] for text in (printed, expected))
    if ours == theirs:
        return True
    if len(ours) != len(theirs):
        return False
    pairs = [(one.split(), other.split()) for one, other in zip(ours, theirs, strict=True)]
    return all(len(one) == len(other) and all(map(_same_word, one, other)) for one, other in pairs)


def _same_word(one: str, other: str) -> bool:
    if one == other:
        return True
    if not (NUMBER.fullmatch(one) and NUMBER.fullmatch(other)):
        return False
    if DECIMALS.fullmatch(other):
        found, wanted = float(one), float(other)
        return math.isfinite(wanted) and math.isclose(found, wanted, rel_tol=TOLERANCE, abs_tol=1e-9)
    try:
        return "." in one and Decimal(one) == Decimal(other)
    except InvalidOperation:  # an exponent beyond those that it has
        return False


def _same_result(text: str, expected: Any) -> bool:
    """Whether the `encode`d result of a function is the expected value; JSON has lists for tuples, and text as keys."""
    try:
        value = decode(text)
        return _equal(value, expected) or (
            isinstance(expected, list) and len(expected) == 1 and _equal(value, expected[0])
        )
    except (NotPlain, RecursionError, OverflowError):
        return False


def _equal(value: Any, expected: Any) -> bool:
    if isinstance(value, list | tuple) and isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(map(_equal, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        named = {str(key): item for key, item in value.items()}
        wanted = {str(key): item for key, item in expected.items()}
        same_keys = len(named) == len(value) and named.keys() == wanted.keys()
        return same_keys and all(_equal(named[key], wanted[key]) for key in wanted)
    if isinstance(value, float) and isinstance(expected, int | float) and not isinstance(expected, bool):
        return value == expected or math.isclose(value, expected, rel_tol=TOLERANCE, abs_tol=1e-9)
    return bool(value == expected)


# Formats of tests


def read_tests(ground_truth: Any, row: Mapping[str, Any]) -> Tests:
    """The tests of a prompt.

    They are, as an object or as JSON: `{"inputs": [...], "outputs": [...]}` with `fn_name` for calls (APPS, TACO); a
    list of `{"input", "output"}`, with `fn_name` or the column `func_name` for calls (LiveCodeBench); a list of
    `{"stdin", "expected_stdout"}` or of `{"assert_code"}` with `import_prefix` and `entry_point` (ROLL); a list of
    assertions (MBPP); or code with assertions, functions `test...`, or `check` and the column `entry_point` (HumanEval,
    KodCode).

    Raises:
        ValueError: they are in none of these formats, or there are none.
    """
    column = next((name for name in COLUMNS if row.get(name) not in (None, "")), None)
    given = row[column] if column else ground_truth
    if hasattr(given, "tolist"):
        given = given.tolist()
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            pass  # code
    where = f"column {column!r}" if column else "the ground truth"
    try:
        tests = _read(given, row)
    except (KeyError, TypeError, NotPlain) as error:
        raise ValueError(f"{where} has tests that cannot be read: {type(error).__name__}: {error}") from None
    if tests is None or not (tests.expected or tests.units):
        raise ValueError(f"{where} holds no tests in a known format: {str(given)[:100]!r}")
    return tests


def _read(given: Any, row: Mapping[str, Any]) -> Tests | None:
    if isinstance(given, str):
        return _asserts([given], row) if re.search(r"\bassert\b|\bdef (test|check)", given) else None
    if isinstance(given, dict) and "assert_code" in given:
        given = [given]
    if isinstance(given, dict):
        if "inputs" not in given:
            return None
        name = given.get("fn_name") or row.get("fn_name") or ""
        return _pairs(_items(given["inputs"]), _items(given["outputs"]), name)
    if not isinstance(given, list) or not given:
        return None
    if all(isinstance(item, str) for item in given):
        return _asserts(given, row)
    if not all(isinstance(item, dict) for item in given):
        return None
    if "assert_code" in given[0]:
        tests = _asserts([item["assert_code"] for item in given], row)
        entry = given[0].get("entry_point") or tests.entry_point
        return replace(tests, prefix=given[0].get("import_prefix") or "", entry_point=entry)
    if "stdin" in given[0]:
        return _pairs([item["stdin"] for item in given], [item["expected_stdout"] for item in given], "")
    functional = given[0].get("testtype") == "functional"
    name = given[0].get("fn_name") or row.get("func_name") or row.get("fn_name") or ""
    if functional and not name:
        raise KeyError("func_name")
    return _pairs([item["input"] for item in given], [item["output"] for item in given], name)


def _items(given: Any) -> list[Any]:
    """The items of a list, a tuple or an array.

    Raises:
        TypeError: it is something else, whose items are no tests.
    """
    given = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(given, list | tuple):
        raise TypeError(f"a list is needed, and not {str(given)[:50]!r}")
    return list(given)


def _asserts(units: list[Any], row: Mapping[str, Any]) -> Tests:
    """Code of tests, with the function that they check."""
    if not all(isinstance(unit, str) for unit in units):
        raise TypeError("code is needed for an assertion")
    entry = row.get("entry_point") or row.get("test_case_function") or ""
    setup = row.get("test_setup_code") or ""
    return Tests("asserts", units=units, prefix=str(setup), entry_point=str(entry))


def _pairs(inputs: list[Any], outputs: list[Any], name: str) -> Tests:
    """Inputs with expected outputs: of a program, or of the function `name`.

    Arguments of a function that are written as text have outputs written as text; as values, outputs are values too.
    """
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs have {len(outputs)} outputs")
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is no name of a function")
    if not name:
        return Tests("stdio", [_text(item) for item in outputs], inputs=[_text(item) for item in inputs])
    written = any(isinstance(item, str) for item in inputs)
    values = [_value(item) if written and isinstance(item, str) else item for item in outputs]
    arguments = [
        [_value(line) for line in item.splitlines() if line.strip()] if isinstance(item, str) else list(item)
        for item in inputs
    ]
    return Tests("calls", values, name=name, arguments=[encode(each) for each in arguments])


def _text(item: Any) -> str:
    """Text of a standard stream; lists are its lines."""
    if item is None:
        raise TypeError("a text is needed, and not null")
    return "\n".join(map(str, item)) if isinstance(item, list) else str(item)


def _value(text: str) -> Any:
    """A value as JSON; text that is none stays text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def SELF_TEST(config: RewardConfig) -> SelfTest:
    """(response, tests, whether it is right), with and without marks around the program."""
    marks = ("", "") if config.code_from == "whole" else ("So:\n```python\n", "\n```\n")
    double, echo = "def double(x):\n    return 2 * x", "print(input())"
    calls = '{"fn_name": "double", "inputs": [[2], [5]], "outputs": [4, 10]}'
    stdio = '{"inputs": ["a\\n"], "outputs": ["a\\n"]}'
    samples = (
        (double, calls, True),
        (double, "assert double(3) == 6\nassert double(0) == 0", True),
        (double, "assert double(3) == 7", False),
        (double, '{"fn_name": "double", "inputs": [[2]], "outputs": [5]}', False),
        (echo, stdio, True),
        (f"import statistics\n{echo}", stdio, True),  # a module that Python has not loaded
        (echo.upper(), stdio, False),
    )
    return tuple((f"{marks[0]}{code}{marks[1]}", tests, right) for code, tests, right in samples)
