from __future__ import annotations

import json
import re

import pytest

from roll.configs.pipeline import RewardConfig
from roll.configs.roles import DataArguments
from roll.datasets.math_expressions import LEVELS, Expression, Term
from roll.datasets.math_problems import generate, main, parse_levels
from roll.datasets.prompts import load_prompts
from roll.datasets.sft import load_pairs
from roll.rewards.math_rule import math_reward


def compact(text: str) -> str:
    """The canonical form of a compact problem such as 34+12=."""
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
def test_worked_solutions_score_under_the_reward_and_word_problems_differ(boxed):
    problems = generate(100, split="train", seed=1, levels=LEVELS, style="words", boxed=boxed)
    for problem in problems:
        assert math_reward(problem.solution, problem.ground_truth, RewardConfig()) == 1.0
        assert ("boxed" in problem.solution) == boxed
        assert problem.prompt.endswith("?") and problem.prompt.count(".") >= 1
    assert len({problem.prompt for problem in problems}) == 100


def test_no_held_out_problem_is_trained_on_in_any_order_of_its_terms():
    train = {compact(problem.prompt) for problem in generate(2000, split="train", seed=1, levels=[1, 2])}
    val = {compact(problem.prompt) for problem in generate(500, split="val", seed=2, levels=[1, 2])}
    assert not train & val


def test_the_same_seed_gives_the_same_problems_and_another_seed_others():
    first = generate(50, split="train", seed=1)
    assert generate(50, split="train", seed=1) == first != generate(50, split="train", seed=2)
    assert [problem.level for problem in first[:4]] == [1, 2, 1, 2]


def test_there_are_enough_problems_of_two_digits():
    assert len(generate(5000, split="train", seed=0, levels=[2])) == 5000


def test_a_mixture_has_the_share_of_words_asked_for():
    problems = generate(400, split="train", seed=1, style="mixed", words_share=0.25)
    assert 60 <= sum(problem.prompt.endswith("?") for problem in problems) <= 140


def test_too_many_or_unknown_problems_are_an_error():
    with pytest.raises(ValueError, match=r"train: levels \[1\] in style compact hold 3\d\d\d problems, 5000 were"):
        generate(5000, split="train", seed=1, levels=[1])
    with pytest.raises(ValueError, match=r"levels \[9\]: there are 1, 2, 3, 4"):
        generate(1, split="train", seed=1, levels=[1, 9])


def test_the_canonical_form_forgets_order_but_not_signs():
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


def test_the_command_writes_files_that_both_pipelines_read(tmp_path, capsys):
    main(["--out", str(tmp_path), "--train", "20", "--val", "5", "--levels", "1-3", "--seed", "7"])
    assert "20 problems in train.jsonl, 5 held out in val.jsonl" in capsys.readouterr().out
    prompts = load_prompts(str(tmp_path / "train.jsonl"), DataArguments())
    assert len(prompts) == len(load_pairs(str(tmp_path / "train.jsonl"), DataArguments())) == 20
    assert {prompt.tag for prompt in prompts} == {"math_rule"}
    first = json.loads((tmp_path / "val.jsonl").read_text().splitlines()[0])
    assert list(first) == ["id", "tag", "level", "prompt", "solution", "ground_truth"]


def test_nothing_is_carried_on_the_first_level():
    for problem in generate(500, split="train", seed=3, levels=[1]):
        digits = re.fullmatch(r"(\d)(\d)([+-])(\d)(\d)=", problem.prompt).groups()
        sign = 1 if digits[2] == "+" else -1
        assert 0 <= int(digits[0]) + sign * int(digits[3]) <= 9
        assert 0 <= int(digits[1]) + sign * int(digits[4]) <= 9


def test_levels_are_spans_and_lists():
    assert parse_levels("1-4") == [1, 2, 3, 4] and parse_levels("2") == [2] and parse_levels("1,3-4") == [1, 3, 4]
