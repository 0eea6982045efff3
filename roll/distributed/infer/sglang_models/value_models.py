"""Reward models as SGLang runs them: a decoder and a head that gives one value for the last token.

SGLang's own classes differ from the models in Hugging Face's folders: those of Qwen give the head a bias, which stays
random where the folder has none; that of Llama has no bias; and all round the value to the precision of the model.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.models.llama_reward import LlamaForSequenceClassification
from sglang.srt.models.qwen2_classification import Qwen2ForSequenceClassification
from sglang.srt.models.qwen3_classification import Qwen3ForSequenceClassification


class ValueHead(torch.nn.Linear):
    """One value [N, 1] in fp32 of hidden states [N, hidden], as Megatron's `ValueHead` computes it.

    The weight is NaN until one is loaded, so that a folder without it gives no scores; the bias is 0.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1)
        torch.nn.init.constant_(self.weight, math.nan)
        torch.nn.init.zeros_(self.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden.float(), self.weight.float(), self.bias.float())


class LlamaValueModel(LlamaForSequenceClassification):  # type: ignore[misc]  # SGLang is not typed
    """A reward model of Llama."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self.score = ValueHead(config.hidden_size)


class Qwen2ValueModel(Qwen2ForSequenceClassification):  # type: ignore[misc]
    """A reward model of Qwen2."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self.score = ValueHead(config.hidden_size)


class Qwen3ValueModel(Qwen3ForSequenceClassification):  # type: ignore[misc]
    """A reward model of Qwen3."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self.score = ValueHead(config.hidden_size)


EntryClass = [LlamaValueModel, Qwen2ValueModel, Qwen3ValueModel]
