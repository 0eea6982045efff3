"""Attention over packed samples: one call of torch's kernel on a GPU equals one call for each length."""

import inspect

import torch

from roll.models import local_spec
from roll.models.operators import RotaryTable

LENGTHS = [3, 5, 5, 1, 7]


def attention(device="cpu"):
    return local_spec.CausalAttention(
        None, [local_spec.LayerRotary(RotaryTable(torch.linspace(1.0, 0.1, 4).to(device)))], 1, 0.3
    )


def packed(device="cpu"):
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int().to(device)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).to(device)
    sizes = {"max_seqlen_q": max(LENGTHS), "max_seqlen_kv": max(LENGTHS), "lengths": LENGTHS}
    return local_spec.PackedSamples(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, positions=positions, **sizes
    )


def plain_varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """What torch documents of `varlen_attn`, sample by sample, with a causal window."""
    assert window_size == (-1, 0) and enable_gqa and torch.equal(cu_seq_q, cu_seq_k) and max_q == max_k == max(LENGTHS)
    contexts = []
    for start, stop in zip(cu_seq_q.tolist()[:-1], cu_seq_q.tolist()[1:], strict=True):
        q, k, v = (x[start:stop].transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
        hidden = torch.ones(stop - start, stop - start).triu(1).bool()
        scores = (scale * q @ k.transpose(1, 2)).masked_fill(hidden, -torch.inf)
        contexts.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(contexts)


def test_one_call_for_all_samples_equals_one_for_each_length(monkeypatch):
    torch.manual_seed(0)
    inputs = [torch.randn(sum(LENGTHS), heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    upstream = torch.randn(sum(LENGTHS), 1, 32)
    results = []
    for one_call in (False, True):
        monkeypatch.setattr(local_spec, "takes_varlen", lambda query, one_call=one_call: one_call)
        monkeypatch.setattr(local_spec, "varlen_attention", lambda: plain_varlen)
        context = attention()(*inputs, None, packed_seq_params=packed())
        results.append([context, *torch.autograd.grad(context, inputs, upstream)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_the_installed_torch_takes_these_arguments_and_has_their_gradient(monkeypatch):
    """On tensors without memory, which checks arguments and shapes, not values."""
    monkeypatch.setattr(local_spec, "takes_varlen", lambda query: True)
    options = {"device": "meta", "dtype": torch.bfloat16, "requires_grad": True}
    inputs = [torch.randn(sum(LENGTHS), heads, 8, **options) for heads in (4, 2, 2)]
    context = attention("meta")(*inputs, None, packed_seq_params=packed("meta"))
    assert context.shape == (sum(LENGTHS), 1, 32)
    context.sum().backward()
    assert [x.grad.shape for x in inputs] == [x.shape for x in inputs]


def test_the_kernel_is_used_where_it_computes(monkeypatch):
    """Elsewhere packed samples take a call for each length, as before."""

    class Query:
        def __init__(self, device="cuda", dtype=torch.bfloat16, size=64):
            self.device, self.dtype, self.shape = torch.device(device), dtype, (9, 4, size)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert local_spec.takes_varlen(Query())
    others = [Query("cpu"), Query(dtype=torch.float32), Query(size=20), Query(size=512)]
    assert not any(map(local_spec.takes_varlen, others))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not local_spec.takes_varlen(Query(dtype=torch.float16))


def test_a_torch_without_the_kernel_or_its_options_has_none(monkeypatch):
    import torch.nn.attention.varlen as module

    local_spec.varlen_attention.cache_clear()
    older = lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False: None  # noqa: E731
    monkeypatch.setattr(module, "varlen_attn", older)
    assert local_spec.varlen_attention() is None
    local_spec.varlen_attention.cache_clear()
    monkeypatch.undo()
    assert "window_size" in inspect.signature(local_spec.varlen_attention()).parameters
