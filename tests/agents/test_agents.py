"""What an agent imports and returns, and which task it gets."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.agents import Agent, Result
from roll.agents.outcome import OutcomeError, checked_result, result_of_line
from roll.agents.tasks import read_tasks, seed_of_place, task_of


def test_an_agent_imports_neither_torch_nor_ray_nor_anything_else_that_takes_time() -> None:
    code = "import sys; old = set(sys.modules); from roll.agents import Agent, Result; print(*set(sys.modules) - old)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {name.partition(".")[0] for name in found} <= {"roll", *sys.stdlib_module_names}


def test_an_agent_without_run_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="run"):
        Agent()  # type: ignore[abstract]


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (None, "run returned None; return Result"),
        (1.0, "run returned a float; return Result"),
        (Result("1"), "the reward is str, not a number"),  # type: ignore[arg-type]
        (Result(math.nan), "the reward is nan"),
        (Result(1e30), "at most 1e.18 in size"),
        (Result(1.0, [1]), "the metrics are list"),  # type: ignore[arg-type]
        (Result(1.0, {"score": 1.0}), "'score', which a run reports itself"),
        (Result(1.0, {1: 1.0}), "the name 1; use text"),  # type: ignore[dict-item]
        (Result(1.0, {"turns": "3"}), "the metric turns is '3'"),  # type: ignore[dict-item]
    ],
)
def test_what_is_no_result_is_named(found: Any, problem: str) -> None:
    with pytest.raises(OutcomeError, match=problem):
        checked_result(found)


@pytest.mark.parametrize(
    ("line", "result"),
    [
        ('{"reward": 1}', Result(1.0, {})),
        ('{"reward": -0.5, "metrics": {"turns": 3}}', Result(-0.5, {"turns": 3.0})),
        ("", None),
        ("1.0", None),
        ('{"score": 1.0}', None),
        ('{"reward": 1.0, "note": "done"}', None),
        ('{"reward": NaN}', None),
        ("[" * 10_000, None),
    ],
)
def test_the_last_line_of_a_program_is_its_result(line: str, result: Result | None) -> None:
    if result is not None:
        assert result_of_line(line) == result
        return
    with pytest.raises(OutcomeError) as caught:
        result_of_line(line)
    assert len(str(caught.value)) < 400


def test_rows_of_all_files_are_tasks_and_without_files_the_seed_is(tmp_path: Path) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for number, file in enumerate(files):
        file.write_text(json.dumps({"question": number}) + "\n")
    rows = read_tasks([*map(str, files)])
    assert [task_of(rows, seed) for seed in (4, 7)] == [{"question": 0}, {"question": 1}]
    assert task_of(read_tasks([]), 12) == {"seed": 12}


@given(rows=st.integers(1, 40), rounds=st.integers(1, 3), run_seed=st.integers(0, 9), seed=st.integers(0, 2**31 - 1))
def test_a_run_goes_through_every_row_before_one_comes_again(rows: int, rounds: int, run_seed: int, seed: int) -> None:
    seeds = [seed_of_place(rows, place, seed, run_seed) for place in range(rows * rounds)]
    for number in range(rounds):
        assert Counter(each % rows for each in seeds[number * rows : (number + 1) * rows]) == Counter(range(rows))
    assert all(abs(each - seed) < rows and each >= 0 for each in seeds)
    assert seed_of_place(0, 5, seed, run_seed) == seed
