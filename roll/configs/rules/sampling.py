"""Sampling whose log-probs are those of the distribution sampled from."""

from __future__ import annotations

from roll.configs.agentic import AgenticConfig
from roll.configs.errors import Report
from roll.configs.pipeline import RLConfig


def check_sampling(config: RLConfig, report: Report) -> None:
    """Temperature, truncation, penalties and lengths of the samples trained on, and the lengths of validation."""
    sampling, path = config.actor_infer.generating_args, "actor_infer.generating_args"
    if sampling.temperature <= 0:
        report.error(
            f"{path}.temperature",
            f"{sampling.temperature:g} is greedy: all samples of a prompt would be equal, with nothing to train on; "
            "use above 0, such as 1.0 (validation may use 0)",
        )
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


def _check_truncation(config: RLConfig, report: Report) -> None:
    sampling = config.actor_infer.generating_args
    cuts = [f"top_p {sampling.top_p:g}"] * (sampling.top_p < 1) + [f"top_k {sampling.top_k}"] * (sampling.top_k > 0)
    if not cuts:
        return
    message = (
        f"{' and '.join(cuts)} sample from a truncated distribution, but the engine returns log-probs of the whole "
        "one: every ratio and KL is biased; use top_p 1.0 and top_k 0"
    )
    if config.truncated_sampling == "refuse":
        report.error("actor_infer.generating_args", f"{message} (truncated_sampling is refuse)")
    else:
        report.warn("actor_infer.generating_args", message)
