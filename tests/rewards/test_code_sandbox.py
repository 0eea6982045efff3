"""Programs of responses: where they are found, the formats of their tests, and their scores."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from roll.configs.scoring.built_in_rewards import BUILT_IN
from roll.configs.scoring.rewards import RewardConfig
from roll.rewards import code_sandbox
from roll.rewards.calling import RewardRequest
from roll.rewards.code_sandbox import code_reward, program_in, read_tests, same_output
from roll.sandbox import client
from roll.usercode.reward_pool import RewardPool

CONFIG = RewardConfig(function=BUILT_IN["code_sandbox"].function, timeout_s=30, max_concurrent_calls=1)
SOFT = RewardConfig(function=CONFIG.function, timeout_s=30, reward_type="soft", code_from="whole")
ADD = "def add(a, b):\n    return a + b"


@pytest.fixture(autouse=True)
def no_server_left_behind() -> Iterator[None]:
    yield
    while client._idle:
        client._idle.pop().close()


def block(code: str, language: str = "python") -> str:
    return f"So:\n```{language}\n{code}\n```\nDone."


def scored(
    code: str, tests: Any, row: Mapping[str, Any] | None = None, config: RewardConfig = SOFT
) -> dict[str, float]:
    truth = tests if isinstance(tests, str) else json.dumps(tests)
    return asyncio.run(code_reward(code, truth, row or {}, config))


F = code_sandbox.Tests("asserts", units=["assert f([2, 1]) == sorted([2, 1])"])


@pytest.mark.parametrize(
    ("response", "tests", "program"),
    [
        (block("right") + block("4 2", ""), None, "right\n"),
        (block("right") + block("4 2", "text") + block("ls", "pycon"), None, "right\n"),
        (block("def f(x): ...") + block("print(f(2))"), F, "def f(x): ...\n"),
        (block("def f(x): draft") + block("def f(x): x") + block("f(2)"), F, "def f(x): x\n"),
        (block("def f(x): x") + block("def f(x): ...") + block("f = f\nf == 3"), F, "def f(x): x\n"),
        (block("def f(x): x") + block("from solution import f\nf(1)"), F, "def f(x): x\n"),
        (block("f: object = max") + block("print(f(2))"), F, "f: object = max\n"),
        (block("f, x = max, 1") + block("print(f(2))"), F, "f, x = max, 1\n"),
        (block("from a import f") + block("print(f(2))"), F, "from a import f\n"),
        (block("print(input())", "") + block("1 2", "") + block("1", ""), None, "print(input())\n"),
        (
            block("print(input())") + block("# linear") + block("import unittest\nunittest.main()"),
            None,
            "print(input())\n",
        ),
        ("```python\nf(1)\n``` That is it.", None, "f(1)\n"),
        ("```python\nf(1)", None, "f(1)"),
        ("```python f(1)```", None, "f(1)"),
        (block("f(1)", "ipython"), None, "f(1)\n"),
        (block("f(1)", "tool_code"), None, "f(1)\n"),
        (block("f(1)", "starlark"), None, "f(1)\n"),
        (block("f(1)", "code"), None, "f(1)\n"),
        (block("'''\n```\n'''\nf(1)"), None, "'''\n```\n'''\nf(1)\n"),
        (block("f = max") + block("print(f(2))"), F, "f = max\n"),
        (block("def f(x): ...", "") + block("print(f(2))"), F, "def f(x): ...\n"),
        (block("def g(x): ...") + block("last"), F, "last\n"),
        (
            block("class Solution:\n  def f(self): ...") + block("x"),
            code_sandbox.Tests("calls", name="f"),
            "class Solution:\n  def f(self): ...\n",
        ),
        (
            block("def f(x): ...") + block("x"),
            code_sandbox.Tests("asserts", units=["def check(candidate): ..."], entry_point="f"),
            "def f(x): ...\n",
        ),
        (block("right", "Python") + block("", "")[:9], None, "right\n"),
        (block("right", "py") + block("x", "json"), None, "right\n"),
        (block("right", "python3.11 title=a.py"), None, "right\n"),
        ("1. So:\n   ```python\n   if 1:\n     right\n   ```\n", None, "if 1:\n  right\n"),
        ("~~~python\n```\nright\n~~~\n", None, "```\nright\n"),
        ("````python\n```\nright\n````\n", None, "```\nright\n"),
        (block("right") + "```python\nnever closed", None, "right\n"),
        ("```python\nx\n```python\ny\n  ``` \nz", None, "x\n```python\ny\n"),
        ("<think>" + block("draft") + "</think>" + block("right"), None, "right\n"),
        ("<think>" + block("draft"), None, None),
        (block("draft") + "</think> none", None, None),
        ("```python\nnever closed", None, None),
        (block("first") + block("second") + block("ls", "bash"), None, "second\n"),
        ("print(input())", None, None),
    ],
)
def test_the_program_is_the_marked_block_that_defines_what_is_tested(response, tests, program):
    assert program_in(response, CONFIG, tests) == program


OUTPUTS = st.text() | st.from_regex(r"[-+]?[0-9.]{0,9}([eE][-+]?[0-9]{0,30})?", fullmatch=True)


@given(OUTPUTS, OUTPUTS)
@example("1.0e99999999999999999999999", "5")
def test_any_two_outputs_can_be_compared(printed, expected):
    assert same_output(printed, expected) in (True, False)


def test_a_response_without_a_program_is_wrong():
    assert scored("no code", "assert add(1, 2) == 3", config=CONFIG) == {"score": 0, "passed": 0, "has_code": 0}


FORMATS = {
    "APPS": ({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}, {}, "print(sum(map(int, input().split())))"),
    "APPS, lines": ({"inputs": [["1", "2"]], "outputs": [["3"]]}, {}, "print(int(input()) + int(input()))"),
    "APPS, calls": ({"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}, {}, ADD),
    "LeetCode class": (
        {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]},
        {},
        "class Solution:\n    def add(self, a: int, b: List[int]) -> int:\n        return a + b",
    ),
    "LiveCodeBench": ([{"input": "1 2", "output": "3", "testtype": "stdin"}], {}, "a, b = input().split()\nprint(3)"),
    "LiveCodeBench, calls": (
        [{"input": '[1, 2]\n"x"', "output": '{"a": [1, 2]}', "testtype": "functional"}],
        {"func_name": "pack"},
        "def pack(values, name):\n    return {'a': tuple(values)}",
    ),
    "ROLL, input": ([{"stdin": "2", "expected_stdout": "4"}], {}, "print(2 * int(input()))"),
    "ROLL, assert": ([{"assert_code": "assert add(1, 2) == 3"}, {"assert_code": "assert add(0, 0) == 0"}], {}, ADD),
    "ROLL, check": (
        [
            {
                "assert_code": "def check(candidate):\n    assert candidate(nums=[1, 3], target=3) == 1\n",
                "import_prefix": "from math import *\n",
                "entry_point": "Solution().find",
            }
        ],
        {},
        "class Solution:\n    def find(self, nums, target):\n        return nums.index(int(floor(target)))",
    ),
    "MBPP": (["assert add(1, 2) == 3", "assert add(1, -1) == 0"], {}, ADD),
    "HumanEval": ("def check(candidate):\n    assert candidate(1, 2) == 3\n", {"entry_point": "add"}, ADD),
    "KodCode": (
        "from solution import add\nimport pytest\n\ndef test_sum():\n    assert add(1, 2) == 3\n\n"
        "def test_text():\n    with pytest.raises(TypeError):\n        add(1, 'a')\n",
        {},
        ADD,
    ),
}


@pytest.mark.parametrize(("tests", "row", "code"), FORMATS.values(), ids=FORMATS.keys())
def test_every_format_of_tests_is_read(tests, row, code):
    assert scored(code, tests, row)["score"] == 1.0
    assert scored("def add(a, b):\n    return 4\nprint(5)", tests, row)["score"] == 0.0


def test_columns_go_before_the_ground_truth():
    row = {"test_cases": json.dumps([{"stdin": "1", "expected_stdout": "1"}])}
    assert read_tests("assert False", row).kind == "stdio"


@pytest.mark.parametrize(
    ("truth", "row", "message"),
    [
        ("42", {}, "the ground truth holds no tests in a known format"),
        ('{"inputs": ["1"], "outputs": []}', {}, "1 inputs have 0 outputs"),
        ('{"inputs": ["1"]}', {}, "cannot be read: KeyError: 'outputs'"),
        ('[{"input": "1", "output": "1", "testtype": "functional"}]', {}, "KeyError: 'func_name'"),
        ("[]", {}, "holds no tests"),
        ("1", {"test_list": [1, 2]}, "column 'test_list' holds no tests"),
    ],
)
def test_tests_that_cannot_be_read_are_an_error_and_not_a_wrong_answer(truth, row, message):
    with pytest.raises(ValueError, match=message):
        read_tests(truth, row)


def test_tests_that_are_wrong_themselves_are_an_error():
    with pytest.raises(ValueError, match="the tests cannot be run: SyntaxError"):
        scored(ADD, "assert add(1, 2 == 3")
    with pytest.raises(ValueError, match="a function cannot be sent to the program"):
        scored("def apply(f, x):\n    return f(x)", "assert apply(lambda x: x + 1, 2) == 3")


def test_a_soft_score_is_the_share_of_tests():
    tests = {"fn_name": "half", "inputs": [[2], [4], [5], [7]], "outputs": [1, 2, 3, 4]}
    assert scored("def half(x):\n    return x // 2", tests)["score"] == 0.5
    assert scored("def half(x):\n    return x // 2 if x != 4 else 1 / 0", tests)["passed"] == 0.25
    strict = RewardConfig(code_from="whole", timeout_s=30, wrong_score=-1.0)
    assert scored("def half(x):\n    return x // 2", tests, config=strict)["score"] == -1.0


def test_tests_see_changes_of_their_lists_objects_of_the_program_and_its_exceptions():
    code = (
        "class Empty(ValueError):\n    pass\n"
        "class Stack:\n    def __init__(self):\n        self.items = []\n"
        "    def push(self, item):\n        self.items.append(item)\n        return self\n"
        "    def pop(self):\n        if not self.items:\n            raise Empty('nothing')\n"
        "        return self.items.pop()\n    def __len__(self):\n        return len(self.items)\n"
        "def sort(values):\n    values.sort()\n"
        "def count(n):\n    for i in range(n):\n        yield i\n"
        "LIMIT = 7\n"
    )
    tests = (
        "values = [3, 1, 2]\nsort(values)\nassert values == [1, 2, 3]\n"
        "stack = Stack()\nassert isinstance(stack, Stack)\nassert stack.push(1).push('a') is not None\n"
        "assert len(stack) == 2 and stack.items == [1, 'a'] and stack.pop() == 'a'\n"
        "assert list(count(3)) == [0, 1, 2]\nassert LIMIT == 7\nstack.pop()\n"
        "def test_empty():\n    try:\n        stack.pop()\n    except Empty as error:\n"
        "        assert str(error) == 'nothing'\n    else:\n        assert False\n"
    )
    assert scored(code, tests) == {"score": 1.0, "passed": 1.0, "has_code": 1.0}


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1 2 \n3\n\n", "1 2\n3", True),
        ("0.3333333", "0.33333333", True),
        ("1e-3", "0.001", True),
        ("1", "2", False),
        ("10", "10.5", False),
        ("a\nb", "a b", False),
        ("nan", "0.5", False),
        ("100000001", "100000002", False),
        ("0e5", "0e7", False),
        ("1e999", "2e999", False),
        ("1_0.0", "10", False),
        ("1000000999.0", "1000000000", False),
        ("3.0", "3", True),
        ("2", "2.0", True),
        ("1e-06", "0.000001", True),
        ("nan", "nan.", False),
    ],
)
def test_outputs_are_compared_by_lines_and_words_and_only_those_with_decimals_may_differ(printed, expected, same):
    assert same_output(printed, expected) is same


@pytest.mark.parametrize("reward_type", ["strict", "soft"])
@pytest.mark.parametrize("code_from", ["last_block", "whole"])
def test_a_pool_of_processes_passes_the_self_test(reward_type, code_from):
    config = RewardConfig(
        function=CONFIG.function, timeout_s=30, max_concurrent_calls=1, reward_type=reward_type, code_from=code_from
    )

    async def run() -> tuple[int, list[list[Any]]]:
        async with RewardPool(config) as pool:
            known = await pool.self_test()
            request = RewardRequest((block("print(input())") if code_from == "last_block" else "print(input())",), "1")
            return known, await pool.score([request])

    known, [[outcome]] = asyncio.run(run())
    assert known == 7 and outcome.score is None and outcome.reason == "raised"
    assert "code_sandbox.py" in outcome.detail or "holds no tests" in outcome.detail


@pytest.mark.parametrize(
    ("body", "inputs", "output", "share"),
    [
        ("'12'", [["a"]], "12", 1.0),
        ("12", [["a"]], "12", 0.0),
        ("12", ['"a"'], "12", 1.0),
        ("1.5", [[1]], 10**400, 0.0),
        ("{1: 'x', '1': 'y'}", [[1]], {"1": "y"}, 0.0),
        ("{1: 'x'}", [[1]], {"1": "x"}, 1.0),
    ],
)
def test_values_are_compared_as_they_are_given(body, inputs, output, share):
    tests = json.dumps({"fn_name": "f", "inputs": inputs, "outputs": [output]})
    assert scored(f"def f(x):\n    return {body}", tests)["passed"] == share


@pytest.mark.parametrize(
    "tests",
    [
        [{"assert_code": 5}],
        {"fn_name": 5, "inputs": [[1]], "outputs": [1]},
        [{"stdin": "a", "expected_stdout": None}],
        {"inputs": "ab", "outputs": "cd"},
        {"inputs": {"a": 1}, "outputs": {"b": 2}},
    ],
)
def test_tests_of_another_kind_are_an_error(tests):
    with pytest.raises(ValueError, match="tests that cannot be read"):
        read_tests(json.dumps(tests), {})
