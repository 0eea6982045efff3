"""RLVR groups: requests of all prompts in one call, scoring, failures, replayed validations, and checkpoints."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from roll.algorithms.turns import read_turns
from roll.base.errors import RunError
from roll.base.events import EVENTS_FILE, EventLog
from roll.base.timers import StepClock
from roll.configs.learning.lora import PolicyArguments
from roll.configs.pipeline import RLVRConfig
from roll.configs.scoring.built_in_rewards import BUILT_IN
from roll.configs.scoring.rewards import FilterArguments, QueryFilterConfig, RewardConfig
from roll.datasets.records import DatasetError
from roll.datasets.templates import EncodedPrompt
from roll.pipeline.kinds.rlvr import RLVRWorker, make_sampler
from roll.pipeline.kinds.scorer import Scorer
from roll.rewards.calling import RewardOutcome, RewardRequest
from roll.rollout.engine_pool import EnginePool
from roll.rollout.ledger import PromptRequest
from roll.rollout.types import Group, SamplingParams
from tests.rollout.agents.agent_setup import Engines, decode, one_of

PROMPTS = [
    EncodedPrompt(id=f"p{i}", tag="math", ids=[7, i + 1], ground_truth=str(i), row={"level": i}) for i in range(5)
]
SAMPLING = SamplingParams(max_new_tokens=8)


class LengthScorer(Scorer):
    """Scores in this process, by length; texts for which `fails` is true have no score."""

    def __init__(self, fails: Callable[[str], bool] = lambda text: False) -> None:
        class Pool:
            async def score(self, requests: list[RewardRequest]) -> list[list[RewardOutcome]]:
                return [[self.outcome(text, request) for text in request.responses] for request in requests]

            def outcome(self, text: str, request: RewardRequest) -> RewardOutcome:
                if fails(text):
                    return RewardOutcome(None, "raised", "ValueError: no")
                return RewardOutcome(float(len(text)), metrics={"level": float(request.row["level"])})

            def close(self) -> None:
                pass

        config = RLVRConfig()
        super().__init__(config.rewards, None)  # type: ignore[arg-type]
        self._pools = {"math_rule": Pool()}  # type: ignore[dict-item]

    def text(self, response_ids: list[int], stop_strings: tuple[str, ...] = ()) -> str:
        return decode(response_ids)


def worker(samples: int = 2, engines: Engines | None = None, scorer: Scorer | None = None, **keys: Any) -> RLVRWorker:
    config = RLVRConfig(num_return_sequences_in_group=samples, **keys)
    pool = EnginePool(engines or Engines(one_of("12", "345", "6")), 0, 64)
    sampling: Any = {"train": SAMPLING, "val": SAMPLING}
    return RLVRWorker(config, {"train": PROMPTS, "val": PROMPTS[:3]}, sampling, pool, scorer or LengthScorer())


def drawn(made: RLVRWorker, first: int, count: int) -> list[int]:
    return [group.problem for group in made.draw([PromptRequest(first + i, 0, 0) for i in range(count)])]


def generated(made: RLVRWorker, count: int) -> list[Group]:
    groups = made.draw([PromptRequest(i, 0, 0) for i in range(count)])
    asyncio.run(made.generate(groups, "train", StepClock()))
    return groups


def test_all_groups_are_generated_in_one_call_and_scored():
    engines = Engines(one_of("12", "345", "6"))
    groups = generated(worker(4, engines), 3)
    assert len(engines.calls) == 1 and len({request.seed for request in engines.requests}) == 3 * 4
    for group in groups:
        assert group.drop_reason is None and group.name == PROMPTS[group.problem].id
        for trajectory in group.trajectories:
            [turn] = trajectory.turns
            assert trajectory.ids[: turn.start] == PROMPTS[group.problem].ids
            assert trajectory.score == len(turn.text) and trajectory.stop == "terminated"


def test_requests_have_the_version_of_their_prompt_and_those_of_validation_none():
    engines = Engines(one_of("12"))
    made = worker(2, engines)
    groups = made.draw([PromptRequest(number, version, version + 1) for number, version in enumerate((3, 4))])
    asyncio.run(made.generate(groups, "train", StepClock()))
    assert [request.version for request in engines.requests] == [3, 3, 4, 4]
    asyncio.run(made.validate())
    assert {request.version for request in engines.requests[4:]} == {None}


def test_a_prompt_is_answered_by_the_policy_of_its_tag_and_other_tags_are_refused():
    engines = Engines(one_of("12", "345"))
    policies = {"sums": PolicyArguments(tags=["math"]), "other": PolicyArguments(tags=["code"])}
    made = worker(2, engines, policies=policies)
    groups = made.draw([PromptRequest(0, 0, 0)])
    asyncio.run(made.generate(groups, "train", StepClock()))
    assert [request.policy for request in engines.requests] == ["sums", "sums"]
    found = made.metrics(groups, version=0)
    assert (
        found["sums/rollout/reward_mean"] == found["rollout/reward_mean"] and "other/rollout/reward_mean" not in found
    )
    with pytest.raises(ValueError, match="policies: tags {} cannot continue from a checkpoint with {'math': 'sums'"):
        worker(2).load_state_dict(made.state_dict())


def test_numbers_that_the_reward_returns_are_metrics_of_the_batch():
    made = worker(2)
    groups = generated(made, 5)
    assert made.metrics(groups, version=1)["reward/math/level"] == 2.0


def test_a_response_cut_at_the_length_limit_is_marked():
    [group] = generated(worker(1, Engines(one_of("1" * 100))), 1)
    assert group.trajectories[0].stop == "sequence_length"


def test_a_failed_response_drops_its_group_and_no_other():
    engines = Engines(lambda request: None if request.request_id == "train-1-1" else "12")
    first, second = generated(worker(2, engines), 2)
    assert first.drop_reason is None and len(first.trajectories) == 2
    assert (second.drop_reason, second.failure, second.trajectories) == (
        "generation_failed",
        "train-1-1: out of memory",
        [],
    )


def test_a_response_without_a_score_drops_its_group_with_the_reason():
    engines = Engines(lambda request: "666" if request.request_id == "train-0-1" else "12")
    first, second = generated(worker(2, engines, LengthScorer(lambda text: text == "666")), 2)
    assert (first.drop_reason, first.failure) == ("reward_raised", "reward math_rule: raised ValueError: no")
    assert second.scores == [2.0, 2.0]


def test_a_validation_replays_a_failed_group_with_the_same_seeds():
    broken = ["val-1-0"]
    engines = Engines(lambda request: None if request.request_id in broken and not broken.clear() else "12")
    metrics = asyncio.run(worker(engines=engines).validate())
    assert metrics == {
        "val/math/score": 2.0,
        "val/math/level": 1.0,
        "val/score": 2.0,
        "val/response_length_mean": 3.0,
        "val/replayed_groups": 1,
    }
    assert [[request.request_id for request in call] for call in engines.calls] == [
        ["val-0-0", "val-1-0", "val-2-0"],
        ["val-1-0"],
    ]
    assert engines.calls[0][1].seed == engines.calls[1][0].seed


@pytest.mark.parametrize(
    ("engines", "scorer", "message"),
    [
        (
            Engines(lambda request: None if request.request_id == "val-2-0" else "12"),
            LengthScorer(),
            "validation group p2: failed 3 times, last with generation_failed: val-2-0: out of memory",
        ),
        (
            Engines(one_of("12")),
            LengthScorer(lambda text: True),
            "validation group p0: failed 3 times, last with reward_raised: reward math_rule: raised ValueError: no",
        ),
    ],
)
def test_a_validation_ends_the_run_with_prompt_and_cause_of_a_group_that_always_fails(engines, scorer, message):
    with pytest.raises(RunError, match=f"^{message}$"):
        asyncio.run(worker(engines=engines, scorer=scorer).validate())


def test_every_sample_is_one_turn():
    made = worker(4)
    batch = made.batch(generated(made, 5)).batch
    assert batch["turn_count"].tolist() == [1] * 20 and read_turns(batch) is not None


def test_groups_are_restored_from_a_checkpoint_exactly():
    groups = generated(worker(3), 2)
    assert [Group.from_state(json.loads(json.dumps(group.state_dict()))) for group in groups] == groups


def test_the_position_in_the_data_is_restored_also_within_a_pass():
    whole, first, second = worker(), worker(), worker()
    order = drawn(whole, 0, 12)
    assert drawn(first, 0, 7) == order[:7]
    second.load_state_dict(first.state_dict())
    assert drawn(second, 7, 5) == order[7:]


def test_groups_of_another_size_are_refused_with_the_size_that_fits():
    with pytest.raises(ValueError, match="num_return_sequences_in_group: 8 cannot continue .* groups of 4; use 4"):
        worker(8).load_state_dict(worker(4).state_dict())


class SumScorer(Scorer):
    """Scores in this process: `length` by the number of characters, `digit` by the last digit."""

    def __init__(self, rewards: dict[str, RewardConfig], fails: str = "") -> None:
        class Pool:
            def __init__(self, name: str) -> None:
                self.name = name

            async def score(self, requests: list[RewardRequest]) -> list[list[RewardOutcome]]:
                return [[self.outcome(text) for text in request.responses] for request in requests]

            def outcome(self, text: str) -> RewardOutcome:
                if self.name == fails:
                    return RewardOutcome(None, "timeout", "too slow")
                value = len(text) if self.name == "length" else int(text[-1])
                return RewardOutcome(float(value), metrics={"seen": 1.0})

            def close(self) -> None:
                pass

        super().__init__(rewards, None)  # type: ignore[arg-type]
        self._pools = {name: Pool(name) for name in rewards}  # type: ignore[misc]

    def text(self, response_ids: list[int], stop_strings: tuple[str, ...] = ()) -> str:
        return decode(response_ids)


def two_rewards(**options: Any) -> dict[str, RewardConfig]:
    digit = RewardConfig(tag_included=["math"], weight=-0.5, **options)
    return {"length": RewardConfig(tag_included=["math"], weight=2.0), "digit": digit, "other": RewardConfig()}


def test_the_score_is_the_weighted_sum_and_each_part_is_a_metric():
    made = worker(2, Engines(one_of("124")), SumScorer(two_rewards()))
    groups = generated(made, 5)
    assert all(group.scores == [2.0 * 3 - 0.5 * 4] * 2 for group in groups)
    metrics = made.metrics(groups, version=1)
    assert {name: value for name, value in metrics.items() if name.startswith("reward/")} == {
        "reward/math/length": 3.0,
        "reward/math/length/seen": 1.0,
        "reward/math/digit": 4.0,
        "reward/math/digit/seen": 1.0,
    }


def test_a_failure_of_any_part_fails_the_group_with_its_reason():
    [group] = generated(worker(2, Engines(one_of("12")), SumScorer(two_rewards(), fails="digit")), 1)
    assert (group.drop_reason, group.failure) == ("reward_timeout", "reward digit: timeout too slow")


def test_a_weighted_sum_that_training_cannot_hold_fails_the_group():
    rewards = two_rewards()
    rewards["length"].weight = 1e38
    [group] = generated(worker(2, Engines(one_of("120")), SumScorer(rewards)), 1)
    assert (group.drop_reason, group.trajectories) == ("reward_not_finite", [])
    assert group.failure == "the weighted sum of length, digit is 3e+38, beyond 1e+18 in size"


def test_the_filter_of_one_part_reads_the_sum():
    options = QueryFilterConfig("mean_filter", FilterArguments(threshold_up=3.0))
    scorer = SumScorer(two_rewards(query_filter_config=options))
    made = worker(2, Engines(one_of("14")), scorer)
    [group] = generated(made, 1)
    assert group.scores == [2.0, 2.0] and made.filter_reason(group) is None
    [group] = generated(worker(2, Engines(one_of("1111")), scorer), 1)
    assert group.scores == [7.5, 7.5]
    assert made.filter_reason(group) == ("filtered_mean_high", "rewards.digit.query_filter_config")


def test_prompts_of_several_rewards_are_drawn_by_the_one_that_has_a_share():
    config = RLVRConfig(rewards=two_rewards())
    config.actor_train.data_args.domain_interleave_probs = {"digit": 0.75, "other": 0.25}
    prompts = [*PROMPTS[:2], EncodedPrompt(id="o", tag="text", ids=[7], ground_truth="1", row={})]
    taken = make_sampler(config, prompts).take(8)
    assert taken.count(2) == 2
    config.actor_train.data_args.domain_interleave_probs = {"math_rule": 1.0}
    with pytest.raises(RunError, match=r"no prompts in math_rule; the files have prompts of length \(2\), other \(1\)"):
        make_sampler(config, prompts)


def test_the_template_of_a_reward_model_is_tried_on_the_prompts_that_it_scores_alone() -> None:
    seen: list[int] = []

    class Model:
        def check(self, questions: list[Any]) -> None:
            seen.append(len(questions))
            if questions:
                raise DatasetError("'none' needs a text")

    function = BUILT_IN["reward_model"].function
    for tag, count in (("other", 0), ("math", len(PROMPTS))):
        rewards = {"model": RewardConfig(function=function, tag_included=[tag]), "rule": RewardConfig()}
        scorer = Scorer(rewards, None, {"model": Model()})  # type: ignore[arg-type, dict-item]
        with pytest.raises(DatasetError, match="rewards.model.template.*needs a text") if count else nullcontext():
            scorer.check(PROMPTS)
        assert seen.pop() == count


def test_a_process_of_a_reward_that_is_replaced_is_an_event(tmp_path: Path) -> None:
    class OddScorer(Scorer):
        def text(self, response_ids: list[int], stop_strings: tuple[str, ...] = ()) -> str:
            return "die"

    reward = RewardConfig(function="tests.usercode.odd_rewards:behave")
    scorer = OddScorer({"odd": reward}, None, events=EventLog(tmp_path))  # type: ignore[arg-type]
    [group] = generated(worker(1, scorer=scorer), 1)
    scorer.close()
    assert group.drop_reason == "reward_raised"
    (event,) = map(json.loads, (tmp_path / EVENTS_FILE).read_text().splitlines())
    assert (event["component"], event["event"]) == ("rewards.odd", "process replaced")
    assert "died with exit code 7" in event["message"]
