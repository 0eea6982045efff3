"""Token ids as text, one piece for each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from roll.base.errors import RunError
from roll.hub.names import local_model

Pieces = Callable[[Sequence[int]], list[str]]
"""f(token ids) -> the text of each; a character of several tokens belongs to the first of them."""


def token_numbers(ids: Sequence[int]) -> list[str]:
    return [f"{token} " for token in ids]


def model_pieces(model: str | None) -> Pieces:
    """The texts of tokens by the tokenizer of a model.

    Raises:
        RunError: it cannot be read.
    """
    file = local_model(model or "") / "tokenizer.json"
    if model is None or not file.is_file():
        from roll.datasets.tokenizer import load_tokenizer  # imports transformers, which takes seconds

        slow = load_tokenizer(model)
        return _pieces_of(lambda ids: str(slow.decode(list(ids), clean_up_tokenization_spaces=False)))
    from tokenizers import Tokenizer

    try:
        fast = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises Exception itself
        raise RunError(f"{file}: {error}") from None
    return _pieces_of(lambda ids: str(fast.decode(list(ids), skip_special_tokens=False)))


def _pieces_of(decode: Callable[[Sequence[int]], str]) -> Pieces:
    def pieces(ids: Sequence[int]) -> list[str]:
        found: list[str] = []
        before: list[int] = []
        pending: list[int] = []
        for token in ids:
            pending.append(token)
            piece = decode([*before, *pending])[len(decode(before)) :] if before else decode(pending)
            if piece.endswith("\ufffd") and len(pending) < 4:  # a part of a character
                continue
            found += [piece, *[""] * (len(pending) - 1)]
            before, pending = [token], []
        return found + [decode([token]) for token in pending]

    return pieces
