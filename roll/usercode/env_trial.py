"""Tries an environment before a run: makes it and plays episodes, in a process that can be killed."""

from __future__ import annotations

import concurrent.futures
import random
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from roll.base.errors import ConfigError
from roll.configs.user_code import NOTICE_S, definition_of, failure_text, report_if_slow
from roll.envs.base import TextEnv
from roll.envs.registry import make_env
from roll.usercode.process import OneProcess, ProcessEndedError
from roll.usercode.server import CallError

ACTIONS = ("I do not know.", "")
"""Actions of the trial besides those that the environment gives as examples, since environments accept any text."""

EXAMPLE = re.compile(r"<(\w+)>[^<>]{1,80}</\1>")
"""An action in the text of an environment, such as <answer>Right</answer>."""

EPISODES = 3
"""Episodes of the trial, since actions are chosen at random."""

PLAY_S = 5.0
"""The trial begins no turn after so many seconds; a slow environment plays a part of its first episode."""

START_TIMEOUT_S = 120.0
"""Deadline for the process to start and to import and make the environment."""


@dataclass(frozen=True)
class EnvTrial:
    """An environment to try; `path` is that of its entry in the configuration."""

    path: str
    env_type: str
    env_config: Mapping[str, Any]


@dataclass(frozen=True)
class Played:
    """What an environment said in the longest episode of its trial: an observation before each action.

    `failure` is that of another episode, if one failed.
    """

    instruction: str
    observations: tuple[str, ...]
    failure: str = ""


def try_environments(
    trials: list[EnvTrial], step_timeout_s: float, played: dict[str, Played] | None = None
) -> list[str]:
    """What is wrong with the environments, one text for each that fails, with the user's file and line first.

    `step_timeout_s` bounds each reset or step; `played` gets the episodes of those that work, by path.
    """
    problems: dict[str, str] = {}
    process = OneProcess()
    try:
        for trial in trials:
            found = _run(process, trial, "make", START_TIMEOUT_S) or _run(process, trial, "play", step_timeout_s)
            if isinstance(found, str):
                problems.setdefault(found, f"{found}\n    the environment {trial.path} was tried before the run")
            elif found is not None and played is not None:
                played[trial.path] = found
    finally:
        process.close()
    return list(problems.values())


def _run(process: OneProcess, trial: EnvTrial, what: Literal["make", "play"], timeout_s: float) -> str | Played | None:
    doing = {"make": "import and constructor", "play": "a reset or step"}[what]
    playing_s = PLAY_S if what == "play" else 0.0
    future, until = process.start_call(_try, trial, what), time.monotonic() + timeout_s + playing_s
    concurrent.futures.wait([future], timeout=min(NOTICE_S, timeout_s) + playing_s)
    if not future.done() and timeout_s > NOTICE_S:
        print(
            f"{trial.path}: {doing} of {trial.env_type} has taken {NOTICE_S:g} s; waiting for at most {timeout_s:g} s",
            file=sys.stderr,
        )
    try:
        found: str | Played | None = process.wait(future, until - time.monotonic())
        return found
    except TimeoutError:
        limit = f" (env_step_timeout_s {timeout_s:g})" if what == "play" else ""
        return f"{doing} of {trial.env_type} took longer than {timeout_s:g} s{limit}"
    except ProcessEndedError as death:
        return f"{trial.env_type} ended its process with exit code {death.exit_code}"
    except CallError as error:
        return str(error)


def _try(trial: EnvTrial, what: str) -> str | Played | None:
    """The problem of a trial or its longest episode, in the process of the pool."""
    with report_if_slow(f"the trial of {trial.env_type}"):
        try:
            env = make_env(trial.env_type, trial.env_config, trial.path)
        except ConfigError as error:
            # Problems of options need their path; those of the class itself begin with the user's file and line.
            shown = (each.message if each.path.endswith(".env_type") else str(each) for each in error.problems)
            return "\n".join(shown)
        except BaseException as error:  # sys.exit, and panics of extensions in Rust
            return failure_text(error)
        return None if what == "make" else play(env)


def play(env: TextEnv) -> str | Played:
    """Plays EPISODES episodes to their end, or for PLAY_S; the longest, or the problem with file and line.

    The failure of an episode is a problem if no other one reached its end.
    """
    longest, failure, ended = Played("", ()), "", 0
    until, choose = time.monotonic() + PLAY_S, random.Random(0).choice
    try:
        if not isinstance(env.instruction, str):
            return f"{definition_of(type(env).rules)}: rules returned a {type(env.instruction).__name__}, not text"
        for seed in range(EPISODES):
            observations = list[str]()
            try:
                ended += _play_episode(env, seed, until, choose, observations)
            except Exception as error:
                turn = f"\n    in turn {len(observations)} of an episode" if observations else ""
                failure = failure or failure_text(error, type(env)) + turn
            if len(observations) > len(longest.observations):
                longest = Played(env.instruction, tuple(observations))
        env.close()
    except BaseException as error:  # sys.exit, and panics of extensions in Rust
        return failure_text(error, type(env))
    return failure if failure and not ended else replace(longest, failure=failure)


def _play_episode(
    env: TextEnv, seed: int, until: float, choose: Callable[[list[str]], str], observations: list[str]
) -> bool:
    """Whether an episode reached its end before `until`; `observations` gets the one before each action, one at least.

    Raises:
        TypeError: `begin` returned no text.
    """
    observation, _ = env.reset(seed=seed)
    if not isinstance(observation, str):
        raise TypeError(f"begin returned a {type(observation).__name__}, not text")
    over = False
    while not over and (not observations or time.monotonic() < until):
        examples = [found[0] for found in EXAMPLE.finditer(f"{env.instruction}\n{observation}")]
        observations.append(observation)
        observation, _, terminated, truncated, _ = env.step(choose([*ACTIONS, *examples]))
        over = terminated or truncated
    return over
