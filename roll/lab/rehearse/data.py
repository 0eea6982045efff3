"""The data of a rehearsal: the first rows of the recipe's own files, or stand-ins with the same columns and tags."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.base.errors import unreachable
from roll.configs.arguments import DataArguments
from roll.configs.pipeline import BaseConfig, PreferenceConfig, RLVRConfig, SFTConfig
from roll.configs.scoring.built_in_rewards import built_in_of
from roll.configs.scoring.rewards import rewards_of
from roll.datasets.preferences import read_preference
from roll.datasets.prompts import Prompt, question, tag_of
from roll.datasets.records import Record, read_records
from roll.datasets.sft import read_prompt_response
from roll.datasets.tokenizer import encode_data, token_lengths
from roll.hub.names import local_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SCANNED_ROWS = 2000
"""Rows of a file that are read, to find the first ones that are short enough and one of every tag."""

MOST_TOKENS = 512
"""Longest prompt, or example of SFT, of a rehearsal; longer ones are taken only if all are longer."""

RULE = "math_rule"
"""Tag of stand-in rows of a reward that takes every tag."""

STAND_IN_TRUTHS = {
    "multiple_choice": "A",
    "ifeval": '{"func_name": "validate_no_commas"}',
    "reasoning_gym": '{"answer": "3", "metadata": {"source_dataset": "chain_sum"}}',
    "code_sandbox": '{"inputs": ["1 2"], "outputs": ["3"]}',
}
"""Ground truths in the format of built-in rewards that do not compare with an answer."""


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
    rewards = config.rewards if isinstance(config, RLVRConfig) else {}
    count = max(1, rows // max(1, len(args.file_name)))
    folder.mkdir(parents=True, exist_ok=True)
    files: list[str] = []
    lengths: list[tuple[int, int]] = []
    for number, name in enumerate(args.file_name):
        if absent:
            made = stand_in_rows(config, args, role, count, number)
            records = [Record(Path(name), line, row) for line, row in enumerate(made, start=1)]
        else:
            records = read_records(name, limit=SCANNED_ROWS)
        measured = _token_lengths(config, args, records, tokenizer)
        scorers = ["+".join(rewards_of(rewards, tag_of(record, args))) for record in records]
        chosen = choose_rows([max(pair) for pair in measured], scorers, count)
        lengths += [measured[index] for index in chosen]
        file = folder / f"{role}-{number}.jsonl"
        lines = [json.dumps(records[index].row, ensure_ascii=False, default=str) + "\n" for index in chosen]
        file.write_text("".join(lines), encoding="utf-8")
        files.append(str(file))
    reason = f"{absent[0]} is not on this machine: stand-in rows" if absent else ""
    return RoleData(files, max(pair[0] for pair in lengths), max(pair[1] for pair in lengths), reason)


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


def stand_in_rows(
    config: BaseConfig, args: DataArguments, role: str, count: int, file: int = 0
) -> list[dict[str, Any]]:
    """Rows with sums of two digits in the columns of the recipe: some for every tag that a reward scores."""
    tags = [RULE]
    if isinstance(config, RLVRConfig):
        tags = [tag for reward in config.rewards.values() for tag in reward.tag_included or [RULE]]
    rows = []
    for number in range(max(count, len(tags))):
        first, second, tag = number % 7 + 1, (3 * number + file) % 3, tags[number % len(tags)]
        answer = str(first + second)
        row = {args.id: f"{role}-{file}-{number}", args.tag: tag, args.prompt: f"{first}+{second}="}
        if isinstance(config, PreferenceConfig):
            row |= {args.chosen: answer, args.rejected: str(first + second + 1)}
        else:
            row[args.response] = answer
        if isinstance(config, RLVRConfig):
            row[args.ground_truth] = _stand_in_truth(config, tag, answer)
        rows.append(row)
    return rows


def _stand_in_truth(config: RLVRConfig, tag: str, answer: str) -> str:
    """The ground truth of a stand-in row: the answer, unless the first reward of its tag reads another format."""
    names = rewards_of(config.rewards, tag)
    built_in = built_in_of(config.rewards[names[0]].function) if names else None
    return STAND_IN_TRUTHS.get(built_in or "", answer)


def _token_lengths(
    config: BaseConfig, args: DataArguments, records: Sequence[Record], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[int, int]]:
    """Tokens of the prompt of each row, and of the prompt with its (longer) answer where answers are learned."""

    def read(record: Record) -> Any:
        if isinstance(config, SFTConfig):
            return read_prompt_response(record, args)
        if isinstance(config, PreferenceConfig):
            return read_preference(record, args)
        return Prompt("", "", question(record, args), None)

    unlimited = replace(config, prompt_length=1 << 30, sequence_length=1 << 30)
    return token_lengths(config, encode_data(unlimited, args, [read(record) for record in records], tokenizer)[0])
