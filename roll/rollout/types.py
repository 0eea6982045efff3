"""What travels between the rollout side and the engines: token ids in, token ids and log-probs out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class SamplingParams:
    """How one response is drawn; the engine's full-softmax log-probs are at `temperature`."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class GenerateRequest:
    """One response to draw for the exact ids of one prompt."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int | None = None


@dataclass(frozen=True)
class GenerateResult:
    """One response: ids as sampled (the stop token included), and for each its log-prob and weight version.

    `finish_reason` is why it ended: a stop token, the length limit, or an abort (then it is not a sample).
    """

    request_id: str
    response_ids: list[int]
    log_probs: list[float]
    versions: list[int]
    finish_reason: Literal["stop", "length", "abort"]
    cached_prompt_tokens: int = 0
    error: str | None = field(default=None)
