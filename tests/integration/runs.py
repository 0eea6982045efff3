"""Whole runs in processes of their own: their recipe, their start and end, and the lines they write."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
import yaml

from examples.tiny_math.problems import write_problems
from roll.base.events import EVENTS_FILE
from roll.configs.trackers import METRICS_FILE
from tests.processes import PATIENCE_S

MEASURED = ("time/", "memory/", "throughput/", "perf/", "val/seconds", "rollout/tokens_per_second")
"""Metrics that are clock or memory readings, and so never the same twice."""

GAE: dict[str, Any] = {
    "adv_estimator": "gae",
    "lambd": 0.9,
    "whiten_advantages": True,
    "critic": {
        "model_args": {"dtype": "fp32"},
        "training_args": {"learning_rate": 3e-3, "per_device_train_batch_size": 8},
        "strategy_args": {"strategy_config": {"tensor_model_parallel_size": 2, "sequence_parallel": True}},
        "device_mapping": [0, 1],
    },
}
"""Keys of a run with a critic, on the policy's devices."""

ROOT = Path(__file__).parents[2]


def inputs_in(data: Path, model: Path, train: int = 64) -> dict[str, Any]:
    """The part of a recipe that says where model and problems are; writes the problems to `data`."""
    write_problems(data, seed=3, train=train, val=16, levels=(1,))
    return {
        "pretrain": str(model),
        "actor_train": {"data_args": {"file_name": [f"{data}/train.jsonl"]}},
        "validation": {"data_args": {"file_name": [f"{data}/val.jsonl"]}},
    }


def with_keys(tree: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """The tree with dotted `keys` replaced, `__` for the dot."""
    for path, value in keys.items():
        *parents, last = path.split("__")
        section = tree
        for name in parents:
            section = section.setdefault(name, {})
        section[last] = value
    return tree


def recipe(inputs: dict[str, Any], folder: Path, **keys: Any) -> Path:
    """A small RLVR run, TP2 beside one engine, with dotted `keys` replaced."""
    tree: dict[str, Any] = {
        "pipeline": "rlvr",
        "platform": "cpu",
        "num_devices_per_node": 3,
        "deterministic": True,
        "output_dir": str(folder / "run"),
        "track_with": [],
        "max_steps": 4,
        "save_steps": 2,
        "eval_steps": 2,
        "rollout_batch_size": 4,
        "num_return_sequences_in_group": 4,
        "prompt_length": 24,
        "response_length": 6,
        "max_failure_rate": 0.0,
        "pretrain": inputs["pretrain"],
        "actor_train": {
            "model_args": {"dtype": "fp32"},
            "training_args": {
                "learning_rate": 1e-3,
                "per_device_train_batch_size": 8,
                "gradient_accumulation_steps": 2,
            },
            "data_args": inputs["actor_train"]["data_args"],
            "strategy_args": {"strategy_config": {"tensor_model_parallel_size": 2, "sequence_parallel": True}},
            "device_mapping": [0, 1],
        },
        "actor_infer": {
            "model_args": {"dtype": "fp32"},
            "strategy_args": {"strategy_name": "sglang", "strategy_config": {"load_format": "dummy"}},
            "device_mapping": [2],
        },
        "validation": inputs["validation"],
        "rewards": {"math_rule": {"function": "tests.integration.rewards:length_reward"}},
    }
    with_keys(tree, **keys)
    file = folder / "config.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(tree))
    return file


def start(config: Path, *overrides: str, module: str = "roll") -> subprocess.Popen[str]:
    """`roll run` in a process of its own, in a session of its own; `module` may be one that prepares `roll`."""
    return subprocess.Popen(
        [sys.executable, "-m", module, "run", str(config), *overrides],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and output; a run past its deadline is killed and fails the test."""
    try:
        output, _ = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        end_late(process, f"the run did not end within {PATIENCE_S:g} s")
    return process.returncode, output


def end_late(process: subprocess.Popen[str], reason: str) -> NoReturn:
    """Kills a run, and fails the test with what it printed last."""
    os.killpg(process.pid, signal.SIGKILL)
    output, _ = process.communicate()
    pytest.fail(f"{reason}:\n{output[-3000:]}")


def succeed(process: subprocess.Popen[str]) -> None:
    """A run that ends well."""
    code, output = finish(process)
    assert code == 0, output


def lines(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without clock readings."""
    text = (folder / "run" / "metrics.jsonl").read_text()
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(MEASURED)}
        for line in text.splitlines()
    ]


def count_dropped(line: dict[str, Any], groups: int = 4) -> float:
    """Groups that were dropped so far, in a line whose ledger adds up and has all `groups` of each batch."""
    dropped: float = sum(value for name, value in line.items() if name.startswith("ledger/dropped_"))
    kept = line["ledger/consumed"] + line["ledger/buffered"] + line["ledger/in_flight"]
    assert kept + dropped == line["ledger/submitted"]
    assert line["ledger/consumed"] == groups * line["step"]
    return dropped


def wait_for_line(run: subprocess.Popen[str], folder: Path, step: int) -> None:
    """Until metrics.jsonl of the run holds `step`; a run that ends before fails the test."""
    wait_for_text(run, folder / "run" / METRICS_FILE, f'"step": {step},')


def wait_for_event(run: subprocess.Popen[str], folder: Path, text: str) -> None:
    """Until events.jsonl of the run contains `text`; a run that ends before fails the test."""
    wait_for_text(run, folder / "run" / EVENTS_FILE, text)


def wait_for_text(run: subprocess.Popen[str], file: Path, text: str) -> None:
    """Until a file that the run writes contains `text`."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        has_ended = run.poll() is not None
        if file.exists() and text in file.read_text():
            return
        if has_ended:
            pytest.fail(f"the run ended without {text} in {file.name}:\n{finish(run)[1][-3000:]}")
        time.sleep(0.05)
    end_late(run, f"{file.name} was without {text} for {PATIENCE_S:g} s")


def processes_of(folder: Path) -> list[psutil.Process]:
    """Processes that still know this run by their command line, environment or open files."""
    found = []
    for process in psutil.process_iter():
        try:
            words = " ".join([*process.cmdline(), *process.environ().values()])
            files = [file.path for file in process.open_files()]
        except psutil.Error:
            continue
        if str(folder) in words or any(file.startswith(str(folder)) for file in files):
            found.append(process)
    return found


def assert_nothing_is_left(folder: Path, within_s: float = 120.0) -> None:
    """No process of the run outlives it."""
    deadline = time.monotonic() + within_s
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, [(process.pid, process.name()) for process in left]
