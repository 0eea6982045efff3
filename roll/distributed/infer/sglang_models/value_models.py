"""Reward models as SGLang runs them: a decoder and a head that gives one value for the last token.

SGLang's own classes differ from the models in Hugging Face's folders: those of Qwen give the head a bias, which stays
random where the folder has none; that of Llama has no bias; and all round the value to the precision of the model.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from roll.base.custom_modules import named_object
from roll.models.families.family import ModelFamily
from roll.models.families.registry import families


class ScoreHead(torch.nn.Linear):
    """One value [N, 1] in fp32 of hidden states [N, hidden], as Megatron's `ValueHead` computes it.

    The weight is NaN until one is loaded, so that a folder without it gives no scores; the bias is 0.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1)
        torch.nn.init.constant_(self.weight, math.nan)
        torch.nn.init.zeros_(self.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden.float(), self.weight.float(), self.bias.float())


def scorer_class(family: ModelFamily) -> type:
    """SGLang's sequence classifier of a family, with this head."""
    base = named_object(family.sglang.scorer or "")

    def __init__(self: Any, config: Any, *args: Any, **options: Any) -> None:
        base.__init__(self, config, *args, **options)
        self.score = ScoreHead(config.hidden_size)

    return type(family.scorer_name, (base,), {"__init__": __init__, "__module__": __name__})


EntryClass = [scorer_class(family) for family in families() if family.sglang.scorer]
