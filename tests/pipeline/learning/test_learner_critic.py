"""A learner with a critic: who learns from what, in which step, and at the same time or not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from roll.base.timers import StepClock
from roll.configs.pipeline import RLVRConfig
from roll.pipeline.learning.learner import RLLearner, explained_variance
from roll.rollout.source import SampleBatch
from tests.configs.samples import RLVR, rlvr
from tests.pipeline.bigram import BigramCluster, BigramCritic
from tests.pipeline.learning.test_learner import SMALL

GAE = ("adv_estimator=gae", "lambd=0.5", "critic.device_mapping=[0,1]", "critic.model_args.dtype=fp32")
OWN_DEVICES = ("critic.device_mapping=[3,4]",)


def learner(folder: Path, *overrides: str) -> tuple[RLLearner, BigramCluster, BigramCritic]:
    config: RLVRConfig = rlvr(folder, *SMALL, f"output_dir={folder}", *GAE, *overrides, text=RLVR)
    actor, critic = BigramCluster(), BigramCritic()
    return RLLearner(config, actor, None, critic), actor, critic  # type: ignore[arg-type]


def learn(made: RLLearner, data, step: int = 1, clock: StepClock | None = None) -> dict[str, float]:
    return asyncio.run(made.learn(SampleBatch(data, {"staleness/max": 0.0}), step, clock or StepClock()))


def test_both_learn_from_the_same_samples(tmp_path):
    made, actor, critic = learner(tmp_path)
    before = actor.table.detach().clone()
    data = actor.sample(1)
    clock = StepClock()
    metrics = learn(made, data, clock=clock)
    mask, batch = data.batch["response_mask"].bool(), made._written.batch
    assert (batch["values"] == 0).all() and metrics["critic/explained_variance"] == 0
    assert metrics["critic/loss"] > 0 and metrics["actor/ratio_mean"] == pytest.approx(1)
    torch.testing.assert_close(batch["returns"][mask], batch["advantages"][mask])
    assert not torch.equal(actor.table.detach(), before) and critic.table.abs().max() > 0
    assert {"time/values", "time/train_critic", "time/train"} <= clock.metrics().keys()


def test_values_are_those_of_the_critic_now_and_it_comes_to_explain_returns(tmp_path):
    made, actor, critic = learner(tmp_path, "critic_warmup=100")
    explained = []
    for step in range(1, 41):
        data = actor.sample(1)
        learned = critic.table.detach().clone()
        explained.append(learn(made, data, step)["critic/explained_variance"])
        mask, before = data.batch["response_mask"].bool(), data.batch["input_ids"].roll(1, 1)
        torch.testing.assert_close(made._written.batch["values"][mask], learned[before[mask]])
    assert explained[0] == 0 and min(explained[-10:]) > 0.1


def test_the_policy_waits_for_the_warm_up_and_its_first_step_is_checked_then(tmp_path):
    made, actor, _ = learner(tmp_path, "critic_warmup=2")
    before = actor.table.detach().clone()
    for step in (1, 2):
        metrics = learn(made, actor.sample(step), step)
        assert not any(name.startswith("actor/") for name in metrics) and metrics["critic/loss"] > 0
        assert torch.equal(actor.table.detach(), before)
    assert made._steps_without_gradient == 2 and not made._updated
    assert "actor/loss" in learn(made, actor.sample(3), 3) and made._updated
    assert not torch.equal(actor.table.detach(), before) and made._steps_without_gradient == 0


def test_a_checkpoint_has_both(tmp_path):
    made, actor, critic = learner(tmp_path)
    learn(made, actor.sample(1))
    asyncio.run(made.save(tmp_path / "saved"))
    other, actor_again, critic_again = learner(tmp_path)
    asyncio.run(other.load(tmp_path / "saved"))
    assert torch.equal(actor_again.table, actor.table) and torch.equal(critic_again.table, critic.table)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_the_first_step_of_the_policy_is_checked_also_after_a_resume_during_the_warm_up(tmp_path, step):
    made, actor, _ = learner(tmp_path, "critic_warmup=2")
    for done in range(1, step + 1):
        learn(made, actor.sample(done), done)
    asyncio.run(made.save(tmp_path / "saved"))
    other, _, _ = learner(tmp_path, "critic_warmup=2")
    asyncio.run(other.load(tmp_path / "saved"))
    assert other._updated == (step == 3)


@pytest.mark.parametrize("own", [True, False])
def test_with_devices_of_its_own_the_critic_works_at_the_same_time(tmp_path, own):
    made, actor, critic = learner(tmp_path, *(OWN_DEVICES if own else ()))
    running: list[str] = []
    most = 0

    def watched(name, call):
        async def wrapped(shards):
            nonlocal most
            running.append(name)
            most = max(most, len(running))
            await asyncio.sleep(0)
            result = await call(shards)
            running.remove(name)
            return result

        return wrapped

    actor.compute_log_probs = watched("log-probs", actor.compute_log_probs)
    critic.compute_values = watched("values", critic.compute_values)
    actor.train_step = watched("train", actor.train_step)
    critic.train_step = watched("train critic", critic.train_step)
    learn(made, actor.sample(1))
    assert most == (2 if own else 1)


def test_samples_left_out_of_the_loss_are_not_learned_by_the_critic_either(tmp_path):
    made, actor, critic = learner(tmp_path, "max_len_mask=true", "critic_warmup=1")
    data = actor.sample(1)
    data.batch["truncated"] = torch.ones(8, dtype=torch.bool)
    data.batch["trajectory_ids"] = torch.arange(8)
    data.batch["truncated"][3] = False
    learn(made, data)
    seen = data.batch["input_ids"][3].roll(1)[data.batch["response_mask"][3].bool()].unique()
    moved = critic.table.detach().nonzero().flatten()
    assert set(moved.tolist()) <= set(seen.tolist()) and len(moved)


def test_explained_variance_in_closed_form():
    mask = torch.tensor([[True, True, True, False]])
    returns = torch.tensor([[1.0, 2.0, 3.0, 100.0]])
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(torch.full_like(returns, 7.0), returns, mask) == 0
    assert explained_variance(returns / 2, returns, mask) == pytest.approx(0.75)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3)
    assert explained_variance(returns, torch.ones_like(returns), mask) == 0
