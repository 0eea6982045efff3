"""Mixtures of experts at every layout against transformers. Each layout is spawned once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from roll.configs.devices.parallel_layout import ParallelLayout
from roll.models.tiny import write_tiny_model
from tests.integration.megatron_scenario import TEMPERATURE, token_batch
from tests.integration.mixture_scenario import expected_balance, expected_training
from tests.integration.test_megatron_strategy import tensors_of

pytestmark = pytest.mark.integration

MODELS = {
    "qwen3_moe": {"num_hidden_layers": 2},
    "mixtral": {"num_hidden_layers": 2, "head_dim": 16},
    "qwen2_moe": {
        "num_hidden_layers": 2,
        "head_dim": 16,
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
    },
}
"""The last has a dense layer, and weights of experts that do not sum to 1."""
BALANCED = {
    "ep1": {"3": [3], "8": [8]},
    "ep2": {"3": [3, 3], "1 and 3": [1, 3]},
    "tp2 x ep2": {"3": [3]},
}
"""Sizes of the micro-batches of each data rank with which the losses of routers are on, by layout."""
ALL = ("ep1", "tp2 x ep2, split experts", "pp2 x ep2")
"""Layouts with every family, others with the first."""

LAYOUTS = {
    "ep1": ParallelLayout(),
    "ep2": ParallelLayout(data=2, expert=2),
    "tp2, whole experts": ParallelLayout(tensor=2, expert_tensor=1),
    "tp2 x ep2": ParallelLayout(tensor=2, expert=2, expert_tensor=1),
    "tp2 x ep2, split experts": ParallelLayout(tensor=2, data=2, expert=2, expert_tensor=2),
    "pp2 x ep2": ParallelLayout(pipeline=2, data=2, expert=2),
}
PLAIN = {"micro_batch_size": 3}
GATHERED = {"megatron": {"moe_token_dispatcher_type": "allgather"}}
VARIANTS = {
    "ep1": {
        "plain": PLAIN,
        "packed, recompute": {"packed": True, "megatron": {"recompute_granularity": "full"}} | PLAIN,
    },
    "ep2": {"plain": PLAIN, "gathered": PLAIN | GATHERED},
    "tp2 x ep2": {"plain": PLAIN | {"packed": True}},
    "tp2 x ep2, split experts": {"plain": PLAIN, "gathered": PLAIN | GATHERED},
}
"""What is trained at a layout; `plain` at the others."""


PAIRS = [(layout, name) for layout in LAYOUTS for name in (MODELS if layout in ALL else ["qwen3_moe"])]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {name: write_tiny_model(root / name, name, **options) for name, options in MODELS.items()}


@pytest.fixture(scope="module")
def run(models, rank_pool, tmp_path_factory):
    """Results of a layout's ranks and the folder they wrote."""
    folders = {layout: tmp_path_factory.mktemp("layout") for layout in LAYOUTS}
    running = {
        layout: rank_pool.start(
            "tests.integration.mixture_scenario:run",
            sizes,
            folders[layout],
            models=models if layout in ALL else {"qwen3_moe": models["qwen3_moe"]},
            variants=VARIANTS.get(layout, {"plain": PLAIN}),
            balanced=BALANCED.get(layout, {}),
        )
        for layout, sizes in LAYOUTS.items()
    }
    return lambda layout: (running[layout].result(), folders[layout])


@pytest.fixture(scope="module")
def reference(models):
    """Log-probs of transformers, and its weights after training, by model."""
    found = {}
    for name, folder in models.items():
        batch = token_batch()
        with torch.no_grad():
            logits = load(folder)(**batch).logits / TEMPERATURE
        picked = torch.log_softmax(logits[:, :-1], -1).gather(2, batch["input_ids"][:, 1:, None]).squeeze(2)
        scored = batch["attention_mask"][:, 1:].bool()
        found[name] = {"log_probs": torch.nn.functional.pad(torch.where(scored, picked, 0.0), (1, 0))}
        for kind in ("gradient", "adam"):
            model = load(folder)
            norms, _ = expected_training(model, kind)
            model.save_pretrained(folder / kind)
            found[name][kind] = norms, tensors_of(folder / kind)
        found[name]["before"] = tensors_of(folder)
    return found


@pytest.mark.parametrize(("layout", "name"), PAIRS)
def test_log_probs_agree_with_transformers(run, reference, layout, name):
    """Also where data ranks that share experts have different numbers of samples and micro-batches."""
    ranks, _ = run(layout)
    last_stage = LAYOUTS[layout].tensor * LAYOUTS[layout].data
    for rank in ranks[-last_stage:]:
        expected = reference[name]["log_probs"][rank[f"rows/{name}"]]
        for packed in (False, True):
            torch.testing.assert_close(rank[f"log_probs/{name}/{packed}"], expected, atol=2e-5, rtol=0)


TRAINED = [(layout, variant, name) for layout, name in PAIRS for variant in VARIANTS.get(layout, {"plain": PLAIN})]


@pytest.mark.parametrize(("layout", "variant", "name"), TRAINED)
def test_gradients_and_adam_steps_agree_with_transformers(run, reference, layout, variant, name):
    ranks, folder = run(layout)
    for kind, tolerance in (("gradient", 1e-5), ("adam", 1e-4)):
        norms, tensors = reference[name][kind]
        for rank in ranks:
            found = [step["grad_norm"] for step in rank[f"steps/{name}/{variant}/{kind}"]]
            assert found == pytest.approx(norms, rel=1e-4)
        ours = tensors_of(folder / name / variant / kind)
        assert ours.keys() == tensors.keys()
        for key, value in tensors.items():
            torch.testing.assert_close(
                ours[key], value, atol=tolerance, rtol=0, msg=lambda text, key=key: f"{key}: {text}"
            )
    assert all(rank[f"same names/{name}/{variant}"] for rank in ranks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_experts_are_not_on_the_device_while_an_engine_has_it(run, layout):
    """Megatron keeps them in buffers of their own where experts are split otherwise; Adam's next steps agree, above."""
    ranks, _ = run(layout)
    for rank in ranks:
        for name in (key for key in rank if key.startswith("buffers/qwen3_moe/")):
            dense, experts, meanwhile = rank[name]
            assert dense > 0 and meanwhile == 0
            assert bool(experts) == (layout != "ep1"), name


@pytest.mark.parametrize(("layout", "name"), [(layout, name) for layout in BALANCED for name in BALANCED[layout]])
def test_losses_of_routers_have_the_gradient_of_their_formulas(run, models, layout, name, tmp_path):
    model = load(models["qwen3_moe"])
    aux_loss = expected_balance(model, BALANCED[layout][name], LAYOUTS[layout].tensor)
    model.save_pretrained(tmp_path)
    ranks, folder = run(layout)
    for rank in ranks:
        [step] = rank[f"steps/balanced/{name}/gradient"]
        assert step["moe/aux_loss"] == pytest.approx(aux_loss, rel=1e-4)
        assert 0 <= step["moe/min_load"] < 1 < step["moe/max_load"] <= 4
    ours, expected = tensors_of(folder / "balanced" / name / "gradient"), tensors_of(tmp_path)
    for key, value in expected.items():
        torch.testing.assert_close(ours[key], value, atol=1e-5, rtol=0, msg=lambda text, key=key: f"{key}: {text}")


def load(folder: Path) -> torch.nn.Module:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
