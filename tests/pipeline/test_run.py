"""Order, counters and resume of the training loop, with parts in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.base.errors import RunError, RunInterrupted
from roll.base.timers import StepClock
from roll.configs.agentic import AgenticConfig
from roll.configs.pipeline import BaseConfig, RLVRConfig
from roll.datasets.batch import Batch
from roll.distributed.calls.remote_errors import PROCESS_DIED, TIMEOUT, ClusterError
from roll.distributed.weights.report import UpdateReport
from roll.pipeline.checkpoint import CheckpointManager
from roll.pipeline.launch import run_with_restarts
from roll.pipeline.run import TrainingLoop
from roll.rollout.source import SampleBatch
from roll.trackers.files import DiskFullError, JsonlTracker, read_metrics


class Counting:
    """Sample source, learner and weight synchronizer in one: counts batches and updates, and records the calls."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.drawn = 0
        self.weights = 0
        self.version = 0

    async def next_batch(self) -> SampleBatch | None:
        self.drawn += 1
        self.events.append(f"batch {self.drawn} at version {self.version}")
        data = Batch({"attention_mask": torch.ones(2, 3, dtype=torch.int64)})
        return SampleBatch(data, {"rollout/reward_mean": float(self.drawn)}, {"generate": 0.5})

    async def validate(self) -> dict[str, float]:
        self.events.append(f"validate version {self.version}")
        return {"val/score": float(self.weights)}

    async def stop(self) -> None:
        self.events.append("stop")

    async def advance(self, version: int) -> None:
        self.events.append(f"advance {version}")

    async def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]

    async def learn(self, batch: SampleBatch, step: int, clock: StepClock) -> dict[str, float]:
        self.weights += 1
        self.events.append("learn")
        return {"actor/loss": 1.0 / self.weights}

    async def finish_step(self) -> dict[str, float]:
        return {"memory/actor_train_used": 1.0}

    async def save(self, folder: Path) -> None:
        (folder / "weights.json").write_text(json.dumps(self.weights))

    async def saved(self) -> float:
        return 0.0

    async def load(self, folder: Path) -> None:
        self.weights = json.loads((folder / "weights.json").read_text())

    async def export_hf(self, folder: Path) -> None:
        self.events.append("export")
        (folder / "config.json").write_text("{}")

    async def while_idle(self, work: Any) -> Any:
        return await work

    def health(self) -> dict[str, str]:
        return {"actor_infer-0": "serving"}

    async def update_weights(self, version: int) -> UpdateReport:
        self.version = version
        self.events.append(f"update weights to {version}")
        return UpdateReport(version, 0.2, 0.1, 8, 0.1, True, 1, 0)


