"""Groups of a dump, and how trajectories, maps and long or unsafe texts are printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.console import Console, RenderableType
from rich.text import Text

from roll.configs.environments import SampleBy
from roll.rollout.types import Group
from roll.tools.show.formatting import cut_middle, sanitize, sanitize_line
from roll.tools.show.layout import CHANGED_STYLE, Texts, is_map, map_text, step_view
from roll.tools.show.samples import SampleGroup, groups_of, read_groups
from roll.tools.show.tokens import token_numbers
from tests.pages import DOCS
from tests.tools.show.dumped_runs import RIGHT, START, agentic_run, lake_groups, trajectory


def lines(view: RenderableType, width: int = 100) -> list[str]:
    console = Console(width=width, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(view)
    return [line.rstrip() for line in capture.get().split("\n")]


def groups(folder: Path, *arguments: Group, sample_by: SampleBy = "traj") -> list[SampleGroup]:
    run = agentic_run(folder / "run", 1, groups=list(arguments) or lake_groups(), sample_by=sample_by)
    return read_groups(run / "samples", 1)


def shown(folder: Path, *arguments: Group, limit: int | None = None, sample_by: SampleBy = "traj") -> list[str]:
    return lines(step_view(1, groups(folder, *arguments, sample_by=sample_by), limit, token_numbers))


def test_trajectory_is_shown_turn_by_turn_with_the_map_before_and_after(tmp_path: Path) -> None:
    output = shown(tmp_path)
    assert output[:4] == [
        "step 1: 3 trajectories in 2 groups, 3 with a gradient",
        "",
        " group 0   gradient 89.0%  FrozenLake  seed 77  scores 1 -0.01, mean 0.495  mean advantage -0.005",
        "  FrozenLake-12-1  advantage -0.510",
    ]
    start = output.index("  FrozenLake-12-0  advantage +0.500")
    assert output[start + 1 : start + 10] == [
        "    turn 1  reward 0  version 3",
        "      P__  ->  _P_  I go <answer>Right</answer>",
        "      _O_      _O_",
        "      __G      __G",
        "    turn 2  reward 1  versions 3, 4",
        "      _P_  ->  ___  <answer>Down</answer>",
        "      _O_      _O_",
        "      __G      __√",
        "    end  score 1  terminated: ended by the environment or the agent  success 1  action_is_valid 1",
    ]


def test_observation_without_map_is_shown_above_the_answer(tmp_path: Path) -> None:
    output = shown(tmp_path)
    start = output.index("      reads   Your guess?")
    assert output[start + 1 : start + 3] == ["      writes  I say <answer>7</answer>", "      then    Higher."]


def test_turns_that_were_samples_are_joined_into_a_trajectory(tmp_path: Path) -> None:
    by_step = groups(tmp_path / "step", sample_by="step")
    by_trajectory = groups(tmp_path / "traj")
    assert [group.scores for group in by_step] == [group.scores for group in by_trajectory]
    assert [len(group.samples) for group in by_step] == [2, 1]
    first = by_step[0].samples[0]
    assert [turn.observation for turn in first.turns] == [START, RIGHT]
    assert [turn.advantage for turn in first.turns] == [0.5, 0.5]


def sample(
    name: str, response: list[int], advantage: float, log_prob: float = -1.0, group: int = 0
) -> dict[str, object]:
    tokens = {"advantages": [advantage] * len(response), "behavior_log_probs": [log_prob] * len(response)}
    row = {"id": name, "prompt_id": name, "ground_truth": None, "group": group, "score": advantage, "prompt_ids": [9]}
    return {**row, "response_ids": response, "weight_version": [1] * len(response), **tokens}


def test_groups_stand_by_their_share_of_the_gradient_and_equal_responses_are_shown_once() -> None:
    """The gradient is in |advantage| (1 - probability): unlikely tokens have nearly all of it, and sure ones little."""
    rows = [sample("none", [1], 0.0), sample("sure", [2], 1.0, -0.001, 1), sample("sure", [3], -1.0, -0.001, 1)]
    rows += [sample("alike", [4, 5], 1.0, -3.0, 2)] * 3 + [sample("other", [6], -1.0, -9.0, 2)]
    output = lines(step_view(1, groups_of(rows), 3, token_numbers))
    assert output[0] == "step 1: 7 samples in 3 groups, 6 with a gradient"
    heads = [line.strip().split("  ")[0] for line in output[:-2] if "scores " in line or " score " in line]
    assert heads == ["group 2", "3 x alike", "other", "group 1", "sure"]
    assert output[-2] == "2 samples not shown; use --limit or --group to see more"


def test_tokens_are_tinted_by_their_weight_in_the_gradient() -> None:
    rows = [sample("up", [7], 1.0, -9.0), sample("down", [8], -0.2, -9.0), sample("flat", [9], 0.0)]
    texts = Texts(token_numbers, whole=False, most=1.0)
    shown_styles = [texts.show_response(each).spans for each in groups_of(rows)[0].samples]
    assert [[span.style for span in spans] for spans in shown_styles] == [["bold reverse green"], ["bold red"], []]


def test_limit_counts_over_groups_and_reports_what_is_omitted(tmp_path: Path) -> None:
    output = shown(tmp_path, limit=1)
    assert sum("turn 1" in line for line in output) == 1
    assert "2 trajectories not shown; use --limit or --group to see more" in output


def test_trajectory_cut_by_the_token_limit_shows_one_map(tmp_path: Path) -> None:
    cut = trajectory([(START, "", 0.0)], "", "sequence_length")
    output = shown(tmp_path, Group(1, "FrozenLake", 7, "FrozenLake-1", [cut]))
    assert "      P__  (nothing)" in output
    assert "    end  score 0  sequence_length: token limit reached  success 0  action_is_valid 1" in output


def test_control_characters_and_markup_are_escaped(tmp_path: Path) -> None:
    text = "[red]no[/red] [/] :smile:\x1b[2J\r\x07\x9b1m\u202eabc\ud800\u2028\t\\"
    harmful = trajectory([(text, text, 0.0)], text)
    output = shown(tmp_path, Group(1, "[bold]tag\n", 7, "[bold]tag\n-1", [harmful]))
    safe_form = "[red]no[/red] [/] :smile:\\x1b[2J\\r\\x07\\x9b1m\\u202eabc\\ud800\\u2028\\t\\"
    assert [line.split(maxsplit=1)[1] for line in output if ":smile:" in line] == [safe_form] * 3
    assert any("[bold]tag\\n  seed 7" in line for line in output)
    assert "\n".join(output).isascii()


def test_escapes_have_another_style_than_a_backslash_in_the_text() -> None:
    shown_text = sanitize("\\x1b\x1b")
    assert shown_text.plain == "\\x1b\\x1b"
    assert [(span.start, span.end) for span in shown_text.spans] == [(4, 8)]


@pytest.mark.parametrize("text", ["a" * 9000, "\n" * 900, "word " * 3000, "a" * 2001, "b\n" * 40])
def test_omitted_characters_of_a_long_text_are_counted(text: str) -> None:
    gap = r"\n\.\.\. ([\d,]+) characters omitted \.\.\.\n"
    head, omitted, tail = re.split(gap, cut_middle(sanitize(text)).plain)
    assert len(head) + int(omitted.replace(",", "")) + len(tail) == len(text)
    assert text.startswith(head) and text.endswith(tail) and (head + tail).count("\n") <= 40


@pytest.mark.parametrize("text", ["", "short", "a" * 2000, "b\n" * 39])
def test_short_text_is_unchanged(text: str) -> None:
    assert cut_middle(sanitize(text)).plain == text


def test_name_stays_on_one_line() -> None:
    assert sanitize_line("a\nb").plain == "a\\nb"
    assert sanitize_line("a" * 130).plain == "a" * 120 + "... 10 characters omitted"


@pytest.mark.parametrize(
    ("text", "expected"),
    [(START, True), ("##\n##\n", True), ("one row", False), ("ab\nabc", False), ("", False), ("a\x1b\nbc", False)],
)
def test_map_has_rows_of_equal_length(text: str, expected: bool) -> None:
    assert is_map(text) is expected


def test_changed_cells_are_highlighted() -> None:
    def changed(text: Text) -> list[int]:
        return [span.start for span in text.spans if span.style == CHANGED_STYLE]

    assert changed(map_text(RIGHT, START)) == [0, 1]
    assert changed(map_text(START, "____\n____")) == []


def test_example_in_the_docs_is_current(tmp_path: Path) -> None:
    page = (DOCS / "environments" / "trajectories.md").read_text(encoding="utf-8")
    example = page.split("```")[1].strip("\n").split("\n")
    assert shown(tmp_path)[1 : len(example)] == example[1:]


def test_the_branches_of_a_session_are_shown_one_after_the_other(tmp_path: Path) -> None:
    first, last = trajectory([("Add 1.", "Let me see.", 0.0)], ""), trajectory([("Check.", "Fine.", 1.0)], "")
    last.branches = [first]
    view = shown(tmp_path, Group(0, "Solver", 3, "Solver-0", [last]))
    said = [line.strip() for line in view]
    assert [line for line in said if line.startswith("branch")] == ["branch 1", "branch 2"]
    assert said.index("branch 1") < said.index("writes  Let me see.") < said.index("branch 2")
    assert any("1 trajectory in 1 group" in line for line in said)
    assert [line.split("  ")[1] for line in said if line.startswith("turn")] == ["reward 1", "reward 1"]
