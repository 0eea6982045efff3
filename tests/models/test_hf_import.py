"""Weights are read into the parameters of a stage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from roll.models.families.hf_config import UnsupportedModel
from roll.models.families.shape import known_model_shape
from roll.models.hf_import import import_hf
from roll.models.tiny import write_tiny_model

NORM = "model.norm.weight"


class LastNorm(torch.nn.Module):
    """A last stage with one layer, whose parameters are left out, and the final norm."""

    pre_process, post_process = False, True
    config = SimpleNamespace(moe_grouped_gemm=False)

    def __init__(self, size: int) -> None:
        super().__init__()
        self.decoder = torch.nn.Module()
        self.decoder.layers = [SimpleNamespace(layer_number=1)]  # type: ignore[assignment]
        self.decoder.final_layernorm = torch.nn.RMSNorm(size)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_an_error(tmp_path: Path, value: float) -> None:
    file = write_tiny_model(tmp_path, "llama", tie_word_embeddings=True) / "model.safetensors"
    shape = known_model_shape(tmp_path)
    config = replace(shape, family=replace(shape.family, layer=()))
    tensors, model = load_file(file), LastNorm(config.hidden)
    model.output_layer = torch.nn.Linear(config.hidden, 112, bias=False)
    import_hf(model, tmp_path, config, rank=0, ranks=1)
    assert torch.equal(model.decoder.final_layernorm.weight, tensors[NORM])
    tensors[NORM][3] = value
    save_file(tensors, file)
    with pytest.raises(UnsupportedModel, match=rf"{NORM} has 1 of 64 values that are NaN or infinite"):
        import_hf(model, tmp_path, config, rank=0, ranks=1)
