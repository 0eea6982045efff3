"""Keys of adapters: what they need, what they exclude, and what the plan shows of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.base.errors import ConfigError
from roll.configs.learning.lora import adapter_arguments, adapter_parameters, base_is_reference, training_of
from roll.loading.load import load_config
from roll.models.families.shape import known_model_shape
from roll.models.tiny import write_tiny_model
from roll.plan.memory import memory_plans, model_shapes
from tests.configs.samples import RLVR, write

LORA = {"lora_target": "all-linear", "lora_rank": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", max_position_embeddings=4096)


def load(folder: Path, model: Path, *overrides: str, **lora: Any) -> Any:
    given = (f"actor_train.model_args.{key}={json.dumps(value)}" for key, value in lora.items())
    rate = "actor_train.training_args.learning_rate=1e-5"
    return load_config(write(folder, RLVR), [f"pretrain={model}", rate, *given, *overrides])


def problems(folder: Path, model: Path, *overrides: str, **lora: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, model, *overrides, **lora)
    return str(caught.value)


def test_names_are_a_list_or_one_text(tmp_path: Path, model: Path) -> None:
    config = load(tmp_path, model, lora_target="q_proj, v_proj", lora_rank=4)
    assert config.actor_train.model_args.lora_target == ["q_proj", "v_proj"]
    assert config.actor_train.model_args.lora_scale == 1
    assert load(tmp_path, model, **LORA, lora_alpha=8).actor_train.model_args.lora_scale == 2


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lora_rank": 16}, "lora_rank: has no effect: lora_target is empty; write all-linear or names of linear"),
        ({**LORA, "lora_target": ["k_prj"]}, "k_prj is no linear layer of Qwen3ForCausalLM; did you mean k_proj?"),
        ({**LORA, "lora_target": ["all-linear", "q_proj"]}, "all-linear stands for all layers"),
        ({**LORA, "lora_dropout": 0.05}, "lora_dropout: 0.05 would make a token's probability random; use 0"),
        ({**LORA, "adapter_name_or_path": "nowhere"}, "nowhere has no adapter_config.json"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, model: Path, keys: dict[str, Any], message: str) -> None:
    assert message in problems(tmp_path, model, **keys)


def test_a_critic_is_trained_in_full(tmp_path: Path, model: Path) -> None:
    keys = ["adv_estimator=gae", "critic.device_mapping=[0]", "critic.model_args.lora_target=all-linear"]
    assert "critic.model_args.lora_target: a critic is trained in full" in problems(tmp_path, model, *keys)


def test_a_low_learning_rate_is_warned_of(tmp_path: Path, model: Path) -> None:
    config = load(tmp_path, model, "actor_train.training_args.learning_rate=1e-6", **LORA)
    assert "adapters usually need about ten times" in str(config.source.report.warnings)


def saved(folder: Path, model: Path | str, **keys: Any) -> str:
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    named = {"base_model_name_or_path": str(model)}
    (folder / "adapter_config.json").write_text(json.dumps(config | named | keys))
    (folder / "adapter_model.safetensors").touch()
    return str(folder)


def test_a_saved_adapter_gives_rank_alpha_and_layers(tmp_path: Path, model: Path) -> None:
    found = load(tmp_path, model, adapter_name_or_path=saved(tmp_path / "a", model)).actor_train.model_args
    assert (found.lora_rank, found.lora_alpha, found.lora_target) == (4, 8, ["q_proj"])


@pytest.mark.parametrize(
    ("saved_keys", "keys", "message"),
    [
        ({"base_model_name_or_path": "Qwen/Qwen2.5-7B"}, {}, "was trained on Qwen/Qwen2.5-7B, pretrain is"),
        ({}, {"lora_rank": 8}, "lora_rank: 8 is not 4, the rank of the adapter"),
        ({}, {"lora_alpha": 4}, "lora_alpha: 4 is not 8, that of the adapter"),
        ({}, {"lora_target": ["q_proj", "v_proj"]}, "lora_target: differs from the adapter's in v_proj"),
        ({"use_dora": True}, LORA, "has use_dora true, which is not available; use a plain LoRA"),
        ({"rank_pattern": {"q_proj": 2}}, LORA, 'has rank_pattern {"q_proj": 2}, which is not available'),
    ],
)
def test_a_saved_adapter_that_does_not_fit_is_refused(
    tmp_path: Path, model: Path, saved_keys: dict[str, Any], keys: dict[str, Any], message: str
) -> None:
    folder = saved(tmp_path / "a", model, **saved_keys)
    assert message in problems(tmp_path, model, adapter_name_or_path=folder, **keys)


def test_a_reference_without_devices_is_the_model_below_the_adapters(tmp_path: Path, model: Path) -> None:
    keys = ["use_kl_loss=true", "kl_loss_coef=0.01", "reference.device_mapping=[]"]
    assert base_is_reference(load(tmp_path, model, *keys, **LORA))
    assert not base_is_reference(load(tmp_path, model, *keys[:2], "reference.device_mapping=[0]", **LORA))
    assert "reference.device_mapping: is empty, but use_kl_loss needs the reference" in problems(tmp_path, model, *keys)
    other = "reference.model_args.model_name_or_path=elsewhere"
    assert "elsewhere is not" in problems(tmp_path, model, *keys, other, **LORA)


def test_the_plan_counts_gradients_and_optimizer_of_adapters_alone(tmp_path: Path, model: Path) -> None:
    config = load(tmp_path, model, **LORA)
    arguments, shape = config.actor_train.model_args, known_model_shape(model)
    each = 4 * ((64 + 4 * 24) * 2 + (64 + 2 * 24) * 2 + 3 * (64 + 96))
    assert adapter_parameters(shape, arguments, layers=shape.layers) == shape.layers * each
    [plan] = [plan for plan in memory_plans(config, model_shapes(config), "cpu") if plan.role == "actor_train"]
    lines = {line.name: line.bytes for line in plan.lines}
    tensor = config.actor_train.layout.tensor
    assert lines["gradients"] == 4 * adapter_parameters(shape, arguments, shape.layers, tensor)
    assert lines["weights"] > lines["gradients"]


@pytest.mark.parametrize(
    ("keys", "cpu", "cuda"),
    [
        ([], True, True),
        (["actor_train.model_args.dtype=fp32", "actor_infer.model_args.dtype=fp32"], False, True),
        (["actor_train.lora_update=adapter"], True, True),
        (["actor_train.lora_update=merged"], False, False),
        (["actor_infer.strategy_args.strategy_config.load_format=dummy"], False, False),
        (["actor_train.device_mapping=[0,1]", "actor_infer.device_mapping=[0,1]", "async_generation_ratio=0"], 1, 0),
    ],
)
def test_engines_get_adapters_where_they_keep_the_weights_below(
    tmp_path: Path, model: Path, keys: list[str], cpu: bool, cuda: bool
) -> None:
    config = load(tmp_path, model, "actor_infer.device_mapping=[16,17]", *keys, **LORA)
    assert [config.adapters(platform) is not None for platform in ("cpu", "cuda")] == [cpu, cuda]


def test_adapters_need_engines_that_load_the_model(tmp_path: Path, model: Path) -> None:
    keys = ["actor_train.lora_update=adapter", "actor_infer.strategy_args.strategy_config.load_format=dummy"]
    message = (
        "actor_train.lora_update: adapter needs engines that load the model, and load_format of actor_infer is dummy"
    )
    assert message in problems(tmp_path, model, *keys, **LORA)


@pytest.mark.parametrize(
    ("dtype", "way", "warned"), [("bf16", "merged", 1), ("fp32", "merged", 0), ("bf16", "adapter", 0)]
)
def test_sums_of_weights_and_adapters_that_are_rounded_are_warned_of(
    tmp_path: Path, model: Path, dtype: str, way: str, warned: bool
) -> None:
    keys = [f"{role}.model_args.dtype={dtype}" for role in ("actor_train", "actor_infer")]
    config = load(
        tmp_path, model, "actor_infer.device_mapping=[16,17]", f"actor_train.lora_update={way}", *keys, **LORA
    )
    assert ("merged rounds small changes away" in str(config.source.report.warnings)) == warned


def test_a_policy_for_running_requests_has_no_effect_on_adapters(tmp_path: Path, model: Path) -> None:
    keys = ["actor_train.lora_update=adapter", "async_generation_ratio=1", "in_flight_policy=drain"]
    config = load(tmp_path, model, "actor_infer.device_mapping=[16,17]", *keys, **LORA)
    assert "drain has no effect: with lora_update adapter a response keeps" in str(config.source.report.warnings)


def test_the_plan_counts_the_places_of_adapters_in_an_engine(tmp_path: Path, model: Path) -> None:
    keys = ["actor_infer.device_mapping=[16,17]", "actor_infer.num_gpus_per_worker=1", "async_generation_ratio=1.5"]
    keys += [f"{role}.model_args.dtype=fp32" for role in ("actor_train", "actor_infer")]
    config = load(tmp_path, model, *keys, **LORA)
    arguments, shape = config.actor_train.model_args, known_model_shape(model)
    for platform, places in (("cpu", 0), ("cuda", 2 + 2)):
        plans = memory_plans(config, model_shapes(config), platform)
        [lines] = [plan.lines for plan in plans if plan.role == "actor_infer"]
        size = sum(line.bytes for line in lines if line.name == "adapters")
        assert size == places * adapter_parameters(shape, arguments, shape.layers) * 4


POLICIES = "policies={math: {tags: [math], lora_rank: 16}, code: {tags: [code], learning_rate: 2e-5}}"
ONE_STEP = "actor_train.training_args.gradient_accumulation_steps=64"


def with_policies(folder: Path, model: Path, *overrides: str, **lora: Any) -> Any:
    return load(folder, model, "actor_infer.device_mapping=[16,17]", ONE_STEP, POLICIES, *overrides, **LORA | lora)


def test_policies_have_adapters_and_rates_of_their_own_and_their_engines_get_adapters(
    tmp_path: Path, model: Path
) -> None:
    config = with_policies(tmp_path, model, "async_generation_ratio=1", lora_alpha=8)
    role, shape = config.actor_train, known_model_shape(model)
    for platform in ("cpu", "cuda"):
        found = config.adapters(platform)
        assert {name: (each.lora_rank, each.lora_scale) for name, each in found.items()} == {
            "math": (16, 0.5),
            "code": (4, 2.0),
        }
    rates = {name: training_of(role.training_args, own).learning_rate for name, own in config.policies.items()}
    assert rates == {"math": 1e-5, "code": 2e-5}
    engine = adapter_arguments(found.values(), shape, ahead=1)
    assert (engine["max_loras_per_batch"], engine["max_lora_rank"]) == (2 * 2 + 1, 16)
    [plan] = [plan for plan in memory_plans(config, model_shapes(config), "cpu") if plan.role == "actor_train"]
    [gradients] = [line.bytes for line in plan.lines if line.name == "gradients"]
    each = [adapter_parameters(shape, one, shape.layers, role.layout.tensor) for one in found.values()]
    assert gradients == 4 * sum(each)


@pytest.mark.parametrize(
    ("overrides", "lora", "message"),
    [
        (["policies={a: {tags: [x]}, b: {tags: [x]}}"], {}, "policies.b.tags: x is a tag of a too; leave it out of"),
        (
            ["policies={a: {tags: [x], learning_rate: 1e-7}}", "actor_train.training_args.min_learning_rate=1e-6"],
            {},
            "policies.a.learning_rate: 1e-07 is below min_learning_rate 1e-06; use at least that",
        ),
        (["policies={a: {}}"], {}, "policies.a.tags: is empty; write the tags of its prompts"),
        (["policies={a/b: {tags: [x]}}"], {}, "policies.a/b: names a folder and metrics; use letters, digits, - and _"),
        (["actor_train.lora_update=merged"], {}, "lora_update: merged gives an engine the weights of one policy"),
        (
            ["actor_train.training_args.gradient_accumulation_steps=16"],
            {},
            "optimizer steps a batch, policies have one",
        ),
        (
            ["actor_infer.strategy_args.strategy_config.load_format=dummy"],
            {},
            "load_format of actor_infer is dummy; use load_format auto, the model of actor_train",
        ),
        (["adv_estimator=gae", "critic.device_mapping=[0]"], {}, "adv_estimator: gae has a critic, and policies have"),
        (
            [],
            {"lora_target": ""},
            "policies.code.learning_rate: has no effect: policies share weights only where adapters are trained",
        ),
    ],
)
def test_what_policies_cannot_do_is_named(
    tmp_path: Path, model: Path, overrides: list[str], lora: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        with_policies(tmp_path, model, *overrides, **lora)
    assert message in str(caught.value)


def test_policies_may_learn_from_a_batch_several_times(tmp_path: Path, model: Path) -> None:
    assert with_policies(tmp_path, model, "ppo_epochs=2").optimizer_steps_per_batch == 2


def test_policies_start_from_new_adapters(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match="adapter_name_or_path: policies start from new adapters; leave it out"):
        with_policies(tmp_path, model, adapter_name_or_path=saved(tmp_path / "a", model, r=4, lora_alpha=4))
