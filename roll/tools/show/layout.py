"""A step as rich prints it: a header for each group, and its samples below."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from roll.tools.show.formatting import advantage, counted, number, safe_line, safe_short, scores, versions
from roll.tools.show.samples import Episode, Sample, SampleGroup, Turn

Decode = Callable[[Sequence[int]], str]
"""From token ids to text."""


def step_view(step: int, groups: Sequence[SampleGroup], limit: int | None, decode: Decode) -> RenderableType:
    """Everything of a step that is to be shown.

    Args:
        step: its number.
        groups: to show.
        limit: most samples in all; None shows all.
        decode: makes the text of responses; that of trajectories is in the dump.
    """
    total = sum(len(group.samples) for group in groups)
    noun = "sample" if any(sample.episode is None for group in groups for sample in group.samples) else "trajectory"
    head = f"step {step}: {counted(total, noun)} in {counted(len(groups), 'group')}\n"
    parts: list[RenderableType] = [Text(head, "bold")]
    left = total if limit is None else limit
    for group in groups:
        if left > 0:
            parts.append(_group_view(group, left, decode))
        left -= len(group.samples)
    if left < 0:
        parts.append(Text(f"{counted(-left, noun)} not shown; --limit and --group show others", "yellow"))
    return Group(*parts)


def _group_view(group: SampleGroup, limit: int, decode: Decode) -> RenderableType:
    first, shown = group.samples[0], group.samples[:limit]
    parts: list[RenderableType] = [group_header(group)]
    if first.episode is None and all(sample.prompt_ids == first.prompt_ids for sample in group.samples):
        parts.append(Padding(safe_short(decode(first.prompt_ids), OBSERVATION), (0, 0, 1, 2), expand=False))
    for sample in shown:
        parts.append(
            episode_view(sample, sample.episode) if sample.episode is not None else response_view(sample, decode)
        )
    return Group(*parts)


def group_header(group: SampleGroup) -> Text:
    """One line: what was compared, and what came of it."""
    episode = group.samples[0].episode
    name = Text(f" group {group.number} ", "bold white on blue")
    about = [Text.assemble(safe_line(episode.tag), f"  seed {episode.seed}")] if episode is not None else []
    told = Text(f"scores {scores(group.scores)}")
    return Text("  ").join([name, *about, told, advantage(group.advantage, "mean advantage")])


def response_view(sample: Sample, decode: Decode) -> RenderableType:
    """A response in one piece."""
    tokens = f"{len(sample.response_ids)} tokens"
    parts = [safe_line(sample.id, "bold"), Text(f"score {number(sample.score)}", "bold"), advantage(sample.advantage)]
    head = Text("  ").join([*parts, versions(sample.versions), Text(tokens, "dim")])
    text = Padding(safe_short(decode(sample.response_ids), MODEL), (0, 0, 1, 2), expand=False)
    return Padding(Group(head, text), (0, 0, 0, 2), expand=False)


WIDEST_MAP = 60
"""Columns of a drawing that still has room for another beside it."""

STOPS = {
    "terminated": "by the rules of the environment",
    "truncated": "no actions were left",
    "sequence_length": "no room was left in sequence_length",
}
"""Why a trajectory ended -> the same in words."""

OBSERVATION, MODEL, CHANGED = "cyan", "green", "bold reverse"
"""Styles: what the environment said, what the model wrote, cells of a map that its move changed."""


def episode_view(sample: Sample, episode: Episode) -> RenderableType:
    """Head, each turn, and how it ended."""
    parts: list[RenderableType] = [Text.assemble(safe_line(sample.id, "bold"), "  ", advantage(sample.advantage))]
    shown = False
    for place, turn in enumerate(episode.turns):
        last = place + 1 == len(episode.turns)
        after = episode.outcome if last else episode.turns[place + 1].observation
        shown = is_map(turn.observation) and is_map(after)
        parts += [_turn_line(place + 1, turn), _indented(_turn_body(turn, after if shown else ""), 4)]
    if episode.outcome and not shown:
        parts.append(_indented(_labelled([("then", safe_short(episode.outcome, OBSERVATION))]), 4))
    return _indented(Group(*parts, _end_line(sample, episode), ""), 2)


def is_map(text: str) -> bool:
    """Whether a text is the drawing of a grid: some rows, all as long and none too wide, and nothing to escape."""
    rows = text.strip("\n").split("\n")
    return len(rows) > 1 and {len(row) for row in rows} <= {len(rows[0])} and all(map(_is_row, rows))


def map_text(text: str, other: str) -> Text:
    """A drawing, in which the cells that differ from the other drawing stand out."""
    shown = Text(style=OBSERVATION, no_wrap=True)
    rows, others = text.strip("\n"), other.strip("\n")
    comparable = other and [len(row) for row in rows.split("\n")] == [len(row) for row in others.split("\n")]
    for cell, cell_other in zip(rows, others if comparable else rows, strict=True):
        shown.append(cell, CHANGED if cell != cell_other else None)
    return shown


def _indented(content: RenderableType, columns: int) -> Padding:
    return Padding(content, (0, 0, 0, columns), expand=False)


def _is_row(row: str) -> bool:
    return 0 < len(row) <= WIDEST_MAP and row.isprintable()


def _turn_line(place: int, turn: Turn) -> Text:
    line = Text.assemble((f"  turn {place}", "bold"), f"  reward {number(turn.reward)}  ", versions(turn.versions))
    return Text.assemble(line, "  ", advantage(turn.advantage)) if turn.advantage is not None else line


def _turn_body(turn: Turn, after: str) -> Table:
    text = safe_short(turn.text, MODEL) if turn.text else Text("(nothing)", "italic yellow")
    if not is_map(turn.observation):
        return _labelled([("reads", safe_short(turn.observation, OBSERVATION)), ("writes", text)])
    return _row(list(_before_and_after(turn.observation, after)), text)


def _before_and_after(before: str, after: str) -> Iterator[Text]:
    yield map_text(before, after)
    if after:
        yield Text("->", "dim")
        yield map_text(after, before)


def _row(fixed: list[Text], last: Text) -> Table:
    """Columns as wide as they need, and one that folds into what is left."""
    table = Table.grid(padding=(0, 2))
    for _ in fixed:
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(*fixed, last)
    return table


def _labelled(lines: list[tuple[str, Text]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(width=len("writes"), style="dim")
    table.add_column(overflow="fold")
    for label, text in lines:
        table.add_row(label, text)
    return table


def _end_line(sample: Sample, episode: Episode) -> Text:
    stop = str(episode.stop)
    reason = Text(f"{stop}: {STOPS[stop]}") if stop in STOPS else safe_line(stop)
    parts = [Text.assemble(("  end", "bold"), ("  score ", "bold"), (number(sample.score), "bold")), reason]
    parts += [Text.assemble(safe_line(name), f" {number(value)}") for name, value in episode.metrics.items()]
    return Text("  ").join(parts)
