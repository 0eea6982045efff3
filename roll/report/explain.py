"""Which tokens moved the weights in a step: its loss computed again from its samples, by the same code.

    weight of a token = |d loss / d log pi| (1 - pi)

Clipping, rejection, weights, masks and aggregation are in the derivative. The second factor makes it the norm of the
gradient of the token's logits, within sqrt(2): a token that was certain cannot move them. It is not the gradient of the
parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from roll.algorithms.aggregation import SAMPLE_WEIGHTS, LossScale, mean_one
from roll.algorithms.losses import LOSSES
from roll.algorithms.options.policy_options import PolicySettings
from roll.base.custom_modules import use_custom_modules
from roll.base.errors import RunError
from roll.base.schema import Converter
from roll.report.read import Run
from roll.report.samples import token_pieces
from roll.report.text import digits, percent, said
from roll.trackers.sample_files import read_about

CHECKED = ("loss", "pg_loss", "ratio_mean", "ratio_max", "clip_fraction", "policy_kl")
"""Metrics of the training that must equal the logged ones."""

SINGLE, HALF = 1e-5, 2e-2
"""Relative difference to the logged metrics that is allowed in fp32 and in half precision."""

LEAST = 1e-6
"""Absolute difference that is always allowed: terms of both signs cancel in the loss."""

GROUPS, TOKENS, UNUSUAL, CONTEXT = 5, 5, 8, 8
"""Groups, tokens and metrics that are shown, and tokens on both sides of one."""

TOKEN_TENSORS = ("old_log_probs", "ref_log_probs", "correction_weights", "correction_kept", "high_covariance")


@dataclass(frozen=True)
class Explained:
    """The samples of a step with the weights of their tokens.

    Attributes:
        rows: of the dump.
        moved: d loss / d log pi of each token [B, T].
        weights: of each token [B, T].
        differences: metrics that are not as the run logged them: computed again, and logged.
        unchecked: why the metrics were not compared; empty where they were.
    """

    step: int
    rows: Sequence[Mapping[str, Any]]
    moved: Tensor
    weights: Tensor
    differences: Mapping[str, tuple[float, float]]
    unchecked: str = ""

    def probability(self, row: int, at: int) -> float:
        """Of a token, under the policy that learned from it."""
        return math.exp(self.rows[row]["train_log_probs"][at])


def explain(run: Run, step: int) -> Explained:
    """The loss of a step, computed again.

    Raises:
        RunError: its samples cannot be read, lack what the loss reads, or gave a loss that is not finite.
    """
    rows = run.samples(step)
    if not rows or run.dump is None:
        raise RunError(f"{step} has no samples that can be read; choose another step")
    if any(row["step"] == step and row.get("actor/loss", 0.0) is None for row in run.rows):
        raise RunError(f"{step} has a loss that is not finite, which no token explains; choose an earlier step")
    about = read_about(run.dump, step)
    if not about or "train_log_probs" not in rows[0]:
        raise RunError(f"{step} is of an older version, without the log-probs of training; `roll show` prints it")
    settings = _settings(run, about["policy"])
    if settings.opd_top_k is not None:
        raise RunError(f"{step} has a loss of teacher's tokens (opd_top_k), which are not kept; `roll show` prints it")
    parts = [_update(rows, number, settings, about) for number in sorted({row["update"] for row in rows})]
    moved, weights = torch.zeros(len(rows), _width(rows)), torch.zeros(len(rows), _width(rows))
    for places, gradient, values, _ in parts:
        moved[places, : gradient.shape[1]], weights[places, : values.shape[1]] = gradient, values
    passes = int(about["passes"])
    unchecked = f"ppo_epochs: {passes} passes, and the log-probs of the first are kept" if passes > 1 else ""
    found = {} if unchecked else _differences(run, step, [metrics for *_, metrics in parts])
    return Explained(step, rows, moved, weights, found, unchecked)


def _settings(run: Run, values: Mapping[str, Any]) -> PolicySettings:
    use_custom_modules(run.key("custom_modules") or [])
    converter = Converter(lambda *_: [])
    return converter.overlay(dict(values), PolicySettings(pg_variant=values["pg_variant"]))


def _width(rows: Sequence[Mapping[str, Any]]) -> int:
    return max(len(row["response_ids"]) for row in rows)


def _update(
    rows: Sequence[Mapping[str, Any]], number: int, settings: PolicySettings, about: Mapping[str, Any]
) -> tuple[list[int], Tensor, Tensor, dict[str, float]]:
    """Places of the samples of an optimizer step, their gradient and weights [b, T], and the metrics of the loss."""
    places = [place for place, row in enumerate(rows) if row["update"] == number]
    chosen = [rows[place] for place in places]
    micro = _tensors(chosen)
    mask = micro["response_mask"]
    counted = micro["correction_kept"] if settings.correction.renormalize else mask
    scale = LossScale(float(counted.sum()), float(counted.any(-1).sum()), int(about["length"]))
    log_probs = _padded(chosen, "train_log_probs").requires_grad_()
    first = bool(about["first_gives_old"]) and number == min(row["update"] for row in rows)
    settings = replace(settings, first_step=first)
    loss, metrics = LOSSES["policy"](log_probs, _padded(chosen, "entropy"), micro, scale, settings)
    loss.backward()
    assert log_probs.grad is not None
    weights = log_probs.grad.abs() * (1 - log_probs.detach().exp())
    found = {"loss": loss.detach(), **metrics}
    return places, log_probs.grad, weights, {name: float(value) for name, value in found.items()}


def _tensors(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """What the loss reads, for the tokens of the responses [b, T] side by side."""
    there = torch.zeros(len(rows), _width(rows), dtype=torch.bool)
    for place, row in enumerate(rows):
        there[place, : len(row["response_ids"])] = True
    mask = _padded(rows, "learned").bool() if "learned" in rows[0] else there
    micro = {name: _padded(rows, name) for name in ("advantages", "behavior_log_probs")}
    micro |= {name: _padded(rows, name) for name in TOKEN_TENSORS if name in rows[0]}
    micro |= {name: micro[name].bool() for name in ("correction_kept", "high_covariance") if name in micro}
    if "correction_kept" in micro:
        micro["correction_kept"] &= mask
    if "turn_index" in rows[0]:
        micro["turn_index"] = torch.where(there, _padded(rows, "turn_index").long(), -1)
    if "sample_weight" in rows[0]:
        weights = torch.tensor([row["sample_weight"] for row in rows])
        micro[SAMPLE_WEIGHTS] = mean_one(weights, range(len(rows)), mask.any(-1))
    return {**micro, "response_mask": mask, "scores": torch.tensor([row["score"] for row in rows])}


def _padded(rows: Sequence[Mapping[str, Any]], name: str) -> Tensor:
    values = torch.zeros(len(rows), _width(rows))
    for place, row in enumerate(rows):
        values[place, : len(row[name])] = torch.tensor(row[name], dtype=torch.float32)
    return values


def _differences(run: Run, step: int, updates: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    logged = next((row for row in run.rows if row["step"] == step), {})
    allowed = SINGLE if run.key("actor_train.model_args.dtype") == "fp32" else HALF
    found = {}
    for name in CHECKED:
        values = [metrics[name] for metrics in updates if name in metrics]
        known = logged.get(f"actor/{name}")
        if not values or known is None:
            continue
        again = max(values) if name.endswith("_max") else fmean(values)
        if abs(again - known) > allowed * abs(known) + LEAST:
            found[name] = again, known
    return found


NAMED_PARTS = ("e_advantage", "e_position", "e_loss")
"""Ways whose parts are texts that are translated; parts of other ways are names and numbers."""


def shares(explained: Explained) -> Mapping[str, Mapping[str, tuple[float, float]]]:
    """Shares of weight and tokens by tag, sign of the advantage, age, engine, position and gradient, by key of text."""
    ways: dict[str, Callable[[Mapping[str, Any], int], str]] = {
        "e_tag": lambda row, at: str(row.get("tag", "")),
        "e_advantage": lambda row, at: _sign(row["advantages"][at]),
        "e_age": lambda row, at: str(explained.step - 1 - row["weight_version"][at]),
        "e_engine": lambda row, at: str(row.get("engine", "")),
        "e_position": lambda row, at: _position(at, len(row["response_ids"])),
    }
    tokens = [(place, at) for place, row in enumerate(explained.rows) for at in range(len(row["response_ids"]))]
    total, weights = float(explained.weights.sum()) or 1.0, explained.weights.tolist()
    moved = explained.moved.tolist()
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for place, at in tokens:
        row = explained.rows[place]
        parts = {way: part(row, at) for way, part in ways.items()}
        parts["e_loss"] = "e_unmoved" if moved[place][at] == 0 and row["advantages"][at] else "e_moved"
        for way, part in parts.items():
            weight, count = found.setdefault(way, {}).get(part, (0.0, 0.0))
            found[way][part] = weight + weights[place][at] / total, count + 1 / len(tokens)
    return {way: dict(sorted(each.items(), key=lambda item: -item[1][0])) for way, each in found.items()}


def _sign(advantage: float) -> str:
    return "e_positive" if advantage > 0 else "e_negative" if advantage < 0 else "e_zero"


def _position(at: int, length: int) -> str:
    return "e_end" if at == length - 1 else ("e_first_third", "e_middle_third", "e_last_third")[3 * at // length]


def half_of(weights: Tensor) -> int:
    """The fewest entries with half of the sum."""
    ordered = weights.flatten().sort(descending=True).values.double()
    return 0 if not float(ordered.sum()) else int((ordered.cumsum(0) < ordered.sum() / 2).sum()) + 1


def unusual(run: Run, step: int) -> list[tuple[str, float, float]]:
    """Metrics of the step further than four standard deviations from their mean in the ten steps before, with it."""
    rows = {int(row["step"]): row for row in run.steps}
    before = [rows[number] for number in range(max(1, step - 10), step) if number in rows]
    found = []
    for name, value in rows.get(step, {}).items():
        past = [row[name] for row in before if row.get(name) is not None]
        if len(past) < 5 or value is None or name.startswith(("time/", "ledger/", "queue/", "memory/")):
            continue
        mean = fmean(past)
        spread = (sum((each - mean) ** 2 for each in past) / len(past)) ** 0.5
        if abs(value - mean) > max(4 * spread, 0.05 * abs(mean), 1e-9) and name not in ("step", "version"):
            found.append((abs(value - mean) / max(spread, 1e-9), name, value, mean))
    return [(name, value, mean) for _, name, value, mean in sorted(found, reverse=True)]


def views(run: Run, explained: Explained) -> list[Table | str]:
    """What is printed: sentences, then tables of shares, groups, tokens, and unusual metrics."""
    carried = [_shares(explained), *_examples(run, explained)] if bool(explained.moved.any()) else []
    return [_sentences(explained), *carried, _unusual(run, explained.step)]


def _sentences(explained: Explained) -> str:
    moved, weights = explained.moved != 0, explained.weights
    if not bool(moved.any()):
        return said("e_none", step=explained.step)
    half = said(
        "e_half",
        step=explained.step,
        samples=f"{half_of(weights.sum(-1)):,}",
        all_samples=f"{len(explained.rows):,}",
        tokens=f"{half_of(weights):,}",
        all_tokens=f"{sum(len(row['response_ids']) for row in explained.rows):,}",
        moved=f"{int(moved.any(-1).sum()):,}",
        moved_tokens=f"{int(moved.sum()):,}",
    )
    return f"{half}\n{said('e_checked', what=explained.unchecked or said('e_equal'))}\n"


def _table(title: str, *columns: str) -> Table:
    return Table(*(said(name) if name else "" for name in columns), title=said(title), title_justify="left")


def _shares(explained: Explained) -> Table:
    table = _table("e_shares", "e_by", "", "e_of_weight", "e_of_tokens")
    for way, parts in shares(explained).items():
        if len(parts) > 1 or way in NAMED_PARTS:
            for number, (part, (weight, tokens)) in enumerate(list(parts.items())[:6]):
                name = said(part) if way in NAMED_PARTS else escape(part)
                table.add_row("" if number else said(way), name, percent(weight), percent(tokens))
    return table


def _examples(found: Run, explained: Explained) -> list[Table]:
    """The groups and the tokens with the most weight."""
    pieces, rows, weights = token_pieces(found), explained.rows, explained.weights
    total = float(weights.sum()) or 1.0
    by_group: dict[int, float] = {}
    for row, weight in zip(rows, weights.sum(-1).tolist(), strict=True):
        by_group[row["group"]] = by_group.get(row["group"], 0.0) + weight / total
    groups = _table("e_groups", "e_weight", "e_scores", "e_prompt")
    for number in sorted(by_group, key=lambda each: -by_group[each])[:GROUPS]:
        samples = [row for row in rows if row["group"] == number]
        scores = " ".join(digits(row["score"]) for row in samples[:8]) + (" ..." if len(samples) > 8 else "")
        groups.add_row(percent(by_group[number]), scores, _one_line(pieces(samples[0]["prompt_ids"][-60:])))
    tokens = _table("e_tokens", "e_weight", "e_p", "e_advantage", "e_token")
    width = weights.shape[1]
    for flat in weights.flatten().argsort(descending=True)[:TOKENS].tolist():
        row, at = rows[flat // width], flat % width
        if at >= len(row["response_ids"]) or not float(weights[flat // width, at]):
            continue
        first = max(0, at - CONTEXT)
        shown = pieces(row["response_ids"][first : at + CONTEXT])
        text = f"{_one_line(shown[: at - first])}[bold]»{_one_line(shown[at - first :][:1])}«[/]"
        tokens.add_row(
            percent(float(weights[flat // width, at]) / total),
            f"{explained.probability(flat // width, at):.2g}",
            digits(row["advantages"][at]),
            text + _one_line(shown[at - first + 1 :]),
        )
    return [groups, tokens]


def _one_line(pieces: Sequence[str]) -> str:
    return escape("".join(pieces).replace("\n", "\\n")[-120:])


def _unusual(found: Run, step: int) -> Table | str:
    metrics = unusual(found, step)
    if not metrics:
        return said("e_usual")
    table = _table("e_unusual", "e_metric", "e_this_step", "e_before")
    for name, value, mean in metrics[:UNUSUAL]:
        table.add_row(name, digits(value), digits(mean))
    return table
