"""Policy losses and corrections against their formulas, written as loops over the tokens of random batches.

`draw` makes the batches: responses without a token and of one token, ratios from almost 1 to beyond every bound, and
NaN outside the mask.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from roll.algorithms.aggregation import LOSS_AGG_MODES, LossScale
from roll.algorithms.correction import off_policy_correction
from roll.algorithms.losses import policy
from roll.algorithms.options.correction_options import CorrectionOptions, RejectionOptions, WeightOptions
from roll.algorithms.options.policy_options import PolicySettings
from roll.algorithms.policy_loss import POLICY_LOSSES
from tests.algorithms.batches import CLOSE, DRAWS, Draw, draw

SEQUENCE_LENGTH = 11


# Policy losses. `now` is log pi of a response's tokens, with a gradient; `fixed` is the same without one.


def bounded(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ratio(now: float, base: float) -> float:
    return math.exp(bounded(now - base, -20, 20))


@dataclass(frozen=True)
class Response:
    """Tokens of one response."""

    now: list[float]
    fixed: list[float]
    base: list[float]
    advantages: list[float]
    chosen: list[float]
    score: float

    def each(self, formula: Callable[[float, float, float, float], float]) -> list[float]:
        """A formula of now, fixed, base and advantage, of every token."""
        return [formula(*token) for token in zip(self.now, self.fixed, self.base, self.advantages, strict=True)]


def clipped(r: float, advantage: float, low: float, high: float) -> float:
    return max(-r * advantage, -bounded(r, 1 - low, 1 + high) * advantage)


def ppo(response: Response, config: PolicySettings) -> list[float]:
    def loss(now: float, fixed: float, base: float, advantage: float) -> float:
        value = clipped(ratio(now, base), advantage, config.pg_clip_low, config.pg_clip_high)
        return min(value, -config.dual_clip_c * advantage) if config.dual_clip_loss and advantage < 0 else value

    return response.each(loss)


def clip_cov(response: Response, config: PolicySettings) -> list[float]:
    return [0.0 if chosen else loss for chosen, loss in zip(response.chosen, ppo(response, config), strict=True)]


def kl_cov(response: Response, config: PolicySettings) -> list[float]:
    plain = response.each(lambda now, fixed, base, advantage: -ratio(now, base) * advantage)
    penalty = response.each(lambda now, fixed, base, advantage: config.kl_cov_coef * abs(now - base))
    return [x + (y if chosen else 0.0) for x, y, chosen in zip(plain, penalty, response.chosen, strict=True)]


def gspo(response: Response, config: PolicySettings) -> list[float]:
    mean = statistics.fmean(x - y for x, y in zip(response.fixed, response.base, strict=True))

    def loss(now: float, fixed: float, base: float, advantage: float) -> float:
        return clipped(ratio(mean + now - fixed, 0), advantage, config.gspo_clip_low, config.gspo_clip_high)

    return response.each(loss)


def geo_mean(response: Response, config: PolicySettings) -> list[float]:
    def inside(log_ratio: float, advantage: float) -> float:
        if advantage > 0:
            return min(log_ratio, config.geo_mean_clip_high)
        return max(log_ratio, -config.geo_mean_clip_low) if advantage < 0 else log_ratio

    mean = statistics.fmean(response.each(lambda now, fixed, base, advantage: inside(fixed - base, advantage)))

    def loss(now: float, fixed: float, base: float, advantage: float) -> float:
        return -ratio(mean + inside(now - base, advantage) - inside(fixed - base, advantage), 0) * advantage

    return response.each(loss)


def sapo(response: Response, config: PolicySettings) -> list[float]:
    def loss(now: float, fixed: float, base: float, advantage: float) -> float:
        tau = config.sapo_tau_positive if advantage > 0 else config.sapo_tau_negative
        at = tau * (ratio(now, base) - 1)
        gate = 1 / (1 + math.exp(-at)) if at > -700 else 0.0
        return -advantage * 4 / tau * gate

    return response.each(loss)


def within(divergence: Callable[[float, float], float], limit: float) -> Callable[[float, float, float, float], float]:
    """-r A, without tokens that moved away from the base beyond a limit."""

    def loss(now: float, fixed: float, base: float, advantage: float) -> float:
        away = (advantage > 0 and fixed > base) or (advantage < 0 and fixed < base)
        return 0.0 if away and divergence(fixed, base) > limit else -ratio(now, base) * advantage

    return loss


def dppo_tv(response: Response, config: PolicySettings) -> list[float]:
    def divergence(fixed: float, base: float) -> float:
        return abs(math.exp(fixed) - math.exp(base))

    return response.each(within(divergence, config.dppo_tv_threshold))


def dppo_kl(response: Response, config: PolicySettings) -> list[float]:
    def divergence(fixed: float, base: float) -> float:
        p, q = math.exp(fixed), math.exp(base)
        others = math.log(max(1 - q, 1e-6)) - math.log(max(1 - p, 1e-6))
        return q * (base - fixed) + (1 - q) * others

    return response.each(within(divergence, config.dppo_kl_threshold))


def weighted_log_prob(weight: Callable[[float, float], float]) -> Callable[[float, float, float, float], float]:
    """-w A log pi, with a weight of the detached ratio and the advantage."""
    return lambda now, fixed, base, advantage: -weight(ratio(fixed, base), advantage) * advantage * now


def vanilla(response: Response, config: PolicySettings) -> list[float]:
    return response.each(weighted_log_prob(lambda r, advantage: 1.0))


def tis(response: Response, config: PolicySettings) -> list[float]:
    return response.each(
        weighted_log_prob(lambda r, advantage: bounded(r, config.tis_lower_bound, config.tis_upper_bound))
    )


def topr(response: Response, config: PolicySettings) -> list[float]:
    whole = math.exp(bounded(sum(x - y for x, y in zip(response.fixed, response.base, strict=True)), -20, 20))

    def weight(r: float, advantage: float) -> float:
        if response.score > 0:
            return config.topr_positive_weight
        return config.topr_negative_weight * min(whole if config.topr_level == "sequence" else r, 1.0)

    return response.each(weighted_log_prob(weight))


def cispo(response: Response, config: PolicySettings) -> list[float]:
    low, high = 1 - config.cispo_epsilon_low, 1 + config.cispo_epsilon_high

    def weight(r: float, advantage: float) -> float:
        masks = config.cispo_use_unified_mask
        return 0.0 if masks and ((advantage > 0 and r > high) or (advantage < 0 and r < low)) else bounded(r, low, high)

    return response.each(weighted_log_prob(weight))


def kimi15(response: Response, config: PolicySettings) -> list[float]:
    return response.each(
        lambda now, fixed, base, advantage: -advantage * now + config.kimi15_tau / 2 * (now - base) ** 2
    )


LOSSES = {
    "vanilla": vanilla,
    "ppo": ppo,
    "decoupled_ppo": ppo,
    "tis": tis,
    "topr": topr,
    "cispo": cispo,
    "kimi15": kimi15,
    "gspo": gspo,
    "geo_mean": geo_mean,
    "sapo": sapo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
}
KEYS: dict[str, list[dict[str, Any]]] = {
    "ppo": [{"dual_clip_loss": True, "pg_clip_high": 0.28}],
    "topr": [
        {"topr_level": "sequence", "topr_negative_weight": 0.5},
        {"topr_positive_weight": 0.7, "topr_negative_weight": 0.4},
    ],
    "cispo": [{"cispo_use_unified_mask": True}, {"cispo_epsilon_low": 1.0}],
    "tis": [{"tis_lower_bound": 0.5, "tis_upper_bound": 2.0}],
    "kimi15": [{"kimi15_tau": 0.3}],
    "gspo": [{"gspo_clip_low": 0.2, "gspo_clip_high": 0.3}],
}
"""Settings that are tried beside the defaults."""


def loss_of_response(data: Draw, config: PolicySettings, sample: int, now: Sequence[float]) -> float:
    """What a response adds to the policy loss of the batch, where `now` has the log-probs that carry a gradient."""
    kl_forms: dict[str, Callable[[float], float]] = {
        "k2": lambda k: k * k / 2,
        "k3": lambda k: bounded(math.exp(-bounded(k, -20, 20)) - 1 + bounded(k, -20, 20), -10, 10),
        "abs": abs,
    }
    sequences = sum(data.length(other) > 0 for other in data.samples)
    divisors = {
        "token-mean": int(data.mask.sum()),
        "seq-mean-token-sum": sequences,
        "seq-mean-token-mean": sequences * data.length(sample),
        "seq-mean-token-sum-norm": sequences * SEQUENCE_LENGTH,
    }
    columns = ("log_probs", "base", "advantages", "high_covariance")
    row = Response(list(now), *(data.response(sample, name) for name in columns), data.scores[sample])
    losses, reference = LOSSES[config.pg_variant](row, config), data.response(sample, "ref_log_probs")
    kl = [kl_forms[config.kl_loss_type](x - y) for x, y in zip(now, reference, strict=True)]
    terms = zip(losses, kl, data.response(sample, "entropy"), strict=True)
    summed = sum(x + config.kl_loss_coef * y - config.entropy_loss_coef * z for x, y, z in terms)
    return summed / divisors[config.loss_agg_mode]


@pytest.mark.parametrize("variant", POLICY_LOSSES)
def test_losses_and_gradients_are_those_of_their_formulas(variant):
    for seed, keys in itertools.product(DRAWS, ({}, *KEYS.get(variant, []))):
        data, kl = draw(seed), ("k2", "k3", "abs")[seed // 3 % 3]
        mode = list(LOSS_AGG_MODES)[seed % len(LOSS_AGG_MODES)]
        shared = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": kl, "entropy_loss_coef": 0.1}
        config = PolicySettings(pg_variant=variant, loss_agg_mode=mode, **shared, **keys)
        log_probs = data.tables["log_probs"].clone().requires_grad_()
        micro = {"response_mask": data.mask, "old_log_probs": data.tables["base"]}
        micro |= {name: data.tables[name] for name in ("advantages", "ref_log_probs")}
        micro |= {"scores": torch.tensor(data.scores), "high_covariance": data.tables["high_covariance"] == 1}
        loss, _ = policy(log_probs, data.tables["entropy"], micro, LossScale.of(data.mask, SEQUENCE_LENGTH), config)
        (gradient,) = torch.autograd.grad(loss, log_probs)
        responses = [(i, data.response(i, "log_probs")) for i in data.samples if data.length(i)]
        expected = sum(loss_of_response(data, config, *response) for response in responses)
        assert float(loss.detach()) == pytest.approx(expected, **CLOSE), (seed, keys)
        assert (gradient[~data.mask] == 0).all()
        for sample, now in responses:
            function = partial(loss_of_response, data, config, sample)
            slopes = [slope(function, now, token) for token in range(len(now))]
            error = 1e-6 * max(1.0, abs(function(now)))
            found = gradient[sample][data.mask[sample]].tolist()
            assert found == pytest.approx(slopes, rel=1e-4, abs=error), (seed, keys)


def slope(function: Callable[[list[float]], float], at: list[float], token: int, step: float = 1e-5) -> float:
    """Central difference of a function of a list in one of its values."""
    low, high = (function([x + move * (i == token) for i, x in enumerate(at)]) for move in (-step, step))
    return (high - low) / (2 * step)


# Corrections


def level_of(values: list[float], level: str) -> list[float]:
    """A statistic of tokens at its level."""
    if level == "sequence-mean":
        return [statistics.fmean(values)] * len(values)
    return [sum(values)] * len(values) if level == "sequence-sum" else values


@pytest.mark.parametrize("mode", ["clamp", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_correction_weights_are_those_of_their_formulas(level, mode):
    options = CorrectionOptions(weights=WeightOptions(level=level, mode=mode, lower=0.5, upper=2.0))
    for seed in DRAWS:
        data = draw(seed)
        found = off_policy_correction(data.tables["log_probs"], data.tables["base"], data.mask, options)
        for sample in data.samples:
            if not data.length(sample):
                continue
            pairs = zip(data.response(sample, "log_probs"), data.response(sample, "base"), strict=True)
            ratios = [bounded(x - y, -20, 20) for x, y in pairs]
            logs = level_of(ratios, {"sequence": "sequence-sum", "geometric": "sequence-mean"}.get(level, level))
            weights = [math.exp(bounded(x, -20, 20)) for x in logs]
            inside = [0.5 <= weight <= 2.0 for weight in weights]
            if mode == "clamp":
                weights = [bounded(weight, 0.5, 2.0) for weight in weights]
            else:
                weights = [weight if keep else 0.0 for weight, keep in zip(weights, inside, strict=True)]
            row = data.mask[sample]
            assert found.weights[sample][row].tolist() == pytest.approx(weights, **CLOSE)
            assert found.kept[sample][row].tolist() == (inside if mode == "mask" else [True] * len(weights))


@pytest.mark.parametrize("bounds", [(0.6, 1.7), (None, 1.7), (0.6, None)])
@pytest.mark.parametrize("level", ["token", "sequence-mean", "sequence-sum", "sequence-max"])
@pytest.mark.parametrize("statistic", ["k1", "k2", "k3"])
def test_rejected_tokens_are_those_of_the_formulas(statistic, level, bounds):
    """Bounds of k1 are those of the ratio p / mu."""
    forms = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}
    rejection = RejectionOptions(statistic=statistic, level=level, lower=bounds[0], upper=bounds[1])
    low, high = (-math.inf if bounds[0] is None else bounds[0]), (math.inf if bounds[1] is None else bounds[1])
    if statistic == "k1":
        low, high = (math.log(low) if bounds[0] else low), math.log(high)
    for seed in DRAWS:
        data = draw(seed)
        options = CorrectionOptions(rejection=rejection)
        found = off_policy_correction(data.tables["log_probs"], data.tables["base"], data.mask, options)
        for sample in data.samples:
            if not data.length(sample):
                continue
            pairs = zip(data.response(sample, "log_probs"), data.response(sample, "base"), strict=True)
            values = level_of([forms[statistic](bounded(x - y, -20, 20)) for x, y in pairs], level)
            inside = [low <= value <= high for value in values]
            if level == "sequence-max":
                inside = [all(inside)] * len(inside)
            assert found.kept[sample][data.mask[sample]].tolist() == inside


def test_every_loss_has_a_formula_here():
    assert set(LOSSES) == set(POLICY_LOSSES)
