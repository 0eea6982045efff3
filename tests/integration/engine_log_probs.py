"""What an engine sampled, compared with what training ranks compute of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from roll.datasets.batch import Batch
from roll.distributed.calls.remote_call import ClusterClient
from roll.distributed.train.train_worker import TrainWorker
from roll.rollout.types import GenerateRequest, GenerateResult


def largest_difference(
    ranks: ClusterClient[TrainWorker],
    requests: Sequence[GenerateRequest],
    answers: Sequence[GenerateResult],
    base: bool = False,
) -> float:
    """Largest difference between the engine's log-probs and those of the trainer's adapters as they are now."""
    rows = [(asked.prompt_ids, answer) for asked, answer in zip(requests, answers, strict=True)]
    width = max(len(prompt) + len(answer.response_ids) for prompt, answer in rows)
    ids, mask, response = (torch.zeros((len(rows), width), dtype=torch.long) for _ in range(3))
    behavior = torch.zeros((len(rows), width))
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer.response_ids)
        ids[row, :end] = torch.tensor(prompt + answer.response_ids)
        mask[row, :end], response[row, len(prompt) : end] = 1, 1
        behavior[row, len(prompt) : end] = torch.tensor(answer.log_probs)
    tensors = {"input_ids": ids, "attention_mask": mask, "response_mask": response.bool()}
    tensors["position_ids"] = torch.arange(width).expand(len(rows), width).contiguous()
    data = Batch(tensors, meta_info={"temperature": 1.0, "micro_batches": [[row] for row in range(len(rows))]})
    data.meta_info["base"] = base
    [scored] = ranks.call_shards(TrainWorker.compute_log_probs, [data]).get()
    return float(((scored.batch["log_probs"] - behavior) * response).abs().max())
