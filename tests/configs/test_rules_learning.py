"""Messages of the rules of the policy loss and its off-policy correction."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.algorithms.estimators import ADV_ESTIMATORS
from roll.algorithms.options.policy_options import POLICY_LOSSES, VARIANT_KEYS
from roll.configs.check import check
from tests.configs.samples import MODEL, refusal, rlvr

VARIANT, ASYNC = "actor_train.pg_variant", "async_generation_ratio=1"
WEIGHTS, REJECTION = "correction.weights", "correction.rejection"
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


REFUSED = {
    f"{ASYNC} old_log_probs_source=recompute": "recompute with async_generation_ratio 1 computes the ratio of ppo "
    "against the policy just before the update",
    f"{ASYNC} pg_ratio_base=proximal {VARIANT}=tis": "pg_ratio_base: proximal with async_generation_ratio 1",
    f"{ASYNC} pg_ratio_base=proximal {VARIANT}=kimi15": "or set allow_uncorrected_off_policy: true",
    f"{ASYNC} old_log_probs_source=recompute correction.veto_threshold=0.1": "or set allow_uncorrected_off_policy",
    "async_generation_ratio=.nan": "async_generation_ratio: nan is not a finite number",
    "async_generation_ratio=.inf": "async_generation_ratio: inf is not a finite number",
    "async_generation_ratio=-1": "async_generation_ratio: -1.0 is too small; the least allowed is 0 (0 is off)",
    "max_grad_norm=-1": "max_grad_norm: -1.0 is too small; the least allowed is 0 (0 turns it off)",
    "kl_loss_coef=-1": "kl_loss_coef: -1.0 is too small; the least allowed is 0 (0 is off)",
    "value_clip=0": "value_clip: 0.0 is too small; it must be above 0 (null: no bound)",
    "adv_estimator=GRPO": "adv_estimator: 'GRPO' is not known; did you mean grpo? known: ",
    "actor_train.pg_variant=PPO": "actor_train.pg_variant: 'PPO' is not known; did you mean ppo? known: ",
    "actor_train.model_args.dtype=BF16": "actor_train.model_args.dtype: 'BF16' is not known; did you mean bf16?",
    "loss_agg_mode=token_mean": "loss_agg_mode: 'token_mean' is not known; did you mean token-mean?",
    f"{WEIGHTS}.level=Token": "correction.weights.level: 'Token' is not known; did you mean token?",
    "async_generation_ratio=half": "async_generation_ratio: 'half' is not a number",
    f"{VARIANT}=decoupled_ppo pg_ratio_base=behavior": "pg_ratio_base: behavior leaves decoupled_ppo without",
    f"{VARIANT}=decoupled_ppo old_log_probs_source=behavior": "behavior makes the proximal policy of",
    "old_log_probs_source=behavior pg_ratio_base=proximal": "pg_ratio_base: proximal needs a proximal policy",
    f"{VARIANT}=tis {TOKENS}": "correction.weights.level: token would count the distance to the sampling policy twice",
    f"{TOKENS} old_log_probs_source=behavior": "the ratio of ppo is already taken against it",
    f"{VARIANT}=tis tis_lower_bound=2": "tis_lower_bound: 2 is above the upper bound 1",
    f"{TOKENS} {WEIGHTS}.lower=3": "correction.weights.lower: 3 is above the upper bound 2",
    f"{REJECTION}.statistic=k3 {REJECTION}.lower=2 {REJECTION}.upper=1": "correction.rejection.lower: 2 is above",
    "correction.rejections.a={statistic: k1, lower: 3, upper: 2}": "correction.rejections.a.lower: 3 is above the",
    "correction.rejections.a={statistic: k2}": "correction.rejections.a.statistic: k2 without bounds rejects nothing",
    "correction.rejections.a={upper: 2}": "correction.rejections.a.upper: has no effect: its statistic is null",
    "correction.difference.level=token": "correction.difference.level: token without bounds rejects nothing; give",
    f"{REJECTION}.statistic=k1": "k1 without bounds rejects nothing; give some, such as lower: 0.5, upper: 2.0",
    f"{VARIANT}=topr topr_positive_weight=0 topr_negative_weight=0": "nothing is learned; give one a weight",
    f"{WEIGHTS}.upper=3": "correction.weights.upper: has no effect: correction.weights.level is null",
    f"{REJECTION}.upper=3": "correction.rejection.upper: has no effect: its statistic is null; set that to k1",
    "correction.renormalize=true": "correction.renormalize: has no effect: nothing is rejected",
    "correction.renormalize=true correction.veto_threshold=0.1 old_log_probs_source=behavior": "true needs to know the "
    "kept tokens before",
    "difficulty_mask=true difficulty_low_threshold=0.8 difficulty_high_threshold=0.2": "difficulty_low_threshold: no "
    "mean score lies between 0.8 and difficulty_high_threshold 0.2, so every group is left out",
    "difficulty_mask=true difficulty_low_threshold=1": "no mean score lies between 1 and difficulty_high_threshold 1",
    f"{WEIGHTS}.level=word": "correction.weights.level: 'word' is not one of token, sequence, geometric, "
    "segment or null",
    f"{WEIGHTS}.uper=3": "correction.weights.uper: unknown key; did you mean correction.weights.upper?",
}


@pytest.mark.parametrize(("overrides", "message"), REFUSED.items())
def test_contradicting_policy_keys_are_refused(tmp_path: Path, overrides: str, message: str) -> None:
    assert message in refusal(tmp_path, *([overrides] if "{" in overrides else overrides.split()))


WARNED = {
    f"{ASYNC} {VARIANT}=vanilla": "actor_train.pg_variant: vanilla does not correct for the age of samples",
    f"{ASYNC} old_log_probs_source=recompute allow_uncorrected_off_policy=true": "allowed by allow_uncorrected_off",
    "allow_uncorrected_off_policy=true": "allow_uncorrected_off_policy: has no effect: async_generation_ratio is 0",
    f"{REJECTION}.statistic=k1 {REJECTION}.upper=0.9": "also rejects on-policy samples: k1 of equal policies is 1",
    "correction.rejections.a={}": "correction.rejections.a: has no effect: its statistic is null",
    "correction.rejections.a={statistic: k3, lower: 0.1}": "correction.rejections.a: also rejects on-policy samples",
    f"{REJECTION}.statistic=k3 {REJECTION}.lower=0.1": "also rejects on-policy samples: k3 of equal policies is 0",
    f"{TOKENS} {WEIGHTS}.mode=mask {WEIGHTS}.lower=1.1": "mask also leaves out on-policy samples",
    f"{TOKENS} {WEIGHTS}.upper=0.0001": "correction.weights: clamp also changes the weight of on-policy samples, "
    "from 1 to 0.0001; use bounds with 1 between them",
    f"{TOKENS} {WEIGHTS}.lower=1.5": "clamp also changes the weight of on-policy samples, from 1 to 1.5",
    "p99_logprob_mismatch=0.5 max_logprob_mismatch=0.1": "p99_logprob_mismatch: 0.5 is never reached: "
    "max_logprob_mismatch 0.1 ends the run first; use at most that, or raise that too",
    "mean_logprob_mismatch=0.5 max_logprob_mismatch=0.1": "mean_logprob_mismatch: 0.5 is never reached",
    "correction.veto_threshold=5": "correction.veto_threshold: 5 also rejects on-policy samples: their ratio is 1",
    "adv_estimator=lite_ppo": "loss_agg_mode: seq-mean-token-mean is not the aggregation of lite_ppo; use token-mean",
    "adv_estimator=gdpo": "adv_estimator: gdpo normalises each reward of a response, but no tag has several: with",
    "adv_estimator=gdpo reward_clip=2": "reward_clip: has no effect: adv_estimator gdpo normalises the score of each",
    "adv_estimator=gdpo whiten_rewards=true": "whiten_rewards: has no effect: adv_estimator gdpo normalises the score",
    "adv_estimator=gdpo whiten_advantages=true": "whiten_advantages: has no effect",
    "adv_estimator=remax gamma=0.9": "gamma: has no effect: it belongs to adv_estimator reinforce",
    "adv_estimator=rloo gamma=0.9": "gamma: has no effect: it belongs to adv_estimator reinforce",
    "adv_estimator=reinforce_plus_plus whiten_advantages=true": "whiten_advantages: has no effect",
}


@pytest.mark.parametrize(("overrides", "message"), WARNED.items())
def test_doubtful_policy_keys_are_warnings(tmp_path: Path, overrides: str, message: str) -> None:
    parts = [overrides] if "{" in overrides else overrides.split()
    warnings = [str(warning) for warning in check(rlvr(tmp_path, *parts)).warnings]
    assert any(message in warning for warning in warnings), warnings


CORRECTED = [
    ASYNC,
    f"{ASYNC} {TOKENS}",
    f"{ASYNC} {VARIANT}=vanilla {TOKENS}",
    *(f"{ASYNC} {VARIANT}={variant}" for variant in POLICY_LOSSES if variant != "vanilla"),
]


@pytest.mark.parametrize("overrides", CORRECTED)
def test_corrected_asynchronous_training_has_no_warnings(tmp_path: Path, overrides: str) -> None:
    assert check(rlvr(tmp_path, *overrides.split())).warnings == []


@pytest.mark.parametrize("estimator", [name for name, each in ADV_ESTIMATORS.items() if each.in_group])
def test_group_estimators_need_groups(tmp_path: Path, estimator: str) -> None:
    message = refusal(
        tmp_path, f"adv_estimator={estimator}", "num_return_sequences_in_group=1", "rollout_batch_size=512"
    )
    assert f"num_return_sequences_in_group: 1 gives every sample of {estimator} advantage 0" in message


def test_remax_learns_from_one_sample_to_a_prompt(tmp_path: Path) -> None:
    overrides = ("adv_estimator=remax", "num_return_sequences_in_group=1", "rollout_batch_size=512")
    assert check(rlvr(tmp_path, *overrides)).errors == []
    message = refusal(tmp_path, *overrides, "whiten_rewards=true")
    assert "whiten_rewards: true would scale the scores of samples but not those of greedy responses" in message


def test_gdpo_of_two_rewards_for_a_tag_has_no_warnings(tmp_path: Path) -> None:
    right, form = (
        "rewards.math_rule={tag_included: [math], weight: 1}",
        "rewards.form={tag_included: [math], weight: %s}",
    )
    assert check(rlvr(tmp_path, "adv_estimator=gdpo", right, form % 0.5)).warnings == []
    alone = check(rlvr(tmp_path, "adv_estimator=gdpo", right, form % 0)).warnings
    assert [warning.path for warning in alone] == ["adv_estimator"], "a reward of weight 0 is a metric"


def test_k1_in_the_loss_is_refused_where_it_is_read(tmp_path: Path) -> None:
    loss = ("use_kl_loss=true", "kl_loss_coef=0.1", "reference.device_mapping=0-15", "kl_loss_type=kl")
    assert "kl_loss_type: k1 in a loss has a gradient of 0 on average" in refusal(tmp_path, *loss)
    assert check(rlvr(tmp_path, "kl_loss_type=kl")).errors == []


def test_the_buffer_of_overlong_responses_fits_into_the_response(tmp_path: Path) -> None:
    message = refusal(tmp_path, "overlong_buffer_len=2000")
    assert "overlong_buffer_len: 2000 is above response_length 1024; use at most that" in message
    assert check(rlvr(tmp_path, "overlong_buffer_len=128")).errors == []


def test_sets_of_pass_at_k_are_smaller_than_the_group(tmp_path: Path) -> None:
    overrides = ("adv_estimator=pass_at_k", "num_return_sequences_in_group=4", "rollout_batch_size=128")
    message = refusal(tmp_path, *overrides, "pass_k=4")
    assert "pass_k: 4 of the 4 responses to a prompt: each set of that size is the whole group" in message
    assert check(rlvr(tmp_path, *overrides, "pass_k=3")).errors == []


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
    message = "true is read as correction.weights {level: token, mode: clamp, lower: 0.5, upper: 2.0}"
    assert ("importance_sampling", message) in config.source.notes


def test_importance_sampling_off_is_a_remark(tmp_path: Path) -> None:
    config = rlvr(tmp_path, "importance_sampling=false", "correction.veto_threshold=0.01")
    assert not config.correction.weighted and config.correction.veto_threshold == 0.01
    message = "false is the default and does not change correction.weights"
    assert config.source.notes == [("importance_sampling", message)]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["is_clip_range=[0.5, 2.0]"], "is_clip_range: has no effect without importance_sampling: true"),
        (["importance_sampling=true", "is_clip_range=2"], "is_clip_range: 2 is not a lower and an upper bound; write"),
        (["importance_sampling=true", "is_clip_range=[2.0, 0.5]"], "correction.weights.lower: 2 is above the upper"),
        (["importance_sampling=true", f"{WEIGHTS}.upper=3"], "is another spelling of correction.weights"),
        (["importance_sampling=false", f"{WEIGHTS}.level=token"], "which is given too; keep one"),
        (["importance_sampling=sequence"], "importance_sampling: 'sequence' is not true or false; use true"),
    ],
)
def test_invalid_importance_sampling_is_explained(tmp_path: Path, overrides: list[str], message: str) -> None:
    assert message in refusal(tmp_path, *overrides)


TEACHER = ("reference.device_mapping=0-15", "reference.model_args.model_name_or_path=a/teacher")


@pytest.mark.parametrize("asked", ["use_opd=true", "adv_estimator=opd"])
@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "reference.model_args.model_name_or_path={policy}",
            "is the model that is trained, but with {asked} the reference ",
        ),
        ("use_kl_loss=true kl_loss_coef=0.1", "use_kl_loss: true needs a reference of its own, but with {asked} the"),
        ("add_token_level_kl=true init_kl_coef=0.1", "add_token_level_kl: true needs a reference of its own, but with"),
    ],
)
def test_a_teacher_is_another_model_and_of_no_kl_term(tmp_path: Path, asked: str, override: str, message: str) -> None:
    policy = rlvr(tmp_path).actor_train.model_args.model_name_or_path
    overrides = override.format(policy=policy).split()
    named = asked.replace("=", ": ") if asked.startswith("use") else asked.replace("=", " ")
    assert message.format(asked=named) in refusal(tmp_path, asked, *TEACHER, *overrides)


def test_keys_of_scores_have_no_effect_where_a_teacher_alone_teaches(tmp_path: Path) -> None:
    config = rlvr(tmp_path, "adv_estimator=opd", "gamma=0.9", "whiten_rewards=true", *TEACHER)
    assert config.uses_reference and config.uses_teacher
    text = "\n".join(map(str, check(config).warnings))
    assert "gamma: has no effect" in text
    assert "whiten_rewards: has no effect: the advantages of adv_estimator opd do not depend on scores" in text
    config = rlvr(tmp_path, "opd_kl_coef=0.5")
    assert "opd_kl_coef: has no effect: there is no teacher" in "\n".join(map(str, check(config).warnings))


def test_keys_of_a_divergence_to_a_teacher_have_no_effect_without_one(tmp_path: Path) -> None:
    warnings = "\n".join(map(str, check(rlvr(tmp_path, "opd_top_k=8")).warnings))
    assert "opd_top_k: has no effect: there is no teacher" in warnings
    warnings = "\n".join(map(str, check(rlvr(tmp_path, "use_opd=true", "opd_divergence=forward", *TEACHER)).warnings))
    assert "opd_divergence: has no effect: opd_top_k is null, so only sampled tokens are compared" in warnings
    keys = ("use_opd=true", "opd_top_k=8", "opd_jsd_beta=0.3", *TEACHER)
    assert "opd_jsd_beta: has no effect: opd_divergence is not jsd" in "\n".join(
        map(str, check(rlvr(tmp_path, *keys)).warnings)
    )
    config = rlvr(tmp_path, *keys, "opd_divergence=jsd")
    assert not any("opd_" in str(warning) for warning in check(config).warnings)
    assert (config.policy.opd_divergence, config.opd_jsd_beta) == ("jsd", 0.3)
    assert config.policy.opd_jsd_beta == 0.3


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0", "opd_jsd_beta: at 0 the divergence is always 0; use opd_divergence: forward"),
        ("1.0", "opd_jsd_beta: at 1 the divergence is always 0; use opd_divergence: reverse"),
        ("-0.1", "opd_jsd_beta: -0.1 is too small; it must be above 0"),
        ("1.5", "opd_jsd_beta: 1.5 is too large; it must be below 1"),
        ("half", "opd_jsd_beta: 'half' is not a number"),
        ("true", "opd_jsd_beta: True is not a number"),
    ],
)
def test_the_weight_of_a_mixture_lies_between_its_limits(tmp_path: Path, value: str, message: str) -> None:
    keys = ("use_opd=true", "opd_top_k=8", "opd_divergence=jsd", f"opd_jsd_beta={value}", *TEACHER)
    assert message in refusal(tmp_path, *keys)


@pytest.mark.parametrize("key", ["whiten_advantages=true", "advantage_clip=2"])
def test_keys_of_advantages_have_no_effect_where_a_teacher_alone_teaches_in_the_loss(tmp_path: Path, key: str) -> None:
    message = f"{key.split('=')[0]}: has no effect: with adv_estimator opd and opd_top_k all advantages are 0"
    for more, expected in ((("opd_top_k=8",), True), ((), False)):
        config = rlvr(tmp_path, "adv_estimator=opd", key, *more, *TEACHER)
        assert (message in "\n".join(map(str, check(config).warnings))) == expected
    config = rlvr(tmp_path, "use_opd=true", "opd_top_k=8", key, *TEACHER)
    assert message not in "\n".join(map(str, check(config).warnings))


LARGE_TEACHER = (
    "pretrain=a/policy",
    "adv_estimator=opd",
    "reference.device_mapping=0-15",
    f"reference.model_args.model_name_or_path={MODEL}",
)


def test_the_tokens_of_a_teacher_fit_into_memory(tmp_path: Path) -> None:
    few, many = (
        [str(each) for each in check(rlvr(tmp_path, f"opd_top_k={top_k}", *LARGE_TEACHER)).warnings]
        for top_k in (64, 1000)
    )
    message = "opd_top_k: 1000 for 512 samples of up to 3072 tokens are 12 GiB of ids and log-probs in the driver; use"
    assert any(each.startswith(message) for each in many) and not any("opd_top_k" in each for each in few)
    message = "opd_top_k: 152064, the whole vocabulary, for 512 samples of up to 3072 tokens are 1,782 GiB of ids and"
    assert message in refusal(tmp_path, "opd_top_k=1000000", *LARGE_TEACHER)


@pytest.mark.parametrize(("dtype", "delta", "warned"), [("bf16", 1e-4, 1), ("bf16", 1e-2, 0), ("fp32", 1e-4, 0)])
def test_an_opsm_delta_below_the_noise_of_half_precision_is_a_warning(
    tmp_path: Path, dtype: str, delta: float, warned: int
) -> None:
    dtypes = [f"{role}.model_args.dtype={dtype}" for role in ("actor_train", "actor_infer")]
    warnings = map(str, check(rlvr(tmp_path, f"correction.opsm_delta={delta}", *dtypes)).warnings)
    assert sum("below the noise between engine and trainer" in text for text in warnings) == warned
