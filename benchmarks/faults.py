"""Runs in which processes die or stop at random moments, or a checkpoint is damaged: does every run finish?

    python -m benchmarks.faults --rounds 40 --json FILE [--seed 0] [--pipelines gateway]

Each round is a run with a fault drawn at random, at ratio 0, 1 or 3: RLVR, with all weights, with adapters that are
sent to the engines (lora), or of a mixture of experts on two ranks with router replay (mixture), agents in
environments, or (gateway) agents that call the policy, half of which fail or do what they must not. It passes if the
fault happened, the run ends by itself with every step (after a killed driver: once it is started again), every prompt
is accounted for and learned from at most once, and no process, shared memory or Ray session is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.agentic_rollout import RECIPE as AGENTIC
from benchmarks.common import at_least, at_most, write_report
from examples.tiny_math.prepare import prepare
from examples.tiny_math.problems import write_problems
from examples.tiny_moe.demo import prepare as prepare_mixture
from roll.base.events import EVENTS_FILE
from roll.distributed.leftovers import PREFIX, SHARED_MEMORY, file_key, temporary_folder, used_files
from roll.trackers.files import read_metrics
from tests.integration.faults import (
    FAULTS_FILE,
    HAPPENED_FILE,
    SIGNALS,
    complete_checkpoints,
    process_of,
    samples_learned,
    spoil,
    workers_of,
)

STEPS = 8
GROUPS = 4
"""Prompts of a step."""

PROMPTS = 64
"""In the data of RLVR, drawn in their order: more than a run submits, so that no prompt comes a second time."""

SHORTER = 5.0
"""Steps of agents over those of RLVR, in which a fault must happen before the run ends."""

LIMIT_S, SETTLE_S = 420.0, 2.0
"""Longest run, with its restarts; time after which a file that no process uses is left over."""

ENGINE, IN_UPDATE, TRAINER, ROLLOUTER, WORKER, DRIVER, CHECKPOINT = (
    "engine",
    "engine in a weight update",
    "training rank",
    "rollout process",
    "reward or environment worker",
    "driver",
    "checkpoint",
)
STOPPED = (ENGINE, IN_UPDATE, TRAINER, ROLLOUTER, WORKER)
"""Faults that happen by a signal that stops the process, too."""

FAULTS = (ENGINE, ENGINE, IN_UPDATE, TRAINER, ROLLOUTER, WORKER, DRIVER, CHECKPOINT)

PIPELINES = ("rlvr", "lora", "mixture", "agentic", "gateway")
ONE_TURN = ("rlvr", "lora", "mixture")

FAULTY = "faulty_agents.txt"
"""File in the folder of a round with what its agents did, a line each."""

RLVR: dict[str, Any] = {
    "pipeline": "rlvr",
    "platform": "cpu",
    "track_with": [],
    "rollout_batch_size": GROUPS,
    "num_return_sequences_in_group": 4,
    "prompt_length": 24,
    "response_length": 40,
    "actor_train": {
        "model_args": {"dtype": "fp32"},
        "training_args": {"learning_rate": 1e-4, "per_device_train_batch_size": 16},
        "pg_variant": "tis",
        "device_mapping": [0],
    },
    "actor_infer": {"model_args": {"dtype": "fp32"}, "device_mapping": [1]},
    "rewards": {"math_rule": {}},
}

MIXTURE: dict[str, Any] = {
    "training_args": {"learning_rate": 1e-4, "per_device_train_batch_size": 8},
    "strategy_args": {"strategy_config": {"expert_model_parallel_size": 2}},
    "router_replay": {"mode": "R3"},
    "device_mapping": [0, 1],
}
"""Options of `actor_train`."""


@dataclass
class Round:
    """One run and its fault.

    Attributes:
        fault: what happens.
        how: kill or stop.
        engines: of the run.
        step: after whose line it happens.
        delay_s: after that line.
        events: what the run noticed and did, in order.
        agents: what agents of the gateway did that they must not, and how many.
    """

    pipeline: str
    ratio: int
    engines: int
    fault: str
    how: str
    step: int
    delay_s: float
    problems: list[str]
    events: list[str] = field(default_factory=list)
    seconds: float = 0.0
    agents: dict[str, int] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """Training ranks."""
        return len(MIXTURE["device_mapping"]) if self.pipeline == "mixture" else 1


def draw(chance: random.Random, pipelines: Sequence[str] = PIPELINES) -> Round:
    """A round; the rollout process exists at a ratio above 0 only."""
    fault = chance.choice(FAULTS)
    ratio = chance.choice((1, 3)) if fault == ROLLOUTER else chance.choice((0, 1, 3))
    how = chance.choice(("kill", "stop")) if fault in STOPPED else "kill"
    each = Round(
        pipeline=chance.choice(pipelines),
        ratio=ratio,
        engines=chance.choice((1, 2)),
        fault=fault,
        how=how,
        step=chance.randint(1, STEPS - 3),
        delay_s=chance.uniform(0.0, 1.5),
        problems=[],
    )
    if each.pipeline in ONE_TURN:
        each.delay_s /= SHORTER
    return each


def write_config(folder: Path, model: Path, each: Round) -> Path:
    """The recipe of a round."""
    tree: dict[str, Any] = dict(RLVR if each.pipeline in ONE_TURN else AGENTIC)
    if each.pipeline not in ONE_TURN:
        tree |= {"rollout_batch_size": 16, "sequence_length": 256, "max_tokens_per_step": 32}
        tree["train_env_manager"] = {"group_size": 4, "num_env_groups": GROUPS, "max_env_num_per_worker": 4}
        tree["actor_infer"] = {
            "model_args": {"dtype": "fp32"},
            "generating_args": AGENTIC["actor_infer"]["generating_args"],
        }
    else:
        write_problems(folder, seed=3, train=PROMPTS, val=4, levels=(1,))
        data = {"file_name": [f"{folder}/train.jsonl"], "shuffle": False}
        tree["actor_train"] = {**RLVR["actor_train"], "data_args": data}
    if each.pipeline == "mixture":
        tree["actor_train"] |= MIXTURE
        model = prepare_mixture(folder / "model", 3)
    if each.pipeline == "lora":
        adapters = {"lora_target": "all-linear", "lora_rank": 4}
        tree["actor_train"] |= {"model_args": {"dtype": "fp32", **adapters}, "lora_update": "adapter"}
    if each.pipeline == "gateway":
        tree |= {
            "custom_envs": {"Faulty": {"agent": "tests.integration.faulty_agent:Faulty", "max_requests": 20}},
            "train_env_manager": {**tree["train_env_manager"], "group_size_redundancy": 4},
            "system_envs": {"FAULTY_AGENTS": str(folder / FAULTY)},
            "max_failure_rate": 1.0,
            "trajectory_timeout_s": 15,
        }
        tree["actor_infer"]["generation_timeout_s"] = 15
    tree |= {
        "pretrain": str(model),
        "num_devices_per_node": each.ranks + each.engines,
        "async_generation_ratio": each.ratio,
        "output_dir": str(folder / "run"),
        "max_steps": STEPS,
        "eval_steps": 0,
        "save_checkpoint": True,
        "save_steps": 1,
        "sync_timeout_s": 20,
        "async_training": {"batch_hook_class": "tests.integration.faults:Killer"},
        "actor_infer": {**tree["actor_infer"], "device_mapping": list(range(each.ranks, each.ranks + each.engines))},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    in_update = f"{each.step + 1} {each.how} actor_infer-0 scheduler in_update"
    (folder / FAULTS_FILE).write_text(in_update if each.fault == IN_UPDATE else "")
    return file


def start(config: Path, *overrides: str) -> subprocess.Popen[str]:
    """A run in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "roll", "run", str(config), *overrides],
        stdout=(config.parent / "output.txt").open("a"),
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for_step(run: subprocess.Popen[str], folder: Path, step: int) -> bool:
    """Waits for the line of a step; whether it came before the run ended."""
    file, until = folder / "run" / "metrics.jsonl", time.monotonic() + LIMIT_S
    while time.monotonic() < until and run.poll() is None:
        if file.exists() and f'"step": {step},' in file.read_text():
            return True
        time.sleep(0.05)
    return False


