"""Mixtures of experts in a configuration: which ranks have which experts, and what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.base.errors import ConfigError
from roll.configs.check import check
from roll.configs.devices.parallel_layout import ParallelLayout
from roll.configs.learning.log_prob_passes import training_gives_old_log_probs
from roll.models.families.hf_config import UnsupportedModel, check_model_config
from roll.models.families.shape import model_shape
from tests.configs.samples import QWEN3_30B, rlvr

OPTIONS = "actor_train.strategy_args.strategy_config"
SIZES = st.sampled_from([1, 2, 4])


def test_the_parameters_are_those_of_the_model_card() -> None:
    """30.5 billion, of which 3.3 billion compute a token; 29.9 without embeddings."""
    shape = model_shape(check_model_config(QWEN3_30B))
    dense, experts = shape.stage_parameters(0, [48], 1), shape.expert_parameters(0, [48], 1, 1)
    assert round((dense + experts) / 1e9, 1) == 30.5
    assert (shape.matrices + 2 * 151936 * 2048) / 1e9 == pytest.approx(3.3, abs=0.06)
    assert shape.expert_parameters(0, [48], 8, 2) == experts // 16


@given(SIZES, SIZES, SIZES, st.sampled_from([1, 2]))
def test_every_expert_is_on_as_many_ranks_as_there_are_copies(
    tensor: int, expert: int, own: int, pipeline: int
) -> None:
    copies = 2
    layout = ParallelLayout(tensor, own * expert * copies, pipeline, expert=expert, expert_tensor=own)
    found: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(layout.world_size):
        place, stage = layout.expert_place(rank), layout.coordinates(rank).pipeline
        assert rank in layout.whole_dense(rank) and rank in layout.whole_experts(rank)
        assert all(layout.coordinates(other).pipeline == stage for other in layout.whole_experts(rank))
        for number in place.numbers(8):
            found.setdefault((stage, number, place.tensor_rank), []).append(place.copy)
    assert len(found) == pipeline * 8 * own
    assert all(ranks == list(range(len(ranks))) for ranks in found.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 200}, "num_experts_per_tok: 200 is more than the 128 experts"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok: 1 of weight 1 trains no router"),
        ({"num_experts": 0}, "num_experts: 0 is not a whole number above 0"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size: null is not a whole number above 0"),
        ({"decoder_sparse_step": 49}, "leave no layer with experts"),
    ],
)
def test_a_model_without_usable_experts_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        check_model_config(QWEN3_30B | change)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"expert_model_parallel_size": 6},
            "expert_model_parallel_size: 6 does not divide 128 experts; use 1, 2, 4, 8",
        ),
        ({"tensor_model_parallel_size": 2}, "sequence_parallel: false with tensor parallel 2 in a mixture of experts"),
        (
            {"expert_model_parallel_size": 8, "expert_tensor_parallel_size": 2},
            "device_mapping: 8 devices cannot hold expert tensor parallel 2 x expert parallel 8; use 16",
        ),
        ({"expert_tensor_parallel_size": 512}, "expert_tensor_parallel_size: 512 does not divide the 768 columns"),
    ],
)
def test_experts_that_do_not_fit_the_ranks_are_refused(options: dict[str, int], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        mixture(tmp_path, *(f"{OPTIONS}.{name}={value}" for name, value in options.items()))
    assert any(message in str(problem) for problem in error.value.problems), error.value


def test_options_of_experts_are_named_where_a_model_is_dense(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expert_model_parallel_size: 2, but .* has no experts; use 1"):
        rlvr(tmp_path, f"{OPTIONS}.expert_model_parallel_size=2")
    config = rlvr(tmp_path, f"{OPTIONS}.moe_token_dispatcher_type=allgather")
    found = [str(warning) for warning in check(config).warnings]
    assert any("moe_token_dispatcher_type: has no effect" in warning for warning in found), found


def test_experts_of_the_log_prob_pass_need_this_pass(tmp_path: Path) -> None:
    replay = "actor_train.router_replay.mode=R2"
    with pytest.raises(ConfigError) as error:
        mixture(tmp_path, replay, "old_log_probs_source=behavior")
    assert any("R2 needs a pass of the old log-probs" in str(each) for each in error.value.problems), error.value
    config = mixture(tmp_path, replay, "old_log_probs_source=recompute", f"{OPTIONS}.sequence_parallel=true")
    assert not config.replays_routing and not training_gives_old_log_probs(config)


def test_tied_embeddings_are_refused_where_an_engine_has_the_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        mixture(tmp_path, f"{OPTIONS}.sequence_parallel=true", tied=True)
    assert any("SGLang does not read" in str(each) for each in error.value.problems), error.value


def mixture(folder: Path, *overrides: str, tied: bool = False) -> Any:
    """A run of Qwen3-30B-A3B, trained on 8 devices."""
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(QWEN3_30B | {"tie_word_embeddings": tied}))
    devices = ["actor_train.device_mapping=list(range(0,8))", "actor_infer.device_mapping=list(range(8,12))"]
    return rlvr(folder, f"pretrain={folder / 'model'}", *devices, *overrides)
