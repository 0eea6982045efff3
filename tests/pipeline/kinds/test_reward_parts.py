"""The score of each reward of a sample (gdpo): from the scorer through checkpoints to the batch."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest
import torch

from roll.algorithms.advantages import REWARD_PARTS, AdvantageSettings, compute_advantages
from roll.base.timers import StepClock
from roll.configs.pipeline import RLVRConfig
from roll.configs.scoring.rewards import RewardConfig
from roll.datasets.templates import EncodedPrompt
from roll.pipeline.kinds.rlvr import RLVRWorker
from roll.rollout.engine_pool import EnginePool
from roll.rollout.ledger import PromptRequest
from roll.rollout.types import Group, Trajectory
from tests.pipeline.kinds.test_rlvr_pipeline import PROMPTS, SAMPLING, SumScorer, two_rewards
from tests.rollout.agents.agent_setup import Engines, one_of

TEXT = EncodedPrompt(id="t", tag="text", ids=[9], ground_truth="1", row={})
"""A prompt that `math` rewards do not score."""


def worker(estimator: str = "gdpo", rewards: dict[str, RewardConfig] | None = None, multiple: int = 1) -> RLVRWorker:
    rewards = rewards or two_rewards()
    config = RLVRConfig(num_return_sequences_in_group=2, adv_estimator=estimator, rewards=rewards)
    config.actor_train.training_args.gradient_accumulation_steps = multiple
    config.actor_train.data_args.shuffle = False
    prompts: Any = {"train": [PROMPTS[0], TEXT], "val": PROMPTS[:1]}
    sampling: Any = {"train": SAMPLING, "val": SAMPLING}
    return RLVRWorker(config, prompts, sampling, EnginePool(Engines(one_of("12", "345")), 0, 64), SumScorer(rewards))


def generated(made: RLVRWorker) -> list[Group]:
    """A group of each prompt."""
    groups = made.draw([PromptRequest(number, 0, 0) for number in range(2)])
    asyncio.run(made.generate(groups, "train", StepClock()))
    return sorted(groups, key=lambda group: group.tag)


def test_a_trajectory_has_the_score_of_each_reward_of_its_tag_before_its_weight():
    math_group, text_group = generated(worker())
    for trajectory in math_group.trajectories:
        text = trajectory.turns[0].text
        assert trajectory.reward_parts == {"length": len(text), "digit": int(text[-1])}
        assert trajectory.score == 2.0 * len(text) - 0.5 * int(text[-1])
    assert [list(trajectory.reward_parts) for trajectory in text_group.trajectories] == [["other"]] * 2


def test_a_batch_has_them_in_the_order_of_the_rewards_with_nan_for_others_and_padding():
    made = worker(multiple=3)
    groups = generated(made)
    batch = made.batch(groups).batch
    assert batch[REWARD_PARTS].shape == (6, 3) and batch[REWARD_PARTS].dtype == torch.float32
    real = batch["response_mask"].any(-1)
    rows = [trajectory.reward_parts for group in groups for trajectory in group.trajectories]
    expected = [[row.get(name, math.nan) for name in ("length", "digit", "other")] for row in rows]
    torch.testing.assert_close(batch[REWARD_PARTS][real], torch.tensor(expected), equal_nan=True)
    assert batch[REWARD_PARTS][~real].isnan().all()
    config = AdvantageSettings(adv_estimator="gdpo", reward_weights=(2.0, -0.5, 1.0))
    arguments = (batch["scores"], batch["group_ids"], batch["response_mask"], config)
    assert torch.isfinite(compute_advantages(*arguments, reward_parts=batch[REWARD_PARTS]).advantages).all()


def test_batches_of_other_estimators_have_their_sum_alone():
    made = worker("grpo")
    assert REWARD_PARTS not in made.batch(generated(made)).batch.keys()


def test_a_group_of_a_checkpoint_keeps_them():
    groups = generated(worker())
    assert [Group.from_state(json.loads(json.dumps(group.state_dict()))) for group in groups] == groups


def test_a_trajectory_of_an_earlier_checkpoint_has_none():
    state = generated(worker())[0].trajectories[0].state_dict()
    del state["reward_parts"]
    assert Trajectory.from_state(state).reward_parts == {}


def test_a_checkpoint_without_the_scores_of_a_reward_is_refused():
    state = worker("grpo").state_dict()
    worker().load_state_dict(state)
    fewer = {name: reward for name, reward in two_rewards().items() if name != "digit"}
    with pytest.raises(ValueError, match=r"adv_estimator: gdpo cannot continue .* no score of rewards.digit; use the"):
        worker().load_state_dict(worker("grpo", fewer).state_dict())
    del state["rewards"]
    with pytest.raises(ValueError, match=r"no score of rewards.length, rewards.digit, rewards.other"):
        worker().load_state_dict(state)
    worker("grpo").load_state_dict(state)
