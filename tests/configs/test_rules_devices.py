"""Rules between roles and the machine; golden_findings.py has those of the file alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.base.errors import ConfigError, Problem
from roll.configs.check import check
from roll.plan.hardware import prepare_run
from roll.plan.plan import make_plan
from tests.configs.samples import LAPTOP, RLVR, SERVER, rlvr

SGLANG = "actor_infer.strategy_args.strategy_config"


def test_missing_resources_stop_a_run_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    config = rlvr(tmp_path, "pretrain=models/Qwen2.5-7B", "resume_from_checkpoint=old/step_5")
    assert check(config).missing == [
        Problem(
            "pretrain",
            "models/Qwen2.5-7B is not a folder on this machine; write a path that exists, or the name of a model on "
            f"the hub, owner/name; relative paths start in {Path.cwd()}",
        ),
        Problem(
            "actor_train.data_args.file_name",
            f"train.jsonl is not a file on this machine; relative paths start in {Path.cwd()}",
        ),
        Problem(
            "resume_from_checkpoint",
            "old/step_5 is not a folder; use a checkpoint's path, or true for the newest one of output_dir; "
            f"relative paths start in {Path.cwd()}",
        ),
    ]


def test_engine_options_are_not_checked_where_sglang_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roll.configs.devices.sglang_options.server_options", lambda: None)
    warnings = check(rlvr(tmp_path, f"{SGLANG}.anything=1")).warnings
    assert [str(warning) for warning in warnings] == [
        f"{SGLANG}: sglang is not installed here: anything were not checked against its options"
    ]


def test_a_section_for_vllm_is_read_as_sglang(tmp_path: Path) -> None:
    text = RLVR + (
        "  strategy_args:\n    strategy_name: vllm\n    strategy_config:\n      gpu_memory_utilization: 0.8\n"
        "      tensor_parallel_size: 2\n      swap_space: 4\n      enable_prefix_caching: true\n"
        "      enforce_eager: true\n      load_format: auto\n"
    )
    config = rlvr(tmp_path, text=text)
    engine = config.actor_infer.strategy_args
    assert (engine.strategy_name, config.actor_infer.num_gpus_per_worker) == ("sglang", 2)
    assert engine.strategy_config == {
        "mem_fraction_static": 0.8,
        "disable_radix_cache": False,
        "disable_cuda_graph": True,
        "load_format": "auto",
    }
    (note,) = [message for path, message in config.source.notes if path.startswith("actor_infer.strategy_args")]
    assert note == (
        "vllm is read as sglang: gpu_memory_utilization 0.8 as mem_fraction_static, tensor_parallel_size 2 as "
        "actor_infer.num_gpus_per_worker, enable_prefix_caching true as disable_radix_cache false, enforce_eager true "
        "as disable_cuda_graph; unchanged: load_format; without effect: swap_space"
    )


def test_an_override_wins_over_an_option_of_vllm(tmp_path: Path) -> None:
    text = RLVR + "  strategy_args: {strategy_name: vllm, strategy_config: {gpu_memory_utilization: 0.8}}\n"
    config = rlvr(tmp_path, f"{SGLANG}.mem_fraction_static=0.5", text=text)
    assert config.actor_infer.strategy_args.strategy_config == {"mem_fraction_static": 0.5}
    config = rlvr(tmp_path, "actor_infer.strategy_args.strategy_name=sglang", text=text)
    assert config.actor_infer.strategy_args.strategy_config == {"mem_fraction_static": 0.8}


def test_optimizer_steps_of_one_sample_are_a_warning(tmp_path: Path) -> None:
    sizes = ["rollout_batch_size=4", "actor_train.training_args.gradient_accumulation_steps=1"]
    config = rlvr(tmp_path, *sizes, "actor_train.device_mapping=[0,1]")
    warnings = [str(warning) for warning in check(config).warnings]
    assert any(
        "gradient_accumulation_steps: 1 with per_device_train_batch_size 1 makes 32 optimizer steps of one sample each"
        in warning
        and "use 32 for one step of the whole batch" in warning
        for warning in warnings
    )
    assert not any("of one sample" in str(warning) for warning in check(rlvr(tmp_path)).warnings)


def test_a_run_on_gpus_needs_gpus_here_or_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = rlvr(tmp_path, "platform=cuda")
    missing = "platform: cuda needs GPUs, and this machine has none; use cpu, or join the Ray of a cluster"
    with pytest.raises(ConfigError, match=missing):
        prepare_run(config, LAPTOP)
    few = rlvr(tmp_path, "platform=cuda", "num_devices_per_node=16")
    with pytest.raises(ConfigError, match="num_devices_per_node: 16, and this machine has 8 GPUs; use those"):
        prepare_run(few, SERVER)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ConfigError) as caught:
        prepare_run(config, LAPTOP)
    assert "platform" not in str(caught.value)
    assert any(line.startswith("num_devices_per_node: is not set") for line in make_plan(config, LAPTOP).stops)


def test_gpus_of_a_node_cannot_be_counted_on_a_machine_without_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    text = RLVR.replace("num_devices_per_node: 8\n", "")
    with pytest.raises(ConfigError, match="num_devices_per_node: is not set, and this machine has no GPUs to count"):
        prepare_run(rlvr(tmp_path, "platform=cuda", text=text), LAPTOP)
    config = rlvr(tmp_path, "num_devices_per_node=8")
    with pytest.raises(ConfigError):  # the model is not on this machine
        prepare_run(config, LAPTOP)
    assert config.platform == "cpu"


def test_devices_of_a_second_node_need_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = rlvr(tmp_path, "platform=cpu", "num_devices_per_node=8")
    message = "device 23 is on another machine, as num_devices_per_node is 8: set num_devices_per_node: 24 if it is on"
    with pytest.raises(ConfigError, match=message):
        prepare_run(config, LAPTOP)
    assert any(message in line for line in make_plan(config, LAPTOP).stops)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ConfigError) as caught:
        prepare_run(config, LAPTOP)
    assert "num_devices_per_node" not in str(caught.value)


def test_parts_that_are_recomputed_may_be_written_with_commas(tmp_path: Path) -> None:
    options = "actor_train.strategy_args.strategy_config"
    config = rlvr(tmp_path, f"{options}.recompute_granularity=selective", f"{options}.recompute_modules='mlp, moe'")
    assert config.actor_train.strategy_args.strategy_config.recompute_modules == ["mlp", "moe"]
