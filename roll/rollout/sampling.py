"""How a role samples."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from roll.base.errors import RunError
from roll.configs.arguments import GeneratingArguments
from roll.rollout.types import SamplingParams


def sampling_params(args: GeneratingArguments, path: str, tokenizer: PreTrainedTokenizerBase) -> SamplingParams:
    """The sampling parameters of a role; generation stops at the tokenizer's eos token and at `stop_strings`.

    Raises:
        RunError: max_new_tokens is not set, or a stop string is not one token.
    """
    if args.max_new_tokens is None:
        raise RunError(f"{path}.max_new_tokens: is not set")
    stops = [tokenizer.encode(text, add_special_tokens=False) for text in args.stop_strings]
    for text, tokens in zip(args.stop_strings, stops, strict=True):
        if len(tokens) != 1:
            raise RunError(
                f"{path}.stop_strings: {text!r} is {len(tokens)} tokens, and an engine stops at one token only; add it "
                "to the tokenizer and the embedding of the model, or leave it out and let the reward read up to it"
            )
    return SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        repetition_penalty=args.repetition_penalty,
        stop_token_ids=(tokenizer.eos_token_id, *(tokens[0] for tokens in stops)),
    )