def strike(run: subprocess.Popen[str], each: Round, output: Path) -> None:
    """Carries out the fault; one in a weight update is left to the hook of the run."""
    time.sleep(each.delay_s)
    while each.fault == CHECKPOINT and len(complete_checkpoints(output)) < 2 and run.poll() is None:
        time.sleep(0.01)  # the run is to continue from the one before
    driver, number = psutil.Process(run.pid), SIGNALS[each.how]
    if each.fault == ENGINE:
        process_of(f"actor_infer-{each.engines - 1}", True, driver).send_signal(number)
    elif each.fault == TRAINER:
        process_of(f"actor_train-{each.ranks - 1}", False, driver).send_signal(number)
    elif each.fault == ROLLOUTER:
        process_of("rollouter", False, driver).send_signal(number)
    elif each.fault in (DRIVER, CHECKPOINT):
        driver.send_signal(signal.SIGKILL)
    elif each.fault == WORKER:
        owner = process_of("rollouter", False, driver) if each.ratio and each.pipeline in ONE_TURN else driver
        workers = workers_of(owner)
        assert workers, "the run has no reward or environment worker"
        workers[0].send_signal(number)


def cause_fault(run: subprocess.Popen[str], folder: Path, each: Round) -> list[str]:
    """Waits for the step of the fault and carries it out; why it did not happen, if it did not."""
    if not wait_for_step(run, folder, each.step):
        return [f"the fault did not happen: the run had no step {each.step}"]
    if each.fault != IN_UPDATE:
        try:
            strike(run, each, folder / "run")
        except (LookupError, AssertionError, psutil.Error) as error:
            return [f"the fault did not happen: {error!r}"]
    return []


