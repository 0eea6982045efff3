"""All decoder layers in one call against the same layers written with torch operators."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from roll.platforms.cpu.decoder import LAYER_WEIGHTS, CpuDecoder, DecoderSizes, DecoderTensors
from roll.platforms.cpu.kernels import CpuKernels

pytestmark = pytest.mark.slow

EPSILON, HEAD_EPSILON = 1e-5, 1e-6
VOCABULARY, POSITIONS, SLOTS = 50, 300, 1000
FAMILIES = {
    "llama": (DecoderSizes(64, 4, 2, 96, 3), 16, ()),
    "qwen2": (DecoderSizes(90, 6, 1, 70, 2), 16, ("qkv_bias",)),
    "qwen3": (DecoderSizes(64, 3, 3, 600, 2), 24, ("query_norm", "key_norm")),
    "llama with biases": (DecoderSizes(48, 8, 2, 64, 2), 32, ("qkv_bias", "out_bias")),
}


def random_tensors(sizes: DecoderSizes, head_dim: int, options: tuple[str, ...]) -> DecoderTensors:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    width, projected = sizes.heads * head_dim, (sizes.heads + 2 * sizes.key_heads) * head_dim
    shapes = {
        "input_norm": (sizes.hidden,),
        "qkv": (projected, sizes.hidden),
        "qkv_bias": (projected,),
        "query_norm": (head_dim,),
        "key_norm": (head_dim,),
        "out": (sizes.hidden, width),
        "out_bias": (sizes.hidden,),
        "mlp_norm": (sizes.hidden,),
        "gate_up": (2 * sizes.intermediate, sizes.hidden),
        "down": (sizes.hidden, sizes.intermediate),
    }
    optional = {"qkv_bias", "query_norm", "key_norm", "out_bias"}

    def weight(name):
        if name in optional and name not in options:
            return None
        shape = shapes[name]
        return normal(*shape) / (shape[1] ** 0.5 if len(shape) > 1 else 1.0)

    angles = torch.arange(POSITIONS)[:, None] * 10000.0 ** (-torch.arange(head_dim // 2) / (head_dim // 2))
    return DecoderTensors(
        embedding=normal(VOCABULARY, sizes.hidden),
        angles=torch.cat([angles.cos(), angles.sin()], dim=1),
        norm=normal(sizes.hidden),
        layers=[[weight(name) for name in LAYER_WEIGHTS] for _ in range(sizes.layers)],
        keys=[torch.zeros(SLOTS, sizes.key_heads, head_dim) for _ in range(sizes.layers)],
        values=[torch.zeros(SLOTS, sizes.key_heads, head_dim) for _ in range(sizes.layers)],
    )


def reference(tensors: DecoderTensors, sizes: DecoderSizes, head_dim: int, ids: torch.Tensor) -> torch.Tensor:
    """Hidden states of one request from its first token on."""
    tokens = len(ids)
    cosine, sine = tensors.angles[:tokens, None].chunk(2, dim=-1)

    def rotate(x):
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)

    hidden = tensors.embedding[ids]
    for layer in tensors.layers:
        weights = dict(zip(LAYER_WEIGHTS, layer, strict=True))
        x = F.rms_norm(hidden, (sizes.hidden,), weights["input_norm"], EPSILON)
        heads = F.linear(x, weights["qkv"], weights["qkv_bias"]).view(tokens, -1, head_dim)
        query, key, value = heads.split([sizes.heads, sizes.key_heads, sizes.key_heads], dim=1)
        if weights["query_norm"] is not None:
            query = F.rms_norm(query, (head_dim,), weights["query_norm"], HEAD_EPSILON)
            key = F.rms_norm(key, (head_dim,), weights["key_norm"], HEAD_EPSILON)
        query, key, value = (x.transpose(0, 1)[None] for x in (rotate(query), rotate(key), value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        hidden = hidden + F.linear(attended[0].transpose(0, 1).flatten(1), weights["out"], weights["out_bias"])
        x = F.rms_norm(hidden, (sizes.hidden,), weights["mlp_norm"], EPSILON)
        gate, up = F.linear(x, weights["gate_up"]).chunk(2, dim=-1)
        hidden = hidden + F.linear(F.silu(gate) * up, weights["down"])
    return F.rms_norm(hidden, (sizes.hidden,), tensors.norm, EPSILON)


DOUBLED = ("embedding", "angles", "norm", "layers")


def double(tensors):
    """Tensors, or lists of them, in float64."""
    return tensors.double() if isinstance(tensors, torch.Tensor) else tensors and [double(each) for each in tensors]


class Engine:
    """Requests whose tokens go to scattered slots of the cache of one model."""

    def __init__(self, sizes: DecoderSizes, head_dim: int, tensors: DecoderTensors) -> None:
        self.sizes, self.head_dim, self.tensors = sizes, head_dim, tensors
        self.kernels = CpuKernels(self.head_dim)
        assert self.tensors.fit(self.sizes, self.head_dim)
        self.decoder = CpuDecoder(self.kernels, self.sizes, EPSILON, HEAD_EPSILON)
        self.table = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1)).view(5, -1).int()

    def forward(self, ids: list[torch.Tensor], rows: list[int], known: list[int]) -> list[torch.Tensor]:
        """Hidden states of new tokens of each request, after the known ones."""
        lengths = torch.tensor([len(each) for each in ids])
        positions = torch.cat([torch.arange(start, start + len(each)) for start, each in zip(known, ids, strict=True)])
        slots = torch.cat(
            [self.table[row, start : start + len(e)] for row, start, e in zip(rows, known, ids, strict=True)]
        )
        keys = torch.tensor(known) + lengths
        requests = CpuKernels.requests(self.table, torch.tensor(rows), keys, lengths)
        scale = self.head_dim**-0.5
        hidden = self.decoder.forward(self.tensors, torch.cat(ids), positions, slots, requests, scale)
        return list(hidden.split(lengths.tolist()))


def engine_of(family: str) -> Engine:
    sizes, head_dim, options = FAMILIES[family]
    return Engine(sizes, head_dim, random_tensors(sizes, head_dim, options))


@pytest.fixture(params=FAMILIES)
def engine(request):
    return engine_of(request.param)


def tokens(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths]


def test_hidden_states_equal_those_of_torch(engine):
    prompts = tokens(1, 200, 33, 90)
    for ids, hidden in zip(prompts, engine.forward(prompts, [3, 0, 4, 1], [0, 0, 0, 0]), strict=True):
        expected = reference(engine.tensors, engine.sizes, engine.head_dim, ids)
        torch.testing.assert_close(hidden, expected, atol=2e-5, rtol=1e-4)


def test_next_to_a_large_residual_hidden_states_are_as_exact_as_those_of_torch(engine):
    (ids,) = tokens(90)
    engine.tensors = replace(engine.tensors, embedding=1e4 * engine.tensors.embedding)
    doubles = replace(engine.tensors, **{name: double(getattr(engine.tensors, name)) for name in DOUBLED})
    exact, ours = reference(doubles, engine.sizes, engine.head_dim, ids), engine.forward([ids], [0], [0])[0]
    theirs = reference(engine.tensors, engine.sizes, engine.head_dim, ids)
    assert (ours - exact).norm() < 2 * (theirs - exact).norm()


def test_a_token_has_the_same_bits_prefilled_decoded_and_in_every_batch(engine):
    ids, other = tokens(60, 17)
    whole, _ = engine.forward([ids, other], [2, 0], [0, 0])
    parts = [engine.forward([ids[:40]], [1], [0])[0]]
    for step in range(40, 60):
        together = engine.forward([ids[step : step + 1], other], [1, 3], [step, 0])
        parts.append(together[0])
    assert torch.equal(torch.cat(parts), whole)


def test_threads_do_not_change_the_result():
    engine, threads = engine_of("llama"), torch.get_num_threads()
    prompts, results = tokens(100, 90), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(torch.cat(engine.forward(prompts, [0, 1], [0, 0])))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


def test_copied_tokens_continue_as_those_that_were_computed(engine):
    (ids,) = tokens(30)
    engine.forward([ids], [0], [0])
    engine.decoder.copy_tokens(engine.tensors, *(engine.table[row, :30].long() for row in (0, 4)))
    following = tokens(1)
    (copied,), (computed,) = engine.forward(following, [4], [30]), engine.forward(following, [0], [30])
    assert torch.equal(copied, computed)


@pytest.mark.parametrize(("ids", "known"), [([VOCABULARY], 0), ([-1], 0), ([3, 4], POSITIONS - 1)])
def test_nothing_is_written_for_an_id_or_a_position_out_of_range(ids, known):
    engine = engine_of("llama")
    table = torch.arange(POSITIONS + 1, dtype=torch.int32)[None]
    requests = CpuKernels.requests(table, torch.tensor([0]), torch.tensor([known + len(ids)]), torch.tensor([len(ids)]))
    positions = torch.arange(known, known + len(ids))
    assert engine.decoder.forward(engine.tensors, torch.tensor(ids), positions, positions, requests, 0.25) is None
    assert not any(cache.any() for cache in (*engine.tensors.keys, *engine.tensors.values))


def test_tensors_that_do_not_fit():
    engine = engine_of("qwen2")
    tensors, sizes, head_dim = engine.tensors, engine.sizes, engine.head_dim
    keys = tensors.keys
    for changed in (
        replace(tensors, norm=tensors.norm.bfloat16()),
        replace(tensors, angles=tensors.angles[:, :-2]),
        replace(tensors, embedding=tensors.embedding.t().contiguous().t()),
        replace(tensors, keys=[*keys[:-1], keys[-1].half()]),
        replace(tensors, keys=[torch.zeros(sizes.key_heads, SLOTS, head_dim).transpose(0, 1) for _ in keys]),
        replace(tensors, values=[torch.zeros(SLOTS, sizes.key_heads, 2 * head_dim)[..., :head_dim] for _ in keys]),
        replace(tensors, layers=[[None if w is None else w[:-1] for w in tensors.layers[0]], tensors.layers[1]]),
    ):
        assert not changed.fit(sizes, head_dim)
