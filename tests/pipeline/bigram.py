"""A bigram policy, a table of next-token scores, with the interface of a cluster that learners use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roll.algorithms.distillation import POLICY_TOP_LOG_PROBS, TEACHER_TOP_IDS
from roll.algorithms.losses import LOSSES, LossScale
from roll.configs.devices.parallel_layout import ParallelLayout
from roll.datasets.batch import Batch
from roll.datasets.collate import collate_samples

WORDS = 5


class BigramCluster:
    """Two data-parallel ranks that share one table; a training step is plain gradient descent."""

    layout = ParallelLayout(data=2)
    platform = "cpu"

    def __init__(self, learning_rate: float = 0.5) -> None:
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(WORDS, WORDS, generator=generator).requires_grad_()
        self._rate = learning_rate

    def log_probs(self, ids: Tensor) -> Tensor:
        """Log-prob of each token given the one before, [b, T]; 0 for the first."""
        scores = self.table.log_softmax(-1)[ids[:, :-1], ids[:, 1:]]
        return torch.nn.functional.pad(scores, (1, 0))

    def all_log_probs(self, ids: Tensor) -> Tensor:
        """Log-probs of all words in place of each token, [b, T, WORDS]; 0 for the first."""
        return torch.nn.functional.pad(self.table.log_softmax(-1)[ids[:, :-1]], (0, 0, 1, 0))

    async def call_shards(self, method: Callable[..., Any], shards: list[Batch]) -> list[Any]:
        """Calls the method of this class with the name of the worker's method."""
        result: list[Any] = await getattr(self, method.__name__)(shards)
        return result

    async def call(self, ranks: None, method: Callable[..., Any], *args: Any) -> Any:
        """As `call_shards`, with the same arguments for every rank."""
        return await getattr(self, method.__name__)(*args)

    async def compute_log_probs(self, shards: list[Batch]) -> list[Batch]:
        answers = []
        with torch.no_grad():
            for shard in shards:
                ids = shard.batch["input_ids"]
                rows = self.table.log_softmax(-1)
                entropy = -(rows.exp() * rows).sum(-1)[ids[:, :-1]]
                scores = {"log_probs": self.log_probs(ids), "entropy": torch.nn.functional.pad(entropy, (1, 0))}
                if shard.meta_info.get("sum_pi_squared"):
                    squares = self.table.softmax(-1).square().sum(-1)[ids[:, :-1]]
                    scores["sum_pi_squared"] = torch.nn.functional.pad(squares, (1, 0))
                if shard.meta_info.get("top_k"):
                    top = self.all_log_probs(ids).topk(min(shard.meta_info["top_k"], WORDS))
                    scores |= {"top_ids": top.indices.int(), "top_log_probs": top.values}
                answers.append(Batch(scores))
        return answers

    def outputs(self, ids: Tensor) -> Tensor:
        """What the loss reads."""
        return self.log_probs(ids)

    async def train_step(self, shards: list[Batch]) -> list[dict[str, float]]:
        rows: list[dict[str, Tensor]] = []
        for shard in shards:
            (step,) = shard.meta_info["optimizer_steps"]
            scale = LossScale(step["tokens"], step["sequences"], 16)
            for indices in step["micro_batches"]:
                micro = shard.batch[torch.tensor(indices)]
                config: Any = shard.meta_info["loss_config"]
                output = self.outputs(micro["input_ids"])
                if TEACHER_TOP_IDS in micro.keys():
                    all_words = self.all_log_probs(micro["input_ids"])
                    micro[POLICY_TOP_LOG_PROBS] = all_words.gather(-1, micro[TEACHER_TOP_IDS].long())
                loss, metrics = LOSSES[shard.meta_info["loss"]](output, None, micro, scale, config)
                loss.backward()
                rows.append({"loss": loss.detach(), **metrics})
        self._descend()
        combined = {name: torch.stack([row[name].double() for row in rows]) for name in rows[0]}
        metrics = {name: (each.max() if name.endswith("_max") else each.sum()) for name, each in combined.items()}
        return [{name: float(value) for name, value in metrics.items()}] * len(shards)

    async def train_step_with_log_probs(self, shards: list[Batch]) -> list[tuple[dict[str, float], Batch]]:
        with torch.no_grad():
            outputs = [self.outputs(shard.batch["input_ids"]) for shard in shards]
        scores = [Batch({"log_probs": each, "entropy": torch.zeros_like(each)}) for each in outputs]
        return list(zip(await self.train_step(shards), scores, strict=True))

    async def begin_checkpoint(self, folder: str) -> None:
        Path(folder).mkdir(parents=True)
        torch.save(self.table, Path(folder) / "table.pt")

    async def checkpoint_written(self) -> list[float]:
        return [0.0]

    async def load_checkpoint(self, folder: str) -> None:
        self.table = torch.load(Path(folder) / "table.pt")

    def _descend(self) -> None:
        assert self.table.grad is not None
        with torch.no_grad():
            self.table -= self._rate * self.table.grad
        self.table.grad = None

    def sample(self, seed: int, samples: int = 8) -> Batch:
        """A batch as a rollouter returns it: responses of different lengths, sampled from the current table."""
        generator = torch.Generator().manual_seed(seed)
        lengths = [3 + number % 4 for number in range(samples)]
        prompts = torch.stack([torch.zeros(samples, dtype=torch.long), torch.arange(samples) % WORDS], 1)
        log_probs = self.table.detach().log_softmax(-1)
        tokens, last = [], prompts[:, -1]
        for _ in range(max(lengths)):
            last = torch.multinomial(log_probs[last].exp(), 1, generator=generator)[:, 0]
            tokens.append(last)
        responses = torch.stack(tokens, 1)
        scores = log_probs[torch.cat([prompts[:, -1:], responses[:, :-1]], 1), responses]
        drawn = [
            (prompt, response[:length], of_tokens[:length], [0] * length)
            for prompt, response, of_tokens, length in zip(
                prompts.tolist(), responses.tolist(), scores.tolist(), lengths, strict=True
            )
        ]
        tensors = collate_samples(drawn)
        tensors["scores"] = (tensors["input_ids"] * tensors["response_mask"] == 3).sum(-1).float() - 1
        tensors["group_ids"] = torch.arange(samples) // 4
        return Batch(tensors)


class BigramCritic(BigramCluster):
    """A critic with the same interface: the value of a token is a number for the token before it."""

    def __init__(self, learning_rate: float = 2.0) -> None:
        super().__init__(learning_rate)
        self.table = torch.zeros(WORDS).requires_grad_()

    def values(self, ids: Tensor) -> Tensor:
        """Value of each token, [b, T]; 0 for the first."""
        return torch.nn.functional.pad(self.table[ids[:, :-1]], (1, 0))

    def outputs(self, ids: Tensor) -> Tensor:
        return self.values(ids)

    async def compute_values(self, shards: list[Batch]) -> list[Batch]:
        with torch.no_grad():
            return [Batch({"values": self.values(shard.batch["input_ids"])}) for shard in shards]
