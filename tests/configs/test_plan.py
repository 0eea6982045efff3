"""Plans against numbers worked out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from io import StringIO
from pathlib import Path
from unittest import mock

import pytest
from rich.console import Console

from roll.base.errors import ConfigError
from roll.base.text import gibibytes
from roll.configs.devices.parallel_layout import spans
from roll.loading.load import load_config
from roll.models.families.shape import read_model_shape
from roll.plan.hardware import Hardware, prepare_run
from roll.plan.plan import Plan, make_plan, needed_memory, shared_device_memory, what_stops
from roll.plan.show import fold, print_plan
from tests.configs.samples import DATA, LAPTOP, SERVER, bytes_of, memory, rlvr, sft

EXAMPLES = Path(__file__).parents[2] / "examples"


def lines(plan: Plan) -> dict[str, int | float | str]:
    return {line.name: line.value for line in plan.batch}


def test_devices_are_placed_on_nodes_in_the_order_of_ranks(tmp_path: Path) -> None:
    plan = make_plan(rlvr(tmp_path), SERVER)
    assert (plan.platform, plan.nodes, plan.devices_per_node) == ("cuda", 3, 8)
    train, infer = plan.roles
    assert (train.workers, train.tensor, train.pipeline, train.data, train.nodes) == (16, 2, 1, 8, [0, 1])
    assert (infer.workers, infer.tensor, infer.data, infer.nodes) == (8, 1, 8, [2])
    assert [(item.device, item.node, item.local_index) for item in plan.devices[7:9]] == [(7, 0, 7), (8, 1, 0)]
    assert plan.devices[9].uses == ["actor_train rank 9 (tp1 dp4 pp0)"]
    assert plan.devices[16].uses == ["actor_infer engine 0"]


def test_equal_devices_are_shared(tmp_path: Path) -> None:
    plan = make_plan(rlvr(tmp_path, "actor_infer.device_mapping=0-15", "actor_infer.num_gpus_per_worker=2"), SERVER)
    assert plan.roles[0].shares_devices_with == ["actor_infer"]
    assert plan.devices[3].uses == ["actor_train rank 3 (tp1 dp1 pp0)", "actor_infer engine 1 tp1"]


def test_batch_arithmetic_by_count(tmp_path: Path) -> None:
    config = rlvr(
        tmp_path,
        "rollout_batch_size=128",
        "ppo_epochs=2",
        "max_steps=50",
        "actor_train.training_args.warmup_ratio=0.1",
        "actor_train.infer_batch_size=12",
    )
    assert lines(make_plan(config, SERVER)) == {
        "prompts per step": 128,
        "samples per step": 1024,
        "requests per engine and step": 128,
        "requests at a time on one engine": 128,
        "samples per optimizer step": 512,
        "samples per rank and optimizer step": 64,
        "micro-batches per rank and optimizer step": 64,
        "optimizer steps per batch": 4,
        "forward micro-batches per rank (log-probs)": 11,
        "tokens per step, at most": 1024 * 3072,
        "learning-rate schedule": "200 steps",
        "warm-up": "20 steps",
        "weight update": "14.19 GiB",
    }


@pytest.mark.parametrize(
    ("ratio", "limit", "requests"), [(0, 256, 64), (1, 256, 128), (0.5, 256, 96), (1, 100, 100), (4, 256, 256)]
)
def test_generation_that_runs_ahead_gives_an_engine_requests_of_several_batches(
    tmp_path: Path, ratio: float, limit: int, requests: int
) -> None:
    overrides = (f"async_generation_ratio={ratio}", f"actor_infer.max_running_requests={limit}")
    plan = lines(make_plan(rlvr(tmp_path, "rollout_batch_size=64", *overrides), SERVER))
    assert (plan["requests per engine and step"], plan["requests at a time on one engine"]) == (64, requests)


@pytest.mark.parametrize(
    ("overrides", "later"),
    [
        ((), "512 samples"),
        (("ppo_epochs=2",), "512 samples"),
        (("actor_train.training_args.gradient_accumulation_steps=128",), "no samples"),
        (("add_token_level_kl=true", "init_kl_coef=0.1", "reference.device_mapping=0-15"), None),
    ],
)
def test_the_plan_says_whose_old_log_probs_training_gives(
    tmp_path: Path, overrides: tuple[str, ...], later: str | None
):
    keys = ("rollout_batch_size=128", "num_return_sequences_in_group=8", *overrides)
    formulas = {line.name: line.formula for line in make_plan(rlvr(tmp_path, *keys), SERVER).batch}
    formula = formulas["forward micro-batches per rank (log-probs)"]
    assert ("training gives" in formula) == (later is not None)
    assert later is None or f"from the second step on {later}" in formula


def test_greedy_responses_are_requests_but_no_samples(tmp_path: Path) -> None:
    plan = make_plan(rlvr(tmp_path, "rollout_batch_size=128", "adv_estimator=remax"), SERVER)
    assert (lines(plan)["samples per step"], lines(plan)["requests per engine and step"]) == (1024, 144)
    [formula] = [line.formula for line in plan.batch if line.name == "requests per engine and step"]
    assert formula == "(1024 samples + 128 greedy responses) / 8 engines, rounded up"


def test_batch_arithmetic_by_tokens(tmp_path: Path) -> None:
    config = rlvr(
        tmp_path,
        "actor_train.use_dynamic_batching_in_train=true",
        "actor_train.max_tokens_per_microbatch_in_train=8192",
        "actor_train.use_dynamic_batching_in_infer=true",
        "actor_train.max_tokens_per_microbatch_in_infer=8192",
    )
    found = lines(make_plan(config, SERVER))
    assert found["samples per optimizer step"] == 512
    assert found["micro-batches"] == "by tokens"
    assert found["forward micro-batches per rank (log-probs)"] == "by tokens"


def test_sft_takes_one_optimizer_step_per_batch(tmp_path: Path) -> None:
    found = lines(make_plan(sft(tmp_path, "max_steps=30"), SERVER))
    assert found["samples per optimizer step"] == 4 * 2 * 2
    assert found["learning-rate schedule"] == "30 steps"


PUBLISHED = {"qwen2.5-0.5B": 494_032_768, "qwen2.5-7B": 7_615_616_512, "qwen2.5-32B": 32_763_876_352}


@pytest.mark.parametrize(
    ("keys", "formula"),
    [
        (["weight_update=delta"], "7,615,616,512 weights x 2 B, if all of them change"),
        (["actor_train.model_args.freeze_module_prefix=[lm_head]"], "7,070,619,136 weights x 2 B"),
        (["actor_train.lora_update=merged"], "462,422,016 weights of layers with adapters x 2 B"),
        (["actor_train.lora_update=adapter"], "3,211,264 parameters of adapters x 2 B"),
    ],
)
def test_the_plan_shows_what_a_weight_update_sends(tmp_path: Path, keys: list[str], formula: str) -> None:
    """Of adapters for q_proj: 28 layers of 4,608 rows of query, key and value x 3,584, or of 14 x (4,608 + 3,584)."""
    lora = ["actor_train.model_args.lora_target=q_proj", "actor_train.model_args.lora_rank=14"]
    plan = make_plan(rlvr(tmp_path, *keys, *(lora if "lora" in keys[0] else [])), SERVER)
    assert [line.formula for line in plan.batch if line.name == "weight update"] == [formula]


def test_the_rank_that_sends_deltas_keeps_the_weights_of_its_stage(tmp_path: Path) -> None:
    stages = "actor_train.strategy_args.strategy_config.pipeline_model_parallel_size=2"
    plan = make_plan(rlvr(tmp_path, "weight_update=delta", stages), SERVER)
    [kept] = memory(plan, "actor_train").host
    assert abs(kept.bytes - 7_615_616_512) == 3584, "two bytes of half of the weights, but for the last norm"


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_parameters_are_those_of_the_published_models(name: str, parameters: int) -> None:
    shape = read_model_shape(DATA / "models" / name)
    assert shape is not None and shape.stage_parameters(0, [shape.layers], 1) == parameters


def test_stages_of_an_untied_model_hold_all_parameters_once() -> None:
    shape = read_model_shape(DATA / "models" / "qwen2.5-7B")
    assert shape is not None
    assert sum(
        shape.stage_parameters(stage, [shape.layers // 4] * 4, 1) for stage in range(4)
    ) == shape.stage_parameters(0, [shape.layers], 1)
    assert shape.padded_vocabulary(2) == 152064 and shape.padded_vocabulary(7) == 152096


SHARE = "actor_infer.strategy_args.strategy_config.mem_fraction_static"


def test_roles_that_take_turns_need_the_memory_of_one_phase(tmp_path: Path) -> None:
    shared = ("platform=cuda", "num_devices_per_node=16", "actor_infer.device_mapping=0-15", "async_generation_ratio=0")
    plan = make_plan(rlvr(tmp_path, *shared), SERVER)
    (sentence,) = shared_device_memory(plan)
    weights = bytes_of(plan, "actor_train", "weights") + bytes_of(plan, "actor_infer", "weights")
    away = bytes_of(plan, "actor_train", "weights") + bytes_of(plan, "actor_train", "optimizer")
    graphs = bytes_of(plan, "actor_infer", "CUDA graphs")
    assert sentence == (
        f"actor_train + actor_infer take turns on one device: {gibibytes(memory(plan, 'actor_train').total + graphs)} "
        f"while training, {gibibytes(weights + graphs)} during an update, "
        f"{gibibytes(memory(plan, 'actor_infer').total)} while generating, "
        f"with {gibibytes(away)} in host memory meanwhile, {gibibytes(16 * away)} on a node "
        "(up to twice that: torch rounds pinned memory up to powers of two)"
    )
    (sentence,) = shared_device_memory(
        make_plan(rlvr(tmp_path, *shared, "is_offload_states=false", f"{SHARE}=0.3"), SERVER)
    )
    assert "on one device: " in sentence and "turns" not in sentence


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("async_generation_ratio=0", "actor_train and actor_infer have devices of their own"),
        (
            "actor_infer.device_mapping=0-15",
            "with async_generation_ratio 1 the engines generate while actor_train trains",
        ),
    ],
)
def test_turns_that_are_not_taken_are_a_warning(tmp_path: Path, override: str, why: str) -> None:
    values = ("platform=cuda", "is_offload_states=true", "async_generation_ratio=1", f"{SHARE}=0.3", override)
    config = rlvr(tmp_path, *values)
    plan = make_plan(config, SERVER)
    assert f"is_offload_states: has no effect: {why}" in plan.warnings and not plan.takes_turns


def test_gpus_shared_on_several_nodes_are_said_to_get_their_weights_slowly(tmp_path: Path) -> None:
    shared = ("actor_infer.device_mapping=0-15", "async_generation_ratio=0")
    said = "actor_infer.device_mapping: shares the GPUs of actor_train on 2 nodes: weights are sent through host memory"
    warnings = make_plan(rlvr(tmp_path, "platform=cuda", "num_devices_per_node=8", *shared), SERVER).warnings
    assert [warning for warning in map(str, warnings) if warning.startswith(said)]
    for other in ("num_devices_per_node=16", "platform=cpu num_devices_per_node=8"):
        warnings = make_plan(rlvr(tmp_path, "platform=cuda", *shared, *other.split()), SERVER).warnings
        assert not [warning for warning in map(str, warnings) if "shares the GPUs" in warning]


def test_missing_model_removes_only_the_memory_estimate_and_the_size_of_updates(tmp_path: Path) -> None:
    known, unknown = rlvr(tmp_path), rlvr(tmp_path, "pretrain=/elsewhere/model")
    plan = make_plan(unknown, SERVER)
    assert plan.memory == []
    assert plan.batch == [line for line in make_plan(known, SERVER).batch if line.name != "weight update"]
    assert "pretrain: /elsewhere/model is not a folder on this machine" in plan.stops
    expected = "no memory estimate for actor_train, actor_infer: the model's config.json is not on this machine"
    assert expected in plan.warnings


@pytest.mark.parametrize(
    ("overrides", "machine", "expected"),
    [
        (["platform=cuda"], SERVER, ("cuda", 8)),
        (["platform=cuda"], LAPTOP, ("cuda", 8)),
        (["platform=cuda", "num_devices_per_node=4"], LAPTOP, ("cuda", 4)),
        ([], LAPTOP, ("cuda", 8)),
        ([], Hardware(gpus=0, cores=32), ("cpu", 32)),
        (["platform=cpu", "num_devices_per_node=24"], LAPTOP, ("cpu", 24)),
        (["platform=cpu"], LAPTOP, ("cpu", 2)),
    ],
)
def test_assumed_platform(tmp_path: Path, overrides: list[str], machine: Hardware, expected: tuple[str, int]) -> None:
    plan = make_plan(rlvr(tmp_path, *overrides), machine)
    assert (plan.platform, plan.devices_per_node) == expected


def test_assumptions_are_warnings(tmp_path: Path) -> None:
    message = "\n".join(make_plan(rlvr(tmp_path), LAPTOP).warnings)
    assert "platform: auto on a machine without a GPU: planned for cuda elsewhere" in message
    assert "num_devices_per_node: is not given and there is no GPU here: assumed 8" in message


def test_an_engine_over_nodes_is_a_warning_and_has_the_same_number_of_devices_on_each(tmp_path: Path) -> None:
    plan = make_plan(rlvr(tmp_path, "actor_infer.num_gpus_per_worker=2", "num_devices_per_node=3"), SERVER)
    assert any(
        "an engine spans nodes and will be slow: devices 20-21 are on nodes 6-7" in line for line in plan.warnings
    )
    config = rlvr(tmp_path, "actor_infer.num_gpus_per_worker=4", "num_devices_per_node=7")
    message = "gives an engine devices 20 on node 2, then 21-23 on node 3 .*the same number on each"
    with pytest.raises(ConfigError, match=message):
        make_plan(config, SERVER)


def test_every_engine_is_split_evenly_over_its_nodes(tmp_path: Path) -> None:
    layout = ("actor_infer.num_gpus_per_worker=4", "num_devices_per_node=4", "actor_infer.device_mapping=18-21,23-26")
    message = "gives an engine devices 23 on node 5, then 24-26 on node 6"
    with pytest.raises(ConfigError, match=message):
        make_plan(rlvr(tmp_path, *layout), SERVER)


def test_a_tensor_parallel_group_across_nodes_is_a_warning(tmp_path: Path) -> None:
    plan = make_plan(rlvr(tmp_path, "num_devices_per_node=3"), SERVER)
    assert any("a tensor-parallel group spans nodes and will be slow" in warning for warning in plan.warnings)
    size = "actor_train.strategy_args.strategy_config.context_parallel_size=4"
    plan = make_plan(rlvr(tmp_path, size, "num_devices_per_node=4"), SERVER)
    assert any("a context-parallel group spans nodes and will be slow" in warning for warning in plan.warnings)
    assert plan.devices[2].uses[0] == "actor_train rank 2 (tp0 cp1 dp0 pp0)"


def test_a_plan_is_json(tmp_path: Path) -> None:
    plan = make_plan(rlvr(tmp_path), SERVER)
    read = json.loads(json.dumps(plan.as_dict()))
    assert read["roles"][0]["devices"] == list(range(16))
    assert read["memory"][0]["total"] == plan.memory[0].total
    assert math.isclose(sum(line["bytes"] for line in read["memory"][0]["lines"]), read["memory"][0]["total"])


def test_ranks_are_shown_as_spans() -> None:
    assert spans([0, 1, 2, 3, 8, 10, 11]) == "0-3,8,10-11"


def test_the_published_rlvr_recipe_plans() -> None:
    plan = make_plan(load_config(DATA / "recipes" / "rlvr_config_async.yaml"), LAPTOP)
    assert (plan.nodes, plan.devices_per_node) == (3, 8)
    found = lines(plan)
    assert found["samples per step"] == found["samples per optimizer step"] == 512
    assert found["learning-rate schedule"] == "1000 steps"
    message = "\n".join(plan.warnings)
    assert "truncated distribution" not in message, "the kept tokens are replayed"
    assert "reward_pretrain: has no effect" in message
    assert "fp16 samples while actor_train computes in bf16" in message


def test_the_published_agentic_recipe_plans() -> None:
    plan = make_plan(load_config(DATA / "recipes" / "agent_val_frozen_lake_async.yaml"), LAPTOP)
    assert lines(plan)["samples per optimizer step"] == 1024
    assert (
        "actor_infer.strategy_args.strategy_name: vllm is read as sglang: gpu_memory_utilization 0.8 as "
        "mem_fraction_static, block_size 16 as page_size; unchanged: load_format"
    ) in plan.warnings


RECIPES = {
    "qwen2.5-7B-rlvr_megatron/rlvr_config.yaml": ("qwen2.5-7B", 512, 2),
    "qwen2.5-0.5B-rlvr/rlvr_config.yaml": ("qwen2.5-0.5B", 256, 2),
}


@pytest.mark.parametrize(("recipe", "expected"), RECIPES.items())
def test_examples_plan(recipe: str, expected: tuple[str, int, int]) -> None:
    model, samples, optimizer_steps = expected
    config = load_config(EXAMPLES / recipe, [f"pretrain={DATA / 'models' / model}"])
    plan = make_plan(config, SERVER)
    assert lines(plan)["samples per step"] == samples
    assert lines(plan)["optimizer steps per batch"] == optimizer_steps
    assert all("is not a file on this machine" in warning for warning in plan.warnings), plan.warnings
    assert sum(item.total for item in plan.memory if item.role == "actor_train") < 70 * 2**30


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        (
            "qwen2.5-7B-rlvr_megatron/rlvr_config.yaml",
            [
                "actor_train.device_mapping=0-7",
                "actor_infer.device_mapping=8-15",
                "actor_train.training_args.gradient_accumulation_steps=64",
            ],
        ),
        (
            "qwen2.5-0.5B-rlvr/rlvr_config.yaml",
            [
                "num_devices_per_node=2",
                "actor_infer.device_mapping=[1]",
                "actor_infer.strategy_args.strategy_config.mem_fraction_static=0.85",
            ],
        ),
        ("qwen2.5-0.5B-rlvr/rlvr_config.yaml", ["actor_train.max_tokens_per_microbatch_in_train=49152"]),
        (
            "qwen2.5-0.5B-rlvr/rlvr_config.yaml",
            [
                "async_generation_ratio=1",
                "actor_train.max_tokens_per_microbatch_in_train=32768",
                "actor_infer.strategy_args.strategy_config.mem_fraction_static=0.3",
            ],
        ),
    ],
)
def test_the_overrides_in_the_readmes_plan(recipe: str, overrides: list[str]) -> None:
    text = (EXAMPLES / recipe).with_name("README.md").read_text()
    assert all(override in text for override in overrides)
    assert make_plan(load_config(EXAMPLES / recipe, overrides), LAPTOP).roles


@pytest.mark.parametrize(
    ("device_gib", "tokens", "overrides"),
    [(24, 8192, []), (80, 49152, []), (80, 32768, ["async_generation_ratio=1", f"{SHARE}=0.3"])],
)
def test_the_recipe_for_one_gpu_needs_what_its_page_says(device_gib: int, tokens: int, overrides: list[str]) -> None:
    folder, cells = EXAMPLES / "qwen2.5-0.5B-rlvr", [f"{tokens:,}", "8.28"]
    for attention in ("auto", "sdpa"):
        values = [*overrides, f"pretrain={DATA / 'models' / 'qwen2.5-0.5B'}"]
        values += [f"actor_train.max_tokens_per_microbatch_in_train={tokens}"]
        values += [f"actor_train.model_args.attn_implementation={attention}"]
        plan = make_plan(load_config(folder / "rlvr_config.yaml", values), Hardware(1, 8))
        assert not what_stops(plan, 0.85 * device_gib, elsewhere=True)
        cells += [f"{size / 2**30:.2f}" for size in needed_memory(plan).values()]
    assert f"| {' | '.join(cells)} |" in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("overrides", "machine", "stop"),
    [
        ((), SERVER, "actor_train.device_mapping: device 15 is on another machine, as the number of GPUs here is 8"),
        ((), LAPTOP, "actor_train.device_mapping: device 15 does not exist: this machine has 2 cores"),
        (("platform=cpu", "num_devices_per_node=24"), Hardware(0, 2, 23 * 2**30), "optimizers need at least"),
    ],
)
def test_a_plan_tells_what_prepare_run_refuses(
    tmp_path: Path, overrides: tuple[str, ...], machine: Hardware, stop: str
) -> None:
    assert any(stop in line for line in make_plan(rlvr(tmp_path, *overrides), machine).stops)
    with pytest.raises(ConfigError, match=stop):
        prepare_run(rlvr(tmp_path, *overrides), machine)


def test_a_run_that_may_fill_the_memory_is_a_warning(tmp_path: Path) -> None:
    config = rlvr(tmp_path, "platform=cpu", "num_devices_per_node=24")
    plan = make_plan(config, Hardware(0, 24, 800 * 2**30))
    assert any("the run may need up to" in line for line in plan.warnings)
    assert not any("memory" in line for line in plan.stops)


def printed(plan: Plan, width: int) -> str:
    text = StringIO()
    with mock.patch("roll.plan.show.make_console", return_value=Console(file=text, width=width, highlight=False)):
        print_plan(plan)
    return text.getvalue()


@pytest.mark.parametrize("width", [80, 100])
def test_devices_are_ranges_and_no_word_is_cut_in_a_narrow_terminal(tmp_path: Path, width: int) -> None:
    plan = make_plan(rlvr(tmp_path, "actor_infer.num_gpus_per_worker=2"), SERVER)
    words, whole = (sorted(printed(plan, columns).replace("─", "").split()) for columns in (width, 1000))
    assert words == whole
    assert {"0-15", "0-1", "tp2", "megatron_train"} <= {*words}


def test_warnings_of_one_kind_are_one_line_with_a_count_and_the_first() -> None:
    moved = "a.b, c.d, e.f, g.h, i.j: is read under its name here; see the page"
    dropped = [f"key{number}: has no effect: reason {number}" for number in range(6)]
    other = "seed: 0 is read as 1"
    assert fold([moved, dropped[0], other, *dropped[1:]]) == [
        "a.b: is read under its name here; see the page; 4 more keys read under their names here: c.d, e.f, g.h, ...",
        "key0: has no effect: reason 0; 5 more keys without effect: key1, key2, key3, ...",
        other,
    ]
    assert fold(dropped[:3]) == dropped[:3]


def test_an_item_of_several_lines_has_one_bullet(tmp_path: Path) -> None:
    plan = replace(make_plan(rlvr(tmp_path), SERVER), stops=["env.py:3: TypeError: no\n    return 1\n    tried", "b"])
    text = StringIO()
    print_plan(plan, text)
    assert "  - env.py:3: TypeError: no\n        return 1\n        tried\n  - b\n" in text.getvalue()


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize("place", ["", "system_envs", "actor_train.system_envs", "actor_infer.system_envs"])
def test_expandable_segments_stop_a_run_that_sends_weights_through_cuda_ipc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: str
) -> None:
    value = "max_split_size_mb:64,expandable_segments:True"
    stop = (
        f"{name}: {value} of {place.partition('.')[0] if '.' in place else 'actor_train'} does not work with CUDA IPC"
    )
    monkeypatch.setenv(name, "" if place else value)
    given = [f"{place}={{{name}: '{value}'}}"] if place else []
    values = ("platform=cuda", "async_generation_ratio=0", *given)
    shared = make_plan(rlvr(tmp_path, *values, "actor_infer.device_mapping=0-15"), SERVER)
    assert any(stop in line for line in shared.stops)
    assert not any(stop in line for line in make_plan(rlvr(tmp_path, *values), SERVER).stops)
    monkeypatch.setenv(name, value)
    off = (f"system_envs={{{name}: 'expandable_segments:False'}}", "actor_infer.device_mapping=0-15")
    assert not any(stop in line for line in make_plan(rlvr(tmp_path, *values[:2], *off), SERVER).stops)


def test_an_engine_needs_nvcc_on_a_machine_with_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    home = tmp_path / "nvidia" / "cu13"
    monkeypatch.setenv("CUDA_HOME", str(home))

    def stops(*overrides: str, machine: Hardware = SERVER) -> list[str]:
        config = rlvr(tmp_path, "platform=cuda", "num_devices_per_node=8", *overrides)
        return [line for line in make_plan(config, machine).stops if "sglang: " in line]

    path = "actor_infer.strategy_args.strategy_name: sglang: "
    missing = f"{path}{home}/bin/nvcc is missing, with which it compiles kernels when it starts"
    assert stops() == [f"{missing}; install the CUDA toolkit, or set CUDA_HOME to its folder"]
    assert not stops(machine=LAPTOP), "there is no GPU here, so the run is planned for another machine"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "nvcc").touch(0o755)
    linked = f"{home}/lib64/libcudart.so is missing, with which it links kernels"
    assert stops() == [f"{path}{linked}; see docs/gpu.md"]
    (home / "lib64").mkdir()
    (home / "lib64" / "libcudart.so").touch()
    assert not stops()
    monkeypatch.setenv("PATH", str(home / "bin"))
    monkeypatch.delenv("CUDA_HOME")
    assert not stops(), "nvcc is on PATH"
    assert stops(f"actor_infer.system_envs={{CUDA_HOME: {tmp_path}}}")
