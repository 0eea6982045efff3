"""Batches of pairs: both rows of a pair stay together, and the policy comes to prefer the better response."""

from __future__ import annotations

import asyncio

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.configs.parallel_layout import ParallelLayout
from roll.configs.pipeline import DPOConfig
from roll.configs.roles import ActorTrainConfig, TrainingArguments
from roll.datasets.preferences import PreferencePair
from roll.datasets.sft import SFTExample
from roll.pipeline.dpo_pipeline import DPOLearner, collate_pairs, pair_plans
from roll.pipeline.training_loop import SampleBatch
from roll.rollout.timers import StepClock
from tests.pipeline.bigram import BigramCluster


def example(prompt, response):
    return SFTExample("x", [0] * prompt, [1] * response)


def role(devices=2, **keys):
    training = TrainingArguments(per_device_train_batch_size=2, gradient_accumulation_steps=2)
    return ActorTrainConfig(training_args=training, device_mapping=list(range(devices)), **keys)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20), st.integers(1, 20)), min_size=8, max_size=8), st.data()
)
def test_both_rows_of_a_pair_are_in_the_same_micro_batch(sizes, data):
    packed, limited = data.draw(st.booleans()), data.draw(st.booleans())
    keys = {"use_sequence_packing": packed}
    if limited:
        keys |= {"use_dynamic_batching_in_train": True, "max_tokens_per_microbatch_in_train": 64}
    pairs = [PreferencePair(example(prompt, a), example(prompt, b)) for prompt, a, b in sizes]
    batch, worker = collate_pairs(pairs), role(**keys)
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
    config = DPOConfig(response_length=8, beta=1.0, actor_train=role(), eval_steps=1)
    policy, reference = BigramCluster(), BigramCluster()
    learner = DPOLearner(config, policy, reference)  # type: ignore[arg-type]
    pairs = [PreferencePair(SFTExample("a", [0], [1, 2, 3]), SFTExample("a", [0], [1, 4, 3]))] * 8
    before = asyncio.run(learner.validate(collate_pairs(pairs)))
    assert before["val/loss"] == pytest.approx(0.6931, abs=1e-4) and before["val/accuracy"] == 0
    frozen = reference.table.detach().clone()
    for step in range(1, 6):
        metrics = asyncio.run(learner.learn(SampleBatch(collate_pairs(pairs)), step, StepClock()))
    after = asyncio.run(learner.validate(collate_pairs(pairs)))
    assert after["val/accuracy"] == 1 and after["val/margin"] > 0.5 and after["val/loss"] < before["val/loss"]
    assert metrics["actor/accuracy"] == 1 and metrics["actor/chosen_reward"] > metrics["actor/rejected_reward"]
    assert torch.equal(reference.table.detach(), frozen)


def test_the_layout_is_that_of_the_role():
    assert role().layout == ParallelLayout(data=2) and role().samples_per_optimizer_step == 8
