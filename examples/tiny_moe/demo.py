"""A small mixture of experts learns arithmetic: supervised, then by reinforcement learning at ratio 1.

    python -m examples.tiny_moe.demo --out output/tiny_moe

The stages and problems are those of `tiny_math`. Each of two training ranks has two of the four experts of a layer.
With seed 4127, 200 steps raised accuracy from 0.57 to 0.98, and 140 to 0.87; the dense model had 0.98 after 140.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from examples import stages

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HERE = Path(__file__).parent


def demo(out: Path, seed: int, overrides: list[str]) -> dict[str, float]:
    """Runs every stage below `out`, with `overrides` for the reinforcement learning run, and returns the summary."""
    from examples.tiny_math.demo import learn

    stages.heading("[bold]A small mixture of experts learns arithmetic")
    return learn(HERE, prepare, out, seed, overrides)


def prepare(folder: Path, seed: int) -> Path:
    """Writes a random model and the tokenizer of `tiny_math` to `folder`, and returns it."""
    import torch
    from transformers import Qwen3MoeForCausalLM

    from examples.tiny_math.prepare import make_tokenizer

    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    Qwen3MoeForCausalLM(make_config(len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_config(vocabulary: int) -> PretrainedConfig:
    """The architecture: a Qwen3 with four experts in each of two layers, of which two compute a token."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        moe_intermediate_size=192,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # type: ignore[call-arg]  # the class takes any key
        max_position_embeddings=1024,
        initializer_range=0.04,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        dtype="float32",
    )


if __name__ == "__main__":
    stages.main(__doc__ or "", "output/tiny_moe", "validation accuracy ... on problems not trained on", demo)
