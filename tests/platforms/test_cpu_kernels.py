"""The C++ kernels of a CPU engine against plain torch operators, and their build."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.platforms.cpu import library as cpu_library
from roll.platforms.cpu.kernels import CpuKernels
from roll.platforms.cpu.library import BuildError, build
from roll.platforms.cpu.sglang_sampling import sample_with_seeds, uniform

pytestmark = pytest.mark.slow

HEAD_DIMS = (8, 16, 24, 64, 80, 128)


@pytest.fixture(scope="module")
def kernels() -> dict[int, CpuKernels]:
    return {size: CpuKernels(size) for size in HEAD_DIMS}


def reference(query, k_cache, v_cache, table, rows, keys, queries, scale):
    """One request and one head after the other, in float64."""
    parts, start = [], 0
    groups = query.shape[1] // k_cache.shape[1]
    for row, length, count in zip(rows.tolist(), keys.tolist(), queries.tolist(), strict=True):
        slots = table[row, :length].long()
        key, value = (cache[slots].double().repeat_interleave(groups, dim=1) for cache in (k_cache, v_cache))
        scores = torch.einsum("qhd,khd->hqk", query[start : start + count].double(), key) * scale
        hidden = torch.arange(length)[None] > torch.arange(length - count, length)[:, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, value))
        start += count
    return torch.cat(parts)


REQUESTS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 200)), min_size=1, max_size=12)


@settings(deadline=None, max_examples=150)
@given(
    REQUESTS,
    st.sampled_from(HEAD_DIMS),
    st.integers(1, 3),
    st.integers(1, 9),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_attention_equals_that_of_torch(kernels, requests, head_dim, key_heads, groups, dtype, heads_first, seed):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.tensor([count for count, _ in requests])
    keys = queries + torch.tensor([prefix for _, prefix in requests])
    context, size = int(keys.max()) + 3, int(keys.sum()) + 5
    shape = (key_heads, size, head_dim) if heads_first else (size, key_heads, head_dim)
    caches = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
    k_cache, v_cache = [cache.transpose(0, 1) if heads_first else cache for cache in caches]
    rows = torch.randperm(len(requests) + 2, generator=generator)[: len(requests)]
    table = torch.zeros(len(requests) + 2, context, dtype=torch.int32)
    slots = torch.randperm(size, generator=generator).to(torch.int32).split([*keys.tolist(), 5])
    for row, mine in zip(rows.tolist(), slots, strict=False):
        table[row, : len(mine)] = mine
    query = 3 * torch.randn(int(queries.sum()), key_heads * groups, head_dim, generator=generator)
    output = torch.full_like(query, float("nan"))
    batch = CpuKernels.requests(table, rows, keys, queries)
    kernels[head_dim].attend(query, output, k_cache, v_cache, batch, head_dim**-0.5)
    expected = reference(query, k_cache, v_cache, table, rows, keys, queries, head_dim**-0.5)
    torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=0)  # scores of 15 have steps of 1e-6


def test_attention_of_a_request_is_the_same_bits_in_every_batch_and_with_any_number_of_threads(kernels):
    generator = torch.Generator().manual_seed(0)
    k_cache, v_cache = torch.randn(2, 400, 2, 16, generator=generator)
    table = torch.randperm(400, generator=generator).to(torch.int32).view(4, 100)
    query, keys = torch.randn(4, 6, 16, generator=generator), torch.tensor([100, 3, 57, 80])
    threads, outputs = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            outputs.append(torch.empty_like(query))
            batch = CpuKernels.requests(table, torch.arange(4), keys, None)
            kernels[16].attend(query, outputs[-1], k_cache, v_cache, batch, 0.25)
    finally:
        torch.set_num_threads(threads)
    alone = torch.empty_like(query[:1])
    kernels[16].attend(
        query[2:3], alone, k_cache, v_cache, CpuKernels.requests(table, torch.tensor([2]), keys[2:3], None), 0.25
    )
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0][2:3], alone)


def test_what_attention_takes(kernels):
    query, cache = torch.randn(2, 4, 16), torch.randn(9, 2, 16)
    assert kernels[16].attends(query, cache, cache)
    assert kernels[16].attends(query.bfloat16(), cache.bfloat16(), cache.bfloat16())
    assert not kernels[16].attends(query, cache.half(), cache.half())
    assert not kernels[16].attends(query, cache, torch.randn(9, 2, 24))
    assert not kernels[24].attends(query, cache, cache)


@pytest.mark.parametrize("rows", [1, 7, 900])
def test_rms_norm(kernels, rows):
    generator = torch.Generator().manual_seed(rows)
    x, residual, weight = (torch.randn(n, 100, generator=generator) for n in (rows, rows, 1))
    out, total = kernels[16].rms_norm(x, weight[0], 1e-6)
    torch.testing.assert_close(out, F.rms_norm(x, (100,), weight[0], 1e-6), atol=1e-6, rtol=1e-5)
    assert total is None
    out, total = kernels[16].rms_norm(x, weight[0], 1e-6, residual)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(out, F.rms_norm(x + residual, (100,), weight[0], 1e-6), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 5, 700])
def test_rotate_reads_a_part_of_wider_rows(kernels, tokens):
    generator = torch.Generator().manual_seed(tokens)
    heads, size = 3, 24
    wide = torch.randn(tokens, 2 * heads * size, generator=generator)
    x = wide[:, heads * size :]
    positions = torch.randint(0, 50, (tokens,), generator=generator)
    angles = torch.rand(50, size // 2, generator=generator)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    first, second = x.reshape(tokens, heads, size).chunk(2, dim=-1)
    cosine, sine = (part[:, None] for part in table[positions].chunk(2, dim=-1))
    expected = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    torch.testing.assert_close(kernels[24].rotate(x, positions, table), expected.flatten(1), atol=1e-6, rtol=1e-5)
    for wrong in (-1, 50):
        positions[-1] = wrong
        with pytest.raises(IndexError, match="rotary table of 50"):
            kernels[24].rotate(x, positions, table)


@pytest.mark.parametrize("rows", [1, 7, 900])
def test_silu_multiply(kernels, rows):
    x = 20 * torch.randn(rows, 2 * 90, generator=torch.Generator().manual_seed(rows))
    x[0, :4] = torch.tensor([0.0, 200.0, -200.0, -80.0])
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(kernels[16].silu_multiply(x), F.silu(gate) * up, atol=1e-6, rtol=1e-5)


def test_silu_far_below_zero_is_exact_to_rounding(kernels):
    gate = torch.linspace(-86, 0, 20_001)
    found = kernels[16].silu_multiply(torch.cat([gate, torch.ones_like(gate)])[None])[0]
    torch.testing.assert_close(found.double(), F.silu(gate.double()), atol=0, rtol=6e-7)


LAYOUTS = {
    "contiguous": lambda x: x,
    "rows apart": lambda x: F.pad(x, (0, 5))[:, : x.shape[1]],
    "transposed": lambda x: x.t().contiguous().t(),
    "every second": lambda x: x.repeat_interleave(2, 1)[:, ::2],
}


@settings(deadline=None, max_examples=250)
@given(
    st.integers(0, 40),
    st.integers(1, 100),
    st.integers(1, 1100),
    st.booleans(),
    st.sampled_from(sorted(LAYOUTS)),
    st.sampled_from(sorted(LAYOUTS)),
    st.integers(0, 2**31),
)
def test_linear_equals_that_of_torch_and_a_row_has_the_same_bits_alone(
    kernels, rows, outputs, inputs, biased, layout, weight_layout, seed
):
    generator = torch.Generator().manual_seed(seed)
    x = LAYOUTS[layout](torch.randn(rows, inputs, generator=generator))
    weight = LAYOUTS[weight_layout](torch.randn(outputs, inputs, generator=generator) / inputs**0.5)
    bias = torch.randn(outputs, generator=generator) if biased else None
    out = kernels[16].linear(x, weight, bias)
    torch.testing.assert_close(out, F.linear(x, weight, bias), atol=1e-5, rtol=1e-5)
    for row in range(rows):
        assert torch.equal(kernels[16].linear(x[row : row + 1], weight, bias), out[row : row + 1])


def test_linear_of_more_dimensions_and_of_threads(kernels):
    generator, threads, outputs = torch.Generator().manual_seed(0), torch.get_num_threads(), []
    x, weight = torch.randn(17, 50, 700, generator=generator), torch.randn(200, 700, generator=generator)
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            outputs.append(kernels[16].linear(x, weight))
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(outputs[0], F.linear(x, weight), atol=1e-3, rtol=1e-5)
    assert torch.equal(*outputs)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 300), st.floats(0.1, 3.0), st.integers(0, 2**31))
def test_samples_and_log_probs_are_those_of_torch(kernels, vocabulary, temperature, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(20, vocabulary, generator=generator)
    if vocabulary > 2:
        logits[:, 1] = float("-inf")
    temperatures = torch.full((20, 1), temperature)
    seeds = torch.randint(-(2**40), 2**40, (20,), generator=generator)
    positions = torch.randint(0, 5000, (20,), generator=generator)
    tokens, log_probs = kernels[16].sample(logits, temperatures, seeds, positions)
    expected = torch.log_softmax(logits / temperatures, -1)
    drawn = sample_with_seeds(expected, seeds, positions).squeeze(1)
    close = expected.double().exp().cumsum(-1) - uniform(seeds, positions)[:, None]
    unclear = (close.abs() < 1e-6).any(-1)  # the number is at the border of two tokens, up to rounding
    assert ((tokens == drawn) | unclear).all()
    assert tokens.dtype == torch.int32
    torch.testing.assert_close(log_probs, expected.gather(1, tokens.long()[:, None])[:, 0], atol=1e-5, rtol=1e-5)
    again, same = kernels[16].sample(logits[3:4], temperatures[3:4], seeds[3:4], positions[3:4])
    assert torch.equal(again, tokens[3:4])
    assert torch.equal(same, log_probs[3:4])


def test_only_what_is_possible_is_sampled(kernels):
    logits = torch.full((1000, 150), float("-inf"))
    logits[:, 130] = -5.0
    none, seeds = torch.zeros(1000, dtype=torch.int64), torch.arange(1000)
    tokens, log_probs = kernels[16].sample(logits, torch.ones(1000), seeds, none)
    assert (tokens == 130).all()
    assert (log_probs == 0).all()
    logits[:, 3] = float("nan")
    assert kernels[16].sample(logits, torch.ones(1000), seeds, none)[1].isnan().all()


def test_a_library_is_built_once_for_each_source_and_head_size(tmp_path, monkeypatch):
    first = build(16, tmp_path)
    written = first.stat().st_mtime_ns
    assert build(16, tmp_path) == first
    assert first.stat().st_mtime_ns == written
    assert build(24, tmp_path) != first
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    changed = tmp_path / "changed"
    shutil.copytree(cpu_library.SOURCES, changed)
    with (changed / "linear.h").open("a") as file:
        file.write("// another version\n")
    monkeypatch.setattr(cpu_library, "SOURCES", changed)
    (changed / ".linear.h.swp").write_bytes(b"\xff\xfe")  # as of an editor
    assert build(16, tmp_path / "cache") != first
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_library_that_cannot_be_loaded_is_not_kept(tmp_path, monkeypatch):
    """As that of a compiler whose code needs another OpenMP than torch's."""
    (tmp_path / "kernels.cpp").write_text('extern "C" void elsewhere(); extern "C" void here() { elsewhere(); }')
    monkeypatch.setattr(cpu_library, "SOURCES", tmp_path)
    with pytest.raises(BuildError, match="cannot be loaded"):
        build(16, tmp_path.with_name("cache"))
    assert list(tmp_path.with_name("cache").iterdir()) == []


def test_why_a_library_cannot_be_built(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="cannot be written"):
        build(16, tmp_path / "file")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "kernels.cpp").write_text("this is not C++")
    monkeypatch.setattr(cpu_library, "SOURCES", broken)
    with pytest.raises(BuildError, match=r"failed: .*kernels\.cpp"):
        build(16, tmp_path)
    monkeypatch.setattr(shutil, "which", lambda command: None)
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        build(16, tmp_path)
