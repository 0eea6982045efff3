"""What the metrics of an update tell about its ratios: wrong in the first step, or inert on stale samples."""

from __future__ import annotations

from collections.abc import Mapping

FIRST_STEP_TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}
"""How far log pi may be from log p before any update. Half precision rounds differently when the forward pass for old
log-probs and the training pass batch samples differently."""

INERT_TOLERANCE = 1e-6
"""Ratios this close to 1 over a whole batch correct nothing."""


def first_update_fault(step: Mapping[str, float], base: str, dtype: str, parity_bound: float | None) -> str | None:
    """What is wrong with the first optimizer step of a run, if anything.

    Before any update the current policy is the proximal one, and the sampling one as far as engine and trainer agree.
    So the log ratio of every token is 0 against the proximal policy, and within `parity_bound` against the behaviour.

    Args:
        step: metrics of the policy loss.
        base: `pg_ratio_base`, behavior or proximal.
        dtype: of actor_train.
        parity_bound: `max_logprob_mismatch`; None asks nothing of the engine.
    """
    tolerance = parity_bound if base == "behavior" else FIRST_STEP_TOLERANCE[dtype]
    off = step["log_ratio_abs_max"]
    if tolerance is None or (off <= tolerance and abs(step["policy_kl"]) <= tolerance):
        return None
    found = (
        f"the first optimizer step has ratio_mean {step['ratio_mean']}, ratio_max {step['ratio_max']} and policy_kl "
        f"{step['policy_kl']}, and a log ratio of {off:.3g}"
    )
    if base == "behavior":
        return (
            f"{found}; before any update it must be 0 to max_logprob_mismatch {tolerance:g}, as far as engine and "
            "trainer agree: check that both load the same weights, temperature and dtype"
        )
    return (
        f"{found}; before any update they must be 1, 1 and 0, and it 0 to {tolerance:g}. The training pass and the "
        "log-prob pass do not compute the same model"
    )


def is_inert(ratio_deviation: float, weight_deviation: float | None, staleness: float) -> bool:
    """Whether stale samples are learned from as if they were fresh: every ratio and every weight in use is 1.

    Args:
        ratio_deviation: largest |r - 1| of the policy loss over the batch.
        weight_deviation: the same of the correction's weights, as far as mean and largest weight tell; None without.
        staleness: versions the oldest sample is behind.
    """
    return staleness > 0 and max(ratio_deviation, weight_deviation or 0.0) <= INERT_TOLERANCE
