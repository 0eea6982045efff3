"""Megatron at every layout against transformers and against itself on one rank. Each layout is spawned once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from roll.configs.devices.parallel_layout import ParallelLayout
from roll.models.tiny import write_tiny_model
from tests.integration.megatron_scenario import STEPS, TEMPERATURE, token_batch
from tests.models.renamed_llama import write_renamed

pytestmark = pytest.mark.integration

FAMILIES = {
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e4,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "qwen2": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    "qwen3": {"tie_word_embeddings": True},
    "renamed": {},
}
"""Options of each family's model; `renamed` is a family of the user, with the weights of llama."""
OWN_FAMILY = "tests.models.own_family"
SEQUENCE_PARALLEL = {"sequence_parallel": True}
PLAIN_OPTIMIZER = {"use_distributed_optimizer": False}
VIRTUAL = {"virtual_pipeline_model_parallel_size": 2}
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3}
MLP = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
VARIANTS = {
    "tp1": {
        "tp1": {"micro_batch_size": 8},
        "tp1, micro-batches of 3": {"micro_batch_size": 3},
        "tp1, full recompute": {"micro_batch_size": 4, "megatron": {"recompute_granularity": "full"}},
        "tp1, block recompute": {"micro_batch_size": 4, "megatron": BLOCK},
        "tp1, selective recompute": {"micro_batch_size": 4, "megatron": MLP},
        "tp1, packed, selective recompute": {"micro_batch_size": 3, "packed": True, "megatron": MLP},
        "tp1, plain optimizer": {"micro_batch_size": 4, "megatron": PLAIN_OPTIMIZER},
        "tp1, bf16": {"micro_batch_size": 4, "dtype": "bf16"},
    },
    "tp2": {
        "tp2": {"micro_batch_size": 4},
        "tp2, sequence parallel": {"micro_batch_size": 3, "megatron": SEQUENCE_PARALLEL},
        "tp2, sequence parallel, full recompute": {
            "micro_batch_size": 3,
            "megatron": SEQUENCE_PARALLEL | {"recompute_granularity": "full"},
        },
        "tp2, sequence parallel, packed": {"micro_batch_size": 3, "packed": True, "megatron": SEQUENCE_PARALLEL},
    },
    "pp2": {
        "pp2": {"micro_batch_size": 2},
        "pp2, uneven stages": {"micro_batch_size": 2, "megatron": {"num_layers_in_last_pipeline_stage": 1}},
        "pp2, virtual stages": {"micro_batch_size": 3, "megatron": VIRTUAL},
    },
    "dp2": {
        "dp2": {"micro_batch_size": 2},
        "dp2, overlapped reduction": {"micro_batch_size": 1, "megatron": {"overlap_grad_reduce": True}},
        "dp2, overlapped gather": {"micro_batch_size": 2, "megatron": OVERLAPPED, "at_once": True},
        "dp2, plain optimizer": {"micro_batch_size": 3, "megatron": PLAIN_OPTIMIZER},
    },
    "tp2 x pp2": {"tp2 x pp2": {"micro_batch_size": 2, "megatron": SEQUENCE_PARALLEL}},
    "tp2 x dp2": {"tp2 x dp2": {"micro_batch_size": 2, "megatron": SEQUENCE_PARALLEL}},
    "pp2 x dp2": {
        "pp2 x dp2, overlapped gather": {"micro_batch_size": 2, "megatron": OVERLAPPED, "at_once": True},
        "pp2 x dp2": {"micro_batch_size": 1, "megatron": OVERLAPPED | VIRTUAL, "at_once": True, "packed": True},
    },
}
RESUMED = {
    "tp1": {
        "bf16": {"micro_batch_size": 4, "dtype": "bf16"},
        "plain": {"micro_batch_size": 4, "megatron": PLAIN_OPTIMIZER},
    },
    "tp2": {},
    "pp2": {"pp2, virtual": {"micro_batch_size": 3, "megatron": VIRTUAL}},
    "dp2": {
        "dp2": {"micro_batch_size": 2},
        "dp2, gathered format": {"micro_batch_size": 2, "written_as": "fully_reshardable"},
        "dp2, earlier format": {"micro_batch_size": 2, "written_as": "dp_reshardable"},
        "dp2, bf16 overlapped": {"micro_batch_size": 2, "dtype": "bf16", "megatron": OVERLAPPED},
    },
    "tp2 x pp2": {"tp2 x pp2": {"micro_batch_size": 2, "megatron": SEQUENCE_PARALLEL}},
    "tp2 x dp2": {"tp2 x dp2": {"micro_batch_size": 2}},
    "pp2 x dp2": {"pp2 x dp2": {"micro_batch_size": 1}},
}
POLICIES = {
    "tp1": {"tp1": {"micro_batch_size": 3}},
    "tp2": {"tp2": {"micro_batch_size": 3, "megatron": SEQUENCE_PARALLEL}},
    "pp2": {"pp2": {"micro_batch_size": 3, "megatron": VIRTUAL}},
    "dp2": {},
    "tp2 x pp2": {},
    "tp2 x dp2": {},
    "pp2 x dp2": {},
}
LAYOUTS = {
    "tp1": ParallelLayout(),
    "tp2": ParallelLayout(tensor=2),
    "pp2": ParallelLayout(pipeline=2),
    "dp2": ParallelLayout(data=2),
    "tp2 x pp2": ParallelLayout(tensor=2, pipeline=2),
    "tp2 x dp2": ParallelLayout(tensor=2, data=2),
    "pp2 x dp2": ParallelLayout(pipeline=2, data=2),
}
SCORED = ("tp1", "tp2", "pp2", "tp2 x pp2")
"""Layouts that score and export a model of every family; data ranks add nothing to that."""
SAME_AS_ONE_RANK = [
    (layout, name) for layout, names in VARIANTS.items() for name in names if "bf16" not in name and name != "tp1"
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    built_in = {name: options for name, options in FAMILIES.items() if name != "renamed"}
    folders = {family: write_tiny_model(root / family, family, **options) for family, options in built_in.items()}
    return folders | {"renamed": write_renamed(folders["llama"], root / "renamed")}


@pytest.fixture(scope="module")
def run(models, rank_pool, tmp_path_factory):
    """Results of a layout's ranks and the folder they wrote; each layout runs once, several side by side."""
    folders = {layout: tmp_path_factory.mktemp(layout.replace(" ", "")) for layout in LAYOUTS}
    running = {
        layout: rank_pool.start(
            "tests.integration.megatron_scenario:run",
            sizes,
            folders[layout],
            custom_modules=[OWN_FAMILY],
            models=models if layout in SCORED else {},
            trained=models["qwen3"],
            variants=VARIANTS[layout],
            policies=POLICIES[layout],
            resumed=RESUMED[layout],
        )
        for layout, sizes in LAYOUTS.items()
    }
    return lambda layout: (running[layout].result(), folders[layout])


@pytest.fixture(scope="module")
def expected(models):
    """Log-probs, and sums of squared probabilities, of transformers by family and padding side."""
    import transformers

    values = {}
    for family, folder in models.items():
        known = models["llama"] if family == "renamed" else folder
        model = transformers.AutoModelForCausalLM.from_pretrained(known, dtype=torch.float32)
        for side in ("right", "left"):
            batch = token_batch(side)
            with torch.no_grad():
                logits = model(**batch).logits / TEMPERATURE
            mask = batch["attention_mask"].bool()
            picked = torch.log_softmax(logits[:, :-1], -1).gather(2, batch["input_ids"][:, 1:, None]).squeeze(2)
            squares = logits[:, :-1].softmax(-1).square().sum(-1)
            scored = mask[:, 1:] & mask[:, :-1]
            values[family, side] = [
                torch.nn.functional.pad(torch.where(scored, each, 0.0), (1, 0)) for each in (picked, squares)
            ]
    return values


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_bind_the_group_of_all_to_their_device_before_they_make_others(run, layout):
    results, _ = run(layout)
    for rank in results:
        assert rank["joining"][0] == ("all_reduce", torch.device("cpu"), (), {})
        assert rank["joining"].count(("new_group",)) > 3


@pytest.mark.parametrize("layout", SCORED)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["right", "left", "right/packed", "left/packed"])
def test_log_probs_agree_with_transformers(run, expected, layout, family, side):
    ranks, _ = run(layout)
    found = [rank[f"log_probs/{family}/{side}"] for rank in ranks]
    last_stage = LAYOUTS[layout].tensor * LAYOUTS[layout].data
    assert all(each is None for each in found[:-last_stage])
    log_probs, squares = expected[family, side.split("/")[0]]
    for each in found[-last_stage:]:
        torch.testing.assert_close(each, log_probs, atol=1e-4, rtol=0)
    if "packed" in side:
        for rank in ranks[-last_stage:]:
            torch.testing.assert_close(rank[f"sum_pi_squared/{family}/{side}"], squares, atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", SCORED)
def test_packed_micro_batches_share_prefixes(run, layout):
    ranks, _ = run(layout)
    for rank in ranks:
        assert rank["shared"] == [True, True, False] * 2 * len(FAMILIES)


@pytest.mark.parametrize("layout", SCORED)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_return_to_hf_bit_for_bit(run, models, layout, family):
    _, folder = run(layout)
    original, exported = tensors_of(models[family]), tensors_of(folder / family)
    assert original.keys() == exported.keys()
    assert all(torch.equal(original[name], exported[name]) for name in original)


@pytest.mark.parametrize("layout", SCORED)
@pytest.mark.parametrize("family", FAMILIES)
def test_specs_announce_what_weights_yield(run, layout, family):
    ranks, _ = run(layout)
    assert all(rank[f"specs/{family}"] == rank[f"names/{family}"] for rank in ranks)


@pytest.mark.parametrize("layout, name", SAME_AS_ONE_RANK)
def test_twenty_steps_agree_with_one_rank(run, layout, name):
    (reference, *_), reference_folder = run("tp1")
    ranks, folder = run(layout)
    for rank in ranks:
        for step in range(STEPS):
            ours, theirs = rank[f"steps/{name}"][step], reference["steps/tp1"][step]
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
            assert ours["entropy"] == pytest.approx(theirs["entropy"], abs=1e-3)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
            assert ours["lr"] == theirs["lr"]
    trained, ours = tensors_of(reference_folder / "tp1"), tensors_of(folder / name)
    for key in trained:
        torch.testing.assert_close(ours[key], trained[key], atol=1e-3, rtol=0)


def test_training_lowers_the_loss(run):
    (rank,), _ = run("tp1")
    for name in ("tp1", "tp1, bf16"):
        losses = [step["loss"] for step in rank[f"steps/{name}"]]
        assert losses[-1] < 0.2 * losses[0]


def test_bf16_follows_fp32(run):
    (rank,), _ = run("tp1")
    assert rank["steps/tp1, bf16"][0]["loss"] == pytest.approx(rank["steps/tp1"][0]["loss"], rel=2e-2)


@pytest.mark.parametrize("layout", [layout for layout in POLICIES if POLICIES[layout]])
def test_first_policy_step_has_ratio_one_and_the_second_has_moved(run, layout):
    ranks, _ = run(layout)
    for rank in ranks:
        first, second = rank[f"policy/{layout}"]
        assert first["ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert first["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert abs(first["policy_kl"]) < 1e-5
        assert abs(second["ratio_max"] - 1.0) > 1e-4


@pytest.mark.parametrize("layout", [layout for layout in POLICIES if POLICIES[layout]])
def test_a_training_step_returns_the_log_probs_from_before_its_update(run, layout):
    ranks, _ = run(layout)
    pairs = [rank[key] for rank in ranks if (key := f"log_probs_of_step/{layout}") in rank]
    assert pairs
    for of_step, of_pass in pairs:
        assert of_pass.abs().max() > 1
        torch.testing.assert_close(of_step, of_pass, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", [layout for layout in POLICIES if POLICIES[layout]])
def test_a_loss_that_is_not_finite_stops_every_rank_with_the_step(run, layout):
    ranks, _ = run(layout)
    for rank in ranks:
        assert re.match("optimizer step 3: the (loss|gradient norm) is (nan|inf)", rank[f"non-finite/{layout}"])


@pytest.mark.parametrize("layout, name", [(layout, name) for layout, names in RESUMED.items() for name in names])
def test_a_resumed_run_repeats_the_unbroken_one_bit_for_bit(run, layout, name):
    ranks, _ = run(layout)
    for rank in ranks:
        outcome = rank[f"resume/{name}"]
        assert outcome["resumed"] == outcome["unbroken"]
        assert outcome["same_weights"]
        assert outcome["copied"] < 0.01
        assert len(set(outcome["freed"])) == 1 and outcome["freed"][0] > outcome["held"]


def test_the_distributed_optimizer_shards_its_state(run):
    ranks, _ = run("dp2")
    sharded, whole = (ranks[0][f"memory/{name}"]["optimizer"] for name in ("dp2", "dp2, plain optimizer"))
    assert sharded < 0.6 * whole


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}
