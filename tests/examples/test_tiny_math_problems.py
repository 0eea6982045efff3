from __future__ import annotations

import json
import re

import pytest

from examples.tiny_math.problems import LEVELS, Expression, Term, generate, main, parse_levels
from roll.configs.arguments import DataArguments
from roll.configs.scoring.rewards import RewardConfig
from roll.datasets.prompts import load_prompts
from roll.datasets.sft import load_sft_data
from roll.rewards.math_rule import math_reward


def compact(text: str) -> str:
    """Canonical form of a compact problem such as 34+12=."""
    terms = text.rstrip("=").replace("-", "+-").split("+")
    return " ".join(sorted("*".join(sorted(term.split("*"))) for term in terms))


@pytest.mark.parametrize("level", LEVELS)
def test_compact_answers_are_exact(level):
    problems = generate(200, split="train", seed=1, levels=[level])
    for problem in problems:
        assert eval(problem.prompt.rstrip("=")) == int(problem.ground_truth) >= 0  # noqa: S307
        assert problem.solution == problem.ground_truth
    assert len({problem.prompt for problem in problems}) == 200


@pytest.mark.parametrize("boxed", [True, False])
def test_worked_solutions_of_word_problems_are_correct_under_the_reward(boxed):
    problems = generate(100, split="train", seed=1, levels=LEVELS, style="words", boxed=boxed)
    for problem in problems:
        assert math_reward(problem.solution, problem.ground_truth, RewardConfig()) == 1.0
        assert ("boxed" in problem.solution) == boxed
        assert problem.prompt.endswith("?") and problem.prompt.count(".") >= 1
    assert len({problem.prompt for problem in problems}) == 100


def test_the_splits_share_no_problem_in_any_order_of_its_terms():
    train = {compact(problem.prompt) for problem in generate(2000, split="train", seed=1, levels=[1, 2])}
    val = {compact(problem.prompt) for problem in generate(500, split="val", seed=2, levels=[1, 2])}
    assert not train & val


def test_the_same_seed_gives_the_same_problems_and_another_seed_others():
    first = generate(50, split="train", seed=1)
    assert generate(50, split="train", seed=1) == first != generate(50, split="train", seed=2)
    assert [problem.level for problem in first[:4]] == [1, 2, 1, 2]


def test_level_2_has_five_thousand_problems():
    assert len(generate(5000, split="train", seed=0, levels=[2])) == 5000


def test_the_mixed_style_has_the_requested_share_of_word_problems():
    problems = generate(400, split="train", seed=1, style="mixed", words_share=0.25)
    assert 60 <= sum(problem.prompt.endswith("?") for problem in problems) <= 140


def test_too_many_problems_and_unknown_levels_are_errors():
    with pytest.raises(
        ValueError, match=r"train: levels \[1\] in style compact have 3\d\d\d problems, fewer than the 5000"
    ):
        generate(5000, split="train", seed=1, levels=[1])
    with pytest.raises(ValueError, match=r"levels \[9\]: the levels are 1, 2, 3, 4"):
        generate(1, split="train", seed=1, levels=[1, 9])


def test_the_canonical_form_ignores_order_but_not_signs():
    def expression(*terms):
        return Expression(tuple(Term(sign, factors) for sign, factors in terms))

    assert expression((1, (12,)), (1, (34,))).canonical == expression((1, (34,)), (1, (12,))).canonical
    assert (
        expression(
            (1, (3, 4)),
        ).canonical
        == expression(
            (1, (4, 3)),
        ).canonical
    )
    assert expression((1, (9,)), (-1, (5,))).canonical != expression((1, (5,)), (-1, (9,))).canonical


def test_the_command_writes_files_for_rlvr_and_sft(tmp_path, capsys):
    main(["--out", str(tmp_path), "--train", "20", "--val", "5", "--levels", "1-3", "--seed", "7"])
    assert "20 problems in train.jsonl, 5 in val.jsonl" in capsys.readouterr().out
    prompts = load_prompts(str(tmp_path / "train.jsonl"), DataArguments())
    assert len(prompts) == len(load_sft_data(str(tmp_path / "train.jsonl"), DataArguments())) == 20
    assert {prompt.tag for prompt in prompts} == {"math_rule"}
    first = json.loads((tmp_path / "val.jsonl").read_text().splitlines()[0])
    assert list(first) == ["id", "tag", "level", "prompt", "solution", "ground_truth"]


def test_level_1_needs_no_carrying():
    for problem in generate(500, split="train", seed=3, levels=[1]):
        digits = re.fullmatch(r"(\d)(\d)([+-])(\d)(\d)=", problem.prompt).groups()
        sign = 1 if digits[2] == "+" else -1
        assert 0 <= int(digits[0]) + sign * int(digits[3]) <= 9
        assert 0 <= int(digits[1]) + sign * int(digits[4]) <= 9


def test_levels_are_parsed_from_ranges_and_lists():
    assert parse_levels("1-4") == [1, 2, 3, 4] and parse_levels("2") == [2] and parse_levels("1,3-4") == [1, 3, 4]
