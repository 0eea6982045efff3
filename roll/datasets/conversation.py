"""A conversation as token ids that only ever grow: what was said is never rendered or tokenised again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from roll.datasets.prompts import Message, Question
from roll.datasets.records import DatasetError
from roll.datasets.templates import QuestionEncoder

STAND_IN = "stand-in"
"""Takes the assistant's place while the text around it is found; it never becomes a token."""


_BEFORE: tuple[Message, ...] = ({"role": "user", "content": "first"}, {"role": "assistant", "content": STAND_IN})
"""A conversation up to the end of a response, around which what follows is rendered."""


class ConversationEncoder:
    """Applies one chat template to the new messages of a conversation only.

    A template closes a turn of the assistant with some text (`closing`) and opens the next with the user's message.
    Both are found once by rendering around a stand-in, so no response is ever decoded and encoded again: the ids of
    turn n, as the engine sampled them, are a prefix of those of turn n + 1.
    """

    def __init__(self, tokenizer: Any, template: str) -> None:
        """Checks that the template has a place for the assistant.

        Raises:
            DatasetError: as QuestionEncoder, or the template changes what the assistant said.
        """
        self._encoder = QuestionEncoder(tokenizer, template)
        self._end = tokenizer.eos_token
        self._end_id = tokenizer.eos_token_id
        self._closed = self._encoder.render(Question(messages=_BEFORE), open_answer=False)
        self._closing = self._after_stand_in()

    def start(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the first messages, ready for the assistant."""
        return self._encoder.encode([Question(messages=tuple(messages))])[0]

    def follow(self, last: int, messages: Sequence[Message]) -> list[int]:
        """Ids that come after a response: what closes it, the messages, and what opens the next response.

        Args:
            last: the response's last token. Where it is the end token, the template's own end is left out.
            messages: what is said next, by `user` or `tool`.
        """
        closing = self._closing
        if last == self._end_id and closing.startswith(self._end):
            closing = closing.removeprefix(self._end)
        opened, closed = self._encoder.render(Question(messages=(*_BEFORE, *messages))), self._closed
        if not opened.startswith(closed):
            became = opened[: len(closed)][-40:]
            raise DatasetError(
                "data_args.template: the template renders earlier turns differently once later ones follow "
                f"({closed[-40:]!r} became {became!r}), so turns cannot be added one by one; use a built-in one"
            )
        return self._encoder.encode_text([closing + opened[len(closed) :]])[0]

    def _after_stand_in(self) -> str:
        _, found, closing = self._closed.rpartition(STAND_IN)
        if not found:
            raise DatasetError("data_args.template: the template leaves out or changes what the assistant said")
        return closing
