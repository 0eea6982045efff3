"""The JSON of Tinker's requests, checked: what is asked and cannot be done is an error that names what can."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from roll.serve.wire import WireError

if TYPE_CHECKING:
    from roll.configs.arguments import TrainingArguments

Body = Mapping[str, Any]
T = TypeVar("T")

NEUTRAL = {
    "topk_prompt_logprobs": 0,
    "topk_sample_logprobs": 0,
    "prompt_alt_tokens_k": 0,
    "target_prompt_logprobs": None,
    "prompt_logprobs_last_n": None,
}
"""Fields of a sample request that are not served, and the value that does not ask for anything."""

ADAM_KEYS = {"beta1": "adam_beta1", "beta2": "adam_beta2", "eps": "adam_epsilon", "weight_decay": "weight_decay"}
"""Field of Adam -> key of `actor_train.training_args`, which is fixed when the trainer starts."""


def required_field(body: Body, name: str, kind: type[T]) -> T:
    """A field of that type.

    Raises:
        WireError: it is missing or has another type.
    """
    value = optional_field(body, name, kind)
    if value is None:
        raise WireError(f"{name}: is missing")
    return value


def optional_field(body: Body, name: str, kind: type[T]) -> T | None:
    """A field of that type, or None where it is missing.

    Raises:
        WireError: it has another type.
    """
    value = body.get(name)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise WireError(f"{name}: {value!r} is no {kind.__name__}")
    return value


@dataclass(frozen=True)
class AdamParams:
    """An optimizer step.

    Attributes:
        grad_clip_norm: largest norm of the gradient; 0 is off.
    """

    learning_rate: float
    grad_clip_norm: float

    @classmethod
    def read(cls, body: Body, fixed: TrainingArguments) -> AdamParams:
        """The parameters of a request.

        Raises:
            WireError: the optimizer is not Adam, or differs from the `fixed` one in a decay or offset.
        """
        given = required_field(body, "adam_params", dict)
        for name, key in ADAM_KEYS.items():
            asked, own = float(given.get(name, getattr(fixed, key))), getattr(fixed, key)
            if asked != own:
                raise WireError(
                    f"adam_params.{name}: {asked:g}, and this server started with {own:g}; "
                    f"start it with actor_train.training_args.{key}={asked:g}"
                )
        found = float(given["learning_rate"]), float(given.get("grad_clip_norm", 0.0))
        if not all(math.isfinite(value) and value >= 0 for value in found):
            raise WireError("adam_params: learning_rate and grad_clip_norm; give finite numbers of at least 0")
        return cls(*found)


@dataclass(frozen=True)
class SampleRequest:
    """Samples of one prompt.

    Attributes:
        params: of `OpenRun.sample`.
        prompt_log_probs: whether those of the prompt are asked for.
    """

    prompt: list[int]
    count: int
    seed: int | None
    params: Mapping[str, Any]
    prompt_log_probs: bool

    @classmethod
    def read(cls, body: Body, longest: int, vocabulary: int) -> SampleRequest:
        """A request whose prompt has less than `longest` tokens, each below `vocabulary`.

        Raises:
            WireError: it is malformed, or asks for what is not served.
        """
        for name, neutral in NEUTRAL.items():
            if body.get(name, neutral) != neutral:
                raise WireError(f"{name}: is not served; leave it out")
        if body.get("record_stability_info"):
            raise WireError("record_stability_info: is not served; train with a loss other than stable_reinforce")
        prompt = _prompt(required_field(body, "prompt", dict))
        room = longest - len(prompt)
        if not prompt or room < 1 or not all(isinstance(each, int) and 0 <= each < vocabulary for each in prompt):
            raise WireError(
                f"prompt: {len(prompt)} tokens; give 1 to {longest - 1} (sequence_length), each below {vocabulary}"
            )
        sampling = required_field(body, "sampling_params", dict)
        params = {
            "max_new_tokens": min(optional_field(sampling, "max_tokens", int) or room, room),
            "temperature": float(sampling.get("temperature", 1.0)),
            "top_p": float(sampling.get("top_p", 1.0)),
            "top_k": max(optional_field(sampling, "top_k", int) or 0, 0),
            **_stop(sampling.get("stop")),
        }
        count = 1 if (asked := optional_field(body, "num_samples", int)) is None else asked
        least = {"num_samples": count, "max_tokens": 1 if (most := sampling.get("max_tokens")) is None else most}
        for name, value in least.items():
            if value < 1:
                raise WireError(f"{name}: {value}; give at least 1")
        if not (params["temperature"] >= 0 and 0 < params["top_p"] <= 1):
            raise WireError("sampling_params: give a temperature of at least 0, and a top_p above 0 and up to 1")
        return cls(prompt, count, optional_field(sampling, "seed", int), params, bool(body.get("prompt_logprobs")))


def _prompt(prompt: Body) -> list[int]:
    tokens: list[int] = []
    for chunk in required_field(prompt, "chunks", list):
        if chunk.get("type") != "encoded_text":
            raise WireError(f"prompt: has a chunk of type {chunk.get('type')}; only encoded_text is served")
        tokens += chunk["tokens"]
    return tokens


def _stop(stop: Any) -> dict[str, Any]:
    """Texts or ids that end a sample, beside the end token of the tokenizer."""
    if stop is None:
        return {}
    stops = [stop] if isinstance(stop, str) else list(stop)
    if not stops:
        raise WireError("stop: an empty list would sample beyond the end token; leave stop out")
    if all(isinstance(each, str) for each in stops):
        return {"stop": stops}
    return {"stop_token_ids": tuple(map(int, stops))}
