"""Arguments of reward functions by the names of their parameters, and the results they may return."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from roll.configs.scoring.rewards import RewardConfig
from roll.datasets.prompts import Question
from roll.rewards.calling import ALL, READS, RewardFunction, RewardFunctionError, RewardOutcome, RewardRequest
from roll.usercode.reward_process import checked_answer

MESSAGES = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3="})
ROW = {"prompt": "2+3=", "answer": "5", "data_source": "sums", "extra_info": {"split": "train"}}
REQUEST = RewardRequest(("5", "six"), "5", Question(text="2+3="), ROW, "math", "p1")
CHAT = RewardRequest(("5", "six"), "5", Question(messages=MESSAGES), ROW, "math", "p1")


def called(function: Any, index: int | None = 1, request: RewardRequest = REQUEST) -> Any:
    """What the function is called with; test functions return their arguments."""
    return RewardFunction(function, RewardConfig(correct_score=3)).call(request, index)


def outcome(value: Any) -> RewardOutcome:
    [found] = RewardFunction(lambda response: None, RewardConfig()).outcomes(value, None)
    return found


def test_a_function_gets_what_its_parameters_name():
    def ours(response, ground_truth, config, prompt, messages, row, tag, id, responses):
        return response, ground_truth, config.correct_score, prompt, messages, row, tag, id, responses

    message = {"role": "user", "content": "2+3="}
    assert called(ours) == ("six", "5", 3, "2+3=", [message], ROW, "math", "p1", ["5", "six"])
    assert called(lambda response, prompt, messages: (prompt, len(messages)), 0, CHAT) == ("2+3=", 2)


def test_any_other_parameter_is_a_column_or_keeps_its_default():
    assert called(lambda response, answer, unit="cm": (answer, unit)) == ("5", "cm")
    rest = called(lambda response, answer, **columns: columns)
    assert rest == {name: value for name, value in ROW.items() if name != "answer"}


def trl_by_id(completions: Any, id: Any) -> None:
    """A reward in TRL's form, for which `id` may be a column."""


@pytest.mark.parametrize(
    ("function", "reads"),
    [
        (lambda response, ground_truth, config: None, set()),
        (lambda response, prompt: None, {"question"}),
        (lambda response, tag, id: None, {"tag", "id"}),
        (lambda response, answer: None, {"row"}),
        (lambda response, **columns: None, {"row"}),
        (lambda data_source, solution_str, ground_truth, extra_info=None: None, {"row", "tag"}),
        (lambda args, sample: None, {"question", "row"}),
        (trl_by_id, {"question", "row", "id"}),
    ],
)
def test_the_parameters_of_a_function_say_what_it_reads(function, reads):
    assert RewardFunction(function, RewardConfig()).reads == reads


def test_every_parameter_says_what_it_reads():
    assert READS.keys() == ALL.keys()


def test_functions_of_other_systems_are_called_by_their_parameters():
    def verl(data_source, solution_str, ground_truth, extra_info=None):
        return data_source, solution_str, ground_truth, extra_info

    def trl(prompts, completions, answer, **columns):
        return prompts, completions, answer, columns["data_source"]

    async def slime(args, sample, **kwargs):
        return args.correct_score, sample.prompt, sample.response, sample.label, sample.metadata["answer"]

    assert called(verl) == ("sums", "six", "5", {"split": "train"})
    assert called(trl, None)[:3] == (["2+3="] * 2, ["5", "six"], ["5", "5"])
    assert called(trl, None, CHAT)[1] == [[{"role": "assistant", "content": text}] for text in ("5", "six")]
    assert asyncio.run(called(slime)) == (3, "2+3=", "six", "5", "5")
    assert [sample.response for sample in called(lambda args, samples: samples, None)] == ["5", "six"]


@pytest.mark.parametrize(
    ("function", "per_group", "sees_group", "is_async"),
    [
        (lambda response: 0, False, False, False),
        (lambda responses: [0], True, True, False),
        (lambda response, responses: 0, False, True, False),
        (lambda completions, **columns: [0], True, True, False),
    ],
)
def test_the_parameters_decide_how_often_a_function_is_called(function, per_group, sees_group, is_async):
    read = RewardFunction(function, RewardConfig())
    assert (read.per_group, read.sees_group, read.is_async) == (per_group, sees_group, is_async)


def test_objects_with_an_async_call_are_coroutine_functions():
    class Judge:
        async def __call__(self, response):
            return 1.0

    assert RewardFunction(Judge(), RewardConfig()).is_async


class Scorer:
    def __call__(self, completions):
        return [0.0 for _ in completions]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (Scorer, "is a class; add the line `score = Scorer()` and name that, as module:score"),
        (lambda text: 0, "has no parameter for the response; name it response"),
        (lambda *texts: 0, "parameter *texts has no name to pass it by"),
        (lambda response, /: 0, "parameter response has no name to pass it by"),
    ],
)
def test_a_function_without_usable_parameters_is_explained_with_its_line(function, message):
    with pytest.raises(RewardFunctionError) as caught:
        RewardFunction(function, RewardConfig())
    assert str(caught.value).startswith("tests/rewards/test_reward_calling.py:") and message in str(caught.value)


