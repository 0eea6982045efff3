"""Tries tokenizer, stop strings and chat template on the first rows of the data, in a process that can be killed."""

from __future__ import annotations

import math
import re
import resource
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Any

from psutil import Process

from roll.base.errors import Report, RunError
from roll.configs.agentic import AgenticConfig
from roll.configs.arguments import DataArguments
from roll.configs.pipeline import BaseConfig, RLConfig
from roll.hub.names import has_tokenizer, local_model
from roll.models.families.hf_config import UnsupportedModel
from roll.models.families.shape import read_model_shape
from roll.usercode.process import OneProcess, ProcessEndedError
from roll.usercode.server import CallError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRIED_ROWS, TRIED_CHARACTERS = 1_000, 200_000
"""Rows of a role, and their characters, that are encoded: about a second; at least one row is."""

START_TIMEOUT_S, TIMEOUT_S = 300.0, 60.0
"""Deadlines for the process to start and read tokenizers, and for a role's rows."""

MEMORY_BYTES = 2 * 2**30
"""Memory in which the rows of a role are encoded."""

SHARE_KEPT = 0.95
"""Share of the prompts that a recommended `prompt_length` keeps."""

UNLIMITED = 1 << 40

CHANCE = re.compile(r"\|\s*random\b|\blipsum\s*\(")
"""What draws at random in Jinja, though perhaps the same twice."""


def first_items(items: Sequence[Any]) -> list[Any]:
    """The first items of a role, as many as are tried."""
    sizes = accumulate(len(repr(item)) for item in items[:TRIED_ROWS])
    return list(items[: max(1, len(list(takewhile(TRIED_CHARACTERS.__ge__, sizes))))])


def try_tokens(config: BaseConfig, samples: Mapping[str, tuple[Sequence[Any], bool]]) -> Report:
    """What is wrong with tokenizers, stop strings, the chat template and lengths.

    `samples` has the first items of each role with data, and whether these are all.
    """
    report = Report()
    process = OneProcess()
    try:
        _run(process, report, START_TIMEOUT_S, "reading the tokenizers", try_tokenizers, config)
        if has_tokenizer(local_model(config.actor_train.model_args.model_name_or_path or "")) and not report.errors:
            for role, (items, whole) in samples.items():
                doing = f"{role}.data_args.template: encoding the first {len(items)} rows"
                _run(process, report, TIMEOUT_S, doing, _with_limit, config, role, items, whole)
    finally:
        process.close()
    return report


def _run(
    process: OneProcess, report: Report, limit_s: float, doing: str, task: Callable[..., Report], *args: Any
) -> None:
    try:
        report.include(process.wait(process.start_call(task, *args), limit_s))
    except TimeoutError:
        fix = "; correct the chat template" if task is _with_limit else ""
        report.error("", f"{doing} took longer than {limit_s:g} s{fix}")
    except ProcessEndedError as death:
        report.error("", f"{doing} ended its process with exit code {death.exit_code}, as it does out of memory")
    except CallError as error:  # of the tokenizers library, which raises nothing more specific
        report.error("", f"{doing} failed: {error}")


def try_tokenizers(config: BaseConfig) -> Report:
    """Reads the tokenizer of every model; the policy's encodes the stop strings and the turns of agents."""
    from roll.datasets.tokenizer import conversation_encoder
    from roll.rollout.types import sampling_params

    report = Report()
    policy = config.actor_train.model_args.model_name_or_path
    for role, worker in config.device_roles().items():
        name = worker.model_args.model_name_or_path
        path = "pretrain" if name == config.pretrain else f"{role}.model_args.model_name_or_path"
        if name is None or not has_tokenizer(local_model(name)) or any(each.path == path for each in report.errors):
            continue
        try:
            highest = max(_tokenizer(name).get_vocab().values())
        except RunError as error:
            report.error(path, str(error))
            continue
        with suppress(UnsupportedModel):  # of a judge; the rules refuse that of another role
            shape = read_model_shape(local_model(name), value_head=True)
            if shape is not None and highest >= shape.vocabulary:
                report.error(
                    path,
                    f"{name} has tokens up to id {highest}, but vocab_size {shape.vocabulary} in config.json; resize "
                    "the embedding of the model, or remove the tokens that were added",
                )
    if policy is None or not has_tokenizer(local_model(policy)) or report.errors:
        return report
    try:
        if isinstance(config, RLConfig):
            sampling_params(config.actor_infer.generating_args, "actor_infer.generating_args", _tokenizer(policy))
            sampling_params(config.validation.generating_args, "validation.generating_args", _tokenizer(policy))
        if isinstance(config, AgenticConfig):
            conversation_encoder(config, config.actor_train.data_args, _tokenizer(policy))
    except RunError as error:
        report.error("", str(error))
    return report


