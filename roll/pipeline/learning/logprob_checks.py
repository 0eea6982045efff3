"""Checks that engine, log-prob pass and training pass are one policy before any update.

They need not agree to the last bit: engines and kernels round differently, and so does one kernel for micro-batches of
other shapes. `roll.configs.learning.rounding` says how far they may be apart. Before anything is generated for
training, `EngineProbe` compares every engine with the trainer on a few tokens; the first step compares all three on its
batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from roll.algorithms.options.policy_options import PolicySettings
from roll.base.errors import RunError
from roll.configs.defaults import default_mismatch
from roll.configs.pipeline import LearnerOptions

BEYOND = 0.01
"""Share of tokens that may be above `p99_logprob_mismatch`."""

TEMPERATURE_OFF, SIGMAS = 0.025, 5.0
"""Relative difference of the engine's apparent temperature that ends a run, and least number of its standard errors."""

EXPLAINED = 0.8
"""Share of the squared difference that another temperature must explain to be named."""

GROWTH = 4.0
"""Mean difference in the later half of the positions in units of the earlier half that makes positions the cause."""

SOURCES = {
    "behavior_log_probs": "actor_infer",
    "old_log_probs": "actor_train",
    "ref_log_probs": "reference",
    "values": "critic",
}
"""Tensor of log-probs, or of values -> the role that computed it."""


def check_finite(response_mask: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
    """Every log-prob and value [B, T] of a response token is a number: ratios of infinite ones would be NaN.

    Raises:
        RunError: with the role that computed the others, and their samples.
    """
    mask = response_mask.bool()
    for name, role in SOURCES.items():
        if name in values:
            bad = (mask & ~values[name].isfinite()).any(-1).nonzero().flatten().tolist()
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

    def exceeded(self, config: LearnerOptions) -> str | None:
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


@dataclass(frozen=True)
class TokenLogProbs:
    """Sampled tokens: log-probs of engine and trainer, entropies of the trainer, and positions, of one shape."""

    engine: torch.Tensor
    trainer: torch.Tensor
    entropy: torch.Tensor
    positions: torch.Tensor

    def where(self, mask: torch.Tensor) -> TokenLogProbs:
        """The tokens of `mask` [B, T], as tensors [N]."""
        return TokenLogProbs(*(each[mask].double() for each in vars(self).values()))

    def temperature(self) -> tuple[float, float, float]:
        """The engine's temperature in units of the trainer's, its standard error, and the share that it explains.

        As log p = z / T - log Z(T), with entropy H, d log p / d(1/T) = T (log p + H). So an engine at T' differs from a
        trainer at T by (T / T' - 1) (log p + H) in first order; the factor is found by least squares.
        """
        apart, surplus = self.engine - self.trainer, self.trainer + self.entropy
        squares, total = float(surplus.square().sum()), float(apart.square().sum())
        if len(apart) < 2 or not 0 < squares < math.inf or not 0 < total < math.inf:
            return 1.0, math.inf, 0.0
        slope = float((apart * surplus).sum()) / squares
        rest = float((apart - slope * surplus).square().sum())
        return 1 / max(1 + slope, 1e-3), math.sqrt(rest / (len(apart) - 1) / squares), 1 - rest / total

    def likely_cause(self) -> str:
        """What the differences look like, and what to check."""
        factor, _, explained = self.temperature()
        if explained > EXPLAINED:
            times = f"the engine samples as at {factor:.3g} times the trainer's temperature"
            return f"{times}; check actor_infer.generating_args.temperature"
        apart, late = (self.engine - self.trainer).abs(), self.positions > self.positions.median()
        if float(apart[late].mean()) > GROWTH * float(apart[~late].mean()):
            return "they grow with the position; check rope settings, such as rope_theta, and position ids"
        return "they do not depend on the position; check that both have the same weights, config.json and dtype"


def check_engines(engines: Mapping[str, TokenLogProbs], config: LearnerOptions) -> None:
    """Log-probs of each engine, by name, are the trainer's up to rounding.

    In half precision rounding hides a wrong temperature in the mean difference, but not in all tokens together.

    Raises:
        RunError: those of an engine are not; with what the differences look like.
    """
    wrong: dict[str, str] = {}
    for name, tokens in engines.items():
        mask = torch.ones_like(tokens.engine, dtype=torch.bool)
        found = Mismatch.between(tokens.engine, tokens.trainer, mask, config.p99_logprob_mismatch).exceeded(config)
        factor, error, _ = tokens.temperature()
        off = abs(factor - 1) > max(TEMPERATURE_OFF, SIGMAS * error)
        if found is None and off and config.mean_logprob_mismatch is not None:
            found = f"in one direction, within mean_logprob_mismatch {config.mean_logprob_mismatch:g}"
        if found is not None:
            wrong[name] = found
    for name, found in wrong.items():
        right = ", ".join(other for other in engines if other not in wrong)
        alone = f", unlike {right}, so check its own weights" if right else ""
        raise _disagreement(name, found, engines[name].likely_cause() + alone)


def check_engine(mismatch: Mismatch, config: LearnerOptions) -> None:
    """Raises RunError where log-probs of the first batch differ by more than rounding; see `check_engines`."""
    exceeded = mismatch.exceeded(config)
    if exceeded:
        raise _disagreement("engine", exceeded, "check that both load the same weights, temperature and dtype")


def _disagreement(engine: str, exceeded: str, cause: str) -> RunError:
    return RunError(
        f"{engine} and trainer disagree about the log-probs of sampled tokens {exceeded}: {cause}; where that is "
        "expected, raise the bound, or set it to null"
    )


def check_first_update(step: Mapping[str, float], loss: PolicySettings, config: LearnerOptions) -> None:
    """Before any update log pi is log p, or log mu as far as engine and trainer agree; RunError where it is not.

    `step` has the metrics of the first optimizer step; `loss` says against which of them its ratio is taken.
    """
    mismatch = Mismatch.of_step(step)
    if loss.bypass or loss.pg_ratio_base == "behavior":
        check_engine(mismatch, config)
        return
    exceeded = mismatch.exceeded(config)
    bound = default_mismatch(config)["mean_logprob_mismatch"] or 0.0
    in_fp32 = config.actor_train.model_args.dtype == "fp32"
    if not exceeded and in_fp32 and not max(mismatch.largest, abs(step["policy_kl"])) <= bound:
        exceeded = f"by {mismatch.largest:.3g} at most, more than {bound:g}"
    if exceeded:
        raise RunError(
            f"the first optimizer step has ratio_mean {step['ratio_mean']} and policy_kl {step['policy_kl']}; before "
            "any update they must be 1 and 0. Log-probs of the training pass and of the log-prob pass differ "
            f"{exceeded}: the two do not compute the same model"
        )
