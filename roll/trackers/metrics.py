"""Every metric of a run with its unit and description, from which `make docs` generates docs/metrics.md.

Metrics are described only here. The code that computes a metric names it; a name without a description is logged as a
warning (`undocumented`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Metric:
    """A metric; `name` may contain `<placeholders>`, each for one word without a slash."""

    name: str
    unit: str
    meaning: str


ALIASES: dict[str, str] = {
    "global_steps": "step",
    "current_param_version": "version",
    "processed_samples": "queue/total_consumed",
    "queue_size": "queue/size",
    "total_produced": "queue/total_produced",
    "total_consumed": "queue/total_consumed",
    "dropped_samples": "queue/dropped_samples",
}
"""Name in other asynchronous trainers -> the metric of this project with the same value."""

RUN = (
    Metric("step", "steps", "Number of the training step, which equals the batches trained on; 0 is before training."),
    Metric("version", "versions", "Weight version after this step; every weight update increases it by one."),
)

TIME = (
    Metric("time/step", "s", "The whole step, including weight update, validation and checkpoint."),
    Metric("time/unix", "s", "Time of day at which the line was written, in seconds since 1970."),
    Metric("time/wait_prev_gen", "s", "Waiting for the next batch; with async_generation_ratio 0 all of generation."),
    Metric("time/generate", "s", "Seconds with at least one generation request running, since the previous batch."),
    Metric("time/reward", "s", "Seconds with at least one response being scored, since the previous batch."),
    Metric("time/env", "s", "Seconds with at least one environment resetting or stepping, since the previous batch."),
    Metric("time/old_log_probs", "s", "Log-probs of the batch under actor_train and the reference, if computed apart."),
    Metric("time/values", "s", "Values of the batch under the critic."),
    Metric("time/advantages", "s", "Advantages and corrections, on the driver."),
    Metric("time/batch_hook", "s", "The class named in async_training.batch_hook_class."),
    Metric("time/train", "s", "Forward and backward passes and optimizer steps."),
    Metric("time/train_critic", "s", "Training of the critic; beside time/train where it has its own devices."),
    Metric("time/hand_over", "s", "Moving the trainer's states to devices that it shares (is_offload_states)."),
    Metric("time/weight_update", "s", "Weight update of the engines, including verification."),
    Metric("time/weight_update_pause", "s", "Part of the weight update during which the engines generated nothing."),
    Metric("time/val", "s", "Validation."),
    Metric("time/checkpoint", "s", "Beginning a checkpoint, which is then written during the next step."),
    Metric("time/checkpoint_wait", "s", "Part of `time/train` that waited until the checkpoint was written."),
    Metric("time/sample_age_mean", "s", "Time from the submission of a group's prompt until it is trained on: mean."),
    Metric("time/sample_age_max", "s", "Time from the submission of a group's prompt until it is trained on: maximum."),
)

ROLLOUT = (
    Metric("rollout/reward_mean", "score", "Mean raw reward of the batch's samples."),
    Metric("rollout/reward_mean/<tag>", "score", "The mean over the samples of one tag, where there are several."),
    Metric("rollout/reward_std", "score", "Standard deviation of the raw reward."),
    Metric("rollout/greedy_reward_mean", "score", "Mean raw reward of the greedy responses (adv_estimator remax)."),
    Metric("rollout/response_length_mean", "tokens", "Mean response length."),
    Metric("rollout/response_length_p90", "tokens", "Response length that nine of ten responses do not exceed."),
    Metric("rollout/response_length_max", "tokens", "Largest response length."),
    Metric("rollout/truncated_fraction", "fraction", "Responses that ended at the length limit."),
    Metric("rollout/sequence_length_mean", "tokens", "Mean trajectory length, including prompt and environment text."),
    Metric("rollout/turns_mean", "turns", "Mean number of turns of a trajectory."),
    Metric("rollout/versions_max", "versions", "Largest number of weight versions within one trajectory."),
    Metric(
        "moe/routing_agreement",
        "fraction",
        "With router_replay: tokens and layers whose experts the trained model would choose too.",
    ),
    Metric("rollout/routing_megabytes", "MB", "Experts of the tokens of a batch, with router_replay R3."),
    Metric(
        "rollout/prefix_reuse",
        "fraction",
        "Prompt tokens found in the engines' prefix cache, counted over turns after the first whose previous turn was "
        "generated with the same weights.",
    ),
    Metric(
        "rollout/tokens_per_second",
        "tokens/s",
        "Response tokens per second of generation (time/generate), those of greedy responses among them.",
    ),
    Metric("batch_hook/<name>", "varies", "A metric that the class of async_training.batch_hook_class returned."),
    Metric(
        "reward/<tag>/<metric>",
        "varies",
        "Mean over the responses of a number that the reward returns with the score; of several rewards for a tag, "
        "each score is `<name>` and each number `<name>/<metric>`.",
    ),
    Metric("env/<tag>/num_actions", "actions", "Mean number of actions of a trajectory."),
    Metric("env/<tag>/<metric>", "varies", "Mean over trajectories of a metric that the environment reports."),
    Metric("env/agent_seconds", "s", "Mean time of an agent's session in which no request of it was answered."),
    Metric("env/failures_<reason>", "environments", "Environments that failed for this reason since the run began."),
)

GATEWAY = (
    Metric("gateway/requests", "requests", "Requests of agents whose sessions ended since the previous batch."),
    Metric("gateway/branches_per_session", "rows", "Mean number of rows that a session is trained on as."),
    Metric("gateway/context_tokens_repeated", "tokens", "Tokens of rows that another row of their session has too."),
    Metric("gateway/overridden_sampling", "values", "Sampling values of requests that were replaced by the run's."),
    Metric("gateway/retries_joined", "requests", "Requests that a client sent again and that got the first answer."),
    Metric("gateway/unread_tool_calls", "calls", "Tool calls that the parser could not read, which stay text."),
    Metric("gateway/cut_answers", "answers", "Answers that ended at max_new_tokens or at sequence_length."),
    Metric("gateway/cached_prompt_fraction", "fraction", "Prompt tokens that the engines had in their prefix cache."),
    Metric("gateway/seconds_in_gateway_p50", "s", "Time of a request less its generation: median."),
    Metric("gateway/seconds_in_gateway_p99", "s", "Time of a request less its generation: 99th percentile."),
)

STALENESS = (
    Metric("staleness/mean", "versions", "Age of a sample when it is trained on, by its oldest token: mean."),
    Metric("staleness/max", "versions", "Age of a sample when it is trained on, by its oldest token: maximum."),
    Metric("staleness/token_mean", "versions", "Age of a token when it is trained on: mean."),
    Metric("staleness/token_max", "versions", "Age of a token when it is trained on: maximum."),
    Metric("avg_sample_age", "versions", "Age of a group when it is trained on, by its oldest token: mean."),
    Metric("max_sample_age", "versions", "Age of a group when it is trained on, by its oldest token: maximum."),
    Metric("stale_samples_ratio", "fraction", "Groups older than async_training.staleness_threshold."),
)

LEDGER = (
    Metric("ledger/submitted", "prompts", "Submitted for generation; the sum of all other ledger metrics."),
    Metric("ledger/consumed", "prompts", "Trained on."),
    Metric("ledger/buffered", "prompts", "Scored, waiting to be trained on."),
    Metric("ledger/in_flight", "prompts", "Being generated or scored."),
    Metric("ledger/dropped_<reason>", "prompts", "Dropped for this reason."),
    Metric("queue/size", "samples", "Samples waiting to be trained on."),
    Metric("queue/total_produced", "samples", "Samples that reached the queue and were not dropped."),
    Metric("queue/total_consumed", "samples", "Samples trained on."),
    Metric("queue/dropped_samples", "samples", "Samples dropped for any reason, in the queue or before it."),
    Metric("total_generated_samples", "samples", "Samples whose generation finished."),
    Metric("generation_errors", "prompts", "Prompts dropped because a response could not be generated."),
    Metric("dropped_stale_samples", "samples", "Samples dropped for a token older than max_staleness_allowed."),
    Metric("dropped_expired_samples", "samples", "Samples dropped for an age in seconds above max_sample_age_s."),
)

ADVANTAGE = (
    Metric("advantage/mean", "", "Mean advantage over response tokens."),
    Metric("advantage/std", "", "Standard deviation of the advantage over response tokens."),
    Metric("advantage/min", "", "Smallest advantage."),
    Metric("advantage/max", "", "Largest advantage."),
    Metric("advantage/return_mean", "score", "Mean return to go over response tokens."),
    Metric(
        "advantage/zero_variance_groups",
        "groups",
        "Groups whose scores are all equal (with gdpo, those of each reward): they give no gradient.",
    ),
    Metric("advantage/zero_variance_group_fraction", "fraction", "Fraction of the groups whose scores are all equal."),
    Metric("advantage/learned_samples", "fraction", "Samples that max_len_mask and difficulty_mask leave in the loss."),
    Metric("advantage/overlong_penalty", "", "Mean length penalty subtracted from the scores (overlong_buffer_len)."),
    Metric("advantage/length_penalty", "", "Mean of what scores lose for their tokens (length_penalty_per_token)."),
    Metric("advantage/length_reward", "", "Mean of what scores gain or lose within a group (length_reward_coef)."),
    Metric("advantage/difficulty", "", "Mean difficulty of the samples' prompts, 0 to 1 (difficulty_loss_weight)."),
    Metric("advantage/difficulty_weight_min", "", "Weight of the easiest prompt of the batch."),
    Metric("advantage/difficulty_weight_max", "", "Weight of the most difficult prompt of the batch."),
    Metric("advantage/length_weight_min", "", "Least weight of a response by its length (length_loss_weight)."),
    Metric("advantage/length_weight_max", "", "Largest weight of a response by its length."),
    Metric("advantage/running_score_mean", "score", "Mean score of the run so far (norm_mean_type, norm_std_type)."),
    Metric("advantage/running_score_std", "score", "Standard deviation of the scores of the run so far."),
    Metric("advantage/running_score_mean/<tag>", "score", "The mean over the scores of one tag (running_tag)."),
    Metric("advantage/running_score_std/<tag>", "score", "The standard deviation of the scores of one tag."),
    Metric("advantage/teacher_kl", "nats", "Mean log-prob of the policy minus that of the teacher (opd, use_opd)."),
    Metric("advantage/token_kl", "nats", "Mean KL to the reference in the token reward (add_token_level_kl)."),
    Metric("advantage/kl_coef", "", "Weight of the KL in the token reward."),
)

ACTOR = (
    Metric("actor/loss", "", "Loss minimized by the optimizer."),
    Metric("actor/pg_loss", "", "Policy term of the loss."),
    Metric("actor/kl_loss", "nats", "KL to the reference in the loss, before its coefficient."),
    Metric("actor/opd_loss", "nats", "Divergence to the teacher in the loss (opd_top_k), before its coefficient."),
    Metric("actor/teacher_top_k_mass", "", "Mean probability that the teacher gives to its opd_top_k tokens."),
    Metric("actor/entropy", "nats", "Mean entropy of the next-token distribution."),
    Metric("actor/policy_kl", "nats", "KL estimate (k3) between the current policy and pg_ratio_base."),
    Metric("actor/ratio_mean", "ratio", "Mean ratio of the policy to pg_ratio_base; 1 before the first update."),
    Metric("actor/ratio_max", "ratio", "Largest ratio."),
    Metric("actor/ratio_deviation_max", "ratio", "Largest distance of a ratio from 1."),
    Metric(
        "actor/log_ratio_abs_mean",
        "nats",
        "Mean absolute log ratio of tokens; in a first step the difference of two computations of the same log-probs.",
    ),
    Metric("actor/log_ratio_abs_max", "nats", "Largest absolute log ratio of a token, before clamping."),
    Metric(
        "actor/log_ratio_beyond_p99",
        "fraction",
        "Tokens whose absolute log ratio is above p99_logprob_mismatch; more than 0.01 in a first step is an error.",
    ),
    Metric("actor/clip_fraction", "fraction", "Tokens whose ratio or weight was clipped."),
    Metric("actor/opsm_fraction", "fraction", "Tokens left out by correction.opsm_delta."),
    Metric("actor/grad_norm", "", "Global gradient norm before clipping."),
    Metric("actor/lr", "", "Learning rate of the optimizer step."),
)

PREFERENCES = (
    Metric("actor/accuracy", "fraction", "Pairs whose better response has the higher reward."),
    Metric("actor/margin", "", "Difference of the two rewards, mean over pairs."),
    Metric("actor/chosen_reward", "", "Mean reward of the better responses."),
    Metric("actor/rejected_reward", "", "Mean reward of the worse responses."),
    Metric("actor/chosen_log_prob", "nats", "Mean log-prob of a token of the better responses (sft_loss_coef)."),
)

LORA = (
    Metric("lora/norm_a", "", "Norm of all matrices A of the adapters (lora_target) after the step."),
    Metric("lora/norm_b", "", "Norm of all matrices B of the adapters; 0 before the first optimizer step."),
    Metric(
        "lora/update_norm",
        "",
        "Norm of what the adapter adds to a weight over the norm of the weight, of the layer where it is largest.",
    ),
    Metric("lora/adapters_loaded", "", "Versions of adapters that the engine with most of them has (lora_update)."),
)

POLICIES = (
    Metric("<policy>/version", "versions", "Batches that the policy was trained with; its own weight version."),
    Metric(
        "<policy>/<subject>/<name>",
        "as there",
        "The metric `<subject>/<name>` of the samples of one policy: `rollout`, `ledger`, `staleness` (in its own "
        "versions), `advantage`, `actor`, `correction` and `lora`. Absent from steps whose batch has no sample of it.",
    ),
)

CRITIC = (
    Metric("critic/loss", "score^2", "Value loss: half the squared distance of values and returns."),
    Metric(
        "critic/explained_variance",
        "fraction",
        "1 - Var(return - value) / Var(return) over tokens, before the critic learns from the batch; 1 is exact, 0 no "
        "better than a constant.",
    ),
    Metric("critic/value_mean", "score", "Mean value of a response token."),
    Metric("critic/clip_fraction", "fraction", "Tokens whose value loss value_clip bounds."),
    Metric("critic/grad_norm", "", "Global gradient norm of the critic before clipping."),
    Metric("critic/lr", "", "Learning rate of the critic."),
)

CORRECTION = (
    Metric("correction/ess", "fraction", "Effective sample size of the tokens, (sum w)^2 / (n sum w^2)."),
    Metric("correction/behavior_k1", "nats", "Mean of l; negative if the samples are less likely under p than mu."),
    Metric("correction/behavior_k3", "nats", "Mean of e^l - 1 - l, an estimate of KL(mu || p); never negative."),
    Metric("correction/chi2_token", "", "Mean of e^2l over tokens, minus 1: the variance of token ratios."),
    Metric("correction/chi2_sequence", "", "Mean of e^2L over samples, minus 1; L is the clamped sum of a sample's l."),
    Metric("correction/is_weight_mean", "", "Mean weight of a token."),
    Metric("correction/is_weight_max", "", "Largest weight of a token."),
    Metric("correction/masked_fraction", "fraction", "Tokens that rejection removed from the loss."),
    Metric(
        "correction/log_prob_diff_max",
        "nats",
        "Largest |log p - log mu| before clamping; with fresh weights the difference between engine and trainer.",
    ),
    Metric("correction/log_ppl_diff", "nats", "Mean over samples of the log-perplexity under p minus that under mu."),
    Metric("correction/no_op", "0 or 1", "1 if samples were stale but every ratio and weight was 1: an error."),
)

MIXTURE = (
    Metric(
        "moe/max_load", "ratio", "Tokens of the busiest expert of any layer over the mean of its layer, in training."
    ),
    Metric("moe/min_load", "ratio", "The same of the least busy expert; 0 is an expert without tokens."),
    Metric("moe/aux_loss", "", "Mean auxiliary loss of a layer (moe_aux_loss_coeff); 1 where experts are balanced."),
)

VALIDATION = (
    Metric("val/score", "score", "Mean reward over all validation responses."),
    Metric("val/<name>/score", "score", "Mean reward over the validation prompts with this tag."),
    Metric("val/response_length_mean", "tokens", "Mean validation response length."),
    Metric("val/<tag>/num_actions", "actions", "Mean number of actions of a validation trajectory."),
    Metric("val/<tag>/<metric>", "varies", "Mean over validation trajectories of a metric of environment or reward."),
    Metric("val/replayed_groups", "groups", "Validation groups that failed and were repeated."),
    Metric("val/seconds", "s", "Duration of the validation."),
    Metric("val/loss", "nats", "SFT: mean negative log-likelihood of answer tokens; preferences: loss of the pairs."),
    Metric("val/accuracy", "fraction", "Preferences: pairs whose better response has the higher reward."),
    Metric("val/margin", "", "Preferences: difference of the two rewards, mean over pairs."),
)

SYSTEM = (
    Metric("weight_update/bytes", "bytes", "Weights sent to the engines."),
    Metric("weight_update/verified", "0 or 1", "Whether names and checksums of weights were compared on both sides."),
    Metric("param_sync_count", "updates", "Weight updates since the run began."),
    Metric("param_sync_requests", "attempts", "Attempts at a weight update, including failed ones."),
    Metric("sync_failures", "attempts", "Failed attempts at a weight update since the process started."),
    Metric("faults/engine_restarts", "restarts", "Engines restarted since the process started; see events.jsonl."),
    Metric("faults/engines_down", "engines", "Engines that do not serve at this weight update."),
    Metric("faults/engine_seconds_down", "seconds", "Time that engines did not serve, until each served again."),
    Metric(
        "faults/run_restarts", "restarts", "Times that the run started again after a failed process; absent before."
    ),
    Metric("faults/rollouter_restarts", "restarts", "Replacements of the rollout process, after the first."),
    Metric("memory/<name>", "bytes", "Memory in use, by role and kind."),
    Metric("throughput/tokens_per_second", "tokens/s", "Tokens trained on, including prompts, per second and device."),
    Metric(
        "perf/tflops_per_device",
        "TFLOP/s",
        "Operations of the model in training per second of `time/train` and device of actor_train. A prompt that is "
        "computed once for its group counts for each sample; recomputation does not count.",
    ),
    Metric("perf/mfu", "fraction", "`perf/tflops_per_device` over `perf/peak_tflops`; absent where that is not known."),
    Metric("perf/peak_tflops", "TFLOP/s", "Peak of a device of actor_train in bf16 or fp16, by the name of the GPU."),
    Metric(
        "throughput/weights_gigabytes_per_second",
        "GB/s",
        "Weights sent per second of the transfer, with checksums where they are verified; see `roll doctor` for links.",
    ),
    Metric("throughput/trainer_idle", "fraction", "Fraction of the step during which actor_train was idle."),
    Metric(
        "throughput/rollout_idle",
        "fraction",
        "Time since the previous batch without a generation request running.",
    ),
)

SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Run": RUN,
    "Time": TIME,
    "Rollout": ROLLOUT,
    "Gateway": GATEWAY,
    "Staleness": STALENESS,
    "Prompt accounting": LEDGER,
    "Advantages": ADVANTAGE,
    "Actor": ACTOR,
    "LoRA": LORA,
    "Several policies": POLICIES,
    "Critic": CRITIC,
    "Preferences": PREFERENCES,
    "Off-policy correction": CORRECTION,
    "Mixtures of experts": MIXTURE,
    "Validation": VALIDATION,
    "System": SYSTEM,
}
"""Every metric by subject, without aliases."""

NOTES = {
    "Preferences": (
        "Of the pipelines dpo and reward_model, with the other metrics of the actor. The reward of dpo is beta times "
        "what a response gained over the reference, that of reward_model the model's value after the last token."
    ),
    "Several policies": (
        "With `policies`: `<policy>` is the name of one. Metrics without it are those of the whole batch."
    ),
    "Critic": "With `adv_estimator: gae`; means over the optimizer steps of the batch.",
    "Actor": "Means over the optimizer steps of the batch; of names ending in `_max`, maxima.",
    "Prompt accounting": (
        "Counts since the run began. A prompt stands for its group of samples: the responses to one prompt, or the "
        "trajectories from one start state."
    ),
    "Off-policy correction": (
        "mu is the policy that sampled, p the proximal policy (the current one in bypass mode), l = log p - log mu of "
        "a token, clamped to +-20, and w its weight, by default e^l; see [algorithms](algorithms/correction.md)."
    ),
}


def with_aliases(metrics: Mapping[str, float]) -> dict[str, float]:
    """`metrics` and, for metrics with an alias, the same value under that name."""
    return {**{alias: metrics[name] for alias, name in ALIASES.items() if name in metrics}, **metrics}


def undocumented(names: Iterable[str]) -> list[str]:
    return [name for name in names if not _pattern().fullmatch(name)]


@cache
def _pattern() -> re.Pattern[str]:
    names = [metric.name for metrics in SECTIONS.values() for metric in metrics] + list(ALIASES)
    patterns = (re.sub(r"<(tag|metric)>", ".+", re.escape(name)) for name in names)  # a tag may be owner/name
    return re.compile("|".join(re.sub(r"<\w+>", r"[^/]+", each) for each in patterns))


HEAD = """\
# Metrics

