"""Checks of a run's first step: before any update the engine, the log-prob pass and the training pass are one policy.

They need not agree to the last bit: engines and kernels round differently, and so does one kernel for micro-batches of
other shapes. In half precision a few tokens of millions may be far apart although the model is the same. So the mean,
the 99th percentile and the largest difference have bounds of their own, and in half precision the largest has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from roll.algorithms.policy_losses import PolicyLossConfig
from roll.configs.defaults import fp32_factor
from roll.configs.errors import RunError
from roll.configs.pipeline import RLConfig
from roll.distributed.protocol import DataProto

BEYOND = 0.01
"""Share of tokens that may be above `p99_logprob_mismatch`."""

SAME_ENGINE_FP32 = 1e-5
"""Largest difference in fp32 between the two passes of the trainer, which are one implementation; see `fp32_factor`."""


SOURCES = {
    "behavior_log_probs": "actor_infer",
    "old_log_probs": "actor_train",
    "ref_log_probs": "reference",
    "values": "critic",
}
"""Tensor of log-probs, or of values -> the role that computed it."""


def check_finite(data: DataProto) -> None:
    """Every log-prob and value of a response token is a number: ratios and returns of infinite ones would be NaN.

    Raises:
        RunError: with the role that computed the others, and their samples.
    """
    mask = data.batch["response_mask"].bool()
    for name, role in SOURCES.items():
        if name in data.batch.keys():
            bad = (mask & ~data.batch[name].isfinite()).any(-1).nonzero().flatten().tolist()
            if bad:
                raise RunError(
                    f"{name} of {role} are infinite or NaN in {len(bad)} of {len(mask)} samples, sample {bad[0]} "
                    f"of the batch first; the weights of {role} are not finite, or their outputs overflow its dtype"
                )


@dataclass(frozen=True)
class Mismatch:
    """How far the log-probs of the same tokens under the same weights are apart, computed in two ways.

    Attributes:
        mean: of the absolute difference, in nats.
        beyond: share of tokens above `p99_logprob_mismatch`.
        largest: absolute difference of a token, in nats.
    """

    mean: float
    beyond: float
    largest: float

    @classmethod
    def between(cls, one: torch.Tensor, other: torch.Tensor, mask: torch.Tensor, p99: float | None) -> Mismatch:
        """The mismatch of the log-probs `one` and `other` [B, T] over the tokens of `mask` [B, T]."""
        apart = (one - other)[mask.bool()].double().abs()
        if not len(apart):
            return cls(0.0, 0.0, 0.0)
        beyond = 0.0 if p99 is None else float((~(apart <= p99)).double().mean())
        return cls(float(apart.mean()), beyond, float(apart.max()))

    @classmethod
    def of_step(cls, metrics: Mapping[str, float]) -> Mismatch:
        """The mismatch of the current policy and the base of its ratio, from the metrics of the policy loss."""
        beyond = metrics.get("log_ratio_beyond_p99", 0.0)
        return cls(metrics["log_ratio_abs_mean"], beyond, metrics["log_ratio_abs_max"])

    def exceeded(self, config: RLConfig) -> str | None:
        """The figures that are above their bounds, or are no numbers; None if none is."""
        mean, p99, largest = config.mean_logprob_mismatch, config.p99_logprob_mismatch, config.max_logprob_mismatch
        found = []
        if mean is not None and not self.mean <= mean:
            found.append(f"by {self.mean:.3g} on average, more than mean_logprob_mismatch {mean:g}")
        if p99 is not None and not self.beyond <= BEYOND:
            found.append(f"by more than p99_logprob_mismatch {p99:g} for {self.beyond:.2%} of tokens")
        if largest is not None and not self.largest <= largest:
            found.append(f"by {self.largest:.3g} at most, more than max_logprob_mismatch {largest:g}")
        return ", and ".join(found) or None


def check_engine(mismatch: Mismatch, config: RLConfig) -> None:
    """Before the first update engine and trainer have the same weights, so their log-probs must agree.

    Raises:
        RunError: they do not.
    """
    exceeded = mismatch.exceeded(config)
    if exceeded:
        raise RunError(
            f"engine and trainer disagree about the log-probs of sampled tokens {exceeded}: check that both load the "
            "same weights, temperature and dtype"
        )


def same_engine_fp32(config: RLConfig) -> float:
    """The bound of the largest difference in fp32 between two passes of the trainer."""
    return SAME_ENGINE_FP32 * fp32_factor(config)


def check_first_update(step: Mapping[str, float], loss: PolicyLossConfig, config: RLConfig) -> None:
    """Before any update log pi is log p, or log mu as far as engine and trainer agree.

    Args:
        step: metrics of the policy loss of the first optimizer step.
        loss: says against which of them its ratio is taken.
        config: has the bounds.

    Raises:
        RunError: they are further apart.
    """
    mismatch = Mismatch.of_step(step)
    if loss.bypass or loss.pg_ratio_base == "behavior":
        check_engine(mismatch, config)
        return
    exceeded = mismatch.exceeded(config)
    in_fp32 = config.actor_train.model_args.dtype == "fp32"
    bound = same_engine_fp32(config)
    if not exceeded and in_fp32 and not max(mismatch.largest, abs(step["policy_kl"])) <= bound:
        exceeded = f"by {mismatch.largest:.3g} at most, more than {bound:g}"
    if exceeded:
        raise RunError(
            f"the first optimizer step has ratio_mean {step['ratio_mean']} and policy_kl {step['policy_kl']}; before "
            "any update they must be 1 and 0. Log-probs of the training pass and of the log-prob pass differ "
            f"{exceeded}: the two do not compute the same model"
        )
