"""Weights are read into the parameters of a stage."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from roll.configs.model_config import UnsupportedModel
from roll.models.hf_config import read_hf_config
from roll.models.hf_import import import_hf
from roll.models.tiny import write_tiny_model

NORM = "model.norm.weight"


class LastNorm(torch.nn.Module):
    """A last stage with one layer, whose parameters are left out, and the final norm."""

    pre_process, post_process = False, True

    def __init__(self, size: int) -> None:
        super().__init__()
        self.decoder = torch.nn.Module()
        self.decoder.layers = [SimpleNamespace(layer_number=1)]  # type: ignore[assignment]
        self.decoder.final_layernorm = torch.nn.RMSNorm(size)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_an_error(tmp_path: Path, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll.models.weight_mapping.layer_rules", lambda config: ())
    file = write_tiny_model(tmp_path, "llama", tie_word_embeddings=True) / "model.safetensors"
    config = read_hf_config(tmp_path, value_head=False)
    tensors, model = load_file(file), LastNorm(config.hidden_size)
    model.output_layer = torch.nn.Linear(config.hidden_size, 112, bias=False)
    import_hf(model, tmp_path, config, rank=0, ranks=1)
    assert torch.equal(model.decoder.final_layernorm.weight, tensors[NORM])
    tensors[NORM][3] = value
    save_file(tensors, file)
    with pytest.raises(UnsupportedModel, match=rf"{NORM} has 1 of 64 values that are NaN or infinite"):
        import_hf(model, tmp_path, config, rank=0, ranks=1)
