"""A client of Tinker that prints, as one line of JSON, what a server answers to requests beside those of recipes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import tinker
from tinker import types


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return str(error)
    return "no error"


def main(model: str) -> None:
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(base_model=model, rank=8).result()
    ids = client.get_tokenizer().encode("What is 17 + 23? It is 40.")
    weighted = types.Datum(
        types.ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:], "weights": [1.0] * len(ids[1:])}
    )
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt, params = types.ModelInput.from_ints(ids), types.SamplingParams(max_tokens=6, seed=7)
    first, again = (sampler.sample(prompt, 2, params).result().sequences for _ in range(2))
    whole = types.ModelInput.from_ints(ids + first[0].tokens)
    scored = sampler.compute_logprobs(whole).result()[len(ids) :]
    untouched = client.save_state("untouched").result().path

    whole_loss = client.forward_backward([weighted, weighted], "cross_entropy").result().metrics["loss:sum"]
    own = client.forward_backward_custom(
        [weighted], lambda data, rows: (sum((-row).sum() for row in rows), {})
    ).result()
    adam = types.AdamParams(learning_rate=1e-3, beta2=0.95, eps=1e-8)
    found = {
        "other_betas": message_of(lambda: client.optim_step(types.AdamParams(beta2=0.5)).result()),
        "step": client.optim_step(types.AdamParams(learning_rate=0.0, beta2=0.95, eps=1e-8)).result().metrics,
        "no_gradients": message_of(lambda: client.optim_step(adam).result()),
    }
    moments = client.save_state("moments").result().path  # the same weights, and moments of Adam
    newer = client.save_weights_and_get_sampling_client().result()
    found |= {
        "repeats": [each.tokens for each in first] == [each.tokens for each in again],
        "gap": max(abs(one - other) for one, other in zip(first[0].logprobs, scored, strict=True)),
        "loss_ratio": whole_loss / own.metrics["loss:sum"],
        "replaced_sampler": message_of(lambda: sampler.sample(prompt, 1, params).result()),
        "newer": len(newer.sample(prompt, 3, params).result().sequences),
        "loss": message_of(lambda: client.forward_backward([weighted], "stable_reinforce").result()),
        "base_model": message_of(lambda: service.create_lora_training_client(base_model="Qwen/Qwen3-8B").result()),
        "trained": message_of(lambda: service.create_lora_training_client(base_model=model).result()),
    }

    def loss_after_step(loaded: tinker.TrainingClient) -> float:
        loaded.forward_backward([weighted], "cross_entropy")
        loaded.optim_step(adam)
        return loaded.forward([weighted], "cross_entropy").result().metrics["loss:sum"]

    found["losses"] = [
        loss_after_step(service.create_training_client_from_state(moments).result()),
        loss_after_step(service.create_training_client_from_state_with_optimizer(untouched).result()),
        loss_after_step(service.create_training_client_from_state_with_optimizer(moments).result()),
    ]
    found["replaced_model"] = message_of(lambda: client.optim_step(adam).result())
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
