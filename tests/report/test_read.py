"""A run in any state has values: what is damaged is left out and named."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roll.base.errors import ConfigError
from roll.report.page import make_page
from roll.report.read import read_run
from tests.report.runs import sample, write_run
from tests.report.test_page import payload


def test_a_folder_without_files_of_a_run_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="give the output_dir of a run"):
            read_run(folder)


def test_numbers_that_cannot_be_computed_with_are_absent_and_the_page_is_json(tmp_path: Path) -> None:
    write_run(tmp_path, steps=2, samples=[sample(0, 1.0, math.nan, [1, 2], behavior_log_probs=[math.nan, -1.0])])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 3, "actor/loss": 1{"0" * 400}, "actor/grad_norm": 1e300}}\n')
    assert read_run(tmp_path).rows[-1] == {"step": 3, "actor/loss": None, "actor/grad_norm": None}
    assert "NaN" not in json.dumps(payload(make_page([read_run(tmp_path)])))


def test_rows_are_those_of_whole_lines_and_the_last_of_a_repeated_step(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "actor/loss": 9.0}\nnonsense\n{"step": 4, "actor/lo')
    run = read_run(tmp_path)
    assert [row["step"] for row in run.rows] == [0, 1, 2, 3]
    assert run.rows[-1] == {"step": 3, "actor/loss": 9.0}
    assert list(run.remarks) == ["metrics.jsonl: 2 damaged lines"]


@pytest.mark.parametrize(
    ("summary", "health", "status"),
    [
        ("finished", None, "finished"),
        ("failed", {"status": "running", "valid_until": 1.0}, "failed"),
        (None, None, "running"),
        (None, {"status": "running", "valid_until": 200.0}, "running"),
        (None, {"status": "running", "valid_until": 99.0}, "died"),
        (None, {"status": "interrupted"}, "interrupted"),
    ],
)
def test_status(tmp_path: Path, summary: str | None, health: dict[str, object] | None, status: str) -> None:
    write_run(tmp_path, steps=1, status=summary)
    if health is not None:
        (tmp_path / "health.json").write_text(json.dumps(health))
    assert read_run(tmp_path, now=100.0).status == status


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
known = st.sampled_from(
    (
        "step config summary status source given exp_name rollout_dump_dir val/score group score prompt_ids origin "
        "response_ids advantages episode turns weight_version ledger/submitted time/step actor/grad_norm message "
        "throughput/trainer_idle ledger/dropped_x staleness/token_max who what start end number version "
        "lengths scores engines dropped failure parts engine entropy train_log_probs behavior_log_probs time commit "
        "devices rewards"
    ).split()
)
objects = st.dictionaries(known, json_values, max_size=6).map(json.dumps)
contents = st.binary(max_size=200) | st.lists(objects, max_size=12).map(lambda lines: "\n".join(lines).encode())


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(metrics=contents, record=contents, events=contents, history=contents, dump=contents)
def test_any_files_have_a_page(
    tmp_path: Path, metrics: bytes, record: bytes, events: bytes, history: bytes, dump: bytes
) -> None:
    write_run(tmp_path, steps=2, samples=[sample(0, 1.0, 1.0, [1])])
    (tmp_path / "metrics.jsonl").write_bytes(metrics)
    (tmp_path / "events.jsonl").write_bytes(events)
    for name in ("spans", "groups"):
        (tmp_path / f"{name}.jsonl").write_bytes(history)
    (tmp_path / "samples" / "step-000002.jsonl").write_bytes(dump)
    assert make_page([read_run(tmp_path)]).endswith("</html>")
    (tmp_path / "run.json").write_bytes(record)
    assert make_page([read_run(tmp_path)]).endswith("</html>")
