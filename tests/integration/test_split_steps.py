"""An optimizer step in two calls, as `roll.open` makes it, is that of one call in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roll.configs.devices.parallel_layout import ParallelLayout
from roll.models.tiny import write_tiny_model
from tests.integration.test_megatron_strategy import OVERLAPPED, PLAIN_OPTIMIZER, SEQUENCE_PARALLEL, VIRTUAL

pytestmark = pytest.mark.integration

VARIANTS: dict[str, tuple[ParallelLayout, dict[str, Any]]] = {
    "dp2, overlapped": (ParallelLayout(data=2), {"megatron": OVERLAPPED}),
    "dp2, plain optimizer": (ParallelLayout(data=2), {"megatron": PLAIN_OPTIMIZER}),
    "tp2 x dp2, sequence parallel": (ParallelLayout(tensor=2, data=2), {"megatron": SEQUENCE_PARALLEL}),
    "pp2 x dp2, virtual, overlapped": (ParallelLayout(pipeline=2, data=2), {"megatron": OVERLAPPED | VIRTUAL}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_in_two_calls_is_that_of_one_and_gradients_of_several_calls_add_up(name, rank_pool, tmp_path):
    layout, options = VARIANTS[name]
    model = write_tiny_model(tmp_path / "model", "qwen3", tie_word_embeddings=True)
    variants = {name: {"micro_batch_size": 1, **options}}
    ranks = rank_pool.run(
        "tests.integration.gradient_scenario:split", layout, tmp_path, model=str(model), variants=variants
    )
    for rank in ranks:
        (whole, weights), (two, of_two), (parts, of_parts) = (
            rank[name, way] for way in ("one call", "two calls", "parts")
        )
        assert two == whole
        assert rank["without gradients"] == "optimizer_step: there are no gradients; call forward_backward before it"
        assert all(torch.equal(of_two[key], value) for key, value in weights.items())
        for one, other in zip(parts, whole, strict=True):
            assert one == pytest.approx(other, rel=1e-4)
        for key, value in weights.items():
            torch.testing.assert_close(of_parts[key], value, atol=2e-5, rtol=1e-4)
