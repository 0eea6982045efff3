"""Makes environments from `env_type` and `env_config`, and registers the built-in ones with gymnasium."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import gymnasium

from roll.base.errors import ConfigError, Finding, Problem, error, missing
from roll.base.text import nearest
from roll.configs.environments import is_external, is_gem, names_class
from roll.configs.user_code import UserCodeError, definition_of, failure_text, import_named
from roll.envs.base import EnvConfig, TextEnv, has_tools, metrics_problem
from roll.envs.external import (
    ExternalEnv,
    GemEnv,
    GymnasiumEnv,
    NotTextError,
    package_to_install,
    with_constructor_options,
)
from roll.envs.options import choices, read_config
from roll.envs.tools.toolbox import Toolbox


class BuiltInEnv(NamedTuple):
    """An environment that comes with this project."""

    id: str
    """In gymnasium."""
    entry_point: str
    """Its `module:Class`, which is imported when the first environment is made."""


BUILT_IN_ENVS = {
    "frozen_lake": BuiltInEnv("roll/FrozenLake-v0", "roll.envs.frozen_lake:FrozenLake"),
    "sokoban": BuiltInEnv("roll/Sokoban-v0", "roll.envs.sokoban:Sokoban"),
    "calculator": BuiltInEnv("roll/Calculator-v0", "roll.envs.calculator:Calculator"),
}
"""The built-in environments by `env_type`.

An environment of the user needs no entry here: its `env_type` is `module:Class` (docs/environments/own.md). To add a
built-in one:

1. its class, a subclass of `TextEnv` (of `MoveEnv` for a grid game), and its options, a subclass of `EnvConfig`, in a
   file of this folder;
2. its entry here;
3. its options in `OPTIONS` of `tests/envs/playing.py`, with which `tests/envs/test_base.py` runs episodes of it, valid
   actions in `texts` of the same file, and a test file of its own;
4. docs/environments.md, of which `tests/envs/test_documentation.py` requires its name, id, options and metrics, and its
   mention in docs/features.md;
