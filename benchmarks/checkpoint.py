"""What checkpoints cost a run: the time they block the loop, memory, and the time of a resume to its first step.

    python -m benchmarks.checkpoint --json FILE

Three SFT runs of a model with about 25 million weights, on one device: without checkpoints, with one after every
second step, and resumed from the last. What a checkpoint takes from the loop, when it is begun and where the next
optimizer step waits for it, is compared with a bare write of the same bytes to the same disk, flushed. A step lasts
longer than that write.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common import Measurement, at_most, main, median
from examples.tiny_math.prepare import prepare
from examples.tiny_math.problems import write_problems
from roll.models.tiny import write_tiny_model
from roll.pipeline.checkpoint import FOLDER, folder_bytes
from roll.trackers.files import read_metrics

SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
STEPS = 8
BLOCK = 1 << 22
"""Bytes of one write."""

HELD, PEAK, RESUMED = 0.1, 1.25, 2.0
"""Targets: blocked time over a bare write, peak memory over that without checkpoints, resume over a cold start."""


def measure() -> Measurement:
    """Times and memory of the three runs."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        config = write_recipe(folder)
        plain = run(config, folder / "plain", "save_checkpoint=false")
        saving = run(config, folder / "saving", "save_steps=2")
        [newest] = [max((folder / "saving" / FOLDER).iterdir())]
        num_bytes = folder_bytes([newest])
        bare = [bare_write(folder / "bare", num_bytes) for _ in range(5)]
        lines = {int(line["step"]): line for line in read_metrics(folder / "saving" / "metrics.jsonl")}
        begun = [lines[step]["time/checkpoint"] for step in range(2, STEPS, 2)]
        waited = [lines[step + 1].get("time/checkpoint_wait", 0.0) for step in range(2, STEPS, 2)]
        again = ["save_steps=2", "resume_from_checkpoint=true", f"max_steps={STEPS + 1}"]
        resumed = run(config, folder / "saving", *again, more=STEPS)
    raw = {
        "bytes": num_bytes,
        "bare_write_s": bare,
        "begun_s": begun,
        "waited_s": waited,
        "step_s": [line["time/step"] for line in lines.values()],
        "plain": plain,
        "saving": saving,
        "resumed": resumed,
    }
    held = [sum(pair) for pair in zip(begun, waited, strict=True)]
    back = resumed["first_step_s"] / plain["first_step_s"]
    return raw, [
        at_most("checkpoint: the loop is held, over a bare write", median(held) / median(bare), HELD),
        at_most("checkpoint: peak memory over a run without", saving["peak_bytes"] / plain["peak_bytes"], PEAK),
        at_most("checkpoint: resume to the first step, over a start", back, RESUMED),
    ]


def write_recipe(folder: Path) -> Path:
    """An SFT run; the model has the tokens of the tiny model."""
    model = prepare(folder / "model")
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    write_tiny_model(model, "qwen2", vocab_size=vocabulary, **SHAPE)
    write_problems(folder, seed=3, train=512, val=4, levels=(1,))
    tree = {
        "pipeline": "sft",
        "platform": "cpu",
        "num_devices_per_node": 1,
        "track_with": [],
        "pretrain": str(model),
        "max_steps": STEPS,
        "prompt_length": 24,
        "response_length": 8,
        "actor_train": {
            "model_args": {"dtype": "fp32"},
            "training_args": {"learning_rate": 1e-4, "per_device_train_batch_size": 64},
            "data_args": {"template": "native", "file_name": [f"{folder}/train.jsonl"]},
            "device_mapping": [0],
        },
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def run(config: Path, output: Path, *overrides: str, more: int = 0) -> dict[str, float]:
    """Peak memory of a run, and its seconds from the command to the line of the first step after step `more`."""
    start = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "roll", "run", str(config), f"output_dir={output}", *overrides])
    metrics, first = output / "metrics.jsonl", 0.0
    while process.poll() is None:
        if not first and metrics.exists() and f'"step": {more + 1},' in metrics.read_text():
            first = time.monotonic() - start
        time.sleep(0.02)
    if process.returncode or not first:
        raise RuntimeError(f"{config} with {overrides} ended with code {process.returncode}")
    summary = json.loads((output / "run.json").read_text())["summary"]
    return {"first_step_s": first, "peak_bytes": float(summary["peak_memory_bytes"])}


def bare_write(file: Path, num_bytes: int) -> float:
    """Seconds of writing so many bytes to a new file and flushing it."""
    block = os.urandom(BLOCK)
    start = time.monotonic()
    with file.open("wb") as opened:
        for _ in range(num_bytes // BLOCK + 1):
            opened.write(block)
        opened.flush()
        os.fsync(opened.fileno())
    seconds = time.monotonic() - start
    file.unlink()
    return seconds


if __name__ == "__main__":
    main(measure, __doc__ or "")
