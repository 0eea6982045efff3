"""What is read of Tinker's requests, and what is refused by the name of its field."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from roll.base.errors import RunError
from roll.configs.arguments import TrainingArguments
from roll.serve.futures import Answer, Futures
from roll.serve.requests import AdamParams, SampleRequest
from roll.serve.wire import FLOAT32, WireError, message_class, read_train_request

TEXT = {"type": "encoded_text", "tokens": [1, 2, 3]}


def sample(chunks: list[Any] | None = None, sampling: dict[str, Any] | None = None, **fields: Any) -> SampleRequest:
    body = {"prompt": {"chunks": [TEXT] if chunks is None else chunks}, "sampling_params": sampling or {}, **fields}
    return SampleRequest.read(body, longest=10, vocabulary=5)


def test_a_sample_request_has_the_parameters_of_the_engine() -> None:
    request = sample([TEXT, {"type": "encoded_text", "tokens": [4]}], {"max_tokens": 3, "top_k": -1}, num_samples=2)
    assert (request.prompt, request.count, request.seed) == ([1, 2, 3, 4], 2, None)
    assert request.params == {"max_new_tokens": 3, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    assert sample(sampling={"max_tokens": 100}).params["max_new_tokens"] == 7
    assert sample(sampling={"stop": "\n\nUser:"}).params["stop"] == ["\n\nUser:"]
    assert sample(sampling={"stop": [2, 3]}).params["stop_token_ids"] == (2, 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chunks": [{"type": "image", "data": ""}]}, "prompt: has a chunk of type image"),
        ({"chunks": []}, "prompt: 0 tokens; give 1 to 9"),
        ({"chunks": [{"type": "encoded_text", "tokens": [5]}]}, "each below 5"),
        ({"topk_sample_logprobs": 3}, "topk_sample_logprobs: is not served"),
        ({"record_stability_info": True}, "train with a loss other than stable_reinforce"),
        ({"sampling": {"stop": []}}, "stop: an empty list"),
        ({"sampling": {"max_tokens": "3"}}, "max_tokens: '3' is no int"),
        ({"sampling": {"max_tokens": 0}}, "max_tokens: 0; give at least 1"),
        ({"num_samples": 0}, "num_samples: 0; give at least 1"),
        ({"sampling": {"temperature": -1.0}}, "give a temperature of at least 0"),
        ({"sampling": {"top_p": 0.0}}, "a top_p above 0 and up to 1"),
    ],
)
def test_a_sample_request_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(WireError, match=message):
        sample(**fields)


def test_adam_keeps_what_was_fixed_at_the_start() -> None:
    fixed = TrainingArguments(adam_beta2=0.95)
    given = {
        "learning_rate": 1e-3,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "grad_clip_norm": 0.5,
    }
    assert AdamParams.read({"adam_params": given}, fixed) == AdamParams(1e-3, 0.5)
    with pytest.raises(WireError, match=r"eps: 1e-12, .* actor_train.training_args.adam_epsilon=1e-12"):
        AdamParams.read({"adam_params": given | {"eps": 1e-12}}, fixed)
    for name, value in (("learning_rate", float("nan")), ("learning_rate", -1.0), ("grad_clip_norm", float("inf"))):
        with pytest.raises(WireError, match="learning_rate and grad_clip_norm; give finite numbers of at least 0"):
            AdamParams.read({"adam_params": given | {name: value}}, fixed)
    with pytest.raises(WireError, match="adam_params: is missing"):
        AdamParams.read({"optimizer_params": {"type": "dimuon"}}, fixed)


def train_body(chunk: dict[str, Any] | None = None, **tensor: Any) -> bytes:
    values = {"dense": np.ones(2, np.float32).tobytes(), "dtype": FLOAT32, "shape": [2], **tensor}
    text = {"encoded_text": {"tokens": np.array([1, 2], np.int32).tobytes()}}
    datum = {"model_input": [text if chunk is None else chunk], "loss_fn_inputs": [{"key": "weights", "value": values}]}
    fields = {"model_id": "m", "seq_id": 3, "loss_fn": "ppo", "data": [datum]}
    settings = {"loss_fn_config": [{"key": "beta", "value": 0.1}]}
    written: bytes = message_class("ForwardBackwardRequest")(**fields, **settings).SerializeToString()
    return written


def test_a_training_request_is_read() -> None:
    request = read_train_request(train_body())
    assert (request.model_id, request.seq_id, request.loss, request.settings) == ("m", 3, "ppo", {"beta": 0.1})
    assert request.data[0].tokens == [1, 2] and request.data[0].inputs["weights"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (train_body({}), r"data\[0\].model_input: has an image or audio"),
        (train_body(shape=[1, 2]), r"data\[0\].weights: has several values per token"),
        (train_body(dtype=4), r"data\[0\].weights: has dtype 4"),
        (b"\x0f no message", "body: is no ForwardBackwardRequest"),
    ],
)
def test_a_training_request_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message):
        read_train_request(body)


def test_a_request_that_is_sent_again_joins_the_first() -> None:
    begun = []

    async def work() -> Answer:
        begun.append(1)
        await asyncio.sleep(0)
        return {"done": True}

    async def fails() -> Answer:
        raise RunError("optim_step: there are no gradients")

    async def play() -> None:
        futures = Futures()
        futures.start("a", work)
        futures.start("a", work)
        assert [await futures.fetch("a", 10), await futures.fetch("a", 10)] == [{"done": True}] * 2
        futures.start("b", fails)
        assert await futures.fetch("b", 10) == {"error": "optim_step: there are no gradients", "category": "server"}
        with pytest.raises(WireError, match="request_id: c is unknown"):
            await futures.fetch("c", 10)
        futures.start("d", asyncio.Event().wait)  # type: ignore[arg-type]
        assert await futures.fetch("d", 0) is None
        futures.close()

    asyncio.run(play())
    assert len(begun) == 1
