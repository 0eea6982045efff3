"""A step is explained by its own loss: what is computed again is what was logged, for every loss and correction."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from roll.algorithms.policy_loss import POLICY_LOSSES
from roll.base.errors import RunError
from roll.base.timers import StepClock
from roll.cli import main
from roll.report.explain import Explained, explain, half_of, shares, unusual
from roll.report.read import read_run
from roll.rollout.source import SampleBatch
from roll.trackers import make_trackers
from tests.pipeline.learning.test_learner import ASYNC, learner

RECOMPUTED = "old_log_probs_source=recompute"

SETTINGS = [
    *((f"actor_train.pg_variant={name}", mode) for name in POLICY_LOSSES for mode in (ASYNC, RECOMPUTED)),
    *(
        (f"loss_agg_mode={mode}", ASYNC)
        for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    ),
    (ASYNC, "correction.weights.level=token"),
    (ASYNC, RECOMPUTED, "correction.weights.level=sequence", "correction.weights.upper=1.01"),
    (RECOMPUTED, "correction.rejection.statistic=k1", "correction.rejection.lower=0.99"),
    (RECOMPUTED, "correction.rejection.statistic=k1", "correction.rejection.lower=0.99", "correction.renormalize=true"),
    ("actor_train.training_args.gradient_accumulation_steps=2",),
    ("actor_train.training_args.gradient_accumulation_steps=2", RECOMPUTED),
]


def run_of(folder: Path, *overrides: str) -> Path:
    """A run of three steps whose samples are of the first policy."""
    made, cluster = learner(folder, "prompt_length=8", "response_length=8", "sequence_length=16", *overrides)
    trackers = make_trackers(made._config)
    batches = [cluster.sample(step) for step in (1, 2, 3)]
    for step, data in enumerate(batches, start=1):
        batch = SampleBatch(data, {"staleness/max": step - 1.0})
        trackers.log(step, {"step": step, **asyncio.run(made.learn(batch, step, StepClock()))})
    return folder


def explained(folder: Path, step: int = 3) -> Explained:
    return explain(read_run(folder), step)


@pytest.mark.parametrize("overrides", SETTINGS, ids=" ".join)
def test_the_loss_computed_again_is_the_one_that_was_logged(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    folder = run_of(tmp_path, *overrides)
    for step in (1, 2, 3):
        found = explained(folder, step)
        assert found.differences == {} and found.unchecked == ""
        assert float(found.weights.sum()) > 0


def change(folder: Path, name: str, value: object) -> None:
    """Changes what the run logged in its last step."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[-1] = json.dumps({**json.loads(lines[-1]), name: value})
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_it_stops_with_both_numbers_where_the_log_has_another_loss(tmp_path: Path, capsys) -> None:
    folder = run_of(tmp_path, ASYNC)
    change(folder, "actor/pg_loss", 0.5)
    assert main(["explain", str(folder), "--step", "3"]) == 1
    said = capsys.readouterr().out
    assert "actor/pg_loss" in said and "0.5 logged" in said and "Who carried" not in said


def test_it_says_who_carried_the_weight_in_the_language_of_the_terminal(tmp_path: Path, capsys, monkeypatch) -> None:
    folder = run_of(tmp_path, ASYNC)
    for locale, words in (
        ("C.UTF-8", ("half of the weight is in", "negative")),
        ("zh_CN.UTF-8", ("一半的权重集中在", "负")),
    ):
        monkeypatch.setenv("LC_ALL", locale)
        assert main(["explain", str(folder)]) == 0
        said = capsys.readouterr().out.replace("\n", " ")
        assert all(word in said for word in words)
    found = explained(folder)
    for parts in shares(found).values():
        assert sum(weight for weight, _ in parts.values()) == pytest.approx(1)
        assert sum(tokens for _, tokens in parts.values()) == pytest.approx(1)
    assert 0 < half_of(found.weights.sum(-1)) <= len(found.rows)


def test_a_token_without_an_advantage_has_no_weight(tmp_path: Path) -> None:
    folder = run_of(tmp_path, ASYNC)
    file = folder / "samples" / "step-000003.parquet"
    table = parquet.read_table(file)
    before, advantages = explained(folder), table["advantages"].to_pylist()
    row, at = divmod(int(before.weights.argmax()), before.weights.shape[1])
    advantages[row][at] = 0.0
    columns = {name: table[name] for name in table.column_names} | {"advantages": advantages}
    parquet.write_table(pyarrow.table(columns, metadata=table.schema.metadata), file)
    after = explained(folder)
    before.weights[row, at] = 0.0
    assert after.weights.tolist() == before.weights.tolist() and "pg_loss" in after.differences


def test_unusual_are_metrics_far_from_the_ten_steps_before(tmp_path: Path) -> None:
    rows = [{"step": step, "actor/grad_norm": 1.0 + 0.01 * (step % 2), "actor/loss": 0.1} for step in range(1, 12)]
    rows[-1]["actor/grad_norm"] = 9.0
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [name for name, *_ in unusual(read_run(tmp_path), 11)] == ["actor/grad_norm"]
    assert unusual(read_run(tmp_path), 10) == []


@pytest.mark.parametrize("step", ["7", "2"])
def test_a_step_without_samples_is_an_error_that_names_the_ones_kept(tmp_path: Path, step: str, capsys) -> None:
    folder = run_of(tmp_path, ASYNC)
    (folder / "samples" / "step-000002.parquet").unlink()
    assert main(["explain", str(folder), "--step", step]) == 2
    assert "nearest" in capsys.readouterr().err


def test_samples_of_an_older_version_and_of_a_loss_that_is_not_finite_are_refused(tmp_path: Path) -> None:
    folder = run_of(tmp_path, ASYNC)
    change(folder, "actor/loss", None)
    with pytest.raises(RunError, match="not finite"):
        explained(folder)
    change(folder, "actor/loss", 0.5)
    (folder / "samples" / "step-000003.parquet").unlink()
    row = {"group": 0, "score": 1.0, "prompt_ids": [1], "response_ids": [2]}
    (folder / "samples" / "step-000003.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(RunError, match="older version"):
        explained(folder)


def test_of_several_policies_one_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(tmp_path)
    record = json.loads((tmp_path / "run.json").read_text())
    samples = Path(record["config"]["rollout_dump_dir"])
    record["config"]["policies"] = {"own": {"tags": ["default"]}}
    (tmp_path / "run.json").write_text(json.dumps(record))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rows = [{name if name == "step" else f"own/{name}": value for name, value in row.items()} for row in rows]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples.rename(tmp_path / "moved")
    samples.mkdir()
    (tmp_path / "moved").rename(samples / "own")
    assert main(["explain", str(tmp_path)]) == 2
    assert "--policy: is not given: the policies are own" in " ".join(capsys.readouterr().err.split())
    assert main(["explain", str(tmp_path), "--policy", "own"]) == 0
