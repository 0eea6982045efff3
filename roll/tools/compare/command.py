"""`roll compare RECIPE --with DUMP`: advantages, loss and gradient of another framework's batch by our formulas."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from roll.base.errors import ConfigError
from roll.base.terminal import make_console
from roll.hub.names import local_model
from roll.tools.terminal import option_error

if TYPE_CHECKING:
    from torch import Tensor

    from roll.configs.pipeline import LearnerOptions
    from roll.tools.compare.batch_dump import BatchDump
    from roll.tools.compare.formulas import AdvantageFormula, Scored

SHOWN = 6
"""Formulas in the table."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `roll compare`."""
    text = "verl's rollout_data_dir/STEP.jsonl, slime's debug data (.pt), or TRL's completions_STEP.parquet"
    parser.add_argument("--with", dest="dump", type=Path, required=True, metavar="DUMP", help=text)
    text = "columns of TRL that are rewards, such as a,b:0.5 with a weight, or the key of slime's rewards"
    parser.add_argument("--rewards", default="", metavar="NAMES", help=text)
    text = "also the gradient norm of the weights: a forward and backward pass of the model in pretrain on this CPU"
    parser.add_argument("--gradient", action="store_true", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Prints the comparison.

    Raises:
        ConfigError: the recipe has no rewards, or the dump is of no known format.
    """
    from roll.configs.pipeline import RLConfig
    from roll.loading.load import load_config

    config = load_config(arguments.config, arguments.overrides)
    if not isinstance(config, RLConfig):
        raise option_error("pipeline", f"{config.pipeline} has no advantages; use a recipe of rlvr or agentic")
    rewards = [name for name in arguments.rewards.split(",") if name]
    dump = read_dump(arguments.dump, rewards)
    if arguments.gradient and dump.ids is None:
        raise option_error("--gradient", f"{arguments.dump} has no token ids; use slime's debug data")
    console = make_console()
    for part in comparison(config, dump, config.num_return_sequences_in_group, arguments.gradient):
        console.print(part, highlight=False)
    return 0


def read_dump(path: Path, rewards: list[str]) -> BatchDump:
    """A dump by the ending of its name.

    Raises:
        ConfigError: there is no such file, or it is of no known format.
    """
    if not path.is_file():
        raise option_error("--with", f"{path} is not a file; give a file of one step")
    from roll.tools.compare.read_slime import read_slime
    from roll.tools.compare.read_trl import read_trl
    from roll.tools.compare.read_verl import read_verl

    readers = {".jsonl": read_verl, ".pt": read_slime, ".parquet": read_trl}
    if path.suffix not in readers:
        raise option_error("--with", f"{path} ends in {path.suffix or 'nothing'}; use {', '.join(readers)}")
    most = {".jsonl": 0, ".pt": 1}.get(path.suffix, len(rewards))
    if len(rewards) > most:
        raise option_error("--rewards", f"{','.join(rewards)}; a file {path.suffix} has at most {most} to name")
    return readers[path.suffix](path, rewards)


def comparison(config: LearnerOptions, dump: BatchDump, group_size: int, gradient: bool) -> Iterator[str | Table]:
    """What is printed: the batch, advantages, loss, gradient of the weights."""
    import torch

    from roll.algorithms.estimators import ADV_ESTIMATORS
    from roll.tools.compare.batch_dump import batch_tensors, group_numbers
    from roll.tools.compare.formulas import Scored

    count = None if dump.ids is not None else _token_counter(config)
    tensors, groups = batch_tensors(dump, count), group_numbers(dump, group_size)
    parts = torch.tensor(list(dump.parts.values())).T if dump.parts else None
    scored = Scored(torch.tensor(dump.scores), groups, tensors["response_mask"], parts, dump.weights)
    sizes = torch.bincount(groups)
    yield f"{dump.system}: {len(groups)} samples of {len(sizes)} prompts, {int(sizes.min())} to {int(sizes.max())} each"
    yield f"not in this dump: {', '.join(dump.lacks) or 'nothing'}"
    yield from (escape(note) for note in dump.notes)
    if dump.ids is None:
        unknown = "unknown, as pretrain is not on this machine; each response counts as one token"
        yield f"lengths: {'of the texts, by the tokenizer of pretrain' if count else unknown}"
    ours, reason = _ours(config, scored, tensors)
    theirs = tensors.get("advantages")
    if theirs is None and dump.alone_is_score and config.adv_estimator == "grpo":
        options: Any = config.advantages.options_of(ADV_ESTIMATORS["grpo"])
        theirs = scored.of_verl(options.grpo_norm_by_std)
        yield "\nadvantages: not in the dump; those of verl's grpo are computed from its scores"
    if ours is None:
        yield f"\nadvantages of the recipe: not computed; {reason}"
    else:
        kept = ours[tensors["response_mask"]]
        yield f"\nadvantages of the recipe ({config.adv_estimator}): {float(kept.min()):.6g} to {float(kept.max()):.6g}"
    if theirs is not None:
        formulas = list(scored.formulas())
        yield from _advantages(config, formulas, ours, theirs)
    chosen = ours if theirs is None else theirs
    if chosen is None:
        return
    if dump.ids is None and count is None:
        yield "\nloss: not computed; it needs the lengths of the responses"
        return
    yield from _loss(config, tensors | {"advantages": chosen}, gradient)


def _token_counter(config: LearnerOptions) -> Callable[[str], int] | None:
    if config.pretrain is None or not local_model(config.pretrain).is_dir():
        return None
    from roll.datasets.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(config.pretrain)
    except (ConfigError, OSError, ValueError):
        return None

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    return count if count("a") else None  # a folder without a vocabulary gives a tokenizer of no words


def _ours(config: LearnerOptions, scored: Scored, tensors: dict[str, Tensor]) -> tuple[Tensor | None, str]:
    """The advantages of the recipe, or why there are none."""
    known = {"log_probs": tensors.get("old_log_probs"), "ref_log_probs": tensors.get("ref_log_probs")}
    try:
        return scored.of_recipe(config.advantages, **known, kl_coef=config.init_kl_coef), ""
    except ValueError as error:
        return None, str(error)


def _advantages(
    config: LearnerOptions, formulas: list[AdvantageFormula], ours: Tensor | None, theirs: Tensor
) -> Iterator[str | Table]:
    from roll.tools.compare.formulas import MATCHES, closest

    ordered = closest(formulas, theirs)
    first = ordered[0]
    if ours is not None:
        distance = float((ours - theirs).abs().max())
        same = distance <= MATCHES * max(1.0, float(theirs.abs().max()))
        verdict = "the recipe gives theirs" if same else "the recipe gives others"
        yield f"\nadvantages: {verdict}; largest difference {distance:.3g} (adv_estimator: {config.adv_estimator})"
    if not first.matches(theirs):
        yield "theirs are of none of the known formulas; the nearest come first"
    elif first.exact:
        yield f"theirs: {escape(first.text)}; here {first.key_text}"
    else:
        nearest = next(each for each in formulas if each.exact and each.keys == first.keys)
        yield (
            f"theirs: {escape(first.text)}; no key gives it, the nearest is {first.key_text}, "
            f"which differs by at most {nearest.distance(theirs):.3g}"
        )
    table = Table("formula", "keys here", "largest difference", title="Formulas", title_justify="left")
    for each in ordered[:SHOWN]:
        keys = each.key_text if each.exact else f"none; nearest {each.key_text}"
        table.add_row(escape(each.text), keys, f"{each.distance(theirs):.3g}")
    yield table


def _loss(config: LearnerOptions, tensors: dict[str, Tensor], gradient: bool) -> Iterator[str | Table]:
    from roll.tools.compare.batch_loss import batch_losses, first_step_settings, weight_gradient

    settings, left_out = first_step_settings(config.policy, tensors)
    policy = "old_log_probs" if "old_log_probs" in tensors else "behavior_log_probs"
    at = f"the policy of {policy}" if policy in tensors else "a ratio of 1, as there are no log-probs"
    yield f"\nloss of the first optimizer step over the whole batch, at {at}"
    yield from (f"left out: {each}" for each in left_out)
    title = f"Loss, pg_variant {settings.pg_variant}"
    table = Table("loss_agg_mode", "loss", "norm of d loss / d log-probs", title=title, title_justify="left")
    try:
        for each in batch_losses(tensors, settings, config.max_sequence_length):
            mark = " (recipe)" if each.mode == config.loss_agg_mode else ""
            table.add_row(each.mode + mark, f"{each.loss:.6g}", f"{each.log_prob_gradient:.6g}")
    except (KeyError, ValueError) as error:
        yield f"not computed: the loss needs {error}"
        return
    yield table
    if not gradient:
        return
    try:
        found = weight_gradient(config, tensors, settings)
    except (ValueError, RuntimeError) as error:
        raise option_error("--gradient", str(error)) from None
    yield f"gradient norm of the weights of pretrain: {found.norm:.6g}, at loss {found.loss:.6g}"
    if policy in tensors:
        apart = (found.log_probs - tensors[policy]).abs()[tensors["response_mask"]].mean()
        yield f"mean difference of its log-probs to {policy} of the dump: {float(apart):.3g}"
