"""Real text for test_real_weights.py, and how transformers and every rank of a layout score it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from roll.datasets.batch import Batch
from tests.integration.rank_pool import RankContext

PROSE = """The harbour was quiet before the first boats came in. A woman in a grey coat walked along the wall, counted
the ropes that hung over the edge, and wrote the number into a small book. Nobody had asked her to do it. Her father had
counted them every morning for thirty years, and when he died she found that she missed the sound of it."""

CODE = '''def merge(left: list[int], right: list[int]) -> list[int]:
    """Merges two sorted lists into one."""
    merged, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            merged.append(left[i])
            i += 1
        else:
            merged.append(right[j])
            j += 1
    return merged + left[i:] + right[j:]
'''

NUMBERS = """Year, rainfall in mm, yield in t/ha
2016, 612.4, 7.31
2017, 598.0, 7.05
2018, 401.7, 4.88
2019, 655.2, 7.62
The mean of the four yields is (7.31 + 7.05 + 4.88 + 7.62) / 4 = 26.86 / 4 = 6.715 t/ha; 2018 is 27 % below it."""

CHAT = [
    {"role": "user", "content": "My train leaves at 9:40 and the walk takes 25 minutes. When should I go?"},
    {"role": "assistant", "content": "Leave at 9:05. Then you are at the station at 9:30, ten minutes early."},
    {"role": "user", "content": "And if I want to buy a coffee first?"},
    {"role": "assistant", "content": "A coffee takes about five minutes, so leave at 9:00 at the latest."},
]


def sequences(folder: Path) -> list[list[int]]:
    """Tokens of the texts."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    chat = tokenizer.apply_chat_template(CHAT, tokenize=False)
    return [tokenizer.encode(text, add_special_tokens=False) for text in (PROSE, CODE, NUMBERS, chat)]


def token_batch(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """The sequences [B, T], padded on the right."""
    width = max(map(len, rows))
    mask = torch.arange(width) < torch.tensor(list(map(len, rows)))[:, None]
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    positions = torch.arange(width).repeat(len(rows), 1)
    return {"input_ids": ids, "attention_mask": mask.long(), "position_ids": positions}


def score_and_export(context: RankContext) -> None:
    """Log-probs [B, T] on the last stage by dtype, at `temperature`; the fp32 weights go to the folder of the run."""
    model, rows = Path(context.arguments["model"]), context.arguments["rows"]
    options = {"sequence_parallel": context.layout.tensor > 1}
    for dtype in ("fp32", "bf16"):
        strategy = context.strategy(model, megatron=options, dtype=dtype, infer=dtype == "bf16")
        data = Batch(token_batch(rows))
        data.meta_info = {"temperature": 1.0, "micro_batches": [list(range(len(rows)))]}
        scored = strategy.compute_log_probs(data)
        context.results[dtype] = scored.batch["log_probs"].clone() if len(scored) else None
        if dtype == "fp32":
            strategy.weights.export_hf(context.folder / "exported")
        strategy.shutdown()
