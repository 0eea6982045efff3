"""Batches of pairs: both rows of a pair stay together, and a policy or reward model learns which response is better."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.base.timers import StepClock
from roll.configs.arguments import TrainingArguments
from roll.configs.devices.parallel_layout import ParallelLayout
from roll.configs.pipeline import DPOConfig, RewardModelConfig
from roll.configs.roles import ActorTrainConfig, RewardModelTrainConfig
from roll.datasets.preferences import PreferencePair
from roll.datasets.sft import SFTExample
from roll.pipeline.kinds.dpo import DPOPipeline
from roll.pipeline.kinds.preference import pair_plans
from roll.pipeline.kinds.reward_model import RewardModelPipeline
from roll.rollout.source import SampleBatch
from tests.pipeline.bigram import BigramCluster, BigramCritic


def example(prompt, response):
    return SFTExample("x", [0] * prompt, [1] * response)


def role(devices=2, kind=ActorTrainConfig, **keys):
    training = TrainingArguments(per_device_train_batch_size=2, gradient_accumulation_steps=2)
    return kind(training_args=training, device_mapping=list(range(devices)), **keys)


def dpo_learner(**keys):
    config = DPOConfig(response_length=8, beta=1.0, actor_train=role(), eval_steps=1, **keys)
    clusters = {"actor_train": BigramCluster(), "reference": BigramCluster()}
    return DPOPipeline.learner(SimpleNamespace(_config=config), clusters)  # type: ignore[arg-type]


def reward_model_learner():
    config = RewardModelConfig(response_length=8, actor_train=role(kind=RewardModelTrainConfig), eval_steps=1)
    return RewardModelPipeline.learner(SimpleNamespace(_config=config), {"actor_train": BigramCritic()})  # type: ignore[arg-type]


@pytest.mark.parametrize("learner", [dpo_learner(), reward_model_learner()], ids=["dpo", "reward model"])
@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20), st.integers(1, 20)), min_size=8, max_size=8),
    data=st.data(),
)
def test_both_rows_of_a_pair_are_in_the_same_micro_batch(learner, sizes, data):
    packed, limited = data.draw(st.booleans()), data.draw(st.booleans())
    keys = {"use_sequence_packing": packed}
    if limited:
        keys |= {"use_dynamic_batching_in_train": True, "max_tokens_per_microbatch_in_train": 64}
    pairs = [PreferencePair(example(prompt, a), example(prompt, b)) for prompt, a, b in sizes]
    batch, worker = learner.collate(pairs), role(**keys)
    (plan,) = pair_plans(batch, worker)
    lengths = batch.batch["attention_mask"].sum(-1)
    assert sorted(plan.permutation) == list(range(16))
    for shard, micro_batches in zip(plan.indices, plan.micro_batches, strict=True):
        assert [row + 1 for row in shard[::2]] == shard[1::2] and all(row % 2 == 0 for row in shard[::2])
        assert [at for micro in micro_batches for at in micro] == list(range(len(shard)))
        for micro in micro_batches:
            assert len(micro) % 2 == 0 and micro[0] % 2 == 0
            of_rows = lengths[[shard[at] for at in micro]]
            tokens = int(of_rows.sum()) if packed else int(of_rows.max()) * len(micro)
            assert (tokens <= 64) if limited else len(micro) <= 4


def test_the_policy_comes_to_prefer_the_better_responses_and_the_reference_stays():
    learner = dpo_learner()
    reference: BigramCluster = learner._reference  # type: ignore[assignment]
    pairs = [PreferencePair(SFTExample("a", [0], [1, 2, 3]), SFTExample("a", [0], [1, 4, 3]))] * 8
    before = asyncio.run(learner.validate(learner.collate(pairs)))
    assert before["val/loss"] == pytest.approx(0.6931, abs=1e-4) and before["val/accuracy"] == 0
    frozen = reference.table.detach().clone()
    for step in range(1, 6):
        metrics = asyncio.run(learner.learn(SampleBatch(learner.collate(pairs)), step, StepClock()))
    after = asyncio.run(learner.validate(learner.collate(pairs)))
    assert after["val/accuracy"] == 1 and after["val/margin"] > 0.5 and after["val/loss"] < before["val/loss"]
    assert metrics["actor/accuracy"] == 1 and metrics["actor/chosen_reward"] > metrics["actor/rejected_reward"]
    assert torch.equal(reference.table.detach(), frozen)


def test_kto_pair_takes_its_means_over_the_pairs_of_all_ranks_before_the_update():
    words = [SFTExample("a", [0], [1, word, 3]) for word in range(5)]
    pairs = [PreferencePair(words[number % 5], words[(2 * number + 1) % 5]) for number in range(8)]
    learner = dpo_learner(dpo_loss_type="kto_pair")
    data = learner.collate(pairs)
    asyncio.run(learner.learn(SampleBatch(data), 1, StepClock()))  # away from the reference
    data = asyncio.run(learner._with_reference(data))
    log_probs = asyncio.run(learner.outputs(data))
    expected = asyncio.run(learner.validate(learner.collate(pairs)))
    metrics = asyncio.run(learner.learn(SampleBatch(data), 2, StepClock()))
    gains = ((log_probs - data.batch["ref_log_probs"]) * data.batch["response_mask"]).sum(-1)
    means = [float(gains[row::2].mean().clamp(min=0)) for row in (0, 1)]
    found = learner.with_means(data, log_probs).batch["pair_kl"].tolist()
    assert means[0] > 0 and found == pytest.approx([means[1], means[0]] * 8)
    assert metrics["actor/loss"] == pytest.approx(expected["val/loss"])


def test_the_reward_of_a_sequence_is_the_value_after_its_last_token():
    learner = reward_model_learner()
    data = learner.collate([PreferencePair(SFTExample("a", [3], [1, 2]), SFTExample("a", [3], [4]))])
    assert data.batch["input_ids"].tolist() == [[3, 1, 2, 0], [3, 4, 0, 0]]
    assert data.batch["attention_mask"].sum(-1).tolist() == [3 + 1, 3]
    with torch.no_grad():
        learner._actor.table.copy_(torch.arange(5.0))
    rewards = (asyncio.run(learner.outputs(data)) * data.batch["response_mask"]).sum(-1)
    assert rewards.tolist() == [2.0, 4.0], "the table gives the last token itself"


def test_a_reward_model_learns_which_responses_are_better():
    learner = reward_model_learner()
    pairs = [PreferencePair(SFTExample("a", [0], [1, 2]), SFTExample("a", [0], [1, 4]))] * 8
    before = asyncio.run(learner.validate(learner.collate(pairs)))
    assert before == pytest.approx({"val/loss": 0.693147, "val/accuracy": 0, "val/margin": 0})
    for step in range(1, 6):
        metrics = asyncio.run(learner.learn(SampleBatch(learner.collate(pairs)), step, StepClock()))
    after = asyncio.run(learner.validate(learner.collate(pairs)))
    assert after["val/accuracy"] == 1 and after["val/margin"] > 1 and after["val/loss"] < 0.3
    assert metrics["actor/accuracy"] == 1 and metrics["actor/chosen_reward"] > metrics["actor/rejected_reward"]


def test_the_layout_is_that_of_the_role():
    assert role().layout == ParallelLayout(data=2) and role().samples_per_optimizer_step == 8
