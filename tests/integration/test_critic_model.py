"""The model of a critic at every layout against transformers and against itself on one rank."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from roll.configs.devices.parallel_layout import ParallelLayout
from roll.models.tiny import write_tiny_model
from tests.integration.megatron_scenario import token_batch
from tests.integration.test_megatron_strategy import tensors_of
from tests.integration.value_scenario import STEPS

pytestmark = pytest.mark.integration

SEQUENCE_PARALLEL = {"sequence_parallel": True}
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS = {
    "tp1": (ParallelLayout(), {"tp1": {"micro_batch_size": 8}}),
    "tp2": (
        ParallelLayout(tensor=2),
        {
            "tp2": {"micro_batch_size": 4},
            "tp2, sequence parallel": {"micro_batch_size": 3, "megatron": SEQUENCE_PARALLEL, "packed": True},
        },
    ),
    "pp2": (
        ParallelLayout(pipeline=2),
        {"pp2": {"micro_batch_size": 3, "megatron": {"virtual_pipeline_model_parallel_size": 2}}},
    ),
    "tp2 x pp2": (
        ParallelLayout(tensor=2, pipeline=2),
        {"tp2 x pp2": {"micro_batch_size": 2, "megatron": SEQUENCE_PARALLEL}},
    ),
    "pp2 x dp2": (
        ParallelLayout(pipeline=2, data=2),
        {"pp2 x dp2": {"micro_batch_size": 2, "megatron": OVERLAPPED}},
    ),
}
SCORED = ("tp1", "tp2", "pp2", "tp2 x pp2")


def write_reward_model(folder, kind: str, bias: bool):
    """A folder of HF's `Qwen3For<kind>Classification` with one label and a random head."""
    write_tiny_model(folder, "qwen3", tie_word_embeddings=False)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    generator = torch.Generator().manual_seed(5)
    width = tensors["model.norm.weight"].shape[0]
    tensors["score.weight"] = torch.randn(1, width, generator=generator)
    if bias:
        tensors["score.bias"] = torch.tensor([0.25])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [f"Qwen3For{kind}Classification"], "id2label": {"0": "LABEL_0"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        "actor": write_tiny_model(root / "actor", "qwen3", tie_word_embeddings=True),
        "token": write_reward_model(root / "token", "Token", bias=True),
        "sequence": write_reward_model(root / "sequence", "Sequence", bias=False),
    }


@pytest.fixture(scope="module")
def run(models, rank_pool, tmp_path_factory):
    """Results of a layout's ranks and the folder they wrote; each layout runs once, several side by side."""
    folders = {layout: tmp_path_factory.mktemp(layout.replace(" ", "")) for layout in LAYOUTS}
    running = {
        layout: rank_pool.start(
            "tests.integration.value_scenario:run",
            sizes,
            folders[layout],
            models=models if layout in SCORED else {},
            trained=models["token"],
            variants=variants,
            resumed=layout in ("tp1", "pp2 x dp2"),
        )
        for layout, (sizes, variants) in LAYOUTS.items()
    }
    return lambda layout: (running[layout].result(), folders[layout])


def expected_values(folder):
    """Values of transformers: index t for the tokens before t."""
    import transformers

    model = transformers.AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32)
    batch = token_batch()
    with torch.no_grad():
        values = model(**batch).logits.squeeze(-1)
    mask = batch["attention_mask"].bool()
    shifted = torch.zeros(mask.shape)
    shifted[:, 1:] = torch.where(mask[:, 1:], values[:, :-1], 0.0)
    return shifted


@pytest.mark.parametrize("layout", SCORED)
@pytest.mark.parametrize("packed", ["", "/packed"])
def test_values_agree_with_transformers(run, models, layout, packed):
    ranks, _ = run(layout)
    sizes = LAYOUTS[layout][0]
    expected = expected_values(models["token"])
    assert expected.abs().max() > 0.1
    found = [rank[f"values/token{packed}"] for rank in ranks]
    assert all(each is None for each in found[: -sizes.tensor * sizes.data])
    for values in found[-sizes.tensor * sizes.data :]:
        torch.testing.assert_close(values, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("layout", SCORED)
def test_a_critic_that_starts_from_a_language_model_has_values_of_0(run, layout):
    ranks, _ = run(layout)
    assert (ranks[-1]["values/actor"] == 0).all()
    assert not any("output_layer" in name for rank in ranks for name in rank["parameters/actor"])


@pytest.mark.parametrize("layout", SCORED)
@pytest.mark.parametrize("name", ["actor", "token", "sequence"])
def test_an_exported_critic_is_what_it_was_read_from_and_loads_in_transformers(run, models, layout, name):
    ranks, folder = run(layout)
    before, after = tensors_of(models[name]), tensors_of(folder / name)
    assert after.keys() == before.keys() - {"lm_head.weight"} | {"score.weight", "score.bias"}
    assert all(torch.equal(after[key], before[key]) for key in after.keys() & before.keys())
    assert all((after[key] == 0).all() for key in after.keys() - before.keys())
    torch.testing.assert_close(expected_values(folder / name), ranks[-1][f"values/{name}"], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "layout, name", [(layout, name) for layout, (_, names) in LAYOUTS.items() for name in names if name != "tp1"]
)
def test_twenty_steps_agree_with_one_rank(run, layout, name):
    (reference, *_), reference_folder = run("tp1")
    ranks, folder = run(layout)
    for rank in ranks:
        for step in range(STEPS):
            ours, theirs = rank[f"steps/{name}"][step], reference["steps/tp1"][step]
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3, abs=1e-4)
            assert ours["value_mean"] == pytest.approx(theirs["value_mean"], abs=1e-3)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-3)
    trained, ours = tensors_of(reference_folder / "trained tp1"), tensors_of(folder / f"trained {name}")
    for key in trained:
        torch.testing.assert_close(ours[key], trained[key], atol=1e-3, rtol=0)


def test_the_loss_falls(run):
    (rank, *_), _ = run("tp1")
    losses = [step["loss"] for step in rank["steps/tp1"]]
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize("layout", ["tp1", "pp2 x dp2"])
def test_a_resumed_critic_repeats_the_unbroken_one_bit_for_bit(run, layout):
    ranks, _ = run(layout)
    for rank in ranks:
        assert rank["resume"]["resumed"] == rank["resume"]["unbroken"]
        assert rank["resume"]["same_weights"]
