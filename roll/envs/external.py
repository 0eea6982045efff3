"""Environments of other packages by id: GEM's, and those of gymnasium whose observations and actions are text."""

from __future__ import annotations

import random
import threading
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Text

from roll.base.schema import declared, option
from roll.configs.environments import is_gem
from roll.envs.base import EnvConfig, TextEnv, Turn

SEEDS = 2**31

GEM_PACKAGE = "gem"
"""Module of the package gem-llm."""

_global_random = threading.Lock()
"""Held while an environment uses the random generators of the process."""


class NotTextError(TypeError):
    """Observations or actions of an environment are not text."""


@dataclass
class ExternalConfig(EnvConfig):
    """Options of an environment of another package."""

    id: str = option("", "Id of the environment in its package; env_type sets it.")
    options: dict[str, Any] = option(
        factory=dict, help="Arguments of its constructor; they may also stand beside max_steps."
    )


class ExternalEnv(TextEnv):
    """Plays an environment of another package; its rules are in its own first observation."""

    config_class: ClassVar[type[EnvConfig]] = ExternalConfig
    config: ExternalConfig

    @cached_property
    def other(self) -> Any:
        return self.make()

    @abstractmethod
    def make(self) -> Any:
        """The environment, which has gymnasium's `reset` and `step`; raises what its package raises."""

    def rules(self) -> str:
        return f"This is {self.config.id}."

    def begin(self) -> str:
        """Resets the environment with a seed drawn from the one of this episode."""
        observation, _ = self.other.reset(seed=int(self.np_random.integers(SEEDS)))
        return str(observation)

    def act(self, text: str) -> Turn:
        """Steps the environment with the whole text."""
        observation, reward, terminated, truncated, _ = self.other.step(text)
        return Turn(str(observation), float(reward), bool(terminated), truncated=bool(truncated))

    def close(self) -> None:
        """Closes both."""
        if "other" in vars(self) and callable(end := getattr(self.other, "close", None)):
            end()
        super().close()


class GymnasiumEnv(ExternalEnv):
    """An environment of gymnasium's registry, or `module:Id-v0`, whose observations and actions are text."""

    def __init__(self, **env_config: Any) -> None:
        """Makes the environment, so that one that is not text is refused at once."""
        super().__init__(**env_config)
        assert self.other is not None

    def make(self) -> Any:
        """Raises NotTextError where its observations or actions are not text."""
        made = gymnasium.make(self.config.id, **self.config.options)
        spaces = made.observation_space, made.action_space
        if not all(isinstance(space, Text) for space in spaces):
            kinds = " and ".join(type(space).__name__ for space in spaces)
            raise NotTextError(
                f"{self.config.id!r} is not a text environment; subclass roll.envs.TextEnv (its spaces are {kinds})"
            )
        return made


class GemEnv(ExternalEnv):
    """An environment of GEM (package `gem-llm`).

    GEM's games draw from the random generators of the process. Each environment has a state of these of its own, so
    that its seed determines it, whatever others of the process do.
    """

    def make(self) -> Any:
        """Imports GEM, which takes seconds and configures logging, where the environment is played only.

        A game without a level, such as game:Wordle-v0, has the defaults of its class.
        """
        gem: Any = import_module(GEM_PACKAGE)
        import_module(f"{GEM_PACKAGE}.envs")
        registry = import_module(f"{GEM_PACKAGE}.envs.registration").ENV_REGISTRY
        levels = [spec for name, spec in registry.items() if name.startswith(f"{self.config.id}-")]
        if self.config.id not in registry and levels:  # a release that has game:Wordle-v0-easy alone
            gem.register(self.config.id, levels[0].entry_point)
        return gem.make(self.config.id, **self.config.options)

    def begin(self) -> str:
        """Resets the game with a seed drawn from the one of this episode, from which it draws on."""
        seed = int(self.np_random.integers(SEEDS))
        self._states = random.Random(seed).getstate(), np.random.RandomState(seed).get_state()
        with self._own_random():
            return str(self.other.reset(seed=seed)[0])

    def act(self, text: str) -> Turn:
        with self._own_random():
            return super().act(text)

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        with _global_random:
            before = random.getstate(), np.random.get_state()
            _set_random(self._states)
            try:
                yield
            finally:
                self._states = random.getstate(), np.random.get_state()
                _set_random(before)


def _set_random(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


def package_to_install(env_type: str) -> str | None:
    """What has to be installed for an id of another package; None if nothing."""
    if is_gem(env_type):
        installed = find_spec(GEM_PACKAGE) is not None
        return (
            None
            if installed
            else f"{env_type} is an environment of GEM; pip install --no-deps gem-llm reasoning-gym nltk math-verify"
        )
    module = env_type.partition(":")[0].partition(".")[0]
    return (
        None
        if module and find_spec(module)
        else f"{env_type} needs the module {module}; install the package that has it"
    )


def with_constructor_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """`env_config` with everything that is no option of ExternalConfig moved into `options`."""
    own = declared(ExternalConfig)
    options = {name: value for name, value in given.items() if name not in own}
    return {name: value for name, value in given.items() if name in own} | {
        "options": {**options, **given.get("options", {})}
    }
