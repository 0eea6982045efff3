"""A tokenizer whose texts have many encodings, and a scripted policy, for tests of sessions."""

from __future__ import annotations

import itertools
import json
from functools import partial

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from roll.datasets.templates import ConversationEncoder
from roll.datasets.tokenizer import response_text
from roll.gateway.session import Dialogue
from roll.gateway.tool_parsers import hermes, thoughts
from roll.rollout.agents.sessions import SessionSpec
from roll.rollout.types import GenerateResult, SamplingParams

END = "<|im_end|>"
MERGES = [("a", "b"), ("ab", "c"), ("o", "l"), ("t", "ol"), ("Ġ", "a"), ("i", "n"), ("4", "2")]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token, and some sequences are one too: sampled bytes decode to texts that encode differently."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate([*symbols, *("".join(pair) for pair in MERGES)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token="<pad>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    return fast


def dialogue(tokenizer: PreTrainedTokenizerFast, template: str = "chatml", **options) -> Dialogue:
    decode = partial(response_text, tokenizer, stop_token_ids=frozenset({tokenizer.eos_token_id}))
    options = {"parse_tools": hermes, "parse_thoughts": thoughts} | options
    return Dialogue(ConversationEncoder(tokenizer, template), decode, **options)


def spec(tokenizer: PreTrainedTokenizerFast, length: int = 100_000, **options) -> SessionSpec:
    sampling = SamplingParams(max_new_tokens=10_000, stop_token_ids=(tokenizer.eos_token_id,))
    return SessionSpec("train-0-0", 7, 3, sampling, length, **options)


def call_text(name: str, arguments: dict) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class ScriptedPolicy:
    """Answers texts byte by byte, each token with a log-prob that no other has; remembers prompts and results."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer, self._numbers = tokenizer, itertools.count(1)
        self.given: list[tuple[list[int], GenerateResult]] = []

    def result(self, request, text: str, cut: bool = False, version: int = 3) -> GenerateResult:
        ids = [self._tokenizer.convert_tokens_to_ids(symbol) for symbol in byte_symbols(self._tokenizer, text)]
        ids = ids[: request.sampling.max_new_tokens] if cut else [*ids, self._tokenizer.eos_token_id]
        log_probs = [-next(self._numbers) / 2**20 for _ in ids]
        result = GenerateResult(request.request_id, ids, log_probs, [version] * len(ids), "length" if cut else "stop")
        self.given.append((list(request.prompt_ids), result))
        return result


def byte_symbols(tokenizer: PreTrainedTokenizerFast, text: str) -> list[str]:
    return [symbol for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text) for symbol in piece]
