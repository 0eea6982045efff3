"""The protobuf messages of Tinker's API: read from requests, written in answers.

The names and numbers of fields are those of its SDK (package `tinker` 0.38).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

PROTOBUF = "application/x-protobuf"

MESSAGES = """
Chunk: encoded_text 1 EncodedTextChunk
EncodedTextChunk: tokens 1 bytes
SparseCsr: values 1 bytes
Tensor: dense 1 bytes, sparse_csr 2 SparseCsr, dtype 3 int32, shape 4 int64*
NamedTensor: key 1 string, value 2 Tensor
Datum: model_input 1 Chunk*, loss_fn_inputs 2 NamedTensor*
Number: key 1 string, value 2 double
LossConfigValue: number 1 double, text 2 string
Setting: key 1 string, value 2 LossConfigValue
ForwardBackwardRequest: model_id 1 string, seq_id 2 int32, data 3 Datum*, loss_fn 4 string, loss_fn_config 5 Number*, \
forward_only 6 bool, loss_fn_config_v2 7 Setting*
BatchedTensor: data 1 bytes, offsets 2 bytes, dtype 3 int32, trailing_shape 4 int64*
NamedBatch: key 1 string, value 2 BatchedTensor
ArrayRecord: type_tag 1 string, fields 2 NamedBatch*, num_datums 3 int64
ForwardBackwardOutput: loss_fn_output_type 1 string, loss_fn_outputs 2 ArrayRecord*, metrics 3 Number*
SampledSequence: stop_reason 1 int32, tokens 2 bytes, logprobs 3 bytes
SampleResponse: sequences 1 SampledSequence*, prompt_logprobs 2 bytes, prompt_cache_hit_tokens 4 int32
"""
"""A message per line: its fields with their numbers and types; those of a list end with *. Maps are lists of pairs."""

FLOAT32, INT64 = 1, 2
NUMPY_TYPES = {FLOAT32: np.float32, INT64: np.int64}
STOP_REASONS = {"stop": 0, "length": 1}


class WireError(ValueError):
    """A request that is no message of Tinker's API, or that has what is not served."""


@dataclass(frozen=True)
class Datum:
    """A sequence of n tokens with the tensors of its loss.

    Attributes:
        tokens: of the input, [n].
        inputs: name -> values; one-dimensional.
    """

    tokens: list[int]
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class TrainRequest:
    """A `forward_backward`, or a `forward` where there is no gradient."""

    model_id: str
    seq_id: int
    data: Sequence[Datum]
    loss: str
    settings: Mapping[str, float | str]
    forward_only: bool


def read_train_request(body: bytes) -> TrainRequest:
    """The body of a `forward_backward`.

    Raises:
        WireError: it is malformed, or has images, audio or tensors that are not dense.
    """
    message = message_class("ForwardBackwardRequest")()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise WireError(f"body: is no ForwardBackwardRequest: {error}") from None
    settings: dict[str, float | str] = {
        each.key: each.value.text or each.value.number for each in message.loss_fn_config_v2
    }
    settings |= {each.key: each.value for each in message.loss_fn_config}
    data = [_datum(each, f"data[{number}]") for number, each in enumerate(message.data)]
    return TrainRequest(message.model_id, message.seq_id, data, message.loss_fn, settings, message.forward_only)


def train_answer(log_probs: Sequence[Sequence[float]], metrics: Mapping[str, float]) -> bytes:
    """The answer to a `forward_backward`: the log-probs of the targets of each datum, and metrics."""
    rows = [np.asarray(row, np.float32) for row in log_probs]
    offsets = np.cumsum([0, *(row.nbytes for row in rows)], dtype=np.int64)
    batch = {"data": b"".join(row.tobytes() for row in rows), "offsets": offsets.tobytes(), "dtype": FLOAT32}
    record = {"fields": [{"key": "logprobs", "value": batch}], "num_datums": len(rows)}
    return _written(
        "ForwardBackwardOutput",
        loss_fn_output_type="ArrayRecord",
        loss_fn_outputs=[record],
        metrics=[{"key": name, "value": value} for name, value in metrics.items()],
    )


def sample_answer(
    sequences: Sequence[tuple[Sequence[int], Sequence[float], str]],
    prompt_log_probs: Sequence[float] | None = None,
) -> bytes:
    """The answer to a sample request.

    Args:
        sequences: ids, their log-probs, and `stop` or `length`.
        prompt_log_probs: of the tokens of the prompt; NaN for the first.
    """
    written = [
        {
            "tokens": np.asarray(ids, np.int32).tobytes(),
            "logprobs": np.asarray(log_probs, np.float32).tobytes(),
            "stop_reason": STOP_REASONS[reason],
        }
        for ids, log_probs, reason in sequences
    ]
    prompt = b"" if prompt_log_probs is None else np.asarray(prompt_log_probs, np.float32).tobytes()
    return _written("SampleResponse", sequences=written, prompt_logprobs=prompt, prompt_cache_hit_tokens=0)


def _datum(message: Any, path: str) -> Datum:
    tokens: list[int] = []
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise WireError(f"{path}.model_input: has an image or audio; only text is served")
        tokens += np.frombuffer(chunk.encoded_text.tokens, np.int32).tolist()
    return Datum(tokens, {each.key: _tensor(each.value, f"{path}.{each.key}") for each in message.loss_fn_inputs})


def _tensor(message: Any, path: str) -> np.ndarray:
    if message.HasField("sparse_csr") or len(message.shape) > 1:
        raise WireError(f"{path}: has several values per token; one per token is served")
    if message.dtype not in NUMPY_TYPES:
        raise WireError(f"{path}: has dtype {message.dtype}; float32 and int64 are served")
    return np.frombuffer(message.dense, NUMPY_TYPES[message.dtype])


@cache
def message_class(name: str) -> Any:
    """The class of a message."""
    file = descriptor_pb2.FileDescriptorProto(name="tinker.proto", package="tinker", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    for line in MESSAGES.strip().splitlines():
        title, _, fields = line.partition(": ")
        message = file.message_type.add(name=title)
        for field in fields.split(", "):
            key, number, kind = field.split()
            label = kinds.LABEL_REPEATED if kind.endswith("*") else kinds.LABEL_OPTIONAL
            added = message.field.add(name=key, number=int(number), label=label)
            kind = kind.rstrip("*")
            added.type = kinds.Type.Value(f"TYPE_{kind.upper() if kind.islower() or kind[-1].isdigit() else 'MESSAGE'}")
            if added.type == kinds.TYPE_MESSAGE:
                added.type_name = f".tinker.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"tinker.{name}"))


def _written(name: str, **fields: Any) -> bytes:
    written: bytes = message_class(name)(**fields).SerializeToString()
    return written