def play(number: int, model: Path, seed: int, pipelines: Sequence[str] = PIPELINES) -> Round:
    """One round; its `problems` are empty if it passed."""
    chance = random.Random(seed * 1000 + number)
    each, began = draw(chance, pipelines), time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    before = shared_files()
    config = write_config(folder, model, each)
    run = start(config)
    each.problems += cause_fault(run, folder, each)
    if each.fault in (DRIVER, CHECKPOINT) and not each.problems:
        if run.wait() != -signal.SIGKILL:
            each.problems.append("the fault did not happen: the run ended before the driver was killed")
        left = still_running(folder, run.pid, 20.0)
        each.problems += [f"left by the killed driver: {name}" for name in left]
        if each.fault == CHECKPOINT:
            spoil(folder / "run", chance)
        run = start(config, "resume_from_checkpoint=true")
    try:
        code = run.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        code = -9
    if each.fault == IN_UPDATE and not (folder / HAPPENED_FILE).exists():
        each.problems.append("the fault did not happen: no weight update after that step")
    if code:
        each.problems.append(f"exit code {code}: " + (folder / "output.txt").read_text()[-1500:])
    else:
        each.problems += accounting(folder, each)
    each.problems += [f"process left: {name}" for name in still_running(folder, run.pid, 15.0)]
    each.problems += [f"left in {SHARED_MEMORY}: {name}" for name in left_in_shared_memory(before)]
    sessions = temporary_folder().glob(f"{PREFIX}*/ray/session_*_{run.pid}")
    each.problems += [f"Ray session left: {path}" for path in sessions]
    log = folder / "run" / EVENTS_FILE
    each.agents = dict(Counter((folder / FAULTY).read_text().splitlines())) if (folder / FAULTY).exists() else {}
    if each.pipeline == "gateway" and not each.agents:
        each.problems.append("no agent failed")
    each.events = [json.loads(line)["event"] for line in log.read_text().splitlines()] if log.exists() else []
    if each.fault == CHECKPOINT and "checkpoint skipped" not in each.events:
        each.problems.append("the run did not notice the damaged checkpoint")
    each.seconds = round(time.monotonic() - began, 1)
    if not each.problems:
        shutil.rmtree(folder)
    else:
        each.problems.append(f"kept: {folder}")
    return each


def accounting(folder: Path, each: Round) -> list[str]:
    """What is wrong with the steps and counts of a finished run."""
    lines = [line for line in read_metrics(folder / "run" / "metrics.jsonl") if line["step"]]
    found = []
    if [line["step"] for line in lines] != list(range(1, STEPS + 1)):
        return [f"steps {[line['step'] for line in lines]}"]
    for line in lines:
        dropped = sum(value for name, value in line.items() if name.startswith("ledger/dropped_"))
        kept = line["ledger/consumed"] + line["ledger/buffered"] + line["ledger/in_flight"]
        if kept + dropped != line["ledger/submitted"] or line["ledger/consumed"] != GROUPS * line["step"]:
            found.append(f"step {line['step']}: {line['ledger/submitted']} submitted, {kept} kept, {dropped} dropped")
        if line["staleness/max"] > each.ratio:
            found.append(f"step {line['step']}: staleness {line['staleness/max']}")
    unlearned = sum(value for name, value in lines[-1].items() if name.startswith("ledger/dropped_"))
    unlearned += lines[-1]["ledger/buffered"] + lines[-1]["ledger/in_flight"]
    numbers = {step: prompt_numbers(folder, samples) for step, samples in samples_learned(folder).items()}
    return found + history(numbers, int(lines[-1]["ledger/submitted"]), int(unlearned))


