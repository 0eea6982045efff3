"""Samples that are split over context ranks give what one rank gives: log-probs, gradients, metrics and weights."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from roll.algorithms.options.correction_options import CorrectionOptions, RejectionOptions, WeightOptions
from roll.algorithms.options.policy_options import PolicySettings
from roll.algorithms.policy_loss import POLICY_LOSSES
from roll.configs.devices.parallel_layout import ParallelLayout
from roll.models.tiny import write_tiny_model
from tests.integration.context_scenario import MUTATIONS

pytestmark = pytest.mark.integration

SEQUENCE_PARALLEL = {"sequence_parallel": True}
PACKED = {"packed": True}
PADDED = {"packed": False}
ONE_RANK = {kind: (kind, PACKED) for kind in ("actor", "critic", "reward", "dpo")}
VARIANTS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "cp2": {
        **ONE_RANK,
        "padded": ("actor", PADDED),
        "padded critic": ("critic", PADDED),
        "full recompute": ("actor", PACKED | {"megatron": {"recompute_granularity": "full"}}),
        "selective recompute": ("actor", PACKED | {"megatron": {"recompute_granularity": "selective"}}),
        "plain optimizer": ("actor", PACKED | {"megatron": {"use_distributed_optimizer": False}}),
    },
    "cp4": {"actor": ("actor", PACKED), "reward": ("reward", PADDED)},
    "tp2 x cp2": {
        "actor": ("actor", PACKED | {"megatron": SEQUENCE_PARALLEL}),
        "padded": ("actor", PADDED | {"megatron": SEQUENCE_PARALLEL}),
        "critic": ("critic", PACKED | {"megatron": SEQUENCE_PARALLEL}),
        "whole residuals": ("actor", PACKED),
    },
    "cp2 x dp2": {"actor": ("actor", PACKED), "dpo": ("dpo", PADDED)},
    "pp2 x cp2": {
        "actor": ("actor", PACKED),
        "virtual stages": ("actor", PACKED | {"megatron": {"virtual_pipeline_model_parallel_size": 2}}),
    },
}
LAYOUTS = {
    "cp2": ParallelLayout(context=2),
    "cp4": ParallelLayout(context=4),
    "tp2 x cp2": ParallelLayout(tensor=2, context=2),
    "cp2 x dp2": ParallelLayout(context=2, data=2),
    "pp2 x cp2": ParallelLayout(pipeline=2, context=2),
}
CORRECTIONS = {
    "none": CorrectionOptions(),
    **{
        f"{level} weights": CorrectionOptions(weights=WeightOptions(level=level, lower=0.5))
        for level in ("token", "sequence", "geometric", "segment")
    },
    **{
        f"{level} rejection": CorrectionOptions(rejection=RejectionOptions(statistic="k3", level=level, upper=0.02))
        for level in ("segment-mean", "sequence-mean", "sequence-max")
    },
    "opsm": CorrectionOptions(opsm_delta=0.01),
}
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
CONFIGS = {
    f"{variant}, {mode}, {name}": PolicySettings(
        pg_variant=variant, loss_agg_mode=mode, correction=correction, old_log_probs_source="behavior"
    )
    for variant, mode, (name, correction) in product(POLICY_LOSSES, AGGREGATIONS, CORRECTIONS.items())
}


@pytest.fixture(scope="module")
def started(rank_pool, tmp_path_factory):
    """Runs of all layouts, and of all losses at one and at two context ranks."""
    folder = tmp_path_factory.mktemp("context")
    model = str(write_tiny_model(folder / "model", "qwen3", tie_word_embeddings=True, initializer_range=0.1))
    small = str(write_tiny_model(folder / "small", "qwen2", num_hidden_layers=1))
    place = "tests.integration.context_scenario"

    def start(layout, **more):
        return rank_pool.start(f"{place}:run", layout, folder, model=model, **more)

    runs = {"cp1": start(ParallelLayout(), variants=ONE_RANK)}
    for name, layout in LAYOUTS.items():
        runs[name] = start(layout, variants=VARIANTS[name], mutations=MUTATIONS if name == "cp2" else ())
    for size in (1, 2):
        layout = ParallelLayout(context=size)
        runs[f"losses cp{size}"] = rank_pool.start(f"{place}:losses", layout, folder, model=small, configs=CONFIGS)
    return runs


def differences(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """How far what one rank has is from what the rank of cp1 has, by kind; gradients relative to their largest."""
    largest = {"scores": 0.0, "gradients": 0.0, "metrics": 0.0, "weights": 0.0}

    def see(kind: str, difference: Any) -> None:
        largest[kind] = max(largest[kind], float(difference))

    for name, scores in (found["scores"] or {}).items():
        see("scores", (scores - expected["scores"][name][found["rows"]]).abs().max())
    scale = max(gradient.abs().max() for gradient in expected["gradients"].values())
    for name, gradient in found["gradients"].items():
        see("gradients", (gradient - expected["gradients"][name]).abs().max() / scale)
    for step, other in zip(found["steps"], expected["steps"], strict=False):
        assert step.keys() == other.keys()
        for name, value in step.items():
            see("metrics", abs(value - other[name]) / max(1.0, abs(other[name])))
    for name, weight in found["weights"].items() if len(found["steps"]) == len(expected["steps"]) else ():
        see("weights", (weight - expected["weights"][name]).abs().max())
    return largest


@pytest.mark.parametrize(("layout", "name"), [(layout, name) for layout in LAYOUTS for name in VARIANTS[layout]])
def test_context_ranks_agree_with_one_rank(started, layout, name):
    kind, _ = VARIANTS[layout][name]
    (expected,) = started["cp1"].result()
    ranks = started[layout].result()
    sizes = LAYOUTS[layout]
    for number, rank in enumerate(ranks):
        found = differences(rank[name], expected[kind])
        assert found["scores"] <= 1e-5 and found["metrics"] <= 1e-5, found
        assert found["gradients"] <= 1e-5 and found["weights"] <= 1e-5, found
        last = sizes.coordinates(number).pipeline == sizes.pipeline - 1
        assert (rank[name]["scores"] is not None) == last
    assert {key for rank in ranks for key in rank[name]["gradients"]} == expected[kind]["gradients"].keys()


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_is_seen(started, name):
    (expected,) = started["cp1"].result()
    found = differences(started["cp2"].result()[0][name], expected["actor"])
    assert max(found.values()) > 1e-3, found


def test_every_loss_is_the_same_on_two_context_ranks(started):
    (expected,), ranks = started["losses cp1"].result(), started["losses cp2"].result()
    for name in CONFIGS:
        for rank in ranks:
            assert rank[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
