"""From `env_type` and `env_config` to an environment."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import gymnasium

from roll.configs.errors import ConfigError, Problem
from roll.envs.base import TextEnv, choices, read_config, rules_fault

NAMES = {
    "frozen_lake": "roll/FrozenLake-v0",
    "sokoban": "roll/Sokoban-v0",
    "calculator": "roll/Calculator-v0",
}
"""What a YAML calls our environments, and what gymnasium does."""

ENTRY_POINTS = {
    "roll/FrozenLake-v0": "roll.envs.frozen_lake:FrozenLake",
    "roll/Sokoban-v0": "roll.envs.sokoban:Sokoban",
    "roll/Calculator-v0": "roll.envs.calculator:Calculator",
}

for _id, _entry_point in ENTRY_POINTS.items():
    # A TextEnv checks its turns and the order of calls itself, so gymnasium.make has nothing to wrap around it.
    gymnasium.register(_id, _entry_point, order_enforce=False, disable_env_checker=True)


def make_env(env_type: str, env_config: Mapping[str, Any] | None = None, path: str = "") -> TextEnv:
    """A new environment; the two first arguments are plain data, from which any process makes the same one.

    Args:
        env_type: a name in NAMES, an id in gymnasium's registry, or `module:Class`; a subclass of `TextEnv` each.
        env_config: its options.
        path: where the entry stands in a file, for errors, such as `custom_envs.Lake`.

    Raises:
        ConfigError: no such environment, or options that it does not take.
    """
    prefix = f"{path}." if path else ""
    cls, preset = _resolve(env_type, f"{prefix}env_type")
    given = {} if env_config is None else env_config
    options = {**preset, **given} if isinstance(given, Mapping) else given
    read_config(cls.config_class, options, f"{prefix}env_config")
    return cls(**options)


def _resolve(env_type: str, path: str) -> tuple[type[TextEnv], dict[str, Any]]:
    """Class of a type, and the options that its registration sets."""
    if not isinstance(env_type, str):
        raise ConfigError([Problem(path, f"{env_type!r} is not text; {choices('', NAMES)}, or write module:Class")])
    spec = gymnasium.registry.get(NAMES.get(env_type, env_type))
    if spec is not None:
        found = spec.entry_point if callable(spec.entry_point) else _imported(str(spec.entry_point), path)
        return _text_env(found, env_type, path), dict(spec.kwargs)
    if ":" in env_type:
        return _text_env(_imported(env_type, path), env_type, path), {}
    ours = [id for id in gymnasium.registry if id.startswith("roll/")]
    known = choices(env_type, [*NAMES, *ours])
    raise ConfigError([Problem(path, f"{env_type!r} is no environment; {known}, or write module:Class")])


def _imported(entry_point: str, path: str) -> Any:
    module_name, _, name = entry_point.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError([Problem(path, f"{entry_point!r}: importing {module_name} failed: {error!r}")]) from error
    if not hasattr(module, name):
        classes = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, TextEnv)]
        raise ConfigError([Problem(path, f"{entry_point!r}: {module_name} has no {name}; {choices(name, classes)}")])
    return getattr(module, name)


def _text_env(found: Any, env_type: str, path: str) -> type[TextEnv]:
    if isinstance(found, type) and issubclass(found, TextEnv):
        fault = rules_fault(found.METRICS)
        if fault is not None:
            raise ConfigError([Problem(path, f"{env_type!r}: {fault}")])
        return found
    raise ConfigError([Problem(path, f"{env_type!r} is no text environment; subclass roll.envs.base.TextEnv")])
