"""Built-in chat templates: what they are, how a simple one is written, and the one that belongs to no family."""

from __future__ import annotations

from dataclasses import dataclass

NATIVE, NONE = "native", "none"
"""Values of `data_args.template` that name no template here: the tokenizer's own, and the text unchanged."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template that does not depend on the tokenizer's own.

    Attributes:
        jinja: the template, in the Jinja format of Hugging Face tokenizers.
        markers: its special tokens. A tokenizer that lacks one would encode it as plain text.
    """

    jinja: str
    markers: tuple[str, ...]


def turns(opening: str, closing: str) -> str:
    """A template whose turns are alike; ROLE in `opening` stands for the role of a message."""
    return (
        "{% for message in messages %}"
        + opening.replace("ROLE", "{{ message.role }}")
        + "{{ message.content }}"
        + closing
        + "{% endfor %}{% if add_generation_prompt %}"
        + opening.replace("ROLE", "assistant")
        + "{% endif %}"
    )


CHATML = ChatTemplate(turns("<|im_start|>ROLE\n", "<|im_end|>\n"), ("<|im_start|>", "<|im_end|>"))
