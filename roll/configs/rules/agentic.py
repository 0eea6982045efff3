"""Turns, deadlines and schedules of agents that fit together."""

from __future__ import annotations

from roll.configs.agentic import AgenticConfig
from roll.configs.errors import Report


def check_agentic(config: AgenticConfig, report: Report) -> None:
    """Trajectories have room for their turns, deadlines are in order, and messages and schedules are of a kind."""
    _check_lengths(config, report)
    _check_deadlines(config, report)
    _check_talk(config, report)
    _check_schedule(config, report)


def _check_lengths(config: AgenticConfig, report: Report) -> None:
    """Each limit of a turn once, at the key it comes from, for the entry with the most turns."""
    given, sampling = set(config.source.given), "actor_infer.generating_args.max_new_tokens"
    common = "max_tokens_per_step" if "max_tokens_per_step" in given else sampling
    turns: dict[tuple[str, int], int] = {}
    for tag, entry in config.custom_envs.items():
        own = f"custom_envs.{tag}.max_tokens_per_step"
        limit = (own if own in given else common, entry.max_tokens_per_step or 0)
        turns[limit] = max(turns.get(limit, 1), entry.max_steps or 1)
    for (path, tokens), most in turns.items():
        _check_turns(path, tokens, most, config, report)
    for role in ("actor_infer", "validation"):
        path, longest = f"{role}.generating_args.max_new_tokens", getattr(config, role).generating_args.max_new_tokens
        if path in given and longest > (config.response_length or 0):
            report.warn(path, f"{longest} is never reached: max_tokens_per_step ends turns at {config.response_length}")


def _check_turns(path: str, tokens: int, turns: int, config: AgenticConfig, report: Report) -> None:
    whole, longest = config.sequence_length or 0, config.actor_infer.generating_args.max_new_tokens or 0
    if tokens >= whole:
        report.error(
            path,
            f"{tokens} tokens for one turn leave no room for an observation in sequence_length {whole}; use less, such "
            f"as {max(1, whole // (2 * turns))}",
        )
    elif tokens > longest:
        report.error(
            path,
            f"{tokens} is above actor_infer.generating_args.max_new_tokens {longest}; use at most that, or leave "
            "max_new_tokens out",
        )
    elif turns * tokens >= whole:
        report.warn(
            path,
            f"{turns} turns of up to {tokens} tokens fill sequence_length {whole} without any observation: long "
            "trajectories are cut there",
        )


def _check_deadlines(config: AgenticConfig, report: Report) -> None:
    whole = config.trajectory_timeout_s
    parts = {
        "env_step_timeout_s": config.env_step_timeout_s,
        "actor_infer.generation_timeout_s": config.actor_infer.generation_timeout_s,
    }
    for path, part in parts.items():
        if part > whole:
            report.error(
                path, f"{part:g} is never reached: trajectory_timeout_s {whole:g} ends it first; use at most that"
            )
    deadline = config.async_training.batch_deadline_s
    if deadline < whole:
        report.warn(
            "async_training.batch_deadline_s",
            f"{deadline:g} ends the run before a trajectory that hangs has failed, at trajectory_timeout_s {whole:g}; "
            "use more than that",
        )


def _check_talk(config: AgenticConfig, report: Report) -> None:
    """Messages of several turns are joined by a chat template."""
    if config.actor_train.data_args.template == "none":
        report.error(
            "actor_train.data_args.template",
            "none cannot tell the messages of a trajectory apart; use native, or a chat template by name",
        )


def _check_schedule(config: AgenticConfig, report: Report) -> None:
    kind = config.actor_train.training_args.lr_scheduler_type
    if config.sample_by == "step" and kind != "constant":
        report.warn(
            "actor_train.training_args.lr_scheduler_type",
            f"{kind} is laid out for the most turns a run can have; trajectories that end early leave it unfinished",
        )
