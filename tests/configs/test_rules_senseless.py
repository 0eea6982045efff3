"""Configurations that each key allows and that make no sense: each is told, and sound neighbours are not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from roll.configs.check import check
from tests.configs.samples import MODEL, refusal, rlvr

ENGINE = "actor_infer.strategy_args.strategy_config"


def findings(folder: Path, *overrides: str) -> str:
    report = check(rlvr(folder, *overrides))
    return "\n".join(map(str, [*report.warnings, *report.missing]))


def split(overrides: str) -> list[str]:
    """`a=1 b=2` as two overrides; a mapping is one."""
    return [overrides] if "{" in overrides.replace("${", "") else overrides.split(" ")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor_train.training_args.learning_rate=1.0", "1 is unusual"),
        ("actor_infer.generating_args.temperature=0.001", "0.001 makes nearly all samples of a prompt equal"),
        ("correction.opsm_delta=5e-324", "too small for single precision"),
        ("rewards={math_rule: {correct_score: 1.0e-300}}", "correct_score: 1e-300 is too small"),
        ("rewards={math_rule: {weight: -1.0e-40}}", "weight: -1e-40 is too small"),
        ("num_devices_per_node=64", "64, but devices 0 to 23 are used; write 24"),
        ("output_dir=.", "output_dir: . contains the current folder"),
        ("checkpoint_dir=..", "checkpoint_dir: .. contains the current folder"),
        (
            "logging_dir=${output_dir}/checkpoints output_dir=o",
            "logging_dir: o/checkpoints is among the checkpoints in",
        ),
        ("rollout_dump_dir=c/samples checkpoint_dir=c", "rollout_dump_dir: c/samples is among the checkpoints in"),
        ("system_envs={TMPDIR: /nowhere}", "system_envs.TMPDIR: /nowhere is not on this machine"),
        ("actor_infer.system_envs={LD_PRELOAD: '/nowhere.so'}", "LD_PRELOAD: /nowhere.so is not on this machine"),
        ("system_envs={GLOO_SOCKET_IFNAME: nonesuch}", "GLOO_SOCKET_IFNAME: nonesuch is not an interface"),
        ("system_envs={HF_HOME: /proc/x}", "HF_HOME: /proc/x cannot be made, since /proc belongs to the kernel"),
        ("output_dir=/proc/x", "output_dir: /proc/x cannot be made"),
        (f"{ENGINE}.crash_dump_folder=/proc/x", "crash_dump_folder: /proc/x cannot be made"),
        (f"{ENGINE}.mem_fraction_static=0.0001", "mem_fraction_static: 0.0001 is unusual"),
        (f"resume_from_checkpoint={MODEL}", "holds no complete checkpoint"),
        ("actor_train.data_args.file_name=[a.jsonl,./a.jsonl]", "a.jsonl twice, so its rows count twice"),
        ("save_steps=1000000", "save_steps: 1000000 is above max_steps"),
        ("actor_infer.model_args.model_name_or_path=/other/model", "whose weights replace its own before"),
    ],
)
def test_what_is_possible_but_senseless_is_told(tmp_path: Path, override: str, message: str) -> None:
    assert message in findings(tmp_path, *split(override))
    assert message not in findings(tmp_path)


def test_engines_of_another_shape_than_the_trained_model_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(MODEL, other)
    (other / "config.json").write_text(
        (other / "config.json").read_text().replace('"num_hidden_layers": 28', '"num_hidden_layers": 4')
    )
    path = f"actor_infer.model_args.model_name_or_path={other}"
    assert "has another shape than the weights that it gets" in refusal(tmp_path, path)


@pytest.mark.parametrize(
    "override",
    [
        "actor_train.training_args.learning_rate=1e-6",
        "actor_infer.generating_args.temperature=0.6",
        "system_envs={TMPDIR: /tmp, PYTHONPATH: '/nowhere:/tmp', NCCL_DEBUG: INFO, OMP_NUM_THREADS: 2}",
        f"{ENGINE}={{trust_remote_code: false, json_model_override_args: '{{}}', load_format: dummy}}",
        f"{ENGINE}={{kv_cache_dtype: auto, load_format: auto}}",
        "system_envs={PYTHONHASHSEED: 0, GLOO_SOCKET_IFNAME: lo, NCCL_SOCKET_IFNAME: ^docker, HF_HOME: /tmp/new/hf}",
        "exp_name=a/b",
        "output_dir=same/run checkpoint_dir=same",
        "output_dir=same checkpoint_dir=same",
        "num_devices_per_node=24",
        "output_dir=output/run checkpoint_dir=/tmp/models/run",
        f"actor_infer.model_args.model_name_or_path={MODEL}",
    ],
)
def test_sound_neighbours_are_not_told(tmp_path: Path, override: str) -> None:
    assert findings(tmp_path, *split(override)) == findings(tmp_path)
