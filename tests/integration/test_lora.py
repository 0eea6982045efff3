"""Adapters at every layout against peft on transformers; what is frozen, checkpoints, exports."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from roll.configs.devices.parallel_layout import ParallelLayout
from roll.models.tiny import write_tiny_model
from tests.integration.megatron_scenario import LENGTHS, PROMPT, TEMPERATURE, WIDTH, token_batch

pytestmark = pytest.mark.integration

RANK, ALPHA = 3, 6.0
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SOME = ["q_proj", "v_proj", "up_proj", "down_proj"]
FAMILIES = {
    "llama": {"num_key_value_heads": 1},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
}
SEQUENCE_PARALLEL = {"sequence_parallel": True}
FULL = {"recompute_granularity": "full"}
SOME_OF_MLP = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "tp1": {
        "tp1": {"family": "qwen3"},
        "tp1, llama": {"family": "llama"},
        "tp1, qwen2, some": {"family": "qwen2", "targets": SOME},
        "tp1, packed": {"family": "qwen3", "packed": True},
        "tp1, recompute": {"family": "qwen3", "megatron": FULL},
        "tp1, recomputed mlp": {"family": "qwen3", "targets": ["down_proj"], "megatron": SOME_OF_MLP},
    },
    "tp2": {
        "tp2": {"family": "qwen3"},
        "tp2, one key-value head, some": {"family": "llama", "targets": SOME},
        "tp2, sequence parallel": {"family": "qwen3", "megatron": SEQUENCE_PARALLEL},
        "tp2, sequence parallel, packed, recompute": {
            "family": "qwen2", "packed": True, "megatron": SEQUENCE_PARALLEL | FULL
        },
    },
    "pp2": {
        "pp2": {"family": "qwen3"},
        "pp2, virtual stages": {"family": "qwen2", "megatron": {"virtual_pipeline_model_parallel_size": 2}},
    },
    "dp2": {"dp2": {"family": "qwen3", "megatron": {"use_distributed_optimizer": False}}},
}  # fmt: skip
LAYOUTS = {
    "tp1": ParallelLayout(),
    "tp2": ParallelLayout(tensor=2),
    "pp2": ParallelLayout(pipeline=2),
    "dp2": ParallelLayout(data=2),
}
NAMES = [(layout, name) for layout, cases in CASES.items() for name in cases]


def peft() -> Any:
    """Imported by the tests alone, so that the others can be collected without it."""
    return importlib.import_module("peft")


def adapter_of(model: Path, folder: Path, targets: list[str]) -> Path:
    """A PEFT folder as peft writes it, with random A and B."""
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    config = peft().LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, task_type="CAUSAL_LM")
    peft().get_peft_model(base, config).save_pretrained(folder)
    drawn = torch.Generator().manual_seed(5)
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors = {name: 0.1 * torch.randn(each.shape, generator=drawn) for name, each in sorted(tensors.items())}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: write_tiny_model(root / family, family, **options) for family, options in FAMILIES.items()}


@pytest.fixture(scope="module")
def adapters(models, tmp_path_factory):
    """A PEFT folder for each family and choice of layers."""
    root = tmp_path_factory.mktemp("adapters")
    wanted = {(case["family"], tuple(case.get("targets", ALL))) for cases in CASES.values() for case in cases.values()}
    return {
        (family, targets): adapter_of(models[family], root / f"{family}{len(targets)}", [*targets])
        for family, targets in sorted(wanted)
    }


def case_of(models, adapters, case: dict[str, Any]) -> dict[str, Any]:
    targets = case.get("targets", ALL)
    folder = adapters[case["family"], tuple(targets)]
    lora = {"lora_target": targets, "lora_rank": RANK, "lora_alpha": ALPHA, "adapter_name_or_path": str(folder)}
    options = {key: value for key, value in case.items() if key not in ("family", "targets")}
    return {"model": str(models[case["family"]]), "lora": lora, **options}


@pytest.fixture(scope="module")
def run(models, adapters, rank_pool, tmp_path_factory):
    """Results of a layout's ranks and the folder they wrote."""
    folders = {layout: tmp_path_factory.mktemp(layout) for layout in LAYOUTS}
    running = {
        layout: rank_pool.start(
            "tests.integration.lora_scenario:run",
            sizes,
            folders[layout],
            cases={name: case_of(models, adapters, case) for name, case in CASES[layout].items()},
            resumed={},
        )
        for layout, sizes in LAYOUTS.items()
    }
    return lambda layout: (running[layout].result(), folders[layout])


