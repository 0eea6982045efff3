"""A training step as rich renderables: a header per group, then its responses or its trajectories turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from roll.tools.show.formatting import (
    format_advantage,
    format_count,
    format_number,
    format_scores,
    format_versions,
    sanitize,
    sanitize_line,
    sanitize_short,
)
from roll.tools.show.samples import SampleGroup, ShownEpisode, ShownSample, ShownTurn

Decode = Callable[[Sequence[int]], str]
"""f(token ids) -> text."""

MAX_MAP_WIDTH = 60
"""Maximum columns of a map, so that a second map fits next to it."""

STOP_REASONS = {
    "terminated": "ended by the environment",
    "truncated": "action limit reached",
    "sequence_length": "token limit reached",
}
"""Explanations of why a trajectory ended, by `stop` of the dump."""

OBSERVATION_STYLE, MODEL_STYLE, CHANGED_STYLE = "cyan", "green", "bold reverse"
"""Styles of observations, of texts of the model, and of map cells that a move changed."""


@dataclass(frozen=True)
class Texts:
    """Texts of models and environments, the middle of a long one left out unless they are shown as a `whole`."""

    decode: Decode
    whole: bool = False

    def show(self, text: str | Sequence[int], style: str) -> Text:
        """A text, or that of token ids."""
        text = text if isinstance(text, str) else self.decode(text)
        return sanitize(text, style) if self.whole else sanitize_short(text, style)


def step_view(
    step: int, groups: Sequence[SampleGroup], limit: int | None, decode: Decode, whole: bool = False
) -> RenderableType:
    """Samples of a step, group by group, at most `limit` over all groups; `whole` leaves out nothing of a long text."""
    texts = Texts(decode, whole)
    total = sum(len(group.samples) for group in groups)
    noun = "sample" if any(sample.episode is None for group in groups for sample in group.samples) else "trajectory"
    head = f"step {step}: {format_count(total, noun)} in {format_count(len(groups), 'group')}\n"
    parts: list[RenderableType] = [Text(head, "bold")]
    left = total if limit is None else limit
    for group in groups:
        if left > 0:
            parts.append(_group_view(group, left, texts))
        left -= len(group.samples)
    if left < 0:
        parts.append(Text(f"{format_count(-left, noun)} not shown; use --limit or --group to see more", "yellow"))
    return Group(*parts)


def _group_view(group: SampleGroup, limit: int, texts: Texts) -> RenderableType:
    first, shown = group.samples[0], group.samples[:limit]
    parts: list[RenderableType] = [_group_header(group)]
    if first.episode is None and all(sample.prompt_ids == first.prompt_ids for sample in group.samples):
        parts.append(Padding(texts.show(first.prompt_ids, OBSERVATION_STYLE), (0, 0, 1, 2), expand=False))
    for sample in shown:
        parts.append(
            _response_view(sample, texts) if sample.episode is None else _episode_view(sample, sample.episode, texts)
        )
    return Group(*parts)


def _group_header(group: SampleGroup) -> Text:
    episode = group.samples[0].episode
    name = Text(f" group {group.number} ", "bold white on blue")
    first = group.samples[0]
    if episode is not None:
        problem = [Text.assemble(sanitize_line(episode.tag), f"  seed {episode.seed}")]
    else:
        problem = [Text.assemble("prompt ", sanitize_line(first.prompt_id))]
    if first.ground_truth is not None:
        problem.append(Text.assemble("ground truth ", sanitize_line(str(first.ground_truth), OBSERVATION_STYLE)))
    scores = Text(f"scores {format_scores(group.scores)}")
    return Text("  ").join([name, *problem, scores, format_advantage(group.advantage, "mean advantage")])


def _response_view(sample: ShownSample, texts: Texts) -> RenderableType:
    head = Text("  ").join(
        [
            sanitize_line(sample.id, "bold"),
            Text(f"score {format_number(sample.score)}", "bold"),
            format_advantage(sample.advantage),
            format_versions(sample.versions),
            Text(f"{len(sample.response_ids)} tokens", "dim"),
        ]
    )
    text = Padding(texts.show(sample.response_ids, MODEL_STYLE), (0, 0, 1, 2), expand=False)
    return Padding(Group(head, text), (0, 0, 0, 2), expand=False)


def _episode_view(sample: ShownSample, episode: ShownEpisode, texts: Texts) -> RenderableType:
    """Header, turns, and a line with score, stop reason and metrics."""
    head = Text.assemble(sanitize_line(sample.id, "bold"), "  ", format_advantage(sample.advantage))
    parts: list[RenderableType] = [head]
    outcome_in_map = False
    for index, turn in enumerate(episode.turns):
        last = index + 1 == len(episode.turns)
        after = episode.outcome if last else episode.turns[index + 1].observation
        outcome_in_map = is_map(turn.observation) and is_map(after)
        body = _turn_body(turn, after if outcome_in_map else "", texts)
        parts += [_turn_header(index + 1, turn), _indented(body, 4)]
    if episode.outcome and not outcome_in_map:
        parts.append(_indented(_labelled([("then", texts.show(episode.outcome, OBSERVATION_STYLE))]), 4))
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


def _end_line(sample: ShownSample, episode: ShownEpisode) -> Text:
    stop = str(episode.stop)
    reason = Text(f"{stop}: {STOP_REASONS[stop]}") if stop in STOP_REASONS else sanitize_line(stop)
    score = Text.assemble(("  end", "bold"), ("  score ", "bold"), (format_number(sample.score), "bold"))
    metrics = [
        Text.assemble(sanitize_line(name), f" {format_number(value)}") for name, value in episode.metrics.items()
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
