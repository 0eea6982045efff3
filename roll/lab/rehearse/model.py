"""The model of a rehearsal: small and random, of the recipe's architecture, with its tokenizer or a stand-in."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.base.errors import RunError
from roll.datasets.tokenizer import load_tokenizer
from roll.hub.names import CONFIG_NAME, has_tokenizer, local_model
from roll.models.families.family import ModelFamily
from roll.models.families.hf_config import read_model_config, rotary_values
from roll.models.families.registry import chat_templates, families, family_named, family_of
from roll.models.tiny import write_tiny_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SIZE = re.compile(r"(\d+(?:\.\d+)?)b(?![a-z0-9])", re.I)

LARGEST_TIED = 4.0
"""Billions of weights up to which the dense families share input and output embeddings."""

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.05,
}
"""Divides by 1, 2 and 4 tensor-parallel ranks and by 2 pipeline stages."""

POSITIONS = 32768
"""`max_position_embeddings` where the recipe's model does not give more."""


@dataclass(frozen=True)
class ModelSource:
    """What is known about a model of the recipe.

    Attributes:
        settings: of its config.json; empty if that is not on this machine.
        basis: how the architecture is known.
    """

    name: str
    family: ModelFamily
    settings: dict[str, Any]
    basis: str


def recipe_model(name: str) -> ModelSource:
    """The architecture of a model, from its config.json if that is on this machine, else from its name.

    Raises:
        UnsupportedModel: its config.json is not that of a supported model.
    """
    file, label = local_model(name) / CONFIG_NAME, Path(name).name
    if file.is_file():
        raw = read_model_config(file, value_head=True)
        return ModelSource(name, family_of(raw["architectures"][0]), raw, "its config.json")
    family = next((each for each in reversed(families()) if each.rehearsal.names.search(label)), None)
    if family is None:
        return ModelSource(name, family_named("qwen2"), {}, "an assumption, as its name does not tell")
    size = SIZE.search(label)
    tied = size is not None and float(size[1]) <= LARGEST_TIED
    return ModelSource(name, family, {"tie_word_embeddings": tied}, "its name")


def find_tokenizer(source: ModelSource, stop_strings: Sequence[str]) -> tuple[PreTrainedTokenizerBase, str]:
    """The tokenizer of the recipe's model if it is on this machine, else a stand-in; and the reason for a stand-in.

    Each of `stop_strings` is one token of the stand-in.
    """
    folder = local_model(source.name)
    try:
        if has_tokenizer(folder):
            return load_tokenizer(source.name), ""
        why = f"{source.name} {'has no tokenizer' if folder.is_dir() else 'is not on this machine'}"
    except RunError as error:
        why = str(error)
    return stand_in_tokenizer(source.family, stop_strings), why


def stand_in_tokenizer(family: ModelFamily, words: Sequence[str] = ()) -> PreTrainedTokenizerBase:
    """A tokenizer with one token per byte, the markers of every built-in chat template, and these words.

    Its chat template is the built-in one of the family.
    """
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    end = family.rehearsal.end_of_turn
    markers = {marker for template in chat_templates().values() for marker in template.markers} - {end}
    vocabulary = {token: number for number, token in enumerate([end, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    options: dict[str, Any] = {
        "pad_token": end,
        "eos_token": end,
        "additional_special_tokens": sorted(markers),
        "chat_template": chat_templates()[family.rehearsal.template].jinja,
        "clean_up_tokenization_spaces": False,
        "model_max_length": POSITIONS,
    }
    if family.rehearsal.tokenizer is not None:
        tokenizer_class = getattr(transformers, family.rehearsal.tokenizer)
        tokenizer: PreTrainedTokenizerBase = tokenizer_class(vocab=vocabulary, merges=[], unk_token=end, **options)
    else:
        core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, **options)
    tokenizer.add_tokens([word for word in dict.fromkeys(words) if word not in tokenizer.get_vocab()])
    return tokenizer


def write_model(source: ModelSource, tokenizer: PreTrainedTokenizerBase, folder: Path, seed: int) -> Path:
    """Writes a random model of the architecture with this tokenizer, and returns the folder."""
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()  # a head without weights gets random ones, as it should
    known = source.settings
    kept = ("tie_word_embeddings", "rms_norm_eps", "norm_topk_prob")
    shape = SHAPE | {key: known[key] for key in kept if known.get(key) is not None}
    shape["max_position_embeddings"] = max(POSITIONS, known.get("max_position_embeddings") or 0)
    heads = known.get("num_attention_heads")
    if heads is not None and known.get("num_key_value_heads", heads) == heads:
        shape["num_key_value_heads"] = SHAPE["num_attention_heads"]
    if (rotary := rotary_values(known)) and not source.family.traits.local_layers:
        kind = rotary.pop("rope_type", None) or rotary.pop("type", None) or "default"
        shape["rope_parameters"] = {"rope_theta": 10000.0, **rotary, "rope_type": kind}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    write_tiny_model(folder, source.family.name, seed, **shape, **ids, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    digits = [token for token in map(tokenizer.get_vocab().get, "0123456789") if token is not None]
    _prefer_tokens(folder, [tokenizer.eos_token_id, *digits])
    return folder


def add_score_head(folder: Path) -> None:
    """Makes a language model a reward model with a random head: a `...ForSequenceClassification` with one output."""
    import torch
    from transformers import AutoModelForSequenceClassification

    labels = {"id2label": {0: "score"}, "label2id": {"score": 0}}
    model = AutoModelForSequenceClassification.from_pretrained(folder, tie_word_embeddings=False, **labels)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(folder)


def _prefer_tokens(folder: Path, preferred: Sequence[int]) -> None:
    """Makes about half of what a random model writes these tokens.

    With digits among them, some answers to stand-in problems are right by chance, so the samples of a group differ in
    their scores and the loss has a gradient. All embeddings get a common part, five times as long as their random one,
    which reaches the last hidden state; the output rows of the tokens get the mean of that state, in the size that
    makes them as likely as all others together.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    vocabulary, hidden = model.get_input_embeddings().weight.shape
    ids = torch.randint(vocabulary, (8, 64), generator=torch.Generator().manual_seed(0))
    odds = math.log(max(vocabulary, 2 * len(preferred)) / len(preferred))
    with torch.no_grad():
        model.get_input_embeddings().weight += 2.0 * hidden**-0.5
        mean = model.model(input_ids=ids).last_hidden_state.mean(dim=(0, 1))
        model.get_output_embeddings().weight[list(preferred)] += odds / float(mean @ mean) * mean
    model.save_pretrained(folder)
