"""Creates the model of this recipe: a small Qwen2 with random weights and a tokenizer without merges.

    python examples/tiny_math/prepare.py --out output/tiny_math/base

The folder loads with transformers and SGLang like any other Hugging Face model.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from transformers import Qwen2Config, Qwen2Tokenizer

PAD, END, ANSWER = "<|pad|>", "<|end|>", "<|answer|>"
"""Ids 0, 1 and 2: padding, the end of an answer, the start of an answer."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}" + ANSWER + "{{ message['content'] }}" + END + "{% else %}"
    "{{ message['content'] }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}" + ANSWER + "{% endif %}"
)
"""The question unchanged, then one marker after which the answer starts: a small model need not learn a format."""


def make_tokenizer(words: tuple[str, ...] = (), chat_template: str = CHAT_TEMPLATE) -> Qwen2Tokenizer:
    """A `Qwen2Tokenizer` with one token per byte, so one per character of a problem: the id is the byte plus three.

    It is Qwen's own class because transformers loads any folder of a Qwen2 model with that one. Decoding the ids of any
    text returns the text.

    Args:
        words: texts that are one token each, after those of the bytes.
        chat_template: of conversations.
    """
    from transformers import Qwen2Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {PAD: 0, END: 1, ANSWER: 2}
    vocabulary |= {character: 3 + byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        pad_token=PAD,
        eos_token=END,
        unk_token=PAD,
        additional_special_tokens=[ANSWER],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    tokenizer.add_tokens(list(words))
    return tokenizer


def make_config(vocab_size: int, positions: int = 1024) -> Qwen2Config:
    """The architecture: a Qwen2 of 0.4 million weights, in fp32, with tied embeddings.

    `initializer_range` is twice the usual 0.02, which suits models ten times as wide: from 0.02 the number of warm-up
    steps to the same loss differs by half between seeds. From 0.06 on the model memorises the problems instead.
    """
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.04,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        dtype="float32",
        architectures=["Qwen2ForCausalLM"],
    )


def make_weights(config: Qwen2Config, seed: int) -> dict[str, Any]:
    """Random tensors under their Hugging Face names: normal with deviation `initializer_range`, norms one, biases zero.

    The output head is the embedding (tied), so it has no tensor of its own.
    """
    import torch

    hidden, inner = config.hidden_size, config.intermediate_size
    key_value = cast(int, config.num_key_value_heads) * hidden // config.num_attention_heads
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        shapes |= {
            f"model.layers.{layer}.{name}": shape
            for name, shape in {
                "input_layernorm.weight": (hidden,),
                "self_attn.q_proj.weight": (hidden, hidden),
                "self_attn.q_proj.bias": (hidden,),
                "self_attn.k_proj.weight": (key_value, hidden),
                "self_attn.k_proj.bias": (key_value,),
                "self_attn.v_proj.weight": (key_value, hidden),
                "self_attn.v_proj.bias": (key_value,),
                "self_attn.o_proj.weight": (hidden, hidden),
                "post_attention_layernorm.weight": (hidden,),
                "mlp.gate_proj.weight": (inner, hidden),
                "mlp.up_proj.weight": (inner, hidden),
                "mlp.down_proj.weight": (hidden, inner),
            }.items()
        }
    shapes["model.norm.weight"] = (hidden,)
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("bias"):
            return torch.zeros(shape)
        if len(shape) == 1:
            return torch.ones(shape)
        return torch.randn(shape, generator=generator) * config.initializer_range

    return {name: draw(name, shape) for name, shape in shapes.items()}


def prepare(
    folder: Path,
    seed: int = 42,
    words: tuple[str, ...] = (),
    chat_template: str = CHAT_TEMPLATE,
    positions: int = 1024,
) -> Path:
    """Writes model and tokenizer to `folder` and returns it; the same seed writes the same bytes.

    Args:
        folder: made when missing; files of an earlier call are overwritten.
        seed: of the random weights.
        words: see `make_tokenizer`.
        chat_template: of conversations.
        positions: tokens of the longest sequence.
    """
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    tokenizer = make_tokenizer(words, chat_template)
    config = make_config(len(tokenizer), positions)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file(make_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def main() -> None:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=42, help="seed of the random weights")
    arguments = parser.parse_args()
    print(f"wrote {prepare(arguments.out, arguments.seed)}")


if __name__ == "__main__":
    main()
