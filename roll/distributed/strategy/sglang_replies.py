"""Between this project's requests and results and SGLang's: parameters, replies, and versions of tokens."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal

from roll.distributed.strategy.sglang_engine import EngineError
from roll.rollout.types import GenerateRequest, GenerateResult, SamplingParams

ALL_TOKENS = -1
"""SGLang's `top_k` for no truncation."""


def sampling_parameters(sampling: SamplingParams, seed: int | None) -> dict[str, Any]:
    """SGLang's sampling parameters."""
    return {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or ALL_TOKENS,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(sampling.stop_token_ids),
        "sampling_seed": seed,
    }


def to_result(request: GenerateRequest, reply: dict[str, Any] | None, error: str | None) -> GenerateResult:
    """SGLang's `reply` to `request`; without a reply, or when it was aborted, `error` says why.

    Raises:
        EngineError: ids, log-probs and version spans of the reply do not cover the same tokens.
    """
    if reply is None:
        return GenerateResult(request.request_id, [], [], [], "abort", error=error)
    meta = reply["meta_info"]
    ids = list(reply["output_ids"])
    rows = meta.get("output_token_logprobs") or []
    versions = token_versions(meta.get("weight_versions") or [], len(ids))
    if [row[1] for row in rows] != ids or len(versions) != len(ids):
        raise EngineError(
            f"request {request.request_id}: {len(ids)} tokens came with {len(rows)} log-probs and "
            f"{len(versions)} versions"
        )
    reason: Literal["stop", "length", "abort"] = meta["finish_reason"]["type"]
    if reason == "abort" and error is None:
        error = meta["finish_reason"].get("message") or "aborted by the engine"
    return GenerateResult(
        request_id=request.request_id,
        response_ids=ids,
        log_probs=[row[0] for row in rows],
        versions=versions,
        finish_reason="abort" if error else reason,
        cached_prompt_tokens=meta.get("cached_tokens", 0),
        error=error,
    )


def token_versions(spans: list[dict[str, Any]], tokens: int) -> list[int]:
    """The weight version of each of the first `tokens` tokens, from spans {version, start, end} in order."""
    versions = [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
    return versions[:tokens]


def completed(request: GenerateRequest, cut: GenerateResult, stop_token_ids: Collection[int]) -> GenerateResult:
    """A part that a pause cut off; where its last token was to be the last anyway, the end that it is.

    SGLang reports an abort before it looks whether the token drawn meanwhile ends the response.
    """
    if cut.finish_reason != "abort" or not cut.response_ids:
        return cut
    if cut.response_ids[-1] in stop_token_ids:
        return replace(cut, finish_reason="stop", error=None)
    if len(cut.response_ids) >= request.sampling.max_new_tokens:
        return replace(cut, finish_reason="length", error=None)
    return cut


def joined(first: GenerateResult, then: GenerateResult) -> GenerateResult:
    """One response that was drawn in two parts; it ended as the second did."""
    return GenerateResult(
        request_id=first.request_id,
        response_ids=[*first.response_ids, *then.response_ids],
        log_probs=[*first.log_probs, *then.log_probs],
        versions=[*first.versions, *then.versions],
        finish_reason=then.finish_reason,
        cached_prompt_tokens=first.cached_prompt_tokens,
        error=then.error,
    )
