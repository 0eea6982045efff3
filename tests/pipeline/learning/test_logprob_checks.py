"""Before the first update engine, log-prob pass and training pass must agree, as far as their rounding allows."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from roll.base.errors import RunError
from roll.pipeline.learning.learner import RLLearner
from roll.pipeline.learning.logprob_checks import Mismatch
from tests.pipeline.bigram import BigramCluster
from tests.pipeline.learning.test_learner import ASYNC, learn, learner

CPU = "platform=cpu"
BF16 = ("actor_train.model_args.dtype=bf16", "actor_infer.model_args.dtype=bf16")
ENGINE = "check that both load the same weights, temperature and dtype"
PASSES = "the two do not compute the same model"
KEYS = ("mean_logprob_mismatch", "p99_logprob_mismatch", "max_logprob_mismatch")


def noise(like: torch.Tensor, deviation: float, outlier: float = 0.0, share: float = 0.0) -> torch.Tensor:
    """Rounding noise, and a share of tokens that are off by `outlier`."""
    generator = torch.Generator().manual_seed(5)
    off = torch.randn(like.shape, generator=generator) * deviation
    return torch.where(torch.rand(like.shape, generator=generator) < share, outlier, off)


class NoisyTraining(BigramCluster):
    """A cluster whose training pass rounds differently from its pass for old log-probs."""

    def __init__(self, *fault: float) -> None:
        super().__init__()
        self.fault, self.trains = fault, False

    def log_probs(self, ids):
        exact = super().log_probs(ids)
        return exact + noise(exact, *self.fault) if self.trains else exact

    async def train_step(self, shards):
        self.trains = True
        return await super().train_step(shards)


def first_step(folder: Path, cluster: BigramCluster, *overrides: str, engine=(0.0, 0.0, 0.0)) -> dict[str, float]:
    """The first step of a run, on 4,000 samples of 3 to 6 tokens; the engine's log-probs have noise."""
    large = (
        "rollout_batch_size=1000",
        "actor_train.training_args.per_device_train_batch_size=1000",
        "actor_train.training_args.gradient_accumulation_steps=2",
    )
    config = learner(folder, *large, "rollout_dump_steps=0", *overrides)[0]._config
    data = cluster.sample(1, samples=4000)
    behavior = data.batch["behavior_log_probs"]
    data.batch["behavior_log_probs"] = behavior + noise(behavior, *engine)
    return learn((RLLearner(config, cluster, None), cluster), data)  # type: ignore[arg-type]


ROUNDING = (0.03, 1.5, 0.002)
"""Noise like that of bf16: 0.024 on average, and 2 of 1,000 tokens far off."""


@pytest.mark.parametrize("mode", ["", ASYNC])
def test_rounding_of_half_precision_aborts_no_run(tmp_path, mode):
    metrics = first_step(tmp_path, NoisyTraining(*ROUNDING), *BF16, *mode.split(), engine=ROUNDING)
    assert metrics["actor/log_ratio_abs_max"] > 1 and 0.01 < metrics["actor/log_ratio_abs_mean"] < 0.05
    assert 0 < metrics["actor/log_ratio_beyond_p99"] < 0.01


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ((0.3, 0.0, 0.0), r"by 0.2\d+ on average, more than mean_logprob_mismatch 0.19"),
        ((0.01, 1.2, 0.02), r"by more than p99_logprob_mismatch 0.95 for [12]\.\d\d% of tokens"),
    ],
)
def test_what_rounding_does_not_explain_aborts_in_half_precision(tmp_path, fault, message):
    with pytest.raises(RunError, match=f"engine and trainer disagree .* {message}.*{ENGINE}"):
        first_step(tmp_path, BigramCluster(), *BF16, engine=fault)
    with pytest.raises(RunError, match=f"engine and trainer disagree .* {message}.*{ENGINE}"):
        first_step(tmp_path, BigramCluster(), *BF16, ASYNC, engine=fault)
    with pytest.raises(RunError, match=f"{message}.*{PASSES}"):
        first_step(tmp_path, NoisyTraining(*fault), *BF16)


@pytest.mark.parametrize("mode", ["", ASYNC])
def test_an_engine_of_another_temperature_is_found_in_the_first_step(tmp_path, mode):
    parts = learner(tmp_path, *mode.split())
    data = parts[1].sample(1)
    data.batch["behavior_log_probs"] = data.batch["behavior_log_probs"] * 0.9
    with pytest.raises(RunError, match=ENGINE):
        learn(parts, data)


def test_in_fp32_every_token_must_agree(tmp_path):
    with pytest.raises(RunError, match="by 0.3 at most, more than max_logprob_mismatch 0.1"):
        first_step(tmp_path, BigramCluster(), CPU, engine=(1e-6, 0.3, 1e-3))


def test_in_fp32_the_passes_of_the_trainer_agree_more_closely_than_with_the_engine(tmp_path):
    first_step(tmp_path, NoisyTraining(1e-7, 0.0, 0.0), CPU)
    off = (0.0, 0.01, 1e-3)
    first_step(tmp_path, BigramCluster(), CPU, engine=off)
    for relaxed in ("mean_logprob_mismatch=~", "mean_logprob_mismatch=0.1"):
        with pytest.raises(RunError, match=rf"by 0.01 at most, more than 0.001\d.*{PASSES}"):
            first_step(tmp_path, NoisyTraining(*off), CPU, relaxed)


def test_bounds_can_be_set_and_left_out(tmp_path):
    off = (0.6, 0.0, 0.0)
    first_step(tmp_path, BigramCluster(), *(f"{key}=~" for key in KEYS), engine=off)
    wide = first_step(tmp_path, BigramCluster(), *(f"{key}=10" for key in KEYS), engine=off)
    assert wide["actor/log_ratio_beyond_p99"] == 0
    with pytest.raises(RunError, match="max_logprob_mismatch 0.2"):
        first_step(tmp_path, BigramCluster(), *BF16, "max_logprob_mismatch=0.2", engine=ROUNDING)


def test_a_mismatch_counts_the_tokens_of_the_mask():
    one, other = torch.tensor([[0.0, 1.0, 5.0]]), torch.tensor([[0.5, 1.0, math.nan]])
    mask = torch.tensor([[True, True, False]])
    assert Mismatch.between(one, other, mask, 0.4) == Mismatch(0.25, 0.5, 0.5)
    assert Mismatch.between(one, other, mask, None).beyond == 0
    assert Mismatch.between(one, other, ~mask & False, 0.4) == Mismatch(0, 0, 0)
    assert math.isnan(Mismatch.between(one, other, mask | True, 0.4).mean)
