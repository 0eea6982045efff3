"""A policy loss that corrects for what it is trained on: bases, weights and rejection that fit together."""

from __future__ import annotations

from roll.configs.errors import Report
from roll.configs.pipeline import RLConfig
from roll.configs.policy import RATIO_WEIGHTED_VARIANTS


def check_policy(config: RLConfig, report: Report) -> None:
    """The base of the ratio exists, bounds are in order, nothing is counted twice, and stale samples are corrected."""
    _check_base(config, report)
    _check_bounds(config, report)
    _check_rejection(config, report)
    if config.correction.renormalize and config.old_log_probs_source == "behavior":
        report.error(
            "correction.renormalize",
            "true needs to know the kept tokens before the loss is computed, but with old_log_probs_source behavior "
            "they depend on the current policy; set that to recompute, or leave renormalize out",
        )
    _check_counted_once(config, report)
    if config.async_generation_ratio > 0:
        _check_corrected(config, report)


def _check_base(config: RLConfig, report: Report) -> None:
    variant = config.actor_train.pg_variant
    if variant == "decoupled_ppo" and config.pg_ratio_base == "behavior":
        report.error(
            "pg_ratio_base",
            "behavior leaves decoupled_ppo without its proximal policy; leave it out, or use pg_variant ppo",
        )
    if config.old_log_probs_source != "behavior":
        return
    if variant == "decoupled_ppo":
        report.error(
            "old_log_probs_source",
            "behavior makes the proximal policy of decoupled_ppo the sampling one, so its weights are 1; leave it out, "
            "or use pg_variant ppo",
        )
    elif config.pg_ratio_base == "proximal":
        report.error(
            "pg_ratio_base",
            "proximal needs a proximal policy, but old_log_probs_source is behavior; set that to recompute, or leave "
            "pg_ratio_base out",
        )


def _check_bounds(config: RLConfig, report: Report) -> None:
    weights, rejection = config.correction.weights, config.correction.rejection
    pairs: dict[str, tuple[float, float]] = {
        "tis_lower_bound": (config.tis_lower_bound, config.tis_upper_bound),
        "correction.weights.lower": (weights.lower, weights.upper),
    }
    if rejection.lower is not None and rejection.upper is not None:
        pairs["correction.rejection.lower"] = (rejection.lower, rejection.upper)
    for path, (lower, upper) in pairs.items():
        if lower > upper:
            report.error(path, f"{lower:g} is above the upper bound {upper:g}; exchange them")
    if config.topr_positive_weight == config.topr_negative_weight == 0:
        report.error("topr_positive_weight", "0, and topr_negative_weight 0 too: nothing is learned; give one a weight")


def _check_rejection(config: RLConfig, report: Report) -> None:
    rejection, path = config.correction.rejection, "correction.rejection"
    if rejection.statistic is not None and not rejection.lower and rejection.upper is None:
        bounds = {"k1": "lower: 0.5, upper: 2.0", "k2": "upper: 0.1", "k3": "upper: 0.01"}[rejection.statistic]
        given = "without bounds" if rejection.lower is None else "with a lower bound of 0 alone"
        report.error(f"{path}.statistic", f"{rejection.statistic} {given} rejects nothing; give some, such as {bounds}")
    agreement = 1.0 if rejection.statistic == "k1" else 0.0
    if rejection.statistic is not None and not _inside(agreement, rejection.lower, rejection.upper):
        report.warn(path, f"rejects what has not aged at all: {rejection.statistic} of equal policies is {agreement:g}")
    veto = config.correction.veto_threshold
    if veto is not None and veto > 1:
        report.warn(
            "correction.veto_threshold", f"{veto:g} rejects what has not aged at all: its ratio is 1; use less than 1"
        )
    weights = config.correction.weights
    if config.correction.weighted and weights.mode == "mask" and not _inside(1.0, weights.lower, weights.upper):
        report.warn("correction.weights", "mask leaves out what has not aged at all: its weight is 1")


def _inside(value: float, lower: float | None, upper: float | None) -> bool:
    return (lower is None or value >= lower) and (upper is None or value <= upper)


def _check_counted_once(config: RLConfig, report: Report) -> None:
    variant, weights = config.actor_train.pg_variant, config.correction.weights
    if not config.correction.weighted or variant not in RATIO_WEIGHTED_VARIANTS or config.pg_ratio_base != "behavior":
        return
    report.error(
        "correction.weights.level",
        f"{weights.level} would count the distance to the sampling policy twice: the ratio of {variant} is taken "
        "against it already; leave correction.weights out, or set pg_ratio_base: proximal and old_log_probs_source: "
        "recompute",
    )


def _check_corrected(config: RLConfig, report: Report) -> None:
    """Stale samples need a ratio against the sampling policy or weights for it, unless someone says otherwise."""
    variant = config.actor_train.pg_variant
    if config.correction.weighted:
        return
    if variant == "vanilla" and "actor_train.pg_variant" in config.source.given:
        report.warn(
            "actor_train.pg_variant",
            "vanilla does not correct for the age of samples; ppo and tis do, and so does vanilla with "
            "correction.weights.level: token",
        )
        return
    if config.pg_ratio_base == "behavior" and variant != "vanilla":
        return
    path = "pg_ratio_base" if "pg_ratio_base" in config.source.given else "old_log_probs_source"
    message = (
        f"{getattr(config, path)} with async_generation_ratio {config.async_generation_ratio:g} takes the ratio of "
        f"{variant} against the policy just before the update, which says nothing about the older one that sampled"
    )
    if config.allow_uncorrected_off_policy:
        report.warn(path, f"{message}; allowed by allow_uncorrected_off_policy")
    else:
        report.error(
            path,
            f"{message}; leave it out, or correct with actor_train.pg_variant: decoupled_ppo or "
            "correction.weights.level: token, or set allow_uncorrected_off_policy: true",
        )
