"""The tokenizer of a HF model folder."""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from roll.pipeline.errors import RunError


def load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """Reads the tokenizer beside a model.

    Raises:
        RunError: the folder has none, or it names no end-of-sequence token.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise RunError(f"{folder}: holds no tokenizer that transformers can read: {error}") from error
    if tokenizer.eos_token_id is None:
        raise RunError(f"{folder}: its tokenizer names no eos_token; a response could never end")
    return tokenizer