The metrics that a run writes to `metrics.jsonl`, one line per step, and to its trackers. A run writes only the metrics
that apply to it; an SFT run, for example, has no rewards. `make docs` generates this page from
`roll/trackers/metrics.py`.
"""

ALIAS_HEAD = """
## Aliases

The names of these metrics in other asynchronous trainers. `param_sync_count`, `param_sync_requests`, `sync_failures`,
`total_generated_samples`, `generation_errors`, `dropped_stale_samples`, `avg_sample_age`, `max_sample_age` and
`stale_samples_ratio` are names of those trainers; they are described above, because no other metric equals them.

| name | same as |
|---|---|
"""


def markdown() -> str:
    """The text of docs/metrics.md, with a table for each section."""
    parts = [HEAD]
    for title, metrics in SECTIONS.items():
        cells = [(f"`{item.name}`", item.unit, item.meaning.replace("|", r"\|")) for item in metrics]
        rows = "".join(f"| {' | '.join(row)} |\n" for row in cells)
        note = f"{NOTES[title]}\n\n" if title in NOTES else ""
        parts.append(f"\n## {title}\n\n{note}| name | unit | meaning |\n|---|---|---|\n{rows}")
    return "".join([*parts, ALIAS_HEAD, *(f"| `{alias}` | `{name}` |\n" for alias, name in ALIASES.items())])
