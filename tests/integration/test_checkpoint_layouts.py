"""A checkpoint of one layout is read at any other: equal log-probs, equal optimizer steps after it, and back."""

from __future__ import annotations

import pytest
import torch

from roll.configs.devices.parallel_layout import ParallelLayout
from roll.models.tiny import write_tiny_model

pytestmark = pytest.mark.integration

WRITTEN = ParallelLayout(tensor=2)
OTHERS = {
    "tp1": (ParallelLayout(), {}),
    "pp2": (ParallelLayout(pipeline=2), {"megatron": {"num_layers_in_last_pipeline_stage": 1}}),
    "pp2, virtual": (ParallelLayout(pipeline=2), {"megatron": {"virtual_pipeline_model_parallel_size": 2}}),
    "dp2": (ParallelLayout(data=2), {"megatron": {"overlap_grad_reduce": True}}),
    "tp2 x dp2": (ParallelLayout(tensor=2, data=2), {}),
    "pp2 x dp2": (ParallelLayout(pipeline=2, data=2), {}),
}
SPLIT = ParallelLayout(data=2, expert=2)
SEQUENCE_PARALLEL = {"megatron": {"sequence_parallel": True}}
MIXTURES = {
    "ep1": (ParallelLayout(), {}),
    "tp2 x ep2": (ParallelLayout(tensor=2, expert=2, expert_tensor=1), SEQUENCE_PARALLEL),
    "tp2, split experts": (ParallelLayout(tensor=2), SEQUENCE_PARALLEL),
    "pp2 x ep2": (ParallelLayout(pipeline=2, data=2, expert=2), {}),
}
BF16 = {"dtype": "bf16"}
PLAIN = {"megatron": {"use_distributed_optimizer": False}}


@pytest.fixture(scope="module")
def run(rank_pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    models = {
        "qwen3": write_tiny_model(folder / "model", "qwen3", num_hidden_layers=4, tie_word_embeddings=True),
        "qwen3_moe": write_tiny_model(folder / "mixture", "qwen3_moe", num_hidden_layers=2),
    }

    def start(layout, read, write, steps, options, model="qwen3"):
        paths = {"read": read and str(folder / read), "write": str(folder / write)}
        return rank_pool.start(
            "tests.integration.megatron_scenario:moved",
            layout,
            folder,
            model=str(models[model]),
            steps=steps,
            options=options,
            **paths,
        )

    return start


def log_probs(ranks, layout):
    """Log-probs of all samples before and after the steps, in the order of the samples."""
    found = {rank["data"]: rank["log_probs"] for rank in ranks if "log_probs" in rank}
    whole = [torch.empty(8, found[0][0].shape[1]) for _ in range(2)]
    for data, both in found.items():
        for target, own in zip(whole, both, strict=True):
            target[data :: layout.data, : own.shape[1]] = own
    return whole


def assert_close(found, expected, tolerance, layout):
    difference = (found - expected).abs().max().item()
    assert difference <= tolerance, f"{layout}: {difference}"


def test_a_checkpoint_is_read_at_any_layout_and_back(run):
    """The other layout takes the first of three steps."""
    run(WRITTEN, None, "start", 3, {}).result()
    unbroken = run(WRITTEN, "start", "unbroken", 3, {}).result()
    expected = log_probs(unbroken, WRITTEN)
    there = {name: run(layout, "start", name, 1, options) for name, (layout, options) in OTHERS.items()}
    for name, (layout, _) in OTHERS.items():
        assert_close(log_probs(there[name].result(), layout)[0], expected[0], 1e-5, name)
    back = {name: run(WRITTEN, name, f"{name} and back", 2, {}) for name in OTHERS}
    for name in OTHERS:
        ranks = back[name].result()
        assert_close(log_probs(ranks, WRITTEN)[1], expected[1], 1e-5, name)
        for mine, theirs in zip(ranks[0]["steps"], unbroken[0]["steps"][1:], strict=True):
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
            assert mine["lr"] == theirs["lr"]


def test_a_checkpoint_does_not_know_on_which_ranks_its_experts_were(run):
    """The other layout takes the first of three steps, and the layout with experts on two ranks the others."""
    run(SPLIT, None, "split", 3, {}, "qwen3_moe").result()
    unbroken = run(SPLIT, "split", "split on", 3, {}, "qwen3_moe").result()
    expected = log_probs(unbroken, SPLIT)
    for name, (layout, options) in MIXTURES.items():
        there = run(layout, "split", f"split {name}", 1, options, "qwen3_moe").result()
        assert_close(log_probs(there, layout)[0], expected[0], 1e-5, name)
        ranks = run(SPLIT, f"split {name}", f"split {name} and back", 2, {}, "qwen3_moe").result()
        assert_close(log_probs(ranks, SPLIT)[1], expected[1], 2e-5, name)
        for mine, theirs in zip(ranks[0]["steps"], unbroken[0]["steps"][1:], strict=True):
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("options", [BF16, PLAIN], ids=["bf16", "plain optimizer"])
def test_nothing_is_lost_on_the_way_through_another_layout(run, options, request):
    """In bf16 layouts differ by rounding, but the other one only reads and writes."""
    name = request.node.callspec.id
    run(WRITTEN, None, f"start {name}", 3, options).result()
    unbroken = run(WRITTEN, f"start {name}", f"unbroken {name}", 2, options).result()
    for other in ("tp1", "pp2", "tp2 x dp2"):
        layout, more = OTHERS[other]
        both = options | {"megatron": options.get("megatron", {}) | more.get("megatron", {})}
        run(layout, f"start {name}", f"{other} {name}", 0, both).result()
        ranks = run(WRITTEN, f"{other} {name}", f"{other} {name} and back", 2, options).result()
        assert [rank["steps"] for rank in ranks] == [rank["steps"] for rank in unbroken]
