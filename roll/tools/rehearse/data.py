"""The data of a rehearsal: the first rows of the recipe's own files, or stand-ins with the same columns and tags."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.base.errors import ConfigError, unreachable
from roll.configs.agentic import AgenticConfig, CustomEnvConfig
from roll.configs.pipeline import BaseConfig, PreferenceConfig, RLVRConfig
from roll.configs.rewards import built_in_of, rewards_of
from roll.configs.roles import DataArguments
from roll.datasets.preferences import read_preference
from roll.datasets.prompts import Prompt, question, tag_of
from roll.datasets.records import Record, read_records
from roll.datasets.sft import read_prompt_response
from roll.datasets.tokenizer import encode_data, token_lengths
from roll.envs import make_env
from roll.hub.names import local_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SCANNED_ROWS = 2000
"""Rows of a file that are read, to find the first ones that are short enough and one of every tag."""

MOST_TOKENS = 512
"""Longest prompt, or example of SFT, of a rehearsal; longer ones are taken only if all are longer."""

FEW_ACTIONS = 3
"""Actions of a trajectory: a first turn, one that continues, and one that ends it."""

CHAT_TOKENS = 200
"""Upper bound of what a chat template adds to one message, its default system message included."""

RULE = "math_rule"
"""Tag of stand-in rows of a reward that takes every tag."""

PROBED_STEPS = 2
"""Steps of an environment whose observations are measured."""


@dataclass(frozen=True)
class RoleData:
    """The files and rows of one role.

    Attributes:
        prompt_tokens: of the longest prompt.
        sequence_tokens: of the longest prompt with its answer; SFT only.
        reason: why the rows are stand-ins; empty for the recipe's own.
    """

    files: list[str]
    prompt_tokens: int
    sequence_tokens: int
    reason: str = ""


def write_data(config: BaseConfig, role: str, tokenizer: PreTrainedTokenizerBase, folder: Path, rows: int) -> RoleData:
    """Writes about `rows` rows of a role, in a file for each file of the recipe; a file has at least one row.

    Raises:
        DatasetError: a row of the recipe's own files cannot be used; the message names file and line.
    """
    args: DataArguments = getattr(config, role).data_args
    absent = [name for name in args.file_name if not local_file(name).is_file() or unreachable(local_file(name))]
    measure = _Lengths(config, args, tokenizer)
    count = max(1, rows // max(1, len(args.file_name)))
    files: list[str] = []
    lengths: list[tuple[int, int]] = []
    for number, name in enumerate(args.file_name):
        if absent:
            made = stand_in_rows(config, args, role, count, number)
            records = [Record(Path(name), line, row) for line, row in enumerate(made, start=1)]
        else:
            records = read_records(name, limit=SCANNED_ROWS)
        measured = measure.all(records)
        rewards = config.rewards if isinstance(config, RLVRConfig) else {}
        scorers = ["+".join(rewards_of(rewards, tag_of(record, args))) or None for record in records]
        chosen = choose_rows([max(pair) for pair in measured], scorers, count)
        lengths += [measured[index] for index in chosen]
        file = folder / f"{role}-{number}.jsonl"
        _write_rows(file, [records[index].row for index in chosen])
        files.append(str(file))
    reason = f"{absent[0]} is not on this machine: stand-in rows" if absent else ""
    return RoleData(files, max(pair[0] for pair in lengths), max(pair[1] for pair in lengths), reason)


def choose_rows(tokens: Sequence[int], kinds: Sequence[str | None], count: int) -> list[int]:
    """Indices of `count` rows in order: the first short one of every kind, then the first short ones.

    A row is short up to `MOST_TOKENS`; of a kind without a short one the shortest is taken. There are more than `count`
    if there are more kinds.
    """
    chosen: set[int] = set()
    for kind in dict.fromkeys(kinds):
        own = [index for index, other in enumerate(kinds) if other == kind]
        short = [index for index in own if tokens[index] <= MOST_TOKENS]
        chosen.add(short[0] if short else min(own, key=lambda index: tokens[index]))
    short = [index for index, length in enumerate(tokens) if length <= MOST_TOKENS]
    rest = short or sorted(range(len(tokens)), key=lambda index: tokens[index])
    for index in rest:
        if len(chosen) >= count:
            break
        chosen.add(index)
    return sorted(chosen)


def stand_in_rows(
    config: BaseConfig, args: DataArguments, role: str, count: int, file: int = 0
) -> list[dict[str, Any]]:
    """Rows with sums of two digits in the columns of the recipe: some for every tag that a reward scores."""
    tags = [RULE]
    if isinstance(config, RLVRConfig):
        tags = [tag for reward in config.rewards.values() for tag in reward.tag_included or [RULE]]
    rows = []
    for number in range(max(count, len(tags))):
        first, second = number % 7 + 1, (3 * number + file) % 3
        row = {args.id: f"{role}-{file}-{number}", args.tag: tags[number % len(tags)]}
        rows.append(row | {args.prompt: f"{first}+{second}=", args.response: str(first + second)})
        if isinstance(config, PreferenceConfig):
            rows[-1] |= {args.chosen: rows[-1].pop(args.response), args.rejected: str(first + second + 1)}
        if isinstance(config, RLVRConfig):
            rows[-1][args.ground_truth] = _stand_in_truth(config, rows[-1][args.tag], str(first + second))
    return rows


STAND_IN_TRUTHS = {
    "multiple_choice": "A",
    "ifeval": '{"func_name": "validate_no_commas"}',
    "reasoning_gym": '{"answer": "3", "metadata": {"source_dataset": "chain_sum"}}',
    "code_sandbox": '{"inputs": ["1 2"], "outputs": ["3"]}',
}
"""Ground truths in the format of built-in rewards that do not compare with an answer."""


def _stand_in_truth(config: RLVRConfig, tag: str, answer: str) -> str:
    """The ground truth of a stand-in row: the answer, unless the first reward of its tag reads another format."""
    names = rewards_of(config.rewards, tag)
    built_in = built_in_of(config.rewards[names[0]].function) if names else None
    return STAND_IN_TRUTHS.get(built_in or "", answer)


def fewest_actions(config: AgenticConfig) -> dict[str, int]:
    """Actions of a trajectory of each tag: `FEW_ACTIONS`, or as many as its environment accepts at least."""
    found = {}
    for tag, entry in config.custom_envs.items():
        most = entry.max_steps or FEW_ACTIONS
        accepted = (count for count in range(min(FEW_ACTIONS, most), most) if _accepts(entry, count))
        found[tag] = next(accepted, most)
    return found


def _accepts(entry: CustomEnvConfig, actions: int) -> bool:
    try:
        make_env(entry.env_type, {**entry.env_config, "max_steps": actions}).close()
    except ConfigError:
        return False
    return True


def longest_messages(config: AgenticConfig) -> tuple[int, int]:
    """Upper bounds of the tokens of the first message of a trajectory, and of the messages between two answers.

    Every environment is reset and stepped a few times; a token has at least one byte.
    """
    first = between = 0
    for tag, entry in config.custom_envs.items():
        env = make_env(entry.env_type, entry.env_config, f"custom_envs.{tag}")
        observation, _ = env.reset(seed=config.seed)
        observations = [observation]
        for _ in range(PROBED_STEPS):
            observation, _, terminated, truncated, _ = env.step("")
            observations.append(observation)
            if terminated or truncated:
                break
        longest = max(len(text.encode()) for text in observations)
        message = len(entry.agent_template.encode()) + longest + CHAT_TOKENS
        texts = (entry.agent_system_template or "", env.instruction)
        first = max(first, message + sum(len(text.encode()) for text in texts))
        between = max(between, message)
        env.close()
    return first, between


class _Lengths:
    """Tokens of the prompt of each row, and of the prompt with its (longer) answer where answers are learned."""

    def __init__(self, config: BaseConfig, args: DataArguments, tokenizer: PreTrainedTokenizerBase) -> None:
        self._config, self._args, self._tokenizer = config, args, tokenizer

    def all(self, records: Sequence[Record]) -> list[tuple[int, int]]:
        unlimited = replace(self._config, prompt_length=1 << 30, sequence_length=1 << 30)
        rows = [self._read(record) for record in records]
        return token_lengths(self._config, encode_data(unlimited, self._args, rows, self._tokenizer)[0])

    def _read(self, record: Record) -> Any:
        if self._config.pipeline == "sft":
            return read_prompt_response(record, self._args)
        if isinstance(self._config, PreferenceConfig):
            return read_preference(record, self._args)
        return Prompt("", "", question(record, self._args), None)


def _write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(_lines(rows)), encoding="utf-8")


def _lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        yield json.dumps(row, ensure_ascii=False, default=str) + "\n"
