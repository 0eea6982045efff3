"""The samples of a step as the page shows them: groups by weight, equal responses once, each token with its values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from roll.report.read import Run, is_number
from roll.report.text import digits
from roll.tools.show.samples import sample_weight
from roll.tools.show.tokens import Pieces, model_pieces, token_numbers

MOST_STEPS, MOST_GROUPS, MOST_ROWS, MOST_TOKENS, MOST_TURNS = 5, 12, 16, 4_000, 40
MOST_OF_STEP, MOST_OF_PROMPT = 20_000, 1_000
"""What of a run the page holds, of a step and of a prompt in tokens; how much was left out is said there."""


def shown_steps(run: Run) -> list[int]:
    """Kept steps that are spread over the run, the oldest and the newest among them; the newest first."""
    if not run.dumped:
        return []
    first, last = run.dumped[0], run.dumped[-1]
    wanted = [first + (last - first) * number / (MOST_STEPS - 1) for number in range(MOST_STEPS)]
    return sorted({min(run.dumped, key=lambda step: abs(step - each)) for each in wanted}, reverse=True)


def step_groups(run: Run, step: int, pieces: Pieces) -> dict[str, Any]:
    """The groups of a step with the most weight, for the page; JSON."""
    rows = run.samples(step)
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    weights = {number: sum(map(sample_weight, group)) for number, group in groups.items()}
    total, room = sum(weights.values()) or 1.0, MOST_OF_STEP
    shown: list[dict[str, Any]] = []
    for number in sorted(groups, key=lambda number: -weights[number])[:MOST_GROUPS]:
        if room > 0:
            shown.append(_group(groups[number], weights[number] / total, pieces, room))
            room -= sum(map(_size, shown[-1]["rows"]))
    return {"step": step, "groups": shown, "left": len(groups) - len(shown)}


def _group(rows: Sequence[dict[str, Any]], share: float, pieces: Pieces, room: int) -> dict[str, Any]:
    first, distinct = rows[0], dict[tuple[int, ...], list[dict[str, Any]]]()
    for row in rows:
        distinct.setdefault(tuple(row["response_ids"]), []).append(row)
    ordered = sorted(distinct.values(), key=lambda equal: -sum(map(sample_weight, equal)))
    shown: list[dict[str, Any]] = []
    for equal in ordered[:MOST_ROWS]:
        if room > 0:
            shown.append(_row(equal[0], len(equal), pieces))
            room -= _size(shown[-1])
    truth = first.get("ground_truth")
    return {
        "id": str(first.get("prompt_id", "")),
        "prompt": "" if "episode" in first else "".join(pieces(first["prompt_ids"][-MOST_OF_PROMPT:])),
        "truth": None if truth is None else str(truth)[:500],
        "mean": sum(row["score"] for row in rows) / len(rows),
        "share": share,
        "rows": shown,
        "left": len(ordered) - len(shown),
    }


def _size(row: Mapping[str, Any]) -> int:
    """Tokens of a row and, with four characters for one, of the texts of its turns."""
    return len(row["tok"]) + sum(len(turn["o"]) + len(turn["t"]) for turn in row["turns"]) // 4


def _row(row: Mapping[str, Any], count: int, pieces: Pieces) -> dict[str, Any]:
    ids = row["response_ids"][:MOST_TOKENS]
    mu, old = (_values(row, name, len(ids)) for name in ("behavior_log_probs", "old_log_probs"))
    trained = _values(row, "train_log_probs", len(ids)) if "train_log_probs" in row else old
    ratio = [_rounded(o - m) if o is not None and m is not None else None for o, m in zip(trained, mu, strict=True)]
    return {
        "n": count,
        "score": row["score"],
        "tok": pieces(ids),
        "cut": len(row["response_ids"]) - len(ids),
        "a": _values(row, "advantages", len(ids)),
        "lp": mu,
        "lr": ratio,
        "h": _values(row, "entropy", len(ids)),
        "of": _described(row),
        "v": _values(row, "weight_version", len(ids)),
        "turns": _turns(row["episode"]) if isinstance(row.get("episode"), dict) else [],
    }


def _described(row: Mapping[str, Any]) -> str:
    """Where a sample comes from and what its score is made of."""
    parts = row["parts"].items() if isinstance(row.get("parts"), dict) else ()
    facts = [f"{name} {digits(value)}" for name, value in parts if is_number(value)]
    facts += [f"engine {row['engine']}"] if isinstance(row.get("engine"), int) else []
    facts += [str(row["stop"])] if row.get("stop") not in (None, "terminated") else []
    return ", ".join(facts)[:200]


def _turns(episode: Mapping[str, Any]) -> list[dict[str, Any]]:
    turns = episode.get("turns")
    known = [turn for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
    return [
        {"o": str(turn.get("observation", ""))[:2000], "t": str(turn.get("text", ""))[:2000], "r": turn.get("reward")}
        for turn in known[:MOST_TURNS]
    ]


def _values(row: Mapping[str, Any], name: str, count: int) -> list[float | int | None]:
    values = row.get(name)
    known = values[:count] if isinstance(values, list) else []
    return [_rounded(value) for value in itertools.chain(known, itertools.repeat(None, count - len(known)))]


def _rounded(value: Any) -> float | int | None:
    if isinstance(value, int):
        return value
    return round(value, 3) if isinstance(value, float) and math.isfinite(value) else None


def token_pieces(run: Run) -> Pieces:
    """The texts of tokens by the tokenizer of the trained model; its numbers where there is none on this machine."""
    model = run.key("actor_train.model_args.model_name_or_path")
    folder = run.start / str(model)
    return model_pieces(str(folder)) if model and (folder / "tokenizer.json").is_file() else token_numbers
