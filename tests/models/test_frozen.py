"""Which weights `freeze_module_prefix` names, what it must not name, and what it saves."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.models.families.frozen import frozen_names, frozen_parameters, untrained_part
from roll.models.families.shape import ModelShape, known_model_shape
from roll.models.families.weights import model_rules
from roll.models.tiny import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    folder: Path = write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", vocab_size=96)
    return known_model_shape(folder)


def test_names_of_a_folder_and_of_megatron_mean_the_same(model: ModelShape) -> None:
    by_folder = frozen_names(model, ["model.embed_tokens", "model.layers.2.mlp", "model.layers.2.post_attention"])
    assert by_folder == frozen_names(model, ["embedding", "decoder.layers.2.mlp"])
    assert frozen_names(model, []) == frozenset()
    assert "model.layers.1.self_attn.q_proj.weight" in frozen_names(model, ["model.layers.1."])
    assert not any(name.startswith("model.layers.1") for name in frozen_names(model, ["model.layers.0."]))


@pytest.mark.parametrize(
    ("prefixes", "message"),
    [
        (["model.layers.9."], "model.layers.9. begins no weight of a Qwen3ForCausalLM; its names are like"),
        (["model.layers.0.self_attn.q_proj"], "is one matrix with model.layers.0.self_attn.k_proj.weight, model"),
    ],
)
def test_a_prefix_that_cannot_be_frozen_is_named(model: ModelShape, prefixes: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        frozen_names(model, prefixes)


def test_every_part_of_a_stage_trains_something(model: ModelShape) -> None:
    first = frozen_names(model, ["model.embed_tokens", "model.layers.0.", "model.layers.1."])
    assert untrained_part(model, first, [[4]]) == ""
    assert untrained_part(model, first, [[2], [2]]).startswith("leaves a part of pipeline stage 0 with nothing")
    assert untrained_part(model, first, [[1, 1], [1, 1]]).startswith("leaves a part of pipeline stage 0")
    assert untrained_part(model, first - {"model.embed_tokens.weight"}, [[1, 1], [1, 1]]).startswith(
        "leaves a part of pipeline stage 1"
    )
    everything = frozen_names(model, ["model.", "lm_head"])
    assert untrained_part(model, everything, [[4]]) == "leaves nothing to train; freeze less"


@pytest.mark.parametrize("tensor", [1, 2])
def test_frozen_and_trained_parameters_are_all_parameters(model: ModelShape, tensor: int) -> None:
    layers = [2, 2]
    everything = frozenset(name for rule in model_rules(model) for name in rule.hf)
    for stage in range(2):
        whole = model.stage_parameters(stage, layers, tensor)
        assert frozen_parameters(model, everything, stage, layers, tensor) == whole
        assert frozen_parameters(model, frozenset({"lm_head.weight"}), stage, layers, tensor) == (
            96 * 64 // tensor if stage == 1 else 0
        )
