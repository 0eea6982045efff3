"""The tokenizer of a HF model folder."""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from roll.configs.errors import RunError


def load_tokenizer(folder: str | None) -> PreTrainedTokenizerBase:
    """Reads the tokenizer beside a model.

    Raises:
        RunError: there is no folder, it has no tokenizer, or it names no end-of-sequence token.
    """
    if folder is None:
        raise RunError("pretrain: names no HF model folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise RunError(f"{folder}: holds no tokenizer that transformers can read: {error}") from error
    if tokenizer.eos_token_id is None:
        raise RunError(f"{folder}: its tokenizer names no eos_token; a response could never end")
    return tokenizer