def _with_limit(*args: Any) -> Report:
    limit = Process().memory_info().vms + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    return try_rows(*args)


def try_rows(config: BaseConfig, role: str, items: Sequence[Any], whole: bool) -> Report:
    """Encodes the first items of a role, twice; `whole` if there are no others."""
    from roll.datasets.tokenizer import encode_data
    from roll.models.families.chat_template import NATIVE

    report, args = Report(), getattr(config, role).data_args
    tokenizer = _tokenizer(config.actor_train.model_args.model_name_or_path)
    unlimited = replace(config, prompt_length=UNLIMITED, sequence_length=UNLIMITED)
    try:
        encoded, _ = encode_data(unlimited, args, items, tokenizer)
        _check_template(config, args, items, tokenizer)
        source = str(tokenizer.chat_template) if args.template == NATIVE else ""
        if CHANCE.search(source) or encoded != encode_data(unlimited, args, items, tokenizer)[0]:
            report.error(f"{role}.data_args.template", "renders the same rows differently each time; leave chance out")
    except RunError as error:
        report.error(f"{role}.data_args", str(error))
        return report
    _check_lengths(config, encoded, whole, report)
    unknown = [name for name in args.template_kwargs if source and name not in source]
    if unknown:
        report.warn(f"{role}.data_args.template_kwargs", f"the chat template does not read {', '.join(unknown)}")
    return report


def _check_template(
    config: BaseConfig, args: DataArguments, items: Sequence[Any], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raises a DatasetError if the chat template leaves out a message of the items."""
    from roll.datasets.templates import PromptEncoder, chat_messages, template_variables

    encoder = PromptEncoder(tokenizer, args.template, template_variables(args.template_kwargs, config.template_time))
    for item in items:
        encoder.check_contents(item.question)
        for answer in (getattr(item, name, None) for name in ("response", "chosen", "rejected")):
            if isinstance(answer, dict):
                messages = (*chat_messages(item.question), answer)
                encoder.check_contents(replace(item.question, text=None, messages=messages), open_answer=False)


def _check_lengths(config: BaseConfig, encoded: Sequence[Any], whole: bool, report: Report) -> None:
    from roll.datasets.tokenizer import token_lengths

    lengths = token_lengths(config, encoded)
    whole_limit = UNLIMITED if isinstance(config, RLConfig) else config.sequence_length or UNLIMITED
    limits, count = (config.prompt_length, whole_limit), len(lengths)
    dropped = sum(prompt > limits[0] or both > limits[1] for prompt, both in lengths)
    if 2 * dropped <= count:
        return
    columns = zip(("prompt_length", "sequence_length"), limits, map(sorted, zip(*lengths, strict=True)), strict=True)
    texts = [
        f"{name} {limit}, where they have {ordered[0]} to {ordered[-1]} tokens and "
        f"{ordered[math.ceil(SHARE_KEPT * count) - 1]} keeps {SHARE_KEPT:.0%}"
        for name, limit, ordered in columns
        if ordered[-1] > limit
    ]
    rows = f"all {count} rows" if dropped == count and whole else f"{dropped} of the first {count} rows"
    end = "; the run ends if it drops the others too" if dropped == count and not whole else ""
    add = report.error if dropped == count and whole else report.warn
    add("prompt_length", f"drops {rows}: they are longer than {' and '.join(texts)}{end}")


@cache
def _tokenizer(name: str) -> PreTrainedTokenizerBase:
    from roll.datasets.tokenizer import load_tokenizer

    return load_tokenizer(name)
