"""Tries an environment before a run: makes, resets and steps it once, in a process that can be killed."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pebble import ProcessExpired, ProcessPool

from roll.configs.errors import ConfigError
from roll.configs.user_code import NOTICE_S, definition_of, failure_text, report_if_slow, start_user_process
from roll.envs.base import TextEnv
from roll.envs.registry import make_env

ACTION = "I do not know."
"""The action of the trial; environments accept any text."""

START_TIMEOUT_S = 120.0
"""Deadline for the process to start and to import and make the environment."""


@dataclass(frozen=True)
class EnvTrial:
    """An environment to try; `path` is that of its entry in the configuration."""

    path: str
    env_type: str
    env_config: Mapping[str, Any]


def try_environments(trials: list[EnvTrial], step_timeout_s: float) -> list[str]:
    """What is wrong with the environments, one text for each that fails, with the user's file and line first.

    Args:
        trials: the environments, tried one after the other.
        step_timeout_s: deadline of a reset with its step, in seconds.
    """
    problems: dict[str, str] = {}
    pool = ProcessPool(1, context=multiprocessing.get_context("spawn"), initializer=start_user_process)
    try:
        for trial in trials:
            problem = _run(pool, trial, "make", START_TIMEOUT_S) or _run(pool, trial, "play", step_timeout_s)
            if problem is not None:
                problems.setdefault(problem, f"{problem}\n    the environment {trial.path} was tried before the run")
    finally:
        pool.stop()  # type: ignore[no-untyped-call]
        pool.join()
    return list(problems.values())


def _run(pool: ProcessPool, trial: EnvTrial, what: Literal["make", "play"], timeout_s: float) -> str | None:
    doing = {"make": "import and constructor", "play": "first reset and step"}[what]
    future = pool.schedule(_try, args=(trial, what), timeout=timeout_s)
    concurrent.futures.wait([future], timeout=NOTICE_S)
    if not future.done():
        print(
            f"{trial.path}: {doing} of {trial.env_type} have taken {NOTICE_S:g} s; waiting for at most {timeout_s:g} s",
            file=sys.stderr,
        )
    try:
        problem: str | None = future.result()
        return problem
    except TimeoutError:
        limit = f" (env_step_timeout_s {timeout_s:g})" if what == "play" else ""
        return f"{doing} of {trial.env_type} took longer than {timeout_s:g} s{limit}"
    except ProcessExpired as death:
        return f"{trial.env_type} ended its process with exit code {death.exitcode}"


def _try(trial: EnvTrial, what: str) -> str | None:
    """The problem of a trial, in the process of the pool."""
    with report_if_slow(f"the trial of {trial.env_type}"):
        return _make_and_play(trial, what)


def _make_and_play(trial: EnvTrial, what: str) -> str | None:
    try:
        env = make_env(trial.env_type, trial.env_config, trial.path)
    except ConfigError as error:
        # Problems of options need their path; those of the class itself begin with the user's file and line.
        shown = (each.message if each.path.endswith(".env_type") else str(each) for each in error.problems)
        return "\n".join(shown)
    except BaseException as error:  # sys.exit, and panics of extensions in Rust
        return failure_text(error)
    return None if what == "make" else _play(env)


def _play(env: TextEnv) -> str | None:
    try:
        if not isinstance(env.instruction, str):
            return f"{definition_of(type(env).rules)}: rules returned a {type(env.instruction).__name__}, not text"
        observation, _ = env.reset(seed=0)
        if not isinstance(observation, str):
            return f"{definition_of(type(env).begin)}: begin returned a {type(observation).__name__}, not text"
        env.step(ACTION)
        env.close()
    except BaseException as error:
        return failure_text(error, type(env))
    return None
