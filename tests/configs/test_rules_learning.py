"""Messages of the rules of the policy loss and its off-policy correction."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.algorithms.estimators import ADV_ESTIMATORS
from roll.algorithms.options.policy_options import VARIANT_KEYS
from roll.configs.asynchronous import versions_ahead
from roll.configs.check import check
from tests.configs.samples import refusal, rlvr

VARIANT, ASYNC = "actor_train.pg_variant", "async_generation_ratio=1"
WEIGHTS = "correction.weights"
TOKENS = f"{WEIGHTS}.level=token"

BASES = {
    "": ("recompute", "proximal"),
    ASYNC: ("behavior", "behavior"),
    f"{VARIANT}=vanilla": ("recompute", "proximal"),
    f"{VARIANT}=gspo": ("recompute", "proximal"),
    f"{VARIANT}=gspo {ASYNC}": ("behavior", "behavior"),
    f"{VARIANT}=tis": ("recompute", "behavior"),
    f"{VARIANT}=topr": ("recompute", "behavior"),
    f"{VARIANT}=cispo {ASYNC}": ("behavior", "behavior"),
    f"{VARIANT}=kimi15 {ASYNC}": ("behavior", "behavior"),
    f"{VARIANT}=kimi15 {TOKENS} pg_ratio_base=proximal {ASYNC}": ("recompute", "proximal"),
    f"{VARIANT}=decoupled_ppo": ("recompute", "proximal"),
    f"{VARIANT}=decoupled_ppo {ASYNC}": ("recompute", "proximal"),
    f"{TOKENS} {ASYNC}": ("recompute", "proximal"),
    f"{TOKENS} {VARIANT}=vanilla {ASYNC}": ("behavior", "behavior"),
    f"correction.renormalize=true correction.veto_threshold=0.01 {VARIANT}=tis {ASYNC}": ("recompute", "behavior"),
    f"correction.m2_threshold=0.04 {ASYNC}": ("recompute", "behavior"),
    f"correction.m2_threshold=0.04 {TOKENS} {ASYNC}": ("recompute", "proximal"),
    "old_log_probs_source=behavior": ("behavior", "behavior"),
    f"old_log_probs_source=recompute pg_ratio_base=behavior {ASYNC}": ("recompute", "behavior"),
}


@pytest.mark.parametrize(("overrides", "expected"), BASES.items())
def test_ratio_base_follows_from_variant_and_ratio(tmp_path, overrides, expected) -> None:
    config = rlvr(tmp_path, *overrides.split())
    assert (config.old_log_probs_source, config.pg_ratio_base) == expected
    settings = config.policy
    assert (settings.old_log_probs_source, settings.pg_ratio_base) == expected


def test_decoupled_ppo_has_token_weights_by_default(tmp_path: Path) -> None:
    weights = rlvr(tmp_path, f"{VARIANT}=decoupled_ppo").correction.weights
    assert (weights.level, weights.mode, weights.lower, weights.upper) == ("token", "clamp", 0.0, 2.0)
    other = rlvr(tmp_path, f"{VARIANT}=decoupled_ppo", f"{WEIGHTS}.level=sequence", f"{WEIGHTS}.upper=5")
    assert (other.correction.weights.level, other.correction.weights.upper) == ("sequence", 5.0)


@pytest.mark.parametrize("estimator", [name for name, each in ADV_ESTIMATORS.items() if each.in_group])
def test_group_estimators_need_groups(tmp_path: Path, estimator: str) -> None:
    message = refusal(
        tmp_path, f"adv_estimator={estimator}", "num_return_sequences_in_group=1", "rollout_batch_size=512"
    )
    assert f"num_return_sequences_in_group: 1 gives every sample of {estimator} advantage 0" in message


@pytest.mark.parametrize("key", VARIANT_KEYS)
def test_key_of_another_variant_names_its_variants(tmp_path: Path, key: str) -> None:
    value = {"topr_level": "sequence", "dual_clip_loss": "true", "cispo_use_unified_mask": "true", "dual_clip_c": 4}
    config = rlvr(tmp_path, f"{VARIANT}=vanilla", f"{key}={value.get(key, 0.7)}")
    message = "\n".join(str(warning) for warning in check(config).warnings)
    assert f"{key}: has no effect: it belongs to actor_train.pg_variant {' or '.join(VARIANT_KEYS[key])}" in message


def test_importance_sampling_is_another_spelling_of_token_weights(tmp_path: Path) -> None:
    config = rlvr(tmp_path, "importance_sampling=true", "is_clip_range=[0.5, 2.0]", ASYNC)
    weights = config.correction.weights
    assert (weights.level, weights.mode, weights.lower, weights.upper) == ("token", "clamp", 0.5, 2.0)
    assert (config.old_log_probs_source, config.pg_ratio_base) == ("recompute", "proximal")
    message = "is read as correction.weights {level: token, mode: clamp, lower: 0.5, upper: 2.0}"
    assert ("importance_sampling, is_clip_range", message) in config.source.notes


def test_importance_sampling_off_is_a_remark(tmp_path: Path) -> None:
    config = rlvr(tmp_path, "importance_sampling=false", "correction.veto_threshold=0.01")
    assert not config.correction.weighted and config.correction.veto_threshold == 0.01
    message = "false is the default and does not change correction.weights"
    assert config.source.notes == [("importance_sampling", message)]


TEACHER = ("reference.device_mapping=0-15", "reference.model_args.model_name_or_path=a/teacher")


def test_options_of_a_divergence_to_a_teacher_reach_the_loss(tmp_path: Path) -> None:
    config = rlvr(tmp_path, "use_opd=true", "opd_top_k=8", "opd_jsd_beta=0.3", "opd_divergence=jsd", *TEACHER)
    assert config.uses_reference and config.uses_teacher
    assert (config.policy.opd_divergence, config.policy.opd_jsd_beta) == ("jsd", 0.3)


@pytest.mark.parametrize(
    ("ratio", "ahead", "allowed"), [(0, 0, 5), (0.5, 1, 5), (0.1 * 3 + 0.7, 1, 5), (1, 1, 5), (6.5, 7, 7)]
)
def test_staleness_defaults_follow_from_the_ratio(tmp_path: Path, ratio: float, ahead: int, allowed: int) -> None:
    config = rlvr(tmp_path, f"async_generation_ratio={ratio!r}")
    assert versions_ahead(config.async_generation_ratio) == ahead
    assert config.async_training.max_staleness_allowed == config.default_max_staleness == allowed
    assert config.runs_in_background == (ratio > 0)
