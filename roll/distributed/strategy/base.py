"""What a role's engine must be able to do, whatever it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from roll.distributed.protocol import DataProto
    from roll.distributed.weight_sync.plan import WeightSpec


class InferenceStrategy(ABC):
    """A model that computes log-probs of given tokens."""

    @abstractmethod
    def initialize(self) -> None:
        """Joins the role's process group and builds the model; weights come from `model_name_or_path`."""

    @abstractmethod
    def compute_log_probs(self, data: DataProto) -> DataProto:
        """Log-probs and entropies of the given tokens.

        Args:
            data: `input_ids`, `attention_mask`, `position_ids` [B, T]; `meta_info["temperature"]` divides the
                logits; `meta_info["micro_batches"]` lists the sample indices of each forward pass.

        Returns:
            `log_probs` and `entropy` [B, T] float32 in the order of `data`, index t holding token t (0 at t = 0),
            on every tensor-parallel rank of the last pipeline stage and empty elsewhere.
        """


class TrainStrategy(InferenceStrategy):
    """A model that learns, publishes its weights and saves itself."""

    @abstractmethod
    def train_step(self, data: DataProto) -> dict[str, float]:
        """Optimizer steps over this rank's shard.

        Args:
            data: this data-parallel rank's samples; `meta_info["optimizer_steps"]` is a list with, for each
                optimizer step, `{"micro_batches": [[sample indices], ...], "tokens": N_tok, "sequences": N_seq}`
                (denominators over the whole global batch), `meta_info["loss"]` names the loss in
                `roll.algorithms.losses` and `meta_info["loss_config"]` is what it is called with.

        Returns:
            Metrics reduced over micro-batches, ranks and optimizer steps, the same on every rank of the last stage:
            `loss`, `grad_norm`, `lr`, and whatever the loss reports.
        """

    @abstractmethod
    def weight_specs(self) -> list[WeightSpec]:
        """What `weights()` will yield on this pipeline stage, in order, known without communication."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """HF-named full tensors of this stage; collective over the stage's tensor-parallel ranks of data index 0."""

    @abstractmethod
    def source_weights(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """As `weights()` on tensor rank 0 of the stage, which publishes; None for every name on the other ranks."""

    @abstractmethod
    def weight_slices(self) -> Iterator[tuple[str, Callable[[torch.Tensor], None]]]:
        """For every name of `weights()` in order, what copies this rank's slice into the whole tensor, by itself."""

    @abstractmethod
    def save_checkpoint(self, folder: Path) -> None:
        """Writes weights, distributed optimizer, schedule and RNG; collective over all ranks."""

    @abstractmethod
    def load_checkpoint(self, folder: Path) -> None:
        """Restores what `save_checkpoint` wrote, bit for bit at the same layout."""

    @abstractmethod
    def export_hf(self, folder: Path) -> None:
        """Writes a folder that transformers and SGLang load; collective over all ranks."""

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes in use, by kind."""
