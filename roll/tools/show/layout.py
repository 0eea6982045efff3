"""A training step as rich renderables: a header per group, then its responses or its trajectories turn by turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from roll.base.text import format_count
from roll.tools.show.formatting import (
    cut_middle,
    format_advantage,
    format_number,
    format_scores,
    format_versions,
    sanitize,
    sanitize_line,
)
from roll.tools.show.samples import SampleGroup, ShownSample, ShownTurn
from roll.tools.show.tokens import Pieces

MAX_MAP_WIDTH = 60
"""Maximum columns of a map, so that a second map fits next to it."""

STOP_REASONS = {
    "terminated": "ended by the environment or the agent",
    "truncated": "action limit reached",
    "sequence_length": "token limit reached",
}
"""Explanations of why a trajectory ended, by `stop` of the dump."""

OBSERVATION_STYLE, MODEL_STYLE, CHANGED_STYLE = "cyan", "green", "bold reverse"
"""Styles of observations, of texts of the model, and of map cells that a move changed."""

STRENGTHS = ((0.5, "bold reverse"), (0.1, "bold"), (0.01, ""))
"""Least weight in the gradient, as a fraction of the largest of a token of the step, and what is added to the style."""

LEGEND = Text.from_markup(
    "tokens that the step makes [green]more[/] or [red]less[/] likely; [bold reverse green]most of the gradient[/]\n"
)
"""Explains the styles of tokens."""


@dataclass(frozen=True)
class Texts:
    """Texts of models and environments; `most` is the largest weight of a token of the step in the gradient."""

    pieces: Pieces
    whole: bool
    most: float

    def show(self, text: str | Sequence[int], style: str) -> Text:
        """A text, or that of token ids."""
        return self._cut(sanitize(text if isinstance(text, str) else "".join(self.pieces(text)), style))

    def show_response(self, sample: ShownSample) -> Text:
        """A response, its tokens in styles by their weight in the gradient."""
        pieces, shown = self.pieces(sample.response_ids), Text()
        for piece, advantage, weight in zip_longest(pieces, sample.advantages, sample.weights):
            shown.append(sanitize(piece or "", self._token_style(advantage or 0.0, weight or 0.0)))
        return self._cut(shown)

    def _token_style(self, advantage: float, weight: float) -> str:
        strengths = [style for least, style in STRENGTHS if weight > 0 and weight >= least * self.most]
        return f"{strengths[0]} {'green' if advantage > 0 else 'red'}" if strengths else ""

    def _cut(self, text: Text) -> Text:
        return text if self.whole else cut_middle(text)


def step_view(
    step: int, groups: Sequence[SampleGroup], limit: int | None, pieces: Pieces, whole: bool = False
) -> RenderableType:
    """Samples of a step, those with most weight in the gradient first, equal ones once; `limit` is over all groups.

    `whole` leaves out nothing of a long text.
    """
    samples = [sample for group in groups for sample in group.samples]
    texts = Texts(pieces, whole, max((weight for sample in samples for weight in sample.weights), default=0.0))
    noun = "sample" if any(sample.episode is None for sample in samples) else "trajectory"
    head = f"step {step}: {format_count(len(samples), noun)} in {format_count(len(groups), 'group')}"
    if texts.most > 0:
        head += f", {sum(sample.weight > 0 for sample in samples):,} with a gradient"
    parts: list[RenderableType] = [Text(f"{head}\n", "bold")]
    total = sum(sample.weight for sample in samples) if len(groups) > 1 else 0.0
    left, hidden = limit, len(samples)
    for group in sorted(groups, key=lambda group: -group.weight):
        shown = group.distinct()[:left]
        if shown:
            parts.append(_group_view(group, shown, group.weight / total if total else None, texts))
        left = None if left is None else left - len(shown)
        hidden -= sum(map(len, shown))
    if hidden:
        parts.append(Text(f"{format_count(hidden, noun)} not shown; use --limit or --group to see more", "yellow"))
    return Group(*parts)


def _group_view(
    group: SampleGroup, shown: Sequence[Sequence[ShownSample]], share: float | None, texts: Texts
) -> RenderableType:
    first = group.samples[0]
    parts: list[RenderableType] = [_group_header(group, share)]
    if first.episode is None and all(sample.prompt_ids == first.prompt_ids for sample in group.samples):
        parts.append(Padding(texts.show(first.prompt_ids, OBSERVATION_STYLE), (0, 0, 1, 2), expand=False))
    for equal in shown:
        sample = equal[0]
        count = f"{len(equal)} x " if len(equal) > 1 else ""
        head = Text.assemble((count, "bold"), sanitize_line(sample.id, "bold"))
        parts.append((_response_view if sample.episode is None else _episode_view)(head, sample, texts))
    return Group(*parts)


def _group_header(group: SampleGroup, share: float | None) -> Text:
    first = group.samples[0]
    name = Text(f" group {group.number} ", "bold white on blue")
    if first.episode is not None:
        problem = [Text.assemble(sanitize_line(first.episode["tag"]), f"  seed {first.episode['seed']}")]
    else:
        problem = [Text.assemble("prompt ", sanitize_line(first.prompt_id))]
    if first.ground_truth is not None:
        problem.append(Text.assemble("ground truth ", sanitize_line(str(first.ground_truth), OBSERVATION_STYLE)))
    scores = [Text(f"scores {format_scores(group.scores)}"), format_advantage(group.advantage, "mean advantage")]
    learned = [] if share is None else [Text(f"gradient {share:.1%}")]
    return Text("  ").join([name, *learned, *problem, *scores])


def _response_view(head: Text, sample: ShownSample, texts: Texts) -> RenderableType:
    line = Text("  ").join(
        [
            head,
            Text(f"score {format_number(sample.score)}", "bold"),
            format_advantage(sample.advantage),
            format_versions(sample.versions),
            Text(f"{len(sample.response_ids)} tokens", "dim"),
        ]
    )
    text = Padding(texts.show_response(sample), (0, 0, 1, 2), expand=False)
    return Padding(Group(line, text), (0, 0, 0, 2), expand=False)


def _episode_view(head: Text, sample: ShownSample, texts: Texts) -> RenderableType:
    """Header, turns, and a line with score, stop reason and metrics."""
    parts: list[RenderableType] = [Text.assemble(head, "  ", format_advantage(sample.advantage))]
    turns, episode = sample.turns, sample.episode or {}
    outcome_in_map = False
    following = [*turns[1:], None]
    for index, (turn, after_it) in enumerate(zip(turns, following, strict=True)):
        if turn.branch and (not index or turn.branch != turns[index - 1].branch):
            parts.append(Text(f"  branch {turn.branch}", "bold cyan"))
        after = episode["outcome"] if after_it is None else after_it.observation
        same = after_it is None or turn.branch == after_it.branch
        outcome_in_map = same and is_map(turn.observation) and is_map(after)
        body = _turn_body(turn, after if outcome_in_map else "", texts)
        parts += [_turn_header(index + 1, turn), _indented(body, 4)]
    if episode["outcome"] and not outcome_in_map:
        parts.append(_indented(_labelled([("then", texts.show(episode["outcome"], OBSERVATION_STYLE))]), 4))
    return _indented(Group(*parts, _end_line(sample, episode), ""), 2)


def _turn_header(number: int, turn: ShownTurn) -> Text:
    reward = f"  reward {format_number(turn.reward)}  "
    line = Text.assemble((f"  turn {number}", "bold"), reward, format_versions(turn.versions))
    return Text.assemble(line, "  ", format_advantage(turn.advantage)) if turn.advantage is not None else line


def _turn_body(turn: ShownTurn, after: str, texts: Texts) -> Table:
    """Observation and answer; a map that the answer changed is followed by the map `after` it."""
    text = texts.show(turn.text, MODEL_STYLE) if turn.text else Text("(nothing)", "italic yellow")
    if not is_map(turn.observation):
        return _labelled([("reads", texts.show(turn.observation, OBSERVATION_STYLE)), ("writes", text)])
    maps = [map_text(turn.observation, after)]
    if after:
        maps += [Text("->", "dim"), map_text(after, turn.observation)]
    table = Table.grid(padding=(0, 2))
    for _ in maps:
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(*maps, text)
    return table


def _end_line(sample: ShownSample, episode: Mapping[str, Any]) -> Text:
    stop = str(episode["stop"])
    reason = Text(f"{stop}: {STOP_REASONS[stop]}") if stop in STOP_REASONS else sanitize_line(stop)
    score = Text.assemble(("  end", "bold"), ("  score ", "bold"), (format_number(sample.score), "bold"))
    metrics = [
        Text.assemble(sanitize_line(name), f" {format_number(value)}") for name, value in episode["metrics"].items()
    ]
    return Text("  ").join([score, reason, *metrics])


def is_map(text: str) -> bool:
    """Whether a text is a drawing of a grid: two or more printable rows of equal length, at most MAX_MAP_WIDTH."""
    rows = text.strip("\n").split("\n")
    width = len(rows[0])
    return len(rows) > 1 and 0 < width <= MAX_MAP_WIDTH and all(len(row) == width and row.isprintable() for row in rows)


def map_text(text: str, other: str) -> Text:
    """A map with the cells highlighted that differ from the other map, if both have the same size."""
    shown = Text(style=OBSERVATION_STYLE, no_wrap=True)
    cells, others = text.strip("\n"), other.strip("\n")
    comparable = other and [len(row) for row in cells.split("\n")] == [len(row) for row in others.split("\n")]
    for cell, other_cell in zip(cells, others if comparable else cells, strict=True):
        shown.append(cell, CHANGED_STYLE if cell != other_cell else None)
    return shown


def _labelled(lines: list[tuple[str, Text]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(width=len("writes"), style="dim")
    table.add_column(overflow="fold")
    for label, text in lines:
        table.add_row(label, text)
    return table


def _indented(content: RenderableType, columns: int) -> Padding:
    return Padding(content, (0, 0, 0, columns), expand=False)
