"""The decoder layers of a dense model in float32 as one C++ call; torch only, without SGLang.

Run operator by operator, most of a decode step of a small model is Python. Here a step costs what its tokens cost, and
a token's result has the same bits in every batch, prefilled or decoded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from roll.platforms.cpu.kernels import CpuKernels, Requests, is_plain

LAYER_WEIGHTS = (
    "input_norm",
    "qkv",
    "qkv_bias",
    "query_norm",
    "key_norm",
    "out",
    "out_bias",
    "mlp_norm",
    "gate_up",
    "down",
)
"""Weights of a layer, in the order of `Layer` in cpp/decoder.h; the keys' and the values' cache follow."""


@dataclass(frozen=True)
class DecoderSizes:
    """Sizes of a model: numbers of features, of heads for queries and for keys, and of layers."""

    hidden: int
    heads: int
    key_heads: int
    intermediate: int
    layers: int


@dataclass(frozen=True)
class DecoderTensors:
    """What a forward pass reads and writes, all float32; the same storage may change its values between passes.

    Attributes:
        embedding: [vocabulary, hidden].
        angles: [positions, D], cosines, then sines of the rotary embedding.
        norm: [hidden], of the last norm.
        layers: by layer, LAYER_WEIGHTS, None where the model has no such weight.
        keys: by layer, cache [slots, key heads, D], heads of a slot together, all with the same strides.
        values: the same of values.
    """

    embedding: torch.Tensor
    angles: torch.Tensor
    norm: torch.Tensor
    layers: Sequence[Sequence[torch.Tensor | None]]
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]

    def fit(self, sizes: DecoderSizes, head_dim: int) -> bool:
        """Whether the kernel can read tensors of these types, shapes and strides."""
        width, projected = sizes.heads * head_dim, (sizes.heads + 2 * sizes.key_heads) * head_dim
        hidden, mlp = sizes.hidden, sizes.intermediate
        shapes: list[tuple[int, ...]] = [(hidden,), (projected, hidden), (projected,), (head_dim,), (head_dim,)]
        shapes += [(hidden, width), (hidden,), (hidden,), (2 * mlp, hidden), (hidden, mlp)]
        expected: list[tuple[torch.Tensor, tuple[int, ...]]] = [
            (self.norm, (hidden,)),
            (self.embedding, (len(self.embedding), hidden)),
            (self.angles, (len(self.angles), head_dim)),
        ]
        for layer in self.layers:
            expected += [(weight, shape) for weight, shape in zip(layer, shapes, strict=True) if weight is not None]
        plain = all(tensor.shape == shape and tensor.is_contiguous() for tensor, shape in expected)
        caches = [*self.keys, *self.values]
        rows = all(cache.shape[1:] == (sizes.key_heads, head_dim) for cache in caches)
        together = rows and {cache.stride()[1:] for cache in caches} == {(head_dim, 1)}
        same = len({cache.stride(0) for cache in caches}) == 1
        tensors = [tensor for tensor, _ in expected] + caches
        return plain and together and same and all(map(is_plain, tensors))


class CpuDecoder:
    """Runs the layers of one model; see `DecoderTensors`."""

    def __init__(self, kernels: CpuKernels, sizes: DecoderSizes, epsilon: float, head_epsilon: float = 0.0) -> None:
        """Of a model with these sizes.

        Args:
            kernels: for its heads.
            sizes: of the model.
            epsilon: of its norms.
            head_epsilon: of the norms of queries and keys, where it has those.
        """
        self.sizes, self.head_dim = sizes, kernels.head_dim
        self._library = kernels.library
        self._epsilons = (ctypes.c_float * 2)(epsilon, head_epsilon)
        self._work = torch.empty(0)

    def forward(
        self,
        tensors: DecoderTensors,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        requests: Requests,
        scale: float,
    ) -> torch.Tensor | None:
        """Hidden states [tokens, hidden] after the last norm; writes keys and values of the tokens to the cache.

        None, with nothing written, where an id is not in the vocabulary or a position not in the table of angles.

        Args:
            tensors: of the model, which `fit`.
            ids: [tokens] int64, of all requests, one after the other.
            positions: [tokens] int64.
            slots: [tokens] int64, where the keys and values of each token go.
            requests: the tokens are the last keys of their requests.
            scale: of attention scores.
        """
        ids, positions, slots = (x.to(torch.int64).contiguous() for x in (ids, positions, slots))
        sizes, tokens = self.sizes, len(ids)
        numbers = (ctypes.c_int64 * 7)(
            sizes.hidden, sizes.heads, sizes.key_heads, sizes.intermediate, sizes.layers, len(tensors.embedding),
            len(tensors.angles),
        )  # fmt: skip
        pointers: list[torch.Tensor | None] = [tensors.embedding, tensors.angles, tensors.norm]
        for weights, keys, values in zip(tensors.layers, tensors.keys, tensors.values, strict=True):
            pointers += [*weights, keys, values]
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in pointers]
        room = self._library.decoder_room(numbers, tokens)
        if self._work.numel() < room:
            self._work = torch.empty(room)
        hidden = torch.empty(tokens, sizes.hidden)
        table, rows = requests.tensors[:2]
        shape = (len(rows), table.stride(0), *tensors.keys[0].stride()[:2], *tensors.values[0].stride()[:2])
        failed = self._library.decoder_forward(
            numbers,
            self._epsilons,
            (ctypes.c_void_p * len(addresses))(*addresses),
            *(x.data_ptr() for x in (ids, positions, slots)),
            tokens,
            hidden.data_ptr(),
            self._work.data_ptr(),
            *requests.addresses,
            (ctypes.c_int64 * 6)(*shape),
            scale,
        )
        return None if failed else hidden

    def copy_tokens(self, tensors: DecoderTensors, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copies keys and values of all layers from slots [tokens] int64 to slots [tokens] int64."""
        caches = [*tensors.keys, *tensors.values]
        addresses = (ctypes.c_void_p * len(caches))(*(cache.data_ptr() for cache in caches))
        sources, targets = sources.contiguous(), targets.contiguous()
        self._library.copy_tokens(
            addresses,
            len(caches),
            sources.data_ptr(),
            targets.data_ptr(),
            len(sources),
            caches[0].stride(0),
            self.sizes.key_heads * self.head_dim,
        )