class Lines:
    """Records logged metrics, without times."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.lines.append((step, {k: v for k, v in metrics.items() if not k.startswith(("time/", "throughput/"))}))


def run(config: BaseConfig) -> tuple[Counting, Lines]:
    parts, lines = Counting(), Lines()
    loop = TrainingLoop(config, parts, parts, parts, lines)

    async def go() -> None:
        await loop.resume()
        await loop.run()

    asyncio.run(go())
    return parts, lines


def config_in(folder: Path, **keys: Any) -> BaseConfig:
    return BaseConfig(output_dir=str(folder), **keys)


class CutOff(Counting):
    """Batches of which a share was cut off."""

    async def next_batch(self) -> SampleBatch | None:
        batch = await super().next_batch()
        assert batch is not None
        batch.metrics["rollout/truncated_fraction"] = (0.2, 0.75, 1.0)[self.drawn - 1]
        return batch


@pytest.mark.parametrize(
    ("config", "warning"),
    [
        (
            AgenticConfig(sequence_length=512),
            "sequence_length: 512 cut off 75% of the trajectories of step 2; raise",
        ),
        (RLVRConfig(response_length=64), "response_length: 64 cut off 75% of the responses of step 2; raise it"),
    ],
)
def test_a_limit_that_cuts_off_most_of_a_step_is_a_warning_once(tmp_path, caplog, config, warning):
    parts = CutOff()
    loop = TrainingLoop(
        replace(config, output_dir=str(tmp_path), max_steps=3, eval_steps=0), parts, parts, parts, Lines()
    )
    asyncio.run(loop.run())
    found = [record.getMessage() for record in caplog.records if "cut off" in record.getMessage()]
    assert len(found) == 1 and found[0].startswith(warning)


def test_engines_get_the_weights_first_and_after_every_update(tmp_path):
    parts, _ = run(config_in(tmp_path, max_steps=2, eval_steps=2, save_hf_model=True))
    assert parts.events == [
        "update weights to 0",
        "validate version 0",
        "advance 0",
        "batch 1 at version 0",
        "learn",
        "update weights to 1",
        "advance 1",
        "batch 2 at version 1",
        "learn",
        "update weights to 2",
        "validate version 2",
        "advance 2",
        "export",
    ]
    assert [path.name for path in (tmp_path / "hf_model").iterdir()] == ["config.json"]


class Turns(Counting):
    """With devices on which trainer and engines take turns."""

    async def to_trainer(self, finish_requests: bool = True) -> None:
        self.events.append("to trainer" if finish_requests else "to trainer at once")

    async def save(self, folder: Path) -> None:
        self.events.append("save")
        await super().save(folder)


def run_in_turns(config: BaseConfig, target_reached: Any = None) -> tuple[Turns, TrainingLoop]:
    parts = Turns()
    devices: Any = parts
    loop = TrainingLoop(config, parts, parts, parts, Lines(), target_reached, devices=devices)

    async def go() -> None:
        await loop.resume()
        await loop.run()

    asyncio.run(go())
    return parts, loop


def test_a_checkpoint_is_written_while_the_trainer_has_the_devices(tmp_path):
    parts, _ = run_in_turns(config_in(tmp_path, max_steps=1, save_hf_model=True))
    step = ["batch 1 at version 0", "to trainer", "learn", "save", "update weights to 1", "advance 1"]
    assert parts.events == ["update weights to 0", "advance 0", *step, "to trainer at once", "export"]
    resumed, loop = run_in_turns(config_in(tmp_path, max_steps=2, resume_from_checkpoint=True))
    assert resumed.events[:3] == ["to trainer at once", "update weights to 1", "advance 1"]
    assert (loop.state.step, resumed.weights, resumed.drawn) == (2, 2, 2)


def test_such_a_checkpoint_counts_once_its_step_is_whole(tmp_path):
    """A run that is killed in the weight update resumes before the step, whose line is not written either."""

    class Killed(Turns):
        async def update_weights(self, version: int) -> UpdateReport:
            if version == 2:
                raise RuntimeError("killed")
            return await super().update_weights(version)

    parts: Any = Killed()
    loop = TrainingLoop(config_in(tmp_path, max_steps=3, save_steps=1), parts, parts, parts, Lines(), devices=parts)
    with pytest.raises(RuntimeError, match="killed"):
        asyncio.run(loop.run())
    assert parts.events.count("save") == 2 and loop.checkpoint is not None
    assert loop.checkpoint.name == "step-000001"
    _, again = run_in_turns(config_in(tmp_path, max_steps=3, save_steps=1, resume_from_checkpoint=True))
    assert again.state.step == 3


def test_a_target_that_is_reached_after_the_weights_were_written_is_in_the_checkpoint(tmp_path):
    config = config_in(tmp_path, max_steps=5, eval_steps=1, save_steps=1)
    reached = lambda metrics: metrics["val/score"] == 2  # noqa: E731
    parts, loop = run_in_turns(config, reached)
    assert parts.events.count("save") == loop.state.step == 2
    config.resume_from_checkpoint = True
    again, loop = run_in_turns(config, reached)
    assert loop.state.reached and again.events.count("learn") == 0


def test_a_target_that_is_reached_between_checkpoints_is_saved_at_the_end(tmp_path):
    config = config_in(tmp_path, max_steps=5, eval_steps=1, save_steps=3)
    parts, loop = run_in_turns(config, lambda metrics: metrics["val/score"] == 2)
    assert parts.events[-3:] == ["advance 2", "to trainer at once", "save"]
    assert loop.checkpoint is not None and loop.checkpoint.name == "step-000002"


def test_one_line_a_step_and_line_zero_is_the_validation_before_training(tmp_path):
    _, lines = run(config_in(tmp_path, max_steps=3, eval_steps=2))
    assert [step for step, _ in lines.lines] == [0, 1, 2, 3]
    assert [metrics.get("val/score") for _, metrics in lines.lines] == [0.0, None, 2.0, 3.0]
    assert all(metrics["step"] == metrics["version"] == step for step, metrics in lines.lines)


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_a_run_in_two_parts_writes_the_lines_of_a_run_in_one(tmp_path, stop):
    _, whole = run(config_in(tmp_path / "whole", max_steps=5, eval_steps=2, save_steps=1))
    _, first = run(config_in(tmp_path / "parts", max_steps=stop, save_steps=1))
    parts, second = run(
        config_in(tmp_path / "parts", max_steps=5, eval_steps=2, save_steps=1, resume_from_checkpoint=True)
    )
    assert [step for step, _ in second.lines] == list(range(stop + 1, 6))
    assert second.lines == whole.lines[stop + 1 :]
    assert parts.events[0] == f"update weights to {stop}"


def test_a_run_ends_early_when_a_validation_reaches_the_target(tmp_path):
    config = config_in(tmp_path, max_steps=9, eval_steps=2, save_steps=5)
    parts, lines = Counting(), Lines()
    loop = TrainingLoop(config, parts, parts, parts, lines, lambda metrics: metrics["val/score"] >= 3)
    asyncio.run(loop.run())
    assert [step for step, _ in lines.lines] == [0, 1, 2, 3, 4]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000004"]
    again = TrainingLoop(config_in(tmp_path, max_steps=9, resume_from_checkpoint=True), parts, parts, parts, lines)
    asyncio.run(again.resume())
    asyncio.run(again.run())
    assert again.state.step == 4, "a run that reached its target continues"


def test_only_the_end_is_saved_when_save_steps_is_zero(tmp_path):
    run(config_in(tmp_path, max_steps=3, save_steps=0))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000003"]


def test_nothing_is_saved_when_checkpoints_are_off(tmp_path):
    run(config_in(tmp_path, max_steps=1, save_checkpoint=False))
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (ValueError("batch_size: 2 cannot continue from batches of 4"), "this run: batch_size: 2 cannot continue from"),
        (KeyError("producer"), "this run: it has no 'producer'"),
    ],
)
def test_a_checkpoint_of_another_run_is_explained(tmp_path, fault, message):
    run(config_in(tmp_path, max_steps=1))

    class Other(Counting):
        async def load_state_dict(self, state: dict[str, Any]) -> None:
            raise fault

    parts = Other()
    loop = TrainingLoop(config_in(tmp_path, resume_from_checkpoint=True), parts, parts, parts, Lines())
    with pytest.raises(RunError, match="resume_from_checkpoint: .*step-000001 does not fit") as error:
        asyncio.run(loop.resume())
    assert message in str(error.value)


def test_a_folder_without_checkpoints_is_an_error_before_anything_starts(tmp_path):
    config = RLVRConfig(output_dir=str(tmp_path), resume_from_checkpoint=str(tmp_path))
    with pytest.raises(RunError, match="resume_from_checkpoint: .* holds no complete checkpoint"):
        asyncio.run(run_with_restarts(config))


def test_seconds_of_a_batch_are_times_of_its_step(tmp_path):
    class Times(Lines):
        def log(self, step: int, metrics: dict[str, float]) -> None:
            self.lines.append((step, dict(metrics)))

    parts, lines = Counting(), Times()
    asyncio.run(TrainingLoop(config_in(tmp_path, max_steps=2), parts, parts, parts, lines).run())
    assert [line["time/generate"] for _, line in lines.lines] == [0.5, 0.5]


class Waiting(Counting):
    """The batch after `ready` of them never comes; `stop` ends the wait for it."""

    def __init__(self, ready: int) -> None:
        super().__init__()
        self.ready = ready
        self.stopped = asyncio.Event()

    async def next_batch(self) -> SampleBatch | None:
        if self.drawn < self.ready:
            return await super().next_batch()
        await self.stopped.wait()
        return None

    async def stop(self) -> None:
        self.stopped.set()


def interrupt(loop: TrainingLoop, after: Callable[[], bool]) -> RunInterrupted:
    """Runs until `after` holds, calls `stop`, and gives how the run ended."""

    async def go() -> None:
        running = asyncio.create_task(loop.run())
        while not after():
            await asyncio.sleep(0)
        assert loop.stop() and loop.stop()
        await running

    with pytest.raises(RunInterrupted) as caught:
        asyncio.run(go())
    return caught.value


def test_a_run_that_waits_for_samples_stops_at_once_with_a_checkpoint_that_it_resumes_from(tmp_path):
    parts, lines = Waiting(ready=2), Lines()
    loop = TrainingLoop(config_in(tmp_path, max_steps=9), parts, parts, parts, lines)
    ended = interrupt(loop, lambda: loop.state.step == 2)
    assert ended.checkpoint == tmp_path / "checkpoints" / "step-000002"
    again, more = run(config_in(tmp_path, max_steps=4, resume_from_checkpoint=True))
    assert again.drawn == 4 and [step for step, _ in more.lines] == [3, 4]


def test_a_step_that_is_learned_from_is_finished_and_its_validation_is_not(tmp_path):
    class Slow(Waiting):
        async def learn(self, batch: SampleBatch, step: int, clock: StepClock) -> dict[str, float]:
            self.learning = True
            for _ in range(5):
                await asyncio.sleep(0)
            return await super().learn(batch, step, clock)

        async def validate(self) -> dict[str, float]:
            await asyncio.sleep(60)
            return {}

    parts, lines = Slow(ready=9), Lines()
    config = config_in(tmp_path, max_steps=9, eval_steps=1)
    loop = TrainingLoop(config, parts, parts, parts, lines)
    loop.state.step = loop.state.version = 4
    ended = interrupt(loop, lambda: hasattr(parts, "learning"))
    assert ended.checkpoint == tmp_path / "checkpoints" / "step-000005"
    assert [(step, "val/score" in metrics) for step, metrics in lines.lines] == [(5, False)]
    assert parts.events[-2:] == ["update weights to 5", "advance 5"]


def test_a_run_without_checkpoints_stops_without_one(tmp_path):
    parts = Waiting(ready=1)
    config = config_in(tmp_path, max_steps=9, save_checkpoint=False)
    loop = TrainingLoop(config, parts, parts, parts, Lines())
    assert interrupt(loop, lambda: loop.state.step == 1).checkpoint is None
    assert not (tmp_path / "checkpoints").exists()


def test_before_the_first_batch_is_waited_for_there_is_no_step_to_stop_after(tmp_path):
    parts = Counting()
    assert not TrainingLoop(config_in(tmp_path), parts, parts, parts, Lines()).stop()


def test_a_full_disk_at_a_checkpoint_keeps_the_metrics_of_its_step(small_disk):
    class Large(Counting):
        async def save(self, folder: Path) -> None:
            (folder / "weights").write_bytes(bytes(2**21))

    parts, tracker = Large(), JsonlTracker(small_disk / "metrics.jsonl")
    config = config_in(small_disk, max_steps=3, save_steps=2)
    with pytest.raises(DiskFullError, match="checkpoints/step-000002: more than"):
        asyncio.run(TrainingLoop(config, parts, parts, parts, tracker).run())
    assert [line["step"] for line in read_metrics(small_disk / "metrics.jsonl")] == [1, 2]
    assert list((small_disk / "checkpoints").iterdir()) == []


class WritingOn(Counting):
    """Writes a checkpoint in the background, which ends during the learning of the next step."""

    async def save(self, folder: Path) -> None:
        async def write() -> float:
            await self.learned.wait()
            (folder / "weights.json").write_text(json.dumps(saved))
            return 0.25

        saved, self.learned = self.weights, asyncio.Event()
        self.writing = asyncio.create_task(write())
        if saved == 3:
            self.learned.set()

    async def learn(self, batch: SampleBatch, step: int, clock: StepClock) -> dict[str, float]:
        if step > 1:
            self.learned.set()
            await asyncio.sleep(0.05)
        return await super().learn(batch, step, clock)

    async def saved(self) -> float:
        return await self.writing


def test_a_checkpoint_is_written_during_the_next_step_and_complete_only_then(tmp_path):
    parts, tracker = WritingOn(), JsonlTracker(tmp_path / "metrics.jsonl")
    complete: dict[int, list[str]] = {}
    learn = parts.learn

    async def look(batch: SampleBatch, step: int, clock: StepClock) -> dict[str, float]:
        complete[step] = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
        return await learn(batch, step, clock)

    parts.learn = look  # type: ignore[method-assign]
    asyncio.run(TrainingLoop(config_in(tmp_path, max_steps=3, save_steps=1), parts, parts, parts, tracker).run())
    assert complete == {1: [], 2: ["step-000001.partial"], 3: ["step-000001", "step-000002.partial"]}
    folders = sorted((tmp_path / "checkpoints").iterdir())
    assert [json.loads((folder / "weights.json").read_text()) for folder in folders] == [2, 3]
    waits = [line.get("time/checkpoint_wait") for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert waits == [None, 0.25, 0.25], "the wait is part of the step that learned meanwhile"


@pytest.mark.parametrize("taking_turns", [True, False])
def test_a_checkpoint_begins_after_the_one_before_is_complete(tmp_path, taking_turns):
    class Slow(Turns):
        async def save(self, folder: Path) -> None:
            names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
            assert names == [f"step-{step:06d}" for step in range(1, self.weights)] + [folder.name]
            await super().save(folder)

        async def saved(self) -> float:
            await asyncio.sleep(0.05)
            return 0.0

    parts: Any = Slow()
    config = config_in(tmp_path, max_steps=4, save_steps=1, max_ckpt_to_keep=0)
    devices = parts if taking_turns else None
    asyncio.run(TrainingLoop(config, parts, parts, parts, Lines(), devices=devices).run())
    assert len(list((tmp_path / "checkpoints").iterdir())) == 4


def test_a_disk_that_fills_up_while_a_checkpoint_is_written_ends_the_run_with_its_path(small_disk):
    class Large(Counting):
        async def saved(self) -> float:
            (small_disk / "checkpoints" / "step-000001.partial" / "more").write_bytes(bytes(2**21))
            return 0.0

    parts = Large()
    with pytest.raises(DiskFullError, match="checkpoints/step-000001: more than"):
        asyncio.run(TrainingLoop(config_in(small_disk, save_steps=1), parts, parts, parts, Lines()).run())
    assert list((small_disk / "checkpoints").iterdir()) == []


class Failing(Counting):
    """A learner whose second step fails while the checkpoint of the first is being written, which takes `writes_s`."""

    def __init__(self, error: Exception, writes_s: float) -> None:
        super().__init__()
        self.error, self.writes_s = error, writes_s

    async def saved(self) -> float:
        await asyncio.sleep(self.writes_s)
        return 0.0

    async def learn(self, batch: SampleBatch, step: int, clock: StepClock) -> dict[str, float]:
        if step == 2:
            await asyncio.sleep(0.02)
            raise self.error
        return await super().learn(batch, step, clock)


def failed_update(role: str) -> RuntimeError:
    """The error of a weight update whose last attempt failed for want of an answer of `role`."""
    error = RuntimeError("weight update failed")
    error.__cause__ = ClusterError(role, "fill_bucket", 0, TIMEOUT, "no answer")
    return error


@pytest.mark.parametrize(
    "error", [ClusterError("actor_train", "train_step", 0, PROCESS_DIED, "gone"), failed_update("actor_train")]
)
def test_a_checkpoint_that_a_failed_trainer_would_have_to_write_is_not_waited_for(tmp_path, error, caplog):
    parts = Failing(error, 60.0)
    with pytest.raises(type(error)):
        asyncio.run(TrainingLoop(config_in(tmp_path, save_steps=1), parts, parts, parts, Lines()).run())
    assert "the last checkpoint was not completed: the trainer failed while it was written" in caplog.text
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001.partial"]


@pytest.mark.parametrize(
    ("error", "writes_s"),
    [
        (ClusterError("actor_train", "train_step", 0, PROCESS_DIED, "gone"), 0.0),
        (ClusterError("actor_train", "train_step", 0, "ValueError", "wrong"), 0.2),
        (failed_update("actor_infer"), 0.2),
    ],
)
def test_a_checkpoint_that_is_written_or_will_be_is_completed_after_a_failure(tmp_path, error, writes_s):
    parts = Failing(error, writes_s)
    with pytest.raises(type(error)):
        asyncio.run(TrainingLoop(config_in(tmp_path, save_steps=1), parts, parts, parts, Lines()).run())
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def test_every_line_after_a_restart_of_the_run_counts_it(tmp_path):
    parts, lines = Counting(), Lines()
    loop = TrainingLoop(config_in(tmp_path, max_steps=2), parts, parts, parts, lines)
    loop.restarts = 2
    asyncio.run(loop.run())
    assert [metrics["faults/run_restarts"] for _, metrics in lines.lines] == [2, 2]


def test_every_checkpoint_has_the_model_as_a_hugging_face_folder(tmp_path):
    run(config_in(tmp_path, max_steps=2, save_steps=1, save_hf_checkpoints=True))
    for step in (1, 2):
        assert (tmp_path / "checkpoints" / f"step-00000{step}" / "hf_model" / "config.json").is_file()


def test_a_stopped_run_waits_for_the_checkpoint_that_is_being_completed_and_writes_no_other(tmp_path, monkeypatch):
    complete, steps = CheckpointManager.complete_step, list[int]()

    async def slowly(self: CheckpointManager, step: int, *arguments: Any) -> Path:
        steps.append(step)
        await asyncio.sleep(0.2)
        return await complete(self, step, *arguments)

    monkeypatch.setattr(CheckpointManager, "complete_step", slowly)
    parts = Waiting(ready=2)
    loop = TrainingLoop(config_in(tmp_path, max_steps=9, save_steps=1), parts, parts, parts, Lines())
    ended = interrupt(loop, lambda: loop.state.step == 2)
    assert ended.checkpoint == tmp_path / "checkpoints" / "step-000002"
    assert steps == [1, 2]
