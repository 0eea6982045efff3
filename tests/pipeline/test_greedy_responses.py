"""The greedy response to each prompt (remax): generated, failed and restored with its group, and no sample of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from roll.algorithms.advantages import GREEDY_KEYS, AdvantageSettings, compute_advantages, read_greedy
from roll.base.errors import RunError
from roll.base.timers import StepClock
from roll.configs.asynchronous import AsyncTrainingConfig
from roll.configs.pipeline import RLVRConfig
from roll.configs.run_options import RolloutOptions
from roll.configs.scoring.rewards import FilterArguments, QueryFilterConfig
from roll.pipeline.kinds.rlvr import RLVRWorker
from roll.pipeline.kinds.scorer import Scorer
from roll.rollout.admission import AdmissionSettings
from roll.rollout.engine_pool import EnginePool
from roll.rollout.filters import QueryFilter
from roll.rollout.ledger import PromptRequest
from roll.rollout.rollouter import Rollouter
from roll.rollout.source import SampleBatch
from roll.rollout.types import GenerateRequest, Group, SamplingParams
from tests.pipeline.kinds.test_rlvr_pipeline import PROMPTS, LengthScorer, SumScorer, two_rewards
from tests.rollout.agents.agent_setup import Engines

BATCH = 2
RUN_STEPS = 4
SAMPLING = SamplingParams(max_new_tokens=8, temperature=0.7, top_p=0.9, top_k=5, repetition_penalty=1.1)


def is_greedy(request: GenerateRequest) -> bool:
    return request.sampling.temperature == 0


def respond(request: GenerateRequest) -> str:
    """Samples have two characters, greedy responses four."""
    return "1234" if is_greedy(request) else "12"


def worker(
    samples: int = 2,
    engines: Engines | None = None,
    scorer: Scorer | None = None,
    retries: int = 0,
    estimator: str = "remax",
) -> RLVRWorker:
    config = RLVRConfig(num_return_sequences_in_group=samples, adv_estimator=estimator)
    pool = EnginePool(engines or Engines(respond), retries, 64)
    sampling: Any = {"train": SAMPLING, "val": SAMPLING}
    return RLVRWorker(config, {"train": PROMPTS, "val": PROMPTS[:3]}, sampling, pool, scorer or LengthScorer())


def generated(made: RLVRWorker, count: int = 3) -> list[Group]:
    groups = made.draw([PromptRequest(i, 0, 0) for i in range(count)])
    asyncio.run(made.generate(groups, "train", StepClock()))
    return groups


def test_a_prompt_has_one_greedy_request_in_the_call_of_its_samples():
    engines = Engines(respond)
    generated(worker(2, engines))
    [requests] = engines.calls
    assert [request.request_id for request in requests[:3]] == ["train-0-0", "train-0-1", "train-0-greedy"]
    greedy = [request for request in requests if is_greedy(request)]
    assert len(greedy) == 3 and len({request.seed for request in requests}) == 9
    assert greedy[0].prompt_ids == requests[0].prompt_ids
    assert greedy[0].sampling == SamplingParams(max_new_tokens=8, temperature=0.0, repetition_penalty=1.1)
    assert requests[0].sampling == SAMPLING


def test_validation_and_other_estimators_have_none():
    engines = Engines(respond)
    asyncio.run(worker(2, engines).validate())
    generated(worker(2, engines, estimator="rloo"))
    assert not any(map(is_greedy, engines.requests))


def test_its_score_is_the_baseline_and_it_is_no_sample():
    made = worker(1)
    groups = generated(made)
    assert [group.scores for group in groups] == [[2.0]] * 3
    assert [group.greedy.score for group in groups if group.greedy] == [4.0] * 3
    batch = made.batch(groups).batch
    assert batch["scores"].tolist() == [2.0] * 3 and batch["response_mask"].sum() == 3 * 3
    assert batch["greedy_scores"].tolist() == [4.0] * 3 and batch["greedy_lengths"].tolist() == [5] * 3
    result = compute_advantages(
        batch["scores"],
        batch["group_ids"],
        batch["response_mask"],
        AdvantageSettings(adv_estimator="remax"),
        greedy=read_greedy(batch),
    )
    assert result.advantages[batch["response_mask"]].tolist() == [-2.0] * 9


def test_padding_rows_have_no_baseline_and_a_batch_without_greedy_responses_has_none():
    made = worker(1)
    made._samples_multiple = 4
    batch = made.batch(generated(made)).batch
    assert sorted(batch["greedy_scores"].tolist()) == [0.0, 4.0, 4.0, 4.0]
    plain = worker(2, estimator="grpo")
    assert not set(GREEDY_KEYS) & set(plain.batch(generated(plain)).batch.keys())


def test_metrics_report_it_apart_from_the_samples():
    made = worker(2)
    groups = generated(made)
    metrics = made.metrics(groups, version=0)
    assert (metrics["rollout/reward_mean"], metrics["rollout/greedy_reward_mean"]) == (2.0, 4.0)
    assert metrics["rollout/response_length_mean"] == metrics["rollout/response_length_max"] == 3
    assert [group.generated_tokens for group in groups] == [3 + 3 + 5] * 3
    assert "rollout/greedy_reward_mean" not in worker(2, estimator="grpo").metrics(
        generated(worker(2, estimator="grpo")), version=0
    )


def test_several_rewards_score_it_with_their_weights():
    [group] = generated(worker(2, Engines(respond), SumScorer(two_rewards())), 1)
    assert group.greedy is not None
    assert group.scores == [2.0 * 2 - 0.5 * 2] * 2 and group.greedy.score == 2.0 * 4 - 0.5 * 4


def test_a_reward_of_all_responses_to_a_prompt_sees_samples_only():
    scorer, seen = LengthScorer(), []
    pool: Any = scorer._pools["math_rule"]
    score = pool.score

    async def recorded(requests):
        seen.extend(request.responses for request in requests)
        return await score(requests)

    pool.score = recorded
    generated(worker(2, scorer=scorer), 1)
    assert seen == [("12", "12"), ("1234",)]


def test_filters_read_the_scores_of_samples():
    scorer = LengthScorer()
    options = QueryFilterConfig("mean_filter", FilterArguments(threshold_up=3.0))
    scorer._filters["math_rule"] = QueryFilter.from_config(options)
    made = worker(2, scorer=scorer)
    assert [made.filter_reason(group) for group in generated(made)] == [None] * 3


@pytest.mark.parametrize(
    ("engines", "scorer", "reason", "failure"),
    [
        (
            Engines(lambda request: None if request.request_id == "train-1-greedy" else respond(request)),
            LengthScorer(),
            "generation_failed",
            "train-1-greedy: out of memory",
        ),
        (
            Engines(lambda request: "666" if request.request_id == "train-1-greedy" else "12"),
            LengthScorer(lambda text: text == "666"),
            "reward_raised",
            "greedy response: reward math_rule: raised ValueError: no",
        ),
        (
            Engines(lambda request: "666" if request.request_id.startswith("train-1") else "12"),
            LengthScorer(lambda text: text == "666"),
            "reward_raised",
            "reward math_rule: raised ValueError: no",
        ),
    ],
)
def test_its_failure_drops_its_group_and_no_other(engines, scorer, reason, failure):
    first, second, third = generated(worker(2, engines, scorer))
    assert (second.drop_reason, second.failure, second.trajectories, second.greedy) == (reason, failure, [], None)
    assert first.drop_reason is None and third.drop_reason is None


def test_an_aborted_one_is_retried_alone():
    broken = ["train-1-greedy"]
    engines = Engines(lambda request: None if request.request_id in broken and not broken.clear() else respond(request))
    groups = generated(worker(2, engines, retries=1))
    assert [[request.request_id for request in call] for call in engines.calls[1:]] == [["train-1-greedy"]]
    assert all(group.greedy is not None and group.greedy.score == 4.0 for group in groups)


def test_a_group_of_a_checkpoint_keeps_it():
    groups = generated(worker(2))
    restored = [Group.from_state(json.loads(json.dumps(group.state_dict()))) for group in groups]
    assert restored == groups and all(group.greedy is not None for group in restored)


def test_a_checkpoint_of_another_estimator_is_refused():
    rloo, remax = worker(2, estimator="rloo"), worker(2)
    with pytest.raises(ValueError, match="adv_estimator: remax cannot continue from a checkpoint whose groups have no"):
        remax.load_state_dict(rloo.state_dict())
    remax.load_state_dict(remax.state_dict())
    rloo.load_state_dict(remax.state_dict())


def rollouter(made: RLVRWorker, ratio: float, failure_rate: float = 1.0) -> Rollouter:
    waits = AsyncTrainingConfig(rollouter="actor", batch_deadline_s=10.0)
    options = RolloutOptions(num_return_sequences_in_group=2, max_failure_rate=failure_rate, async_training=waits)
    return Rollouter(made, AdmissionSettings(batch_size=BATCH, ratio=ratio, total=RUN_STEPS * BATCH), options)


async def steps(made: Rollouter, engines: Engines, versions: range) -> list[SampleBatch]:
    batches = []
    for version in versions:
        engines.version = version
        await made.advance(version)
        batch = await made.next_batch()
        assert batch is not None
        made.admission.ledger.check()
        batches.append(batch)
    return batches


def slow(respond: Callable[[GenerateRequest], str | None]) -> Engines:
    """Calls take one or two milliseconds."""
    return Engines(respond, seconds=lambda request: 0.001 * (1 + (request.seed or 0) % 2))


@pytest.mark.parametrize("ratio", [0.0, 1.0, 2.5])
def test_prompts_stay_accounted_for_while_greedy_responses_fail(ratio):
    """Every third prompt fails by its greedy response alone, and is replaced."""

    def fails(request: GenerateRequest) -> str | None:
        return None if is_greedy(request) and int(request.request_id.split("-")[1]) % 3 == 1 else respond(request)

    async def run() -> None:
        engines = slow(fails)
        made = rollouter(worker(2, engines), ratio)
        batches = await steps(made, engines, range(RUN_STEPS))
        ledger = made.admission.ledger
        assert all(batch.data.batch["greedy_scores"].tolist() == [4.0] * 2 * BATCH for batch in batches)
        assert (ledger.consumed, ledger.in_flight, ledger.buffered) == (RUN_STEPS * BATCH, 0, 0)
        assert ledger.dropped == {"generation_failed": ledger.submitted - RUN_STEPS * BATCH}
        assert ledger.dropped_total >= 3
        await made.close()

    asyncio.run(run())


def test_too_many_failures_of_greedy_responses_end_the_run_with_their_cause():
    async def run() -> None:
        engines = slow(lambda request: None if is_greedy(request) else "12")
        made = rollouter(worker(2, engines), 1.0, failure_rate=0.1)
        try:
            await steps(made, engines, range(1))
        finally:
            await made.close()

    with pytest.raises(RunError, match=r"max_failure_rate .* last cause: train-\d-greedy: out of memory"):
        asyncio.run(run())


@pytest.mark.parametrize("wait_s", [0.0, 0.0015, 0.01])
def test_running_and_buffered_greedy_responses_survive_a_restart(wait_s):
    async def run() -> None:
        engines = slow(respond)
        made = rollouter(worker(2, engines), 1.0)
        before = await steps(made, engines, range(2))
        await asyncio.sleep(wait_s)
        state = json.loads(json.dumps(await made.state_dict()))
        await made.close()
        again = rollouter(worker(2, engines), 1.0)
        await again.load_state_dict(state)
        after = await steps(again, engines, range(2, RUN_STEPS))
        batches = torch.cat([batch.data.batch["greedy_scores"] for batch in [*before, *after]])
        assert batches.tolist() == [4.0] * 2 * BATCH * RUN_STEPS
        assert again.admission.ledger.consumed == again.admission.ledger.submitted == RUN_STEPS * BATCH
        await again.close()

    asyncio.run(run())


def test_requests_of_an_engine_count_it():
    assert RLVRConfig(adv_estimator="grpo", num_return_sequences_in_group=4).responses_per_group == 4
    assert RLVRConfig(adv_estimator="remax", num_return_sequences_in_group=4).responses_per_group == 5
