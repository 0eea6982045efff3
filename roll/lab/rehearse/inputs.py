"""What a rehearsal runs on: random models, the first rows of the data, and the lengths of messages of environments."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.base.errors import ConfigError, RunError, unreachable
from roll.configs.agentic import AgenticConfig
from roll.configs.arguments import DataArguments
from roll.configs.environments import CustomEnvConfig
from roll.configs.learning.lora import policy_of
from roll.configs.pipeline import BaseConfig, PreferenceConfig, RLConfig, RLVRConfig, SFTConfig
from roll.configs.scoring.built_in_rewards import built_in_of
from roll.configs.scoring.rewards import rewards_of
from roll.datasets.preferences import read_preference
from roll.datasets.prompts import Prompt, question, tag_of
from roll.datasets.records import Record, read_records
from roll.datasets.sft import read_prompt_response
from roll.datasets.tokenizer import encode_data, token_lengths
from roll.envs import make_env
from roll.hub.names import local_file
from roll.lab.rehearse.model import add_score_head, find_tokenizer, recipe_model, write_model
from roll.lab.rehearse.sizes import shrink_batch, shrink_layouts
from roll.plan.agent_trial import try_agents
from roll.plan.check_inputs import check_environments
from roll.usercode.env_trial import Played, play

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VALIDATION_ROWS, EXAMPLES = 4, 16
"""Rows of validation, and rows that SFT and preference training learn from."""

FEW_ACTIONS = 3
"""Actions of a trajectory: a first turn, one that continues, and one that ends it."""

CHAT_TOKENS = 200
"""Upper bound of what a chat template adds to one message, its default system message included."""

SCANNED_ROWS = 2000
"""Rows of a file that are read, to find the first ones that are short enough and one of every tag."""

MOST_TOKENS = 512
"""Longest prompt, or example of SFT, of a rehearsal; longer ones are taken only if all are longer."""

STAND_IN_TRUTHS = {
    "multiple_choice": "A",
    "ifeval": '{"func_name": "validate_no_commas"}',
    "reasoning_gym": '{"answer": "3", "metadata": {"source_dataset": "chain_sum"}}',
    "code_sandbox": '{"inputs": ["1 2"], "outputs": ["3"]}',
}
"""Ground truths in the format of built-in rewards that do not compare with an answer."""


@dataclass(frozen=True)
class Inputs:
    """What a rehearsal puts in place of the recipe's model and data.

    Attributes:
        models: name of a model in the recipe -> folder of its random stand-in.
        files: role -> its data files; only of roles that read files.
        prompt_tokens: of the longest prompt, or of the first message of a trajectory.
        sequence_tokens: of the longest prompt with its answer (SFT).
        turn_tokens: of the messages between two answers (agents).
        actions: of a trajectory, by tag (agents).
        reasons: key -> why its stand-in is used, for the list of changes.
    """

    models: Mapping[str, str]
    files: Mapping[str, list[str]] = field(default_factory=dict)
    prompt_tokens: int = 64
    sequence_tokens: int = 96
    turn_tokens: int = 64
    actions: Mapping[str, int] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)


def make_inputs(recipe: BaseConfig, folder: Path, steps: int, say: Callable[[str], None]) -> Inputs:
    """Writes models and data below `folder`; RLVR gets as many prompts as `steps` consume, so every reward has some.

    Raises:
        ConfigError, UnsupportedModel: the model cannot be rehearsed.
        DatasetError: the recipe's own data cannot be used.
        RunError: an environment failed; the message begins with the place in the user's code.
    """
    main = recipe.actor_train.model_args.model_name_or_path or ""
    source = recipe_model(main)
    stops = recipe.actor_infer.generating_args.stop_strings if isinstance(recipe, RLConfig) else []
    tokenizer, why = find_tokenizer(source, [*stops, *recipe.validation.generating_args.stop_strings])
    judge = recipe.judge.model_args.model_name_or_path if isinstance(recipe, RLVRConfig) else None
    names = {role.model_args.model_name_or_path or "" for role in recipe.device_roles().values()} - {main}
    models = {}
    for number, name in enumerate([main, *sorted(names)]):
        model = source if name == judge else recipe_model(name)
        models[name] = str(write_model(model, tokenizer, folder / f"model-{number}", number))
    if isinstance(recipe, RLVRConfig) and recipe.uses_reward_model:
        add_score_head(Path(models[recipe.reward.model_args.model_name_or_path or ""]))
    kind = f"a stand-in tokenizer, since {why}" if why else f"its own tokenizer of {len(tokenizer)} tokens"
    reasons = {"model": f"a random {source.family.architecture} (known from {source.basis}) with {kind}"}
    say(f"model: {reasons['model']}")
    if isinstance(recipe, AgenticConfig):
        first, between = longest_messages(recipe)
        actions = fewest_actions(recipe)
        return Inputs(models, prompt_tokens=first, turn_tokens=between, actions=actions, reasons=reasons)
    rows = {"actor_train": EXAMPLES, "validation": VALIDATION_ROWS}
    if isinstance(recipe, RLConfig):
        ranks = shrink_layouts(recipe.device_roles()).layouts["actor_train"].data
        rows["actor_train"] = shrink_batch(recipe, ranks).groups * steps
    made = {role: write_data(recipe, role, tokenizer, folder / "data", rows[role]) for role in recipe.data_roles()}
    for role, data in made.items():
        reasons[role] = data.reason
        say(f"data of {role}: {data.reason}")
    return Inputs(
        models,
        {role: data.files for role, data in made.items()},
        prompt_tokens=max(data.prompt_tokens for data in made.values()),
        sequence_tokens=max(data.sequence_tokens for data in made.values()),
        reasons=reasons,
    )


@dataclass(frozen=True)
class RoleData:
    """The files of one role, the tokens of the longest prompt and of the longest example, and where rows are from."""

    files: list[str]
    prompt_tokens: int
    sequence_tokens: int
    reason: str


def write_data(config: BaseConfig, role: str, tokenizer: PreTrainedTokenizerBase, folder: Path, rows: int) -> RoleData:
    """Writes about `rows` rows of a role, in a file for each file of the recipe; a file has at least one row.

    Raises:
        DatasetError: a row of the recipe's own files cannot be used; the message names file and line.
    """
    args: DataArguments = getattr(config, role).data_args
    absent = [name for name in args.file_name if not local_file(name).is_file() or unreachable(local_file(name))]
    count = max(1, rows // max(1, len(args.file_name)))
    folder.mkdir(parents=True, exist_ok=True)
    lengths: list[tuple[int, int]] = []
    files = [folder / f"{role}-{number}.jsonl" for number in range(len(args.file_name))]
    for number, (name, file) in enumerate(zip(args.file_name, files, strict=True)):
        records = _stand_ins(config, args, file, number, count) if absent else read_records(name, limit=SCANNED_ROWS)
        measured = _token_lengths(config, args, records, tokenizer)
        chosen = choose_rows([max(pair) for pair in measured], [_kind(config, args, each) for each in records], count)
        lengths += [measured[index] for index in chosen]
        lines = [json.dumps(records[index].row, ensure_ascii=False, default=str) + "\n" for index in chosen]
        file.write_text("".join(lines), encoding="utf-8")
    reason = f"{absent[0]} is not on this machine: stand-in rows" if absent else "the first rows of its own files"
    prompts, examples = zip(*lengths, strict=True)
    return RoleData([str(file) for file in files], max(prompts), max(examples), reason)


def _kind(config: BaseConfig, args: DataArguments, record: Record) -> str:
    """What scores a row and which of several policies learns from it."""
    if not isinstance(config, RLVRConfig):
        return ""
    tag = tag_of(record, args)
    return "+".join([*rewards_of(config.rewards, tag), policy_of(config.policies, tag) or ""])


def choose_rows(tokens: Sequence[int], kinds: Sequence[str], count: int) -> list[int]:
    """Indices of `count` rows in order: the first short one of every kind, then the first short ones.

    A row is short up to `MOST_TOKENS`; where there is none, the shortest are taken. There are more than `count` if
    there are more kinds.
    """
    order = sorted(range(len(tokens)), key=lambda index: max(tokens[index], MOST_TOKENS))
    first = {kinds[index]: index for index in reversed(order)}.values()
    short = [index for index in order if tokens[index] <= MOST_TOKENS]
    chosen = list(dict.fromkeys([*first, *(short or order)]))
    return sorted(chosen[: max(count, len(first))])


def _stand_ins(config: BaseConfig, args: DataArguments, file: Path, salt: int, count: int) -> list[Record]:
    """Rows with sums of two digits in the columns of the recipe: some for every tag of a policy or of a reward."""
    rewards, policies = (config.rewards, config.policies) if isinstance(config, RLVRConfig) else ({}, {})
    tags = [tag for policy in policies.values() for tag in policy.tags]
    tags = tags or [tag for reward in rewards.values() for tag in reward.tag_included or ["math_rule"]] or ["math_rule"]
    records = []
    for number in range(max(count, len(tags))):
        first, second, tag = number % 7 + 1, (3 * number + salt) % 3, tags[number % len(tags)]
        answer = str(first + second)
        row = {args.id: f"{file.stem}-{number}", args.tag: tag, args.prompt: f"{first}+{second}="}
        if isinstance(config, PreferenceConfig):
            row |= {args.chosen: answer, args.rejected: str(first + second + 1)}
        else:
            row[args.response] = answer
        if scorers := rewards_of(rewards, tag):
            row[args.ground_truth] = STAND_IN_TRUTHS.get(built_in_of(rewards[scorers[0]].function) or "", answer)
        records.append(Record(file, number + 1, row))
    return records


def _token_lengths(
    config: BaseConfig, args: DataArguments, records: Sequence[Record], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[int, int]]:
    """Tokens of the prompt of each row, and of the prompt with its (longer) answer where answers are learned."""

    def read() -> Iterator[Any]:
        for record in records:
            if isinstance(config, SFTConfig):
                yield read_prompt_response(record, args)
            elif isinstance(config, PreferenceConfig):
                yield read_preference(record, args)
            else:
                yield Prompt("", "", question(record, args), None)

    unlimited = replace(config, prompt_length=1 << 30, sequence_length=1 << 30)
    return token_lengths(config, encode_data(unlimited, args, [*read()], tokenizer)[0])


def fewest_actions(config: AgenticConfig) -> dict[str, int]:
    """Actions of a trajectory of each tag: `FEW_ACTIONS`, or as many as its environment accepts at least.

    Of an agent, they are the requests that a sequence has room for.
    """
    found = {}
    for tag, entry in config.custom_envs.items():
        most = entry.max_steps or FEW_ACTIONS
        accepted = (count for count in range(min(FEW_ACTIONS, most), most) if _accepts(entry, count))
        found[tag] = next(accepted, most)
    return found


def _accepts(entry: CustomEnvConfig, actions: int) -> bool:
    if entry.is_agent:
        return True
    try:
        make_env(entry.env_type, {**entry.env_config, "max_steps": actions}).close()
    except ConfigError:
        return False
    return True


def longest_messages(config: AgenticConfig) -> tuple[int, int]:
    """Upper bounds of the tokens of the first message of a trajectory, and of the messages between two answers.

    A token has at least one byte; every environment plays the episodes of its trial, and of an agent both are those of
    its whole conversation there.

    Raises:
        RunError: an environment failed; the message begins with the place in the user's code.
    """
    first = between = 0
    played: dict[str, Played] = {}
    tried = try_agents(config)
    problems = [*check_environments(config, played), *(each.problem for each in tried.values() if each.problem)]
    if problems:
        raise RunError("\n".join(problems))
    for tag, entry in config.custom_envs.items():
        path = f"custom_envs.{tag}"
        if entry.is_agent:
            text = _bytes(tried[path].text) + CHAT_TOKENS if path in tried else CHAT_TOKENS
            first, between = max(first, text), max(between, text)
            continue
        episode = played.get(path) or play(make_env(entry.env_type, entry.env_config, path))
        if isinstance(episode, str):
            raise RunError(episode)
        message = _bytes(entry.agent_template) + max(map(_bytes, episode.observations), default=0) + CHAT_TOKENS
        first = max(first, message + _bytes(entry.agent_system_template or "") + _bytes(episode.instruction))
        between = max(between, message)
    return first, between


def _bytes(text: str) -> int:
    return len(text.encode())