def test_a_parameter_without_a_column_is_explained_with_the_nearest_name():
    with pytest.raises(RewardFunctionError, match=r"asks for anser, .* \(prompt, answer, .*did you mean answer\?"):
        called(lambda response, anser: 0)


@pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1), np.bool_(True), np.array(1), {"score": np.array(1)}])
def test_one_number_is_a_score(value):
    assert outcome(value) == RewardOutcome(1.0)


def test_other_numbers_of_a_dictionary_are_metrics():
    value = {"score": 0.5, "acc": True, "length": np.array(12), "pred": "5", "odd": math.nan, "vast": 1e300}
    assert outcome(value) == RewardOutcome(0.5, metrics={"acc": 1.0, "length": 12.0})


@pytest.mark.parametrize(
    ("value", "reason", "message"),
    [
        (None, "wrong_type", "returned None; return one number, or a dictionary with 'score'"),
        ("1", "wrong_type", "returned a str of length 1"),
        ([1.0], "wrong_type", "returned a list of length 1"),
        (math.nan, "not_finite", "returned nan; return a finite number"),
        (10**400, "not_finite", "returned a number too large for a float; return a finite number"),
        (1e39, "not_finite", "returned 1e+39; return a number of at most 1e+18 in size"),
        (-np.float32(2e18), "not_finite", "returned -2e+18; return a number of at most 1e+18 in size"),
        ({"score": 1e39}, "not_finite", "returned 1e+39"),
        ({"reward": 1}, "wrong_type", "returned a dictionary without the key 'score'; its keys are reward"),
        ({"score": None}, "wrong_type", "returned None"),
        (np.array([1.0]), "wrong_type", "return one number, or a dictionary with 'score', for example with .item()"),
    ],
)
def test_any_other_value_is_a_failure_with_the_line_of_the_function(value, reason, message):
    failure = outcome(value)
    assert (failure.score, failure.reason) == (None, reason) and message in failure.detail
    assert failure.detail.startswith("tests/rewards/test_reward_calling.py:")


@pytest.mark.parametrize("value", [[0, 1], (0, 1), np.array([0, 1]), [{"score": 0}, {"score": 1}]])
def test_a_result_for_a_group_is_a_list(value):
    found = RewardFunction(lambda responses: None, RewardConfig()).outcomes(value, 2)
    assert [each.score for each in found] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1], "returned 1 scores for 2 responses"),
        (1.0, "returned a float; return a list of 2 scores"),
        ("ab", "a str"),
        (np.array(1.0), "a ndarray;"),
    ],
)
def test_a_wrong_result_for_a_group_fails_all_of_it(value, message):
    found = RewardFunction(lambda responses: None, RewardConfig()).outcomes(value, 2)
    assert len(found) == 2 and all(message in each.detail and each.reason == "wrong_type" for each in found)


def test_a_function_may_ask_for_the_rendered_prompt_and_for_token_ids():
    request = RewardRequest(
        ("5", "six"),
        "5",
        Question(text="2+3="),
        prompt_text="<user>2+3=",
        prompt_ids=(1, 2),
        response_ids=((3,), (4, 5)),
    )
    function = RewardFunction(lambda response, prompt_text, prompt_ids, response_ids: None, RewardConfig())
    assert function.reads == {"prompt_text", "prompt_ids", "response_ids"}
    assert called(lambda response, prompt_text, prompt_ids: (prompt_text, prompt_ids), 1, request) == (
        "<user>2+3=",
        [1, 2],
    )
    assert called(lambda response, response_ids: response_ids, 1, request) == [4, 5]
    assert called(lambda responses, response_ids: response_ids, None, request) == [[3], [4, 5]]
    assert called(lambda prompts, completions, completion_ids: completion_ids, None, request) == [[3], [4, 5]]
    assert called(lambda response, response_ids, prompt_text: (response_ids, prompt_text)) == ([], "2+3=")


OUTCOME = RewardOutcome(0.5, metrics={"length": 3.0})


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ([[OUTCOME]], None),
        ([[RewardOutcome(None, "raised", "no")]], "raised"),
        *(([[RewardOutcome(score)]], "not_finite") for score in (1e30, -1e19, float("nan"), float("inf"))),
        ([[RewardOutcome(0.5, metrics={"length": float("nan")})]], "not_finite"),
        *(([[RewardOutcome(score)]], "wrong_type") for score in ("1", None, 1j, 10**400)),
        ([[RewardOutcome(0.5, metrics={"length": "long"})]], "wrong_type"),
        ([[RewardOutcome(0.5, metrics=dict.fromkeys(map(str, range(100_000)), 1.0))]], "wrong_type"),
        *(
            (answer, "wrong_type")
            for answer in (99.0, None, [], [99.0], [[99.0]], [[]], [[OUTCOME, OUTCOME]], [[OUTCOME]] * 2)
        ),
    ],
)
def test_what_a_process_answers_is_checked_by_the_driver(answer, reason):
    ((outcome,),) = checked_answer(answer, [(RewardRequest(("a",), ""), 0)])
    assert outcome.reason == reason and (outcome == OUTCOME or outcome.score is None)


def test_a_dictionary_with_very_many_numbers_is_no_result():
    many = outcome({"score": 1.0, **dict.fromkeys(range(100_000), 1.0)})
    assert many.reason == "wrong_type" and "100001 keys; return at most 1000" in many.detail
