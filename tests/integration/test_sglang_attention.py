"""Attention in padded batches and by the kernel equals SGLang's loop over requests."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.integration

CONTEXT = 700


@pytest.fixture(scope="module", params=["batches", "kernel"])
def backends(request):
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    from roll.platforms.cpu.kernels import CpuKernels
    from roll.platforms.cpu.sglang_attention import BatchedTorchAttention

    def make(kind):
        backend = kind.__new__(kind)  # the pools that the constructor takes play no part in the attention itself
        backend._plan, backend._requests = None, None
        backend._kernels = CpuKernels(16) if request.param == "kernel" else None
        return backend

    return make(TorchNativeAttnBackend), lambda: make(BatchedTorchAttention)


def problem(prefixes, extends, heads, key_heads, seed=0):
    """Requests in rows of the pool in reverse order, their keys scattered over the cache."""
    generator = torch.Generator().manual_seed(seed)
    requests = len(prefixes)
    slots = torch.randperm(requests * CONTEXT + 1, generator=generator)[: requests * CONTEXT]
    caches = torch.randn(2, requests * CONTEXT + 1, key_heads, 16, generator=generator)
    query = torch.randn(sum(extends), heads, 16, generator=generator)
    prefix, extend = torch.tensor(prefixes), torch.tensor(extends)
    return {
        "query": query,
        "k_cache": caches[0],
        "v_cache": caches[1],
        "req_to_token": slots.view(requests, CONTEXT).to(torch.int32),
        "req_pool_indices": torch.arange(requests).flip(0),
        "seq_lens": prefix + extend,
        "extend_prefix_lens": prefix,
        "extend_seq_lens": extend,
        "scaling": 0.25,
        "enable_gqa": heads != key_heads,
    }


def extend(backend, case, **options):
    output = torch.empty_like(case["query"])
    return backend._run_sdpa_forward_extend(output=output, **{**case, "causal": True, **options})


def decode(backend, case, **options):
    case = {name: value for name, value in case.items() if not name.startswith("extend_")}
    output = torch.empty_like(case["query"])
    return backend._run_sdpa_forward_decode(output=output, **{**case, **options})


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (6, 1)])
def test_decode(backends, heads, key_heads):
    stock, batched = backends
    case = problem([0, 5, 63, 64, 200, 640], [1] * 6, heads, key_heads)
    torch.testing.assert_close(decode(batched(), case), decode(stock, case), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("prefixes", [[0, 0, 0, 0, 0], [0, 7, 64, 300, 1]])
def test_extend(backends, heads, key_heads, prefixes):
    stock, batched = backends
    case = problem(prefixes, [1, 9, 33, 64, 300], heads, key_heads)
    torch.testing.assert_close(extend(batched(), case), extend(stock, case), atol=2e-6, rtol=1e-5)


def test_a_request_with_too_large_a_mask_uses_the_stock_loop(backends, monkeypatch):
    from roll.platforms.cpu import sglang_attention as sglang_cpu_attention
    from roll.platforms.cpu import sglang_batches as sglang_cpu_batches

    monkeypatch.setattr(sglang_cpu_attention, "MASK_ELEMENTS", 1000)
    stock, batched = backends
    case = problem([0, 40, 3], [60, 2, 60], 4, 2)
    monkeypatch.setattr(sglang_cpu_batches.group_by_length, "__defaults__", (1, 1000))
    torch.testing.assert_close(extend(batched(), case), extend(stock, case), atol=2e-6, rtol=1e-5)


def test_a_sliding_window_uses_the_stock_loop(backends):
    stock, batched = backends
    case = problem([0, 100], [30, 40], 4, 2)
    window = {"sliding_window_size": 16}
    assert torch.equal(extend(batched(), case, **window), extend(stock, case, **window))
    steps = problem([0, 100], [1, 1], 4, 2)
    assert torch.equal(decode(batched(), steps, **window), decode(stock, steps, **window))


def test_layers_of_one_forward_pass_share_the_plan(backends):
    _, batched = backends
    backend = batched()
    backend.use_sliding_window_kv_pool = False
    decode(backend, problem([5, 6], [1, 1], 4, 2))
    plan = backend._plan, backend._requests
    assert plan != (None, None)
    decode(backend, problem([5, 6], [1, 1], 4, 2, seed=1))
    assert (backend._plan, backend._requests) == plan
    backend.init_forward_metadata(None)
    assert (backend._plan, backend._requests) == (None, None)


def test_the_kernel_takes_extensions_of_any_length(backends):
    _, make = backends
    backend = make()
    extend(backend, problem([3, 0], [600, 33], 4, 2))
    assert (backend._plan is None) == (backend._kernels is not None)


def test_norms_of_a_layer_are_one_call_of_the_kernel(monkeypatch):
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.layernorm import RMSNorm

    from roll.platforms.cpu import sglang_ops as sglang_cpu_ops
    from roll.platforms.cpu.kernels import CpuKernels

    class Counted(CpuKernels):
        calls = 0

        def rms_norm(self, *arguments):
            self.calls += 1
            return super().rms_norm(*arguments)

    kernels = Counted(16)
    monkeypatch.setattr(BaseFusedOp, "_oot_forward_registry", {})
    sglang_cpu_ops.register_kernels(kernels)
    forward = BaseFusedOp._oot_forward_registry[sglang_cpu_ops.PLATFORM_KEY][RMSNorm]
    norm, linear = RMSNorm(100), torch.nn.Linear(100, 4)
    x, residual = torch.randn(2, 7, 100, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2.0)
        for further in ({}, {"quant_linear": linear}):  # decoder layers pass the linear that follows
            for given in ((x,), (x, residual)):
                expected = norm.forward_native(*given)
                torch.testing.assert_close(forward(norm, *given, **further), expected, atol=1e-6, rtol=1e-5)
        assert kernels.calls == 4
        forward(norm, x, residual, residual)
        forward(norm, x.bfloat16())
    assert kernels.calls == 4, "what the kernel does not take is computed by SGLang"
