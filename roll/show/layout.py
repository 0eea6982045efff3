"""A step as rich prints it: a header for each group, and its samples below."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from roll.show.episodes import MODEL, OBSERVATION, episode_view
from roll.show.plain_text import safe_line, safe_short
from roll.show.samples import Sample, SampleGroup
from roll.show.words import advantage, counted, number, scores, versions

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
