"""Lets SGLang's scheduler look for stop strings, although it has no tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StopDecoder:
    """In place of SGLang's tokenizer for a request with stop strings; its stop tokens are those of the request."""

    eos_token_id = None
    additional_stop_token_ids = None

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))


@cache
def stop_decoder(folder: str) -> StopDecoder:
    """Of the tokenizer in a folder; imported here, since an engine starts sooner without."""
    from roll.datasets.tokenizer import load_tokenizer

    return StopDecoder(load_tokenizer(folder))


def add_stop_strings(parameters: Any, stops: Sequence[str]) -> None:
    """Sets the stop strings of SGLang's normalized sampling parameters.

    SGLang decodes as many of the last tokens as the longest stop string has, and one more. By its own count, of the
    tokens that the string is encoded as, it would miss a string that was sampled as more tokens. A token has at least
    one byte.
    """
    parameters.stop_strs = list(stops)
    parameters.stop_str_max_len = max((len(stop.encode()) for stop in stops), default=0)


def decode_for_stop_strings() -> None:
    """Gives a decoder to each request with stop strings that this process, a scheduler, receives.

    The tokenizer is read when the first one comes: most runs have none.
    """
    from sglang.srt.managers.scheduler import Scheduler, get_serving

    original = Scheduler.init_req_max_new_tokens

    def init_req_max_new_tokens(self: Any, req: Any) -> None:
        if req.sampling_params.stop_strs and req.tokenizer is None:
            req.tokenizer = stop_decoder(get_serving().tokenizer_path)
        original(self, req)

    Scheduler.init_req_max_new_tokens = init_req_max_new_tokens
