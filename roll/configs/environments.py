"""Environments of agents: the keys of an entry, the messages of its turns, and the managers that run groups of them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from string import Formatter
from typing import Any, Literal

from roll.base.errors import Finding, error, missing, warning
from roll.base.schema import Condition, one_or_many, option
from roll.base.text import nearest
from roll.configs.user_code import names_code, names_in
from roll.hub.names import local_file

SYSTEM_FIELDS = ("env_instruction",)
"""Fields of `agent_system_template`, the system message of a trajectory; other braces in it are text."""


TURN_FIELDS = ("turn_idx", "observation", "actions_left", "max_response_length", "env_instruction")
"""Fields of `agent_template`, the message of every turn."""


STEP_FIELDS = ("current_observation", "current_step", "step_count", "history", "history_length", "suffix")
"""Fields that templates of ROLL have for single turns. Here earlier turns are messages of their own, so `history` says
that they are above, `history_length` and `step_count` are their number, and `suffix` is empty."""


OBSERVATIONS = ("observation", "current_observation")


SYSTEM_TEMPLATE = "You act in an environment, one action per turn, and want the highest total reward."
"""Default of `agent_system_template`."""


TURN_TEMPLATE = """Turn {turn_idx}:
{observation}
Actions left: {actions_left}. Think briefly, then give one action, in at most {max_response_length} tokens."""
"""Default of `agent_template`. `turn_idx` counts from 1."""


HISTORY = "the messages above"
"""Text of the field `history`: earlier turns are part of the conversation and are not repeated."""


def first_messages(
    system: str, template: str, instruction: str, observation: str, actions: int, tokens: int
) -> list[dict[str, str]]:
    """The messages before the first action; the instruction comes first, unless a template has a field for it.

    A trajectory has at most `actions` answers of at most `tokens` tokens; `system` is empty for no system message.
    """
    text = turn_message(template, 0, observation, actions, tokens, instruction)
    if not any("{env_instruction}" in each for each in (system, template)):
        text = f"{instruction}\n{text}"
    before = [{"role": "system", "content": system.replace("{env_instruction}", instruction)}] if system else []
    return [*before, {"role": "user", "content": text}]


def turn_message(template: str, turn: int, observation: str, actions: int, tokens: int, instruction: str = "") -> str:
    """The message before action number `turn`, from 0; other arguments as in `first_messages`."""
    fields: dict[str, Any] = {
        "turn_idx": turn + 1,
        "observation": observation,
        "actions_left": actions - turn,
        "max_response_length": tokens,
        "env_instruction": instruction,
        "current_observation": observation,
        "current_step": turn + 1,
        "step_count": turn,
        "history": HISTORY if turn else "",
        "history_length": turn,
        "suffix": "",
    }
    return template.format(**fields)


def system_template(text: Any) -> Any:
    """An `agent_system_template`: everything but its field is sent as it is, braces too.

    Raises:
        ValueError: it has a field of `agent_template`.
    """
    for name in re.findall(r"\{(\w+)\}", text) if isinstance(text, str) else []:
        if name in TURN_FIELDS + STEP_FIELDS and name not in SYSTEM_FIELDS:
            raise ValueError(f"{{{name}}} is not a field; known: {{{SYSTEM_FIELDS[0]}}}; write it in agent_template")
    return text


def turn_template(text: Any) -> Any:
    """An `agent_template` whose fields are checked; a value of another type is returned unchanged.

    Raises:
        ValueError: a field is unknown, braces do not match, or the observation is missing.
    """
    if isinstance(text, str) and not set(OBSERVATIONS) & set(fields_of(text, TURN_FIELDS + STEP_FIELDS)):
        raise ValueError("does not contain {observation}, so the model would see nothing of the environment; add it")
    return text


def fields_of(text: str, known: tuple[str, ...]) -> list[str]:
    """Names of the fields of a template.

    Raises:
        ValueError: one is not in `known`, or braces do not match.
    """
    literal = "write {{ and }} for literal braces"
    try:
        names = [name for _, name, _, _ in Formatter().parse(text) if name is not None]
    except ValueError as error:
        raise ValueError(f"braces do not match ({error}); {literal}") from None
    for name in names:
        if name not in known:
            own = ", ".join(f"{{{one}}}" for one in known if one not in STEP_FIELDS)
            raise ValueError(f"{{{name}}} is not a field; known: {own}; {literal}")
    return names


SampleBy = Literal["traj", "step"]
"""One training sample is a whole trajectory or one turn of it."""


MANAGERS = {"TrajEnvManager": "traj", "StepEnvManager": "step", "StepConcatEnvManager": "step"}
"""Classes in recipes of ROLL -> value of `sample_by`."""


def env_manager(value: Any) -> Any:
    """`traj` or `step`, also for the class path of a recipe of ROLL.

    Raises:
        ValueError: another class.
    """
    if not isinstance(value, str) or value in MANAGERS.values():
        return value
    name = value.rpartition(".")[2]
    if name not in MANAGERS:
        known = ", ".join([*dict.fromkeys(MANAGERS.values()), *(f"...{cls}" for cls in MANAGERS)])
        raise ValueError(f"{value!r} is not available; known: {known}")
    return MANAGERS[name]


MAX_REQUESTS = 30
"""Default of `max_requests`."""

COMMAND_FIELDS = ("task_file", "seed")
"""What is replaced in the words of a `command`."""

OF_AGENTS = Condition(
    lambda config, entry: entry.is_agent, "only agents have it; set agent or command", (".agent", ".command")
)

OF_ENVIRONMENTS = Condition(
    lambda config, entry: not entry.is_agent,
    "an agent writes its own messages and ends by itself",
    (".agent", ".command"),
)

INSTEAD_OF_ENVIRONMENT = Condition(
    lambda config, entry: not entry.is_agent, "agent or command is in its place; keep one", (".agent", ".command"), True
)


def agent_class(value: Any) -> Any:
    """The `agent` of an entry.

    Raises:
        ValueError: it has not the form `module:Class`.
    """
    if isinstance(value, str) and not names_code(value):
        module, _, name = value.rpartition(".") if ":" not in value else (value.partition(":")[0], "", "Class")
        module = module.removesuffix(".py").rpartition("/")[2] or "my_agent"
        raise ValueError(f"{value!r} is not module:Class; write {module}:{name if name.isidentifier() else 'Class'}")
    return value


def command_words(value: Any) -> Any:
    """A command line as the list of its words; any other value unchanged.

    Raises:
        ValueError: a quotation does not end.
    """
    return shlex.split(value) if isinstance(value, str) else value


@dataclass
class TaskFiles:
    """The tasks of an agent."""

    file_name: list[str] = option(
        factory=list, help="JSONL, JSON or parquet files; a row is a task. Without: the seed is it.", parse=one_or_many
    )


@dataclass
class CustomEnvConfig:
    """One kind of environment and the messages the model gets about it, or one kind of agent."""

    env_type: str = option(
        "frozen_lake",
        "A name of docs/environments.md, an id of gymnasium or GEM, or `module:Class`.",
        only_for=INSTEAD_OF_ENVIRONMENT,
    )
    env_config: dict[str, Any] = option(factory=dict, help="Options of the environment.", only_for=OF_ENVIRONMENTS)
    agent: str | None = option(
        None,
        "`module:Class`, an `Agent` that calls an OpenAI-compatible endpoint (docs/agents.md), in place of env_type.",
        parse=agent_class,
    )
    command: list[str] = option(
        factory=list,
        help="A program that calls the endpoint, in place of env_type: its words, with {task_file} for a JSON file of "
        'the task and {seed}. The last line of its output is its reward, {"reward": 1.0}.',
        parse=command_words,
    )
    tasks: TaskFiles = option(factory=TaskFiles, help="The tasks of an agent.", only_for=OF_AGENTS)
    max_requests: int | None = option(
        None,
        f"Requests of one episode of an agent; more end it. Default: {MAX_REQUESTS}.",
        ge=1,
        usual=(1, 1e5),
        only_for=OF_AGENTS,
    )
    branches: int = option(
        1,
        "Branches of one session of an agent, a sample each, which batch sizes and the learning-rate schedule count; a "
        "session may have more or fewer.",
        ge=1,
        usual=(1, 1000),
        only_for=OF_AGENTS,
    )
    max_steps: int | None = option(
        None,
        "Actions of one trajectory; default: env_config.max_steps, or max_actions_per_traj.",
        ge=1,
        usual=(1, 1e8),
        only_for=OF_ENVIRONMENTS,
    )
    max_tokens_per_step: int | None = option(
        None, "Longest text of one turn in tokens; default: the pipeline's max_tokens_per_step.", ge=1
    )
    agent_system_template: str | None = option(
        SYSTEM_TEMPLATE,
        "System message, null for none; {env_instruction} is replaced, other braces are text.",
        parse=system_template,
        only_for=OF_ENVIRONMENTS,
    )
    agent_template: str = option(
        TURN_TEMPLATE,
        "Message of every turn, with the fields {turn_idx} (from 1), {observation}, {actions_left}, "
        "{max_response_length} and {env_instruction}, which is empty after the first turn. Where neither template has "
        "{env_instruction}, the first turn begins with it. Fields of ROLL's templates for single turns are read too.",
        parse=turn_template,
        only_for=OF_ENVIRONMENTS,
    )
    env_manager_cls: SampleBy | None = option(
        None, "traj or step, the same for all entries; default: the pipeline's sample_by.", parse=env_manager
    )

    @property
    def is_agent(self) -> bool:
        return bool(self.agent or self.command)


@dataclass
class EnvManagerConfig:
    """Which environments run, how many at a time, and in how many processes.

    A group is `group_size` trajectories of one task: the same environment, the same options, the same seed.
    """

    num_env_groups: int | None = option(
        None,
        "Groups whose environments run at a time; default: the sum of num_groups_partition, or those of 1 + "
        "async_generation_ratio batches, at most 4, and of one validation.",
        ge=1,
        usual=(1, 1e6),
    )
    group_size: int = option(8, "Trajectories of one task; in val_env_manager the default is 1.", ge=1, usual=(1, 1e4))
    group_size_redundancy: int = option(
        0, "Extra environments per group, which is complete when group_size of them have finished; 0 is off.", ge=0
    )
    tags: list[str] = option(
        factory=list,
        parse=one_or_many,
        help="Names in custom_envs that are used; a single one is a list of one; empty: all.",
    )
    num_groups_partition: list[int] = option(
        factory=list, help="How many of num_env_groups each of `tags` gets; empty: equal parts."
    )
    max_env_num_per_worker: int = option(16, "Environments of one process; 0: all in one.", ge=0, usual=(0, 1e5))
    max_traj_per_env: Literal[-1] = option(
        -1, "Trajectories of one environment, one after the other: only -1, as many as the batches need."
    )

    @property
    def environments(self) -> int:
        return (self.num_env_groups or 1) * (self.group_size + self.group_size_redundancy)

    @property
    def processes(self) -> int:
        return -(-self.environments // (self.max_env_num_per_worker or self.environments))


GEM_NAMESPACES = ("code", "eval", "game", "logic", "math", "qa", "rg")
"""First parts of the ids of GEM, such as `game:GuessTheNumber-v0`."""


def is_gem(env_type: str) -> bool:
    """Whether an `env_type` is an id of GEM, whose namespace is no module of the user."""
    module, colon, _ = env_type.partition(":")
    known = bool(colon) and module in GEM_NAMESPACES
    return known and (module in sys.stdlib_module_names or find_spec(module) is None)


def is_external(env_type: str) -> bool:
    """Whether an `env_type` is an id of GEM or, with the module that registers it, of gymnasium."""
    return ":" in env_type and not names_class(env_type)


def names_class(env_type: str) -> bool:
    """Whether an `env_type` is `module:Class`, and not an id of another library that has a colon too."""
    _, colon, name = env_type.partition(":")
    if is_gem(env_type):
        return False
    return (bool(colon) or env_type.endswith(".py")) and not re.fullmatch(r".+-v\d+", name)


TryEnvironment = Callable[[str, str, dict[str, Any]], Iterator[Finding]]
"""Creates an environment, given the path, `env_type` and `env_config` of its entry, and yields what is wrong."""


def check_entries(entries: Mapping[str, CustomEnvConfig], try_environment: TryEnvironment | None) -> Iterator[Finding]:
    """Entries exist and describe environments; without `try_environment` their types and options are not checked.

    A class of the user, `module:Class`, is tried later, in a process of its own (`roll.usercode.env_trial`).
    """
    if not entries:
        yield error("custom_envs", "is empty, so there is no environment; describe one, such as Lake: {}")
    for tag, entry in entries.items():
        if entry.is_agent:
            yield from _check_agent(f"custom_envs.{tag}", entry)
        elif try_environment is not None and not names_class(entry.env_type):
            yield from try_environment(f"custom_envs.{tag}", entry.env_type, entry.env_config)


def _check_agent(path: str, entry: CustomEnvConfig) -> Iterator[Finding]:
    if entry.agent and entry.command:
        yield error(f"{path}.command", f"agent {entry.agent} is given too; keep one")
    elif entry.command and shutil.which(entry.command[0]) is None:
        there = os.path.exists(entry.command[0])
        fix = "is no program; make it executable, or name its interpreter" if there else "is not on this machine"
        yield missing(f"{path}.command", f"{entry.command[0]} {fix}")
    for field in re.findall(r"\{(\w+)\}", " ".join(entry.command)):
        like = None if field in COMMAND_FIELDS else nearest(field, COMMAND_FIELDS)
        if like:
            yield warning(f"{path}.command", f"{{{field}}} is not a field; did you mean {{{like}}}?")
    module, _, name = (entry.agent or "").partition(":")
    names = names_in(module) if module else None
    if names is not None and name not in names:
        like = nearest(name, names)
        hint = f"; did you mean {like}?" if like else ""
        yield error(f"{path}.agent", f"{module} has no class {name}{hint}")
    for name in entry.tasks.file_name:
        if not local_file(name).is_file():
            yield missing(f"{path}.tasks.file_name", f"{name} is not here")


def check_manager(
    name: str, manager: EnvManagerConfig, batch: tuple[str, int], entries: Collection[str]
) -> Iterator[Finding]:
    """A batch, its key and its trajectories, is whole groups; tags exist, and their shares add up."""
    yield from _check_whole(*batch, name, manager.group_size)
    yield from _check_tags(name, manager, entries)
    yield from _check_partition(name, manager)


def _check_whole(key: str, size: int, manager: str, group: int) -> Iterator[Finding]:
    if size % group:
        below = size // group * group
        yield error(
            key,
            f"{size} trajectories are not whole groups of {manager}.group_size {group}; "
            f"use {f'{below} or ' if below else ''}{below + group}",
        )


def _check_tags(name: str, manager: EnvManagerConfig, entries: Collection[str]) -> Iterator[Finding]:
    for index, tag in enumerate(manager.tags):
        if tag not in entries:
            like = nearest(tag, entries)
            hint = f"; did you mean {like}?" if like else ""
            yield error(f"{name}.tags", f"{tag!r} is not in custom_envs; known: {', '.join(entries)}{hint}")
        elif tag in manager.tags[:index]:
            yield error(f"{name}.tags", f"contains {tag} twice; list it once, with its share in num_groups_partition")


def _check_partition(name: str, manager: EnvManagerConfig) -> Iterator[Finding]:
    parts, tags, groups = manager.num_groups_partition, manager.tags, manager.num_env_groups or 1
    path = f"{name}.num_groups_partition"
    if not parts:
        below = groups // len(tags) * len(tags) if tags else 0
        sizes = f"{f'{below} or ' if below else ''}{below + len(tags)}"
        yield error(
            path,
            f"is not given, and num_env_groups {groups} does not divide into equal parts for {len(tags)} tags; "
            f"use num_env_groups {sizes}, or write the parts",
        )
    elif len(parts) != len(tags):
        yield error(
            path, f"{parts} has {len(parts)} part(s) for {len(tags)} tag(s), {', '.join(tags)}; write one part for each"
        )
    elif min(parts) < 1:
        yield error(path, f"{parts} leaves a tag without groups; use at least 1 each, or remove the tag from tags")
    elif sum(parts) != groups:
        yield error(path, f"{parts} adds up to {sum(parts)}, but num_env_groups is {groups}; use the same for both")