def prompt_numbers(folder: Path, samples: list[str]) -> set[int]:
    """The numbers of the prompts of samples: lines of the data in RLVR, in the names of the trajectories of agents."""
    data = folder / "train.jsonl"
    if not data.exists():
        return {int(name.rsplit("-", 2)[1]) for name in samples}
    lines = {json.loads(line)["id"]: number for number, line in enumerate(data.read_text().splitlines())}
    return {lines[name] for name in samples}


def history(numbers: dict[int, set[int]], submitted: int, unlearned: int) -> list[str]:
    """What is wrong with the prompts that a run has learned from.

    Args:
        numbers: of the prompts of each step, as it was learned from last; the first prompt has number 0.
        submitted: prompts.
        unlearned: prompts that were dropped, or that no step has learned from yet.
    """
    found, steps = [], {number: list[int]() for number in range(submitted)}
    for step, learned in sorted(numbers.items()):
        if len(learned) != GROUPS:
            found.append(f"step {step} learned from {len(learned)} prompts")
        for number in sorted(learned):
            steps.setdefault(number, []).append(step)
    if sorted(numbers) != list(range(1, STEPS + 1)):
        found.append(f"steps {sorted(numbers)} were learned from")
    found += [f"prompt {number} was learned from in steps {at}" for number, at in steps.items() if len(at) > 1]
    found += [f"prompt {number} was never submitted" for number in steps if number >= submitted]
    lost = [number for number, at in steps.items() if not at]
    if len(lost) != unlearned:
        found.append(f"prompts {lost} were not learned from, and {unlearned} were dropped or remain")
    return found


def still_running(folder: Path, session: int, within_s: float) -> list[str]:
    """Processes of the run's session, or that know its folder, after waiting for their end."""
    until = time.monotonic() + within_s
    while True:
        found = [each for each in psutil.process_iter() if _belongs(each, session) or _knows(each, str(folder))]
        if not found or time.monotonic() > until:
            return [f"{process.pid} {process.name()}" for process in found]
        time.sleep(0.2)


def _belongs(process: psutil.Process, session: int) -> bool:
    try:
        return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):
        return False


def _knows(process: psutil.Process, folder: str) -> bool:
    try:
        words = " ".join([*process.cmdline(), *process.environ().values()])
        return folder in words or any(file.path.startswith(folder) for file in process.open_files())
    except psutil.Error:
        return False


def shared_files() -> set[str]:
    """Names of the files in shared memory."""
    return {path.name for path in SHARED_MEMORY.iterdir()}


def left_in_shared_memory(before: set[str]) -> list[str]:
    """Names of later files that no process uses, now and SETTLE_S later; other programs may share the machine."""
    left = shared_files() - before
    for pause in (0.0, SETTLE_S if left else 0.0):
        time.sleep(pause)
        used = used_files(SHARED_MEMORY)
        keys = {name: file_key(SHARED_MEMORY / name) for name in left}
        left = {name for name, key in keys.items() if key is not None and key not in used}
    return sorted(left)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, help="file for the report")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pipelines", nargs="+", choices=PIPELINES, default=PIPELINES)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = prepare(Path(folder) / "model")
        rounds = []
        for number in range(arguments.rounds):
            each = play(number, model, arguments.seed, arguments.pipelines)
            rounds.append(each)
            state = f"ok {each.events} {each.agents or ''}" if not each.problems else f"FAILED {each.problems}"
            what = f"{each.pipeline}, ratio {each.ratio}, {each.engines} engines: {each.how} {each.fault}"
            print(f"{number + 1:3} {each.seconds:6.1f} s  {what}: {state}", flush=True)
    passed = sum(not each.problems for each in rounds)
    checks = [
        at_least("faults: rounds that passed, fraction", passed / len(rounds), 1.0),
        at_most("faults: longest round, seconds", max(each.seconds for each in rounds), LIMIT_S),
    ]
    write_report(arguments.json, {"rounds": [asdict(each) for each in rounds]}, checks)


if __name__ == "__main__":
    main()