def with_peft(models, adapters, layout: str, name: str) -> Any:
    case = CASES[layout][name]
    base = transformers.AutoModelForCausalLM.from_pretrained(models[case["family"]])
    folder = adapters[case["family"], tuple(case.get("targets", ALL))]
    return peft().PeftModel.from_pretrained(base, folder, is_trainable=True).double()


def log_probs(model: Any, temperature: float = 1.0) -> torch.Tensor:
    """[B, T], index t for token t."""
    batch = token_batch()
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits / temperature
    chosen = torch.log_softmax(logits[:, :-1], -1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    mask = torch.arange(1, WIDTH) < torch.tensor(LENGTHS)[:, None]
    return torch.nn.functional.pad(chosen * mask, (1, 0))


@pytest.mark.parametrize(("layout", "name"), NAMES)
def test_log_probs_with_and_without_adapters_are_those_of_peft(models, adapters, run, layout, name):
    ranks, _ = run(layout)
    model = with_peft(models, adapters, layout, name)
    last = next(rank[name] for rank in ranks if rank[name]["adapted"] is not None)
    with torch.no_grad():
        expected = log_probs(model, TEMPERATURE)
        assert torch.allclose(last["adapted"], expected.float(), atol=3e-5)
        with model.disable_adapter():
            base = log_probs(model, TEMPERATURE)
        assert torch.allclose(last["base"], base.float(), atol=3e-5)
    assert (expected - base).abs().max() > 0.1


@pytest.mark.parametrize(("layout", "name"), NAMES)
def test_gradients_are_those_of_peft(models, adapters, run, layout, name):
    ranks, _ = run(layout)
    model = with_peft(models, adapters, layout, name)
    mask = token_batch()["attention_mask"].bool() & (torch.arange(WIDTH) >= PROMPT)
    tokens = sum(length - PROMPT for length in LENGTHS)
    (-(log_probs(model) * mask).sum() / tokens).backward()
    expected = {key.replace(".default", ""): each.grad for key, each in model.named_parameters() if "lora_" in key}
    found = {key: each for rank in ranks for key, each in rank[name]["gradients"].items()}
    assert found.keys() == expected.keys()
    largest = max(each.abs().max() for each in expected.values())
    worst = {key: float((found[key] - each).abs().max() / largest) for key, each in expected.items()}
    assert max(worst.values()) < 1e-5, max(worst, key=worst.__getitem__)


@pytest.mark.parametrize(("layout", "name"), NAMES)
def test_only_adapters_change_and_have_memory_for_training(run, layout, name):
    ranks, folder = run(layout)
    data = 1 if "use_distributed_optimizer" in str(CASES[layout][name]) else LAYOUTS[layout].data
    for rank in ranks:
        assert rank[name]["frozen"]
        assert rank[name]["memory"]["gradients"] <= 4 * rank[name]["trained"] + 4096
        assert rank[name]["memory"]["optimizer"] <= 8 * rank[name]["trained"] / data + 4096
    stored = sum(path.stat().st_size for path in (folder / name / "checkpoint").rglob("*") if path.is_file())
    state = 12 * sum(rank[name]["trained"] for rank in ranks) / LAYOUTS[layout].data
    assert stored < 3 * state + 300_000


@pytest.mark.parametrize(("layout", "name"), NAMES)
def test_an_imported_adapter_is_exported_unchanged_and_a_trained_one_equals_the_merged_weights(
    models, adapters, run, layout, name
):
    ranks, folder = run(layout)
    case = CASES[layout][name]
    given = load_file(adapters[case["family"], tuple(case.get("targets", ALL))] / "adapter_model.safetensors")
    exported = folder / name / "first" / "adapter_model.safetensors"
    first = load_file(exported)
    assert first.keys() == given.keys()
    assert all(rank[name]["sent"] <= exported.stat().st_size + 4096 for rank in ranks)
    assert all(torch.equal(first[key], given[key]) for key in given)
    base = transformers.AutoModelForCausalLM.from_pretrained(models[case["family"]])
    merged = transformers.AutoModelForCausalLM.from_pretrained(folder / name / "merged")
    with torch.no_grad():  # in double precision, so that only the rounding of the merged weights is seen
        expected = log_probs(peft().PeftModel.from_pretrained(base, folder / name / "trained").double())
        assert torch.allclose(log_probs(merged.double()), expected, atol=1e-5)
    changed = load_file(folder / name / "trained" / "adapter_model.safetensors")
    assert not any(torch.equal(first[key], changed[key]) for key in first)


def test_frozen_names_are_all_but_those_of_layers_with_adapters(run):
    ranks, _ = run("tp1")
    fixed = ranks[0]["tp1, qwen2, some"]["frozen names"]
    assert {"model.embed_tokens.weight", "model.norm.weight", "model.layers.0.self_attn.o_proj.weight"} <= fixed
    assert not {f"model.layers.3.{name}.weight" for name in ("self_attn.k_proj", "mlp.gate_proj")} & fixed


def resumed(models, adapters, rank_pool, folder: Path, layout: str, **cases: dict[str, Any]) -> list[dict[str, Any]]:
    made = {}
    for name, case in cases.items():
        made[name] = case_of(models, adapters, CASES["tp2"]["tp2"]) | {"checkpoint": str(case.pop("checkpoint"))}
        made[name]["lora"] = made[name]["lora"] | {"adapter_name_or_path": None} | case.pop("lora", {})
        made[name] |= case
    return rank_pool.run("tests.integration.lora_scenario:run", LAYOUTS[layout], folder, cases={}, resumed=made)


def test_a_checkpoint_continues_bit_for_bit_and_at_another_layout(models, adapters, run, rank_pool, tmp_path):
    _, folder = run("tp2")
    written = folder / "tp2"
    resumed(models, adapters, rank_pool, tmp_path / "tp2", "tp2", same={"checkpoint": written / "checkpoint"})
    resumed(models, adapters, rank_pool, tmp_path / "tp1", "tp1", other={"checkpoint": written / "checkpoint"})
    for step, exact in (("trained", True), ("continued", False)):
        expected = load_file(written / step / "adapter_model.safetensors")
        same = load_file(tmp_path / "tp2" / "same" / step / "adapter_model.safetensors")
        other = load_file(tmp_path / "tp1" / "other" / step / "adapter_model.safetensors")
        assert all(torch.equal(same[key], each) for key, each in expected.items())
        close = torch.equal if exact else lambda one, two: torch.allclose(one, two, atol=1e-5)
        assert all(close(other[key], each) for key, each in expected.items())


def test_a_checkpoint_refuses_another_rank_and_another_base(models, adapters, run, rank_pool, tmp_path):
    _, folder = run("tp2")
    written = folder / "tp2" / "checkpoint"
    other = write_tiny_model(tmp_path / "other", "qwen3", seed=1, **FAMILIES["qwen3"])
    [found] = resumed(
        models, adapters, rank_pool, tmp_path / "out", "tp1",
        rank={"checkpoint": written, "lora": {"lora_rank": 4}},
        base={"checkpoint": written, "model": str(other)},
        full={"checkpoint": written, "lora": {"lora_target": []}},
    )  # fmt: skip
    assert found["rank"]["error"].startswith("lora_rank: 4 cannot continue from a checkpoint with 3")
    assert "model.safetensors of" in found["base"]["error"]
    assert "has adapters, this run trains all weights" in found["full"]["error"]


def test_the_configuration_names_the_base_and_the_layers(run, models):
    _, folder = run("tp1")
    config = json.loads((folder / "tp1, qwen2, some" / "trained" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(models["qwen2"])
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (RANK, ALPHA, sorted(SOME))
