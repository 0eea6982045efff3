"""Stop strings: where a response ends, in tokens and in text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def divide_stops(tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The tokens among stop strings, which end a response as tokens, and the others, which are searched in its text."""
    encoded = {stop: tokenizer.encode(stop, add_special_tokens=False) for stop in stops}
    return (
        tuple(ids[0] for ids in encoded.values() if len(ids) == 1),
        tuple(stop for stop, ids in encoded.items() if len(ids) != 1),
    )


def tokens_until_stop(ids: Sequence[int], stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> int | None:
    """Tokens up to the one in which a stop string ends first, that one included; None if the text has none.

    A sampled stop string may be spelled with other tokens than those it is encoded as, and its last token may go on
    after it, so it is looked for in the text.
    """

    def stopped(count: int) -> bool:
        text = decode(ids[:count])
        return any(stop in text for stop in stops)

    if not stopped(len(ids)):
        return None
    if not stopped(len(ids) - 1):
        return len(ids)
    return bisect_left(range(len(ids)), True, key=stopped)


def text_until_stop(text: str, stops: Sequence[str], keep: bool = True, after: int = 0) -> str:
    """The text up to the stop string that ends first, with it unless `keep` is false; all of it if it has none.

    Only what ends behind the first `after` characters counts.
    """
    starts = {stop: text.find(stop, max(0, after - len(stop) + 1)) for stop in stops}
    found = [(start + len(stop), start) for stop, start in starts.items() if start >= 0]
    end, start = min(found, default=(len(text), len(text)))
    return text[: end if keep else start]
