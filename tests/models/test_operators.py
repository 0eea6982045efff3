"""RMSNorm, rotary embedding and SwiGLU: values and gradients equal those of torch and transformers."""

import pytest
import torch
import torch.nn.functional as F

from roll.models.families.shape import model_shape
from roll.models.operators import RotaryTable, rms_norm, rotary_frequencies, swiglu, take_rows


def test_rms_norm_and_its_gradient_equal_torch():
    torch.manual_seed(0)
    x = (3 * torch.randn(5, 2, 16)).requires_grad_()
    weight = torch.randn(16, requires_grad=True)
    upstream = torch.randn(5, 2, 16)
    expected = F.rms_norm(x, (16,), weight, 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)
    ours = torch.autograd.grad(rms_norm(x, weight, 1e-5), (x, weight), upstream)
    theirs = torch.autograd.grad(expected, (x, weight), upstream)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_rms_norm_of_a_non_contiguous_tensor():
    x = torch.randn(3, 4, 12)[..., 2:10]
    torch.testing.assert_close(rms_norm(x, torch.ones(8), 1e-6), F.rms_norm(x, (8,), torch.ones(8), 1e-6))


SCALINGS = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_rotary_frequencies_equal_transformers(kind):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    hf = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=32, rope_parameters=SCALINGS[kind])
    ours = model_shape(hf.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    expected = LlamaRotaryEmbedding(hf).inv_freq
    torch.testing.assert_close(rotary_frequencies(ours.rotary, ours.head_dim), expected, rtol=1e-6, atol=0)


def test_rotation_and_its_gradient_equal_transformers():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    torch.manual_seed(0)
    frequencies = torch.rand(4)
    x = torch.randn(5, 2, 3, 8, requires_grad=True)
    upstream = torch.randn(2, 3, 5, 8)
    angles = torch.outer(torch.arange(5.0), frequencies).repeat(1, 2)[None]
    expected, _ = apply_rotary_pos_emb(x.permute(1, 2, 0, 3), x.permute(1, 2, 0, 3), angles.cos(), angles.sin())
    table = RotaryTable(frequencies)
    table.rotate(x[:2])
    ours = table.rotate(x)
    torch.testing.assert_close(ours, expected)
    ours, theirs = (torch.autograd.grad(each, x, upstream)[0] for each in (ours, expected))
    torch.testing.assert_close(ours, theirs)


def test_swiglu_and_its_gradient_equal_silu_times_up():
    torch.manual_seed(0)
    x = torch.randn(3, 2, 10, requires_grad=True)
    gate, up = x.chunk(2, dim=-1)
    expected = F.silu(gate) * up
    upstream = torch.randn_like(expected)
    torch.testing.assert_close(swiglu(x), expected)
    ours, theirs = (torch.autograd.grad(each, x, upstream)[0] for each in (swiglu(x), expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_taken_and_a_row_taken_often_adds_up_all_its_gradients(dtype):
    x = torch.arange(6.0).view(3, 2, 1).to(dtype).requires_grad_()
    taken = take_rows(x, torch.tensor([2, 0, *[1] * 1000]))
    assert taken.shape == (1002, 2, 1) and taken.dtype == dtype
    assert taken[:3].flatten().tolist() == [4, 5, 0, 1, 2, 3]
    taken.sum().backward()
    assert x.grad is not None and x.grad.flatten().tolist() == [1, 1, 1000, 1000, 1, 1]