5. its names in recipes of ROLL, if it has any, in `roll/compat/systems/environments.py`."""

SIMILAR_NAMES = ("sokoban_sandbox", "sokoban_mcp")
"""Environments of other projects whose names look like misspelled names of built-in ones."""

for _built_in in BUILT_IN_ENVS.values():
    # TextEnv checks its turns and the order of calls itself, so gymnasium's wrappers are not needed.
    gymnasium.register(_built_in.id, _built_in.entry_point, order_enforce=False, disable_env_checker=True)


def make_env(env_type: str, env_config: Mapping[str, Any] | None = None, path: str = "") -> TextEnv:
    """Makes an environment. The first two arguments are plain data, so any process can make the same one.

    Args:
        env_type: a name in BUILT_IN_ENVS, an id of gymnasium or GEM, or `module:Class`, of a `TextEnv`.
        env_config: its options.
        path: path of the entry in the file, for errors, such as `custom_envs.Lake`.

    Raises:
        ConfigError: the environment does not exist or does not accept the options.
    """
    prefix = f"{path}." if path else ""
    cls, registered = _resolve(env_type, f"{prefix}env_type")
    given = {} if env_config is None else env_config
    options = {**registered, **given} if isinstance(given, Mapping) else given
    if issubclass(cls, ExternalEnv) and isinstance(options, Mapping):
        options = with_constructor_options(options)
    more = "; options of your own are fields of its config_class" if cls.config_class is EnvConfig else ""
    config = read_config(cls.config_class, options, f"{prefix}env_config", more)
    if has_tools(cls.config_class):
        Toolbox(config.tools, f"{prefix}env_config.tools")
    try:
        env = cls(**options)
    except ConfigError:
        raise
    except NotTextError as error:
        raise ConfigError([Problem(f"{prefix}env_type", str(error))]) from error
    except Exception as error:
        text = failure_text(error, None if issubclass(cls, ExternalEnv) else cls)
        raise ConfigError([Problem(f"{prefix}env_type", text)]) from error
    if not hasattr(env, "config"):
        text = f"{definition_of(cls.__init__)}: __init__ has to call super().__init__(**options)"
        raise ConfigError([Problem(f"{prefix}env_type", text)])
    return env


def is_known(env_type: str) -> bool:
    return env_type in BUILT_IN_ENVS or env_type in gymnasium.registry


def try_environment(path: str, env_type: str, env_config: dict[str, Any]) -> Iterator[Finding]:
    """Makes the environment of an entry of `custom_envs`, which is cheap for a built-in one, and yields its errors.

    A name that is not similar to a known one is taken for an environment of another project, which a plan does without.
    An installed environment of another package is tried later, in a process of its own, as a class of the user is.
    """
    if is_external(env_type):
        if (problem := package_to_install(env_type)) is not None:
            yield missing(f"{path}.env_type", problem)
        return
    misspelled = nearest(env_type, BUILT_IN_ENVS) and env_type not in SIMILAR_NAMES
    if not is_known(env_type) and not misspelled:
        yield missing(
            f"{path}.env_type",
            f"{env_type} is not an environment of this project; known: {', '.join(BUILT_IN_ENVS)}, or write env_type: "
            "module:Class, one of your own (docs/environments/own.md)",
        )
        return
    try:
        make_env(env_type, env_config, path)
    except ConfigError as refused:
        yield from (error(problem.path, problem.message) for problem in refused.problems)


def _resolve(env_type: str, path: str) -> tuple[type[TextEnv], dict[str, Any]]:
    """Class of an `env_type`, and the options set by its registration."""
    if not isinstance(env_type, str):
        raise ConfigError(
            [Problem(path, f"{env_type!r} is not text; {choices('', BUILT_IN_ENVS)}, or write module:Class")]
        )
    spec = gymnasium.registry.get(BUILT_IN_ENVS[env_type].id if env_type in BUILT_IN_ENVS else env_type)
    if spec is not None:
        found = spec.entry_point if callable(spec.entry_point) else _imported(str(spec.entry_point), path, callable)
        if isinstance(found, type) and issubclass(found, TextEnv):
            return _text_env(found, env_type, path), dict(spec.kwargs)
        return GymnasiumEnv, {"id": env_type}
    if is_external(env_type):
        if (problem := package_to_install(env_type)) is not None:
            raise ConfigError([Problem(path, problem)])
        return GemEnv if is_gem(env_type) else GymnasiumEnv, {"id": env_type}
    if names_class(env_type):
        return _text_env(_imported(env_type, path), env_type, path), {}
    ids = [id for id in gymnasium.registry if id.startswith("roll/")]
    known = choices(env_type, [*BUILT_IN_ENVS, *ids])
    raise ConfigError([Problem(path, f"{env_type!r} is not an environment; {known}, or write module:Class")])


def _is_class(value: Any) -> bool:
    return isinstance(value, type)


def _imported(entry_point: str, path: str, fits: Callable[[Any], bool] = _is_class) -> Any:
    try:
        return import_named(entry_point, fits)[1]
    except UserCodeError as error:
        raise ConfigError([Problem(path, str(error))]) from error


def _text_env(found: Any, env_type: str, path: str) -> type[TextEnv]:
    if isinstance(found, type) and issubclass(found, TextEnv):
        problem = metrics_problem(found.METRICS)
        if problem is not None:
            raise ConfigError([Problem(path, f"{env_type!r}: {problem}")])
        options = found.config_class
        if not (isinstance(options, type) and issubclass(options, EnvConfig)):
            text = f"{definition_of(found)}: config_class of {found.__name__} has to be a subclass of EnvConfig"
            raise ConfigError([Problem(path, text)])
        missing = [name for name, code in inspect.getmembers(found) if getattr(code, "__isabstractmethod__", False)]
        if missing:
            text = f"{definition_of(found)}: {found.__name__} has to define {' and '.join(missing)}"
            raise ConfigError([Problem(path, text)])
        return found
    raise ConfigError([Problem(path, f"{env_type!r} is not a text environment; subclass roll.envs.TextEnv")])
