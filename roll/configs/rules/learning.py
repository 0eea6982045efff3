"""What is learned: estimators, losses, KL terms, corrections, sampling and preferences that exist and fit together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from roll.algorithms.advantage_options import ADV_ESTIMATORS, GROUP_ESTIMATORS, RESPONSE_ESTIMATORS, TURN_ESTIMATORS
from roll.algorithms.policy_loss import POLICY_LOSSES
from roll.algorithms.policy_options import known_losses, losses_of, traits_of
from roll.base.errors import Report
from roll.base.schema import check_order, value_at
from roll.base.text import nearest
from roll.configs.agentic import AgenticConfig
from roll.configs.arguments import LONGEST_SAMPLING_MASK
from roll.configs.pipeline import DPOConfig, RLConfig, RLVRConfig

OPSM_NOISE = 1e-2
"""In half precision log-probs differ by up to 0.05 nats a token; a smaller mean over a response says nothing."""

LOWEST_TEMPERATURE = 1e-3
"""Lowest sampling temperature of samples that are trained on; logits divided by less overflow."""

BYTES_OF_KEPT_TOKEN = 36
"""Memory of one id in a list of Python."""

LARGE_MASK_BYTES = 4 * 2**30
"""Memory for the kept tokens of a batch that is warned of."""


def check_algorithm(config: RLConfig, report: Report) -> None:
    """Names are known, groups are large enough, and terms that are on have a weight."""
    estimator, variant = "adv_estimator", "actor_train.pg_variant"
    check_name(estimator, config.adv_estimator, ADV_ESTIMATORS, report, {variant: POLICY_LOSSES})
    for name in losses_of(config.actor_train.pg_variant):
        check_name(variant, name, [*POLICY_LOSSES], report, {estimator: ADV_ESTIMATORS})
    if config.adv_estimator in TURN_ESTIMATORS and isinstance(config, RLVRConfig):
        report.error(
            "adv_estimator",
            f"{config.adv_estimator} needs trajectories of several turns, and pipeline rlvr has one turn; use grpo or "
            "reinforce",
        )
    if config.uses_greedy_responses and isinstance(config, AgenticConfig):
        report.error(
            "adv_estimator",
            f"{config.adv_estimator} needs a greedy response to each prompt, which agents of several turns do not "
            "generate; use grpo or rloo, or reinforce where train_env_manager.group_size is 1",
        )
    if config.uses_reward_parts and isinstance(config, AgenticConfig):
        report.error(
            "adv_estimator",
            f"{config.adv_estimator} normalises each of several rewards of a response, and an environment gives one; "
            "use grpo or rloo",
        )
    group = config.num_return_sequences_in_group
    if config.adv_estimator in GROUP_ESTIMATORS and group == 1:
        report.error(
            "train_env_manager.group_size" if isinstance(config, AgenticConfig) else "num_return_sequences_in_group",
            f"1 gives every sample of {config.adv_estimator} advantage 0, so nothing is learned; use at least 2, "
            "or adv_estimator reinforce",
        )
    elif config.adv_estimator == "pass_at_k" and config.pass_k >= group:
        report.error(
            "pass_k",
            f"{config.pass_k} of the {group} responses to a prompt: each set of that size is the whole group, so every "
            f"advantage is 0; use at most {group - 1}, or a larger group",
        )
    losses = losses_of(config.actor_train.pg_variant)
    choosing = [loss.name for loss in known_losses(config.actor_train.pg_variant) if loss.choose]
    if len(choosing) > 1:
        report.error(variant, f"{' and '.join(choosing)} cannot be mixed with each other; keep one of them")
    settings = config.policy
    for loss in known_losses(config.actor_train.pg_variant):
        for problem in loss.check(settings.options_of(loss)) if loss.check else ():
            report.error(problem.path, problem.message)
    if "kl_cov" in losses and config.optimizer_steps_per_batch == 1 and config.async_generation_ratio == 0:
        report.warn(
            variant,
            "kl_cov has no effect with one optimizer step for each batch: its KL has no gradient before the second; "
            "use ppo_epochs 2 or smaller optimizer steps",
        )
    if config.uses_critic and config.whiten_rewards and isinstance(config, AgenticConfig):
        report.error(
            "whiten_rewards",
            "true would scale the score of a trajectory but not the rewards of its turns, which gae adds up; set it to "
            "false, or use whiten_advantages",
        )
    if config.uses_greedy_responses and config.whiten_rewards:
        report.error(
            "whiten_rewards",
            f"true would scale the scores of samples but not those of greedy responses, which {config.adv_estimator} "
            "subtracts; set it to false, or use whiten_advantages",
        )
    if config.uses_critic and config.critic_warmup >= config.max_steps:
        report.warn(
            "critic_warmup",
            f"{config.critic_warmup} is not below max_steps {config.max_steps}: only the critic is trained",
        )
    if config.uses_teacher:
        _check_teacher(config, report)
    buffer, longest = config.overlong_buffer_len, config.response_length
    if buffer is not None and longest is not None and buffer > longest:
        report.error("overlong_buffer_len", f"{buffer} is above response_length {longest}; use at most that")
    if config.adv_estimator == "lite_ppo" and config.loss_agg_mode != "token-mean":
        report.warn("loss_agg_mode", f"{config.loss_agg_mode} is not the aggregation of lite_ppo; use token-mean")
    if not config.is_num_return_sequences_expand and group > 1:
        report.error(
            "is_num_return_sequences_expand",
            "false is not available: each sample is a request with its own seed; set it to true or leave it out",
        )
    if config.use_kl_loss and config.kl_loss_type == "k1":
        report.error(
            "kl_loss_type", "k1 in a loss has a gradient of 0 on average; use k3 or k2, or put the KL in the reward"
        )
    if config.use_kl_loss and config.kl_loss_coef == 0:
        report.error("kl_loss_coef", "0 turns off the KL that use_kl_loss requires; use a weight such as 0.001")
    if config.add_token_level_kl and config.init_kl_coef == 0:
        report.error("init_kl_coef", "0 turns off the KL that add_token_level_kl requires; use a weight such as 0.001")
    if config.adv_estimator in RESPONSE_ESTIMATORS and config.add_token_level_kl:
        report.warn(
            "add_token_level_kl",
            f"with {config.adv_estimator} the KL of a response is summed and counts for all its tokens alike; "
            "use_kl_loss keeps it per token",
        )
    _check_difficulty(config, report)
    _check_old_log_probs(config, report)
    _check_mismatch(config, report)


def _check_difficulty(config: RLConfig, report: Report) -> None:
    low, high = config.difficulty_low_threshold, config.difficulty_high_threshold
    if config.difficulty_mask and low >= high:
        report.error(
            "difficulty_low_threshold",
            f"no mean score lies between {low:g} and difficulty_high_threshold {high:g}, so every group is left out of "
            "the loss; the low one must be the smaller",
        )


def _check_teacher(config: RLConfig, report: Report) -> None:
    teacher, policy = (role.model_args.model_name_or_path for role in (config.reference, config.actor_train))
    asked = "use_opd: true" if config.use_opd else f"adv_estimator {config.adv_estimator}"
    if teacher == policy:
        report.error(
            "reference.model_args.model_name_or_path",
            f"{teacher} is the model that is trained, but with {asked} the reference is the teacher; name the teacher",
        )
    for name in ("use_kl_loss", "add_token_level_kl"):
        if getattr(config, name):
            report.error(
                name,
                f"true needs a reference of its own, but with {asked} the reference is the teacher; set it to false",
            )


def check_name(
    path: str, name: str, known: Sequence[str], report: Report, others: Mapping[str, Collection[str]] | None = None
) -> None:
    """Reports an unknown name together with the known ones, or the key among `others` whose value it is."""
    if name not in known:
        owner = next((key for key, names in (others or {}).items() if name in names), None)
        like = nearest(name, known)
        hint = f"{name} is a value of {owner}; " if owner else f"did you mean {like}? " if like else ""
        report.error(path, f"{name!r} is not known; {hint}known: {', '.join(known)}")


def _check_old_log_probs(config: RLConfig, report: Report) -> None:
    if config.old_log_probs_source != "behavior" or config.async_generation_ratio > 0:
        return
    report.warn(
        "old_log_probs_source",
        "behavior in synchronous training uses the engine's log-probs instead of the trainer's, so the first ratio "
        "is not exactly 1; auto recomputes them",
    )


def _check_mismatch(config: RLConfig, report: Report) -> None:
    largest = config.max_logprob_mismatch
    for key in ("mean_logprob_mismatch", "p99_logprob_mismatch"):
        bound = getattr(config, key)
        if key in config.source.given and largest is not None and bound is not None and bound > largest:
            report.warn(
                key,
                f"{bound:g} is never reached: max_logprob_mismatch {largest:g} ends the run first; use at most that, "
                "or raise that too",
            )


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
    for key in ("m2_threshold", "weights.normalize"):
        if value_at(config.correction, key) and config.old_log_probs_source == "behavior":
            report.error(
                f"correction.{key}",
                "needs the log ratios of the whole batch before the loss is computed, but with old_log_probs_source "
                "behavior they depend on the current policy; set that to recompute, or leave this out",
            )
    if config.uses_sum_pi_squared and config.old_log_probs_source == "behavior":
        report.error(
            "adv_estimator",
            f"{config.adv_estimator} needs the probabilities of all tokens, which the log-prob pass of the trainer "
            "computes, but with old_log_probs_source behavior there is no such pass; set that to recompute, or use opo",
        )
    if config.correction.renormalize and config.correction.opsm_delta is not None:
        report.error(
            "correction.renormalize",
            "true needs to know the kept tokens before the loss is computed, and those of opsm_delta depend on the "
            "current policy; leave one of them out",
        )
    _check_opsm(config, report)
    _check_counted_once(config, report)
    if config.async_generation_ratio > 0:
        _check_corrected(config, report)


def _check_opsm(config: RLConfig, report: Report) -> None:
    delta = config.correction.opsm_delta
    in_fp32 = config.actor_train.model_args.dtype == config.actor_infer.model_args.dtype == "fp32"
    if delta is not None and delta < OPSM_NOISE and not in_fp32:
        report.warn(
            "correction.opsm_delta",
            f"{delta:g} is below the noise between engine and trainer in half precision, so negative responses are "
            f"left out at random; use {OPSM_NOISE:g} or more",
        )


def _check_base(config: RLConfig, report: Report) -> None:
    variant = config.actor_train.pg_variant
    needs_proximal = traits_of(variant).ratio_base == "proximal"
    needs_behavior = [name for name in losses_of(variant) if traits_of(name).ratio_base == "behavior"]
    if needs_proximal and needs_behavior:
        report.error(
            "actor_train.pg_variant",
            f"{variant}: the losses of a mixture have one base of the ratio, and that of {needs_behavior[0]} is the "
            "sampling policy; use ppo instead of decoupled_ppo, or leave the others out",
        )
    if needs_proximal and config.pg_ratio_base == "behavior":
        report.error(
            "pg_ratio_base",
            f"behavior leaves {variant} without its proximal policy; leave it out, or use pg_variant ppo",
        )
    if config.old_log_probs_source != "behavior":
        return
    if needs_proximal:
        report.error(
            "old_log_probs_source",
            f"behavior makes the proximal policy of {variant} the sampling one, so its weights are 1; leave it out, "
            "or use pg_variant ppo",
        )
    elif config.pg_ratio_base == "proximal":
        report.error(
            "pg_ratio_base",
            "proximal needs a proximal policy, but old_log_probs_source is behavior; set that to recompute, or leave "
            "pg_ratio_base out",
        )


def _check_bounds(config: RLConfig, report: Report) -> None:
    weights = config.correction.weights
    pairs: dict[str, tuple[float, float]] = {
        "correction.weights.lower": (weights.lower, weights.upper),
    }
    for path, rejection in config.correction.all_rejections.items():
        if rejection.lower is not None and rejection.upper is not None:
            pairs[f"{path}.lower"] = (rejection.lower, rejection.upper)
    for path, (lower, upper) in pairs.items():
        for problem in check_order(path, lower, upper):
            report.error(problem.path, problem.message)


def _check_rejection(config: RLConfig, report: Report) -> None:
    for path, rejection in config.correction.all_rejections.items():
        if not rejection.lower and rejection.upper is None:
            bounds = {"k1": "lower: 0.5, upper: 2.0", "k2": "upper: 0.1", "k3": "upper: 0.01"}[str(rejection.statistic)]
            given = "without bounds" if rejection.lower is None else "with a lower bound of 0 alone"
            report.error(
                f"{path}.statistic", f"{rejection.statistic} {given} rejects nothing; give some, such as {bounds}"
            )
        agreement = 1.0 if rejection.statistic == "k1" else 0.0
        if not _inside(agreement, rejection.lower, rejection.upper):
            report.warn(
                path, f"also rejects on-policy samples: {rejection.statistic} of equal policies is {agreement:g}"
            )
    for name, rejection in config.correction.rejections.items():
        if rejection.statistic is None:
            report.warn(f"correction.rejections.{name}", "has no effect: its statistic is null; set it to k1, k2 or k3")
    difference = config.correction.difference
    if difference.level is not None and difference.lower is None and difference.upper is None:
        report.error(
            "correction.difference.level",
            f"{difference.level} without bounds rejects nothing; give correction.difference.upper, .lower or both",
        )
    veto = config.correction.veto_threshold
    if veto is not None and veto > 1:
        report.warn(
            "correction.veto_threshold", f"{veto:g} also rejects on-policy samples: their ratio is 1; use less than 1"
        )
    weights = config.correction.weights
    if config.correction.weighted and weights.lower <= weights.upper and not _inside(1.0, weights.lower, weights.upper):
        if weights.mode == "mask":
            report.warn("correction.weights", "mask also leaves out on-policy samples: their weight is 1")
        else:
            bound = min(max(1.0, weights.lower), weights.upper)
            report.warn(
                "correction.weights",
                f"clamp also changes the weight of on-policy samples, from 1 to {bound:g}; use bounds with 1 between "
                "them",
            )


def _inside(value: float, lower: float | None, upper: float | None) -> bool:
    return (lower is None or value >= lower) and (upper is None or value <= upper)


def _check_counted_once(config: RLConfig, report: Report) -> None:
    variant, weights = config.actor_train.pg_variant, config.correction.weights
    traits = traits_of(variant)
    if traits.ratio_base == "proximal" or not traits.multiplies_ratio:
        return
    if not config.correction.weighted or config.pg_ratio_base != "behavior":
        return
    report.error(
        "correction.weights.level",
        f"{weights.level} would count the distance to the sampling policy twice: the ratio of {variant} is "
        "already taken against it; leave correction.weights out, or set pg_ratio_base: proximal and "
        "old_log_probs_source: recompute",
    )


def _check_corrected(config: RLConfig, report: Report) -> None:
    """Stale samples need a ratio against the sampling policy or weights for it, unless explicitly allowed without."""
    variant = config.actor_train.pg_variant
    if config.correction.weighted:
        return
    reads_ratio = traits_of(variant).reads_ratio
    if not reads_ratio and "actor_train.pg_variant" in config.source.given:
        report.warn(
            "actor_train.pg_variant",
            f"{variant} does not correct for the age of samples; ppo and tis do, and {variant} does with "
            "correction.weights.level: token",
        )
        return
    if config.pg_ratio_base == "behavior" and reads_ratio:
        return
    path = "pg_ratio_base" if "pg_ratio_base" in config.source.given else "old_log_probs_source"
    message = (
        f"{getattr(config, path)} with async_generation_ratio {config.async_generation_ratio:g} computes the ratio of "
        f"{variant} against the policy just before the update, not against the older one that sampled"
    )
    if config.allow_uncorrected_off_policy:
        report.warn(path, f"{message}; allowed by allow_uncorrected_off_policy")
    else:
        report.error(
            path,
            f"{message}; leave it out, or correct with actor_train.pg_variant: decoupled_ppo or "
            "correction.weights.level: token, or set allow_uncorrected_off_policy: true",
        )


def check_preferences(config: DPOConfig, report: Report) -> None:
    """The loss prefers one of the two responses of a pair."""
    if config.dpo_loss_type == "sigmoid" and config.label_smoothing == 0.5:
        report.error(
            "label_smoothing",
            "0.5 takes half of all pairs for swapped, so no preference is learned; use less, such as 0.1",
        )
    if config.dpo_loss_type == "kto_pair" and config.actor_train.samples_per_optimizer_step == 1:
        report.warn(
            "dpo_loss_type",
            "kto_pair compares a response with the mean over the pairs of an optimizer step, and this one has 1 pair; "
            "use more, such as actor_train.training_args.gradient_accumulation_steps 8",
        )


def check_sampling(config: RLConfig, report: Report) -> None:
    """Temperature, truncation, penalties and lengths of the samples trained on, and the lengths of validation."""
    sampling, path = config.actor_infer.generating_args, "actor_infer.generating_args"
    if sampling.temperature < LOWEST_TEMPERATURE:
        report.error(
            f"{path}.temperature",
            f"{sampling.temperature:g} is greedy: all samples of a prompt would be equal, with nothing to train on; "
            f"use at least {LOWEST_TEMPERATURE:g}, such as 1.0 (validation may use 0)",
        )
    if sampling.top_k == 1:
        report.error(f"{path}.top_k", "1 is greedy: all samples of a prompt would be equal; use 0 for all tokens")
    agentic = isinstance(config, AgenticConfig)
    if not agentic and sampling.num_return_sequences != config.num_return_sequences_in_group:
        report.error(
            f"{path}.num_return_sequences",
            f"{sampling.num_return_sequences} is not num_return_sequences_in_group "
            f"{config.num_return_sequences_in_group}; leave it out",
        )
    if sampling.repetition_penalty != 1:
        report.warn(
            f"{path}.repetition_penalty",
            f"{sampling.repetition_penalty:g} changes the distribution sampled from, but not the log-probs the engine "
            "returns: every ratio is biased; use 1.0",
        )
    _check_truncation(config, report)
    if agentic:
        return
    for role in ("actor_infer", "validation"):
        longest = getattr(config, role).generating_args.max_new_tokens
        if longest is not None and config.response_length is not None and longest > config.response_length:
            report.error(
                f"{role}.generating_args.max_new_tokens",
                f"{longest} is above response_length {config.response_length}; use at most that, or leave it out",
            )


def _check_sampling_mask(config: RLConfig, report: Report) -> None:
    top_k, options = config.actor_infer.generating_args.top_k, config.actor_infer.strategy_args.strategy_config
    limit = options.get("sampling_mask_max_tokens")
    if isinstance(limit, int) and limit < top_k:
        path = "actor_infer.strategy_args.strategy_config.sampling_mask_max_tokens"
        report.error(path, f"{limit} is below top_k {top_k}, so the engine would refuse every request; leave it out")
    if config.actor_infer.generating_args.top_p == 1:
        length = getattr(config, "response_length", None) or config.sequence_length or 0
        size = config.samples_per_batch * length * top_k * BYTES_OF_KEPT_TOKEN
        if size > LARGE_MASK_BYTES:
            report.warn(
                "actor_infer.generating_args.top_k",
                f"{top_k} keeps as many ids for every token, up to {size / 2**30:.0f} GiB for a batch of long "
                "responses; use a smaller top_k, a top_p below 1, or on_truncated_sampling: warn",
            )


def _check_truncation(config: RLConfig, report: Report) -> None:
    sampling = config.actor_infer.generating_args
    cuts = [f"top_p {sampling.top_p:g}"] * (sampling.top_p < 1) + [f"top_k {sampling.top_k}"] * (sampling.top_k > 0)
    if config.replays_sampling_mask:
        _check_sampling_mask(config, report)
    if not cuts or config.replays_sampling_mask:
        return
    message = (
        f"{' and '.join(cuts)} sample from a truncated distribution, but the engine returns log-probs of the whole "
        "one: every ratio and KL is biased; use top_p 1.0 and top_k 0, or on_truncated_sampling: replay with a top_k "
        f"from 2 to {LONGEST_SAMPLING_MASK}"
    )
    if config.on_truncated_sampling == "refuse":
        report.error("actor_infer.generating_args", f"{message} (on_truncated_sampling is refuse)")
    else:
        report.warn("actor_infer.generating_args", message)
