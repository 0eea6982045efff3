"""Every metric a run writes, with its unit and meaning: the one place a metric is named and explained.

docs/metrics.md is made from it (`make docs`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Metric:
    """One line of the table; `name` may hold `<placeholders>`, each standing for one word without a slash."""

    name: str
    unit: str
    meaning: str


RUN = (
    Metric("step", "steps", "Number of the line: batches learned from so far; 0 is the state before the first."),
    Metric("version", "versions", "Weight version that this step produced; each update makes the next."),
)

TIME = (
    Metric("time/step", "s", "The whole step, publishing and validation included."),
    Metric("time/wait_prev_gen", "s", "Waiting for the batch; generation itself when async_generation_ratio is 0."),
    Metric(
        "time/generate",
        "s",
        "Time since the batch before in which responses were sampled.",
    ),
    Metric("time/reward", "s", "The same for scoring them."),
    Metric("time/env", "s", "The same for environments that were opened or reacted to an answer."),
    Metric("time/old_log_probs", "s", "Log-probs of the batch under actor_train and the reference."),
    Metric("time/advantages", "s", "Advantages and corrections, on the driver."),
    Metric("time/train", "s", "Forward, backward and optimizer steps."),
    Metric("time/publish", "s", "Bringing the new weights to the engines, verification included."),
    Metric("time/publish_pause", "s", "Inside that: the time engines stood still, from the end of their last step on."),
    Metric("time/val", "s", "Validation."),
    Metric("time/checkpoint", "s", "Writing a checkpoint."),
)

ROLLOUT = (
    Metric("rollout/reward_mean", "score", "Mean raw reward of the batch's samples."),
    Metric("rollout/reward_std", "score", "Its standard deviation."),
    Metric("rollout/response_length_mean", "tokens", "Mean length of a response."),
    Metric("rollout/response_length_max", "tokens", "Longest response."),
    Metric("rollout/truncated_fraction", "share", "Responses that ended at the length limit."),
    Metric("rollout/sequence_length_mean", "tokens", "Mean length of a trajectory, environment and prompt included."),
    Metric("rollout/turns_mean", "turns", "Mean number of answers in a trajectory."),
    Metric("rollout/versions_max", "versions", "Most weight versions that the tokens of one trajectory come from."),
    Metric(
        "rollout/prefix_reuse",
        "share",
        "Prompt tokens that engines had in their cache, of those of second and later turns whose turn before was "
        "answered by the same weights.",
    ),
    Metric("env/<tag>/num_actions", "actions", "Mean number of actions of a trajectory."),
    Metric("env/<tag>/<metric>", "varies", "Mean over trajectories of what the environments measure."),
    Metric("env/failures_<reason>", "environments", "Environments that raised, hung or died since the run began."),
    Metric("rollout/tokens_per_second", "tokens/s", "Response tokens by the time it took to generate them."),
    Metric("staleness/mean", "versions", "How many versions old the oldest token of a sample is when learned from."),
    Metric("staleness/max", "versions", "The same, of the oldest sample."),
    Metric("staleness/token_mean", "versions", "Age of a token when it is learned from."),
    Metric("staleness/token_max", "versions", "The same, of the oldest token."),
)

LEDGER = (
    Metric("ledger/submitted", "prompts", "Sent to the engines since the run began."),
    Metric("ledger/consumed", "prompts", "Learned from."),
    Metric("ledger/buffered", "prompts", "Scored, waiting to be learned from."),
    Metric("ledger/in_flight", "prompts", "Being generated or scored."),
    Metric("ledger/dropped_<reason>", "prompts", "Given up for that reason. All of the above add up to submitted."),
    Metric("queue/size", "samples", "Samples waiting to be learned from."),
    Metric(
        "queue/total_produced", "samples", "Samples that waited for a batch and were not dropped, since the run began."
    ),
    Metric("queue/total_consumed", "samples", "Samples that left it for a batch."),
    Metric(
        "queue/dropped_samples",
        "samples",
        "Samples given up for any reason, whether they were waiting or still being generated.",
    ),
)

ACCOUNT = (
    Metric("global_steps", "steps", "As step."),
    Metric("current_param_version", "versions", "As version."),
    Metric("processed_samples", "samples", "Samples learned from since the run began."),
    Metric("param_sync_count", "publishes", "Versions brought to the engines since the run began."),
    Metric("param_sync_requests", "attempts", "Attempts at that: one each, and the failed ones."),
    Metric("sync_failures", "attempts", "Failed attempts since the process started."),
    Metric("total_generated_samples", "samples", "Samples that came back from generation since the run began."),
    Metric("generation_errors", "prompts", "Prompts given up because a response could not be generated."),
    Metric("dropped_stale_samples", "samples", "Samples dropped for a token older than max_staleness_allowed."),
    Metric("avg_sample_age", "versions", "Mean age of the oldest token of a group when it is learned from."),
    Metric("max_sample_age", "versions", "The same, of the oldest group."),
    Metric("stale_samples_ratio", "share", "Groups older than async_training.staleness_threshold."),
    Metric("queue_size", "samples", "As queue/size."),
    Metric("total_produced", "samples", "As queue/total_produced."),
    Metric("total_consumed", "samples", "As queue/total_consumed."),
    Metric("dropped_samples", "samples", "As queue/dropped_samples."),
)

ADVANTAGE = (
    Metric("advantage/mean", "", "Mean advantage over response tokens."),
    Metric("advantage/std", "", "Its standard deviation."),
    Metric("advantage/min", "", "Smallest advantage."),
    Metric("advantage/max", "", "Largest advantage."),
    Metric("advantage/return_mean", "score", "Mean return to go over response tokens."),
    Metric("advantage/zero_spread_groups", "groups", "Groups whose scores are all equal: they teach nothing."),
    Metric("advantage/zero_spread_group_fraction", "share", "Their share of all groups."),
    Metric("advantage/token_kl", "nats", "Mean KL to the reference in the token reward (add_token_level_kl)."),
    Metric("advantage/kl_coef", "", "Its weight."),
)

ACTOR = (
    Metric("actor/loss", "", "What the optimizer minimised; like all of actor/, the mean over its optimizer steps."),
    Metric("actor/pg_loss", "", "Its policy term."),
    Metric("actor/kl_loss", "nats", "Its KL to the reference, before the coefficient."),
    Metric("actor/entropy", "nats", "Mean entropy of the next token."),
    Metric("actor/policy_kl", "nats", "KL estimate (k3) between the policy now and pg_ratio_base."),
    Metric("actor/ratio_mean", "ratio", "Mean of policy now over that base; 1 before the first update."),
    Metric("actor/ratio_max", "ratio", "Largest such ratio."),
    Metric("actor/ratio_deviation_max", "ratio", "Largest distance of such a ratio from 1."),
    Metric("actor/log_ratio_abs_max", "nats", "Largest log ratio of a token, either sign, before any clamp."),
    Metric("actor/clip_fraction", "share", "Tokens whose ratio or weight a clip cut off."),
    Metric("actor/grad_norm", "", "Global norm of the gradient before clipping."),
    Metric("actor/lr", "", "Learning rate of the optimizer step."),
)

VALIDATION = (
    Metric("val/score", "score", "Mean reward over all validation responses."),
    Metric("val/<name>/score", "score", "The same, of the prompts with that tag."),
    Metric("val/response_length_mean", "tokens", "Mean length of a validation response."),
    Metric("val/<tag>/num_actions", "actions", "Mean number of actions of a validation trajectory."),
    Metric("val/<tag>/<metric>", "varies", "Mean over validation trajectories of what the environments measure."),
    Metric("val/replayed_groups", "groups", "Groups of trajectories that failed and were played again."),
    Metric("val/seconds", "s", "Time of the validation."),
    Metric("val/loss", "nats", "SFT: mean negative log-likelihood of the answers' tokens."),
)

SYSTEM = (
    Metric("publish/bytes", "bytes", "Weights brought to the engines."),
    Metric("publish/verified", "0 or 1", "Whether names and checksums were compared on both sides."),
    Metric("memory/<name>", "bytes", "Memory in use, by role and kind."),
    Metric(
        "throughput/tokens_per_second",
        "tokens/s",
        "Tokens learned from, prompts included, by the step's time and devices.",
    ),
    Metric("throughput/trainer_idle", "share", "Share of the step in which actor_train did nothing."),
    Metric("throughput/rollout_idle", "share", "Share of the time since the last batch in which no engine generated."),
)


def sections() -> dict[str, tuple[Metric, ...]]:
    """Every metric by subject; those of the correction are explained where they are computed."""
    from roll.algorithms.correction import CORRECTION_METRICS, INERT

    correction = tuple(Metric(name, "", meaning) for name, meaning in CORRECTION_METRICS.items())
    inert = Metric(INERT, "0 or 1", "Whether the samples were stale and yet every ratio and weight was 1: an error.")
    return {
        "The run": RUN,
        "Time": TIME,
        "Rollout and staleness": ROLLOUT,
        "The account of prompts": LEDGER,
        "The account in other systems' terms": ACCOUNT,
        "Advantages": ADVANTAGE,
        "Actor": ACTOR,
        "Sampling policy against training policy": (*correction, inert),
        "Validation": VALIDATION,
        "System": SYSTEM,
    }


def undocumented(names: Iterable[str]) -> list[str]:
    """Those of `names` that no metric describes."""
    return [name for name in names if not _pattern().fullmatch(name)]


@cache
def _pattern() -> re.Pattern[str]:
    """One expression that matches every documented name."""
    names = [metric.name for metrics in sections().values() for metric in metrics]
    return re.compile("|".join(re.sub(r"<\w+>", r"[^/]+", re.escape(name)) for name in names))


HEAD = """\
# Metrics

What a run writes to `metrics.jsonl`, one line per step, and to the trackers. A metric is there when the run has it: an
SFT run has no rewards. This page is made from `roll/trackers/metrics.py` by `make docs`.
"""


def markdown() -> str:
    """The page: a table for each section."""
    parts = [HEAD]
    for title, metrics in sections().items():
        rows = "".join(f"| `{metric.name}` | {metric.unit} | {metric.meaning} |\n" for metric in metrics)
        parts.append(f"\n## {title}\n\n| name | unit | meaning |\n|---|---|---|\n{rows}")
    return "".join(parts)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(markdown())
