"""Training ranks with two policies on one base: what a step of one changes, their checkpoints and exports."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from roll.configs.devices.parallel_layout import ParallelLayout
from roll.models.tiny import write_tiny_model

pytestmark = pytest.mark.integration

SCENARIO = "tests.integration.policies_scenario:run"
LAYOUTS = {"tp2": ParallelLayout(tensor=2), "dp2": ParallelLayout(data=2)}
ORDERS = {"both": ["math", "code", "math"], "math alone": ["math", "math"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def run(model: Path, rank_pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Results of a layout's ranks and the folder they wrote."""
    folders = {name: tmp_path_factory.mktemp(name) for name in LAYOUTS}
    running = {
        name: rank_pool.start(SCENARIO, layout, folders[name], model=model, orders=ORDERS)
        for name, layout in LAYOUTS.items()
    }
    return lambda name: (running[name].result(), folders[name])


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(folder / "adapter_model.safetensors")
    return found


def same(one: Path, other: Path) -> bool:
    first, second = adapter(one), adapter(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_of_one_policy_changes_nothing_of_the_other_and_of_the_base(run: Any, layout: str) -> None:
    for rank in run(layout)[0]:
        states = rank["both"]["states"]
        for before, after, trained in zip(states, states[1:], ORDERS["both"], strict=False):
            changed = {name for name in before if before[name] != after[name]}
            assert changed == {trained}
        assert len(set(rank["both"]["frozen"])) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_policy_is_trained_as_if_it_were_alone(run: Any, layout: str) -> None:
    """Adapters, moments, step counts and rates: steps of the other in between leave no trace."""
    ranks, folder = run(layout)
    for step in ("trained", "continued"):
        assert same(folder / "both" / step / "math", folder / "math alone" / step / "math")
    for rank in ranks:
        first, of_code, second = rank["both"]["metrics"]
        assert [first, second] == rank["math alone"]["metrics"]
        assert (first["lr"], of_code["lr"], second["lr"]) == (1e-2, 2e-2, pytest.approx(1e-2 * 7 / 8))


def test_a_checkpoint_has_every_policy_and_continues_bit_for_bit_and_at_another_layout(
    model: Path, run: Any, rank_pool: Any, tmp_path: Path
) -> None:
    written = run("tp2")[1] / "both"
    assert {path.name for path in (written / "checkpoint").iterdir()} == {"math", "code"}
    arguments = {"model": model, "resumed": str(written / "checkpoint"), "continues": ORDERS["both"][-1]}
    for name, layout in (("tp2", LAYOUTS["tp2"]), ("tp1", ParallelLayout())):
        ranks = rank_pool.run(SCENARIO, layout, tmp_path / name, **arguments)
        assert {rank["rates"]["resumed"] for rank in ranks} == {run("tp2")[0][0]["rates"]["both"]}
        for policy in ("math", "code"):
            assert same(tmp_path / name / "resumed/trained" / policy, written / "trained" / policy)
            for key, tensor in adapter(tmp_path / name / "resumed/continued" / policy).items():
                expected = adapter(written / "continued" / policy)[key]
                assert torch.equal(tensor, expected) if name == "tp2" else torch.allclose(tensor, expected, atol=1e-5)


def test_each_export_loads_in_peft_with_its_own_rank_and_scale(model: Path, run: Any) -> None:
    peft = importlib.import_module("peft")
    folder, logits = run("tp2")[1] / "both" / "trained", {}
    for policy, rank, alpha in (("math", 4, 8), ("code", 2, 2)):
        config = json.loads((folder / policy / "adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"]) == (rank, alpha)
        base = transformers.AutoModelForCausalLM.from_pretrained(model)
        with torch.no_grad():
            logits[policy] = peft.PeftModel.from_pretrained(base, folder / policy)(torch.arange(1, 25)[None]).logits
    assert (logits["math"] - logits["code"]).abs().max() > 1e-3
