"""The table that the GPU scripts print: what was measured, its bound, and whether it holds."""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table

from roll.configs.pipeline import RLConfig
from roll.pipeline.learning.logprob_checks import BEYOND, Mismatch
from roll.platforms import detect

Platform = Literal["cpu", "cuda"]
Dtype = Literal["fp32", "bf16"]

LOSS_BOUNDS: dict[str, float] = {"fp32": 1e-4, "bf16": 2e-2}
"""Largest relative difference of a training step's loss from that of the fp32 reference, by dtype."""

LARGEST_FP32 = 1e-4
"""Largest difference of any log-prob in fp32: these small models agree more closely than a run's first step must."""

WIDTH = 110
"""Columns of a table that is not printed to a terminal."""


@dataclass(frozen=True)
class Row:
    """One row: a figure, or a text such as why nothing was measured. Without a bound it holds unless it failed."""

    name: str
    value: float | str
    unit: str = ""
    bound: float | None = None
    failed: bool = False

    @property
    def ok(self) -> bool:
        if self.bound is None or isinstance(self.value, str):
            return not self.failed
        return self.value <= self.bound  # false for nan

    def cells(self) -> tuple[str, str, str, str]:
        value = self.value if isinstance(self.value, str) else f"{self.value:.4g} {self.unit}".strip()
        bound = "" if self.bound is None else f"{self.bound:g}"
        result = "ok" if self.bound is not None and self.ok else "" if self.ok else "MISSED"
        return self.name, value, bound, "FAILED" if self.failed else result


class GpuTable:
    """Rows in the order in which they were measured."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def add(self, name: str, value: float | str, unit: str = "", bound: float | None = None) -> None:
        self._add(Row(name, value, unit, bound))

    def _add(self, row: Row) -> None:
        """Prints the row at once too, so that nothing is lost if a later check hangs."""
        self.rows.append(row)
        name, value, bound, result = row.cells()
        print("  ".join(filter(None, [f"{name}:", value, bound and f"bound {bound}", result])), flush=True)

    def add_log_probs(
        self, name: str, one: torch.Tensor, other: torch.Tensor, mask: torch.Tensor, config: RLConfig,
        largest: float | None = None,
    ) -> None:  # fmt: skip
        """Differences of log-probs [B, T] over the tokens of `mask`, with the bounds of a run's first step.

        In fp32 the bound of the largest difference is LARGEST_FP32, or `largest`.
        """
        if config.actor_train.model_args.dtype == "fp32":
            largest = largest or LARGEST_FP32
        p99 = config.p99_logprob_mismatch
        mismatch = Mismatch.between(one, other, mask, p99)
        self.add(f"{name}: mean", mismatch.mean, "nats", config.mean_logprob_mismatch)
        self.add(f"{name}: tokens beyond {p99:g}", mismatch.beyond, "", BEYOND)
        self.add(f"{name}: largest", mismatch.largest, "nats", largest)

    @contextmanager
    def check(self, name: str) -> Iterator[None]:
        """Turns an exception of the block into a failed row, so that the checks after it still run."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            first_line = str(error).partition("\n")[0]
            self._add(Row(name, f"{type(error).__name__}: {first_line}", failed=True))

    def show(self, platform: str) -> int:
        """Prints the table; returns exit code 0 if every row holds, else 1."""
        device = torch.cuda.get_device_name() if platform == "cuda" else "CPU"
        table = Table(title=f"{device}, torch {torch.__version__}", title_justify="left")
        for header in ("what", "measured", "bound", "ok"):
            table.add_column(header, justify="right" if header in ("measured", "bound") else "left")
        for row in self.rows:
            table.add_row(*row.cells())
        console = Console()
        (console if console.is_terminal else Console(width=WIDTH)).print(table)
        return 0 if all(row.ok for row in self.rows) else 1


def make_parser(description: str | None, devices: int = 1) -> argparse.ArgumentParser:
    """A parser with `--platform`, whose default is cuda with that many GPUs."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def platform(name: str) -> str:
        if name == "cuda" and (detect() != "cuda" or torch.cuda.device_count() < devices):
            needed = "no GPU" if devices == 1 else f"fewer than {devices} GPUs"
            parser.error(f"torch finds {needed}; check `nvidia-smi`, or use --platform cpu")
        return name

    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda", type=platform)
    return parser


def add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=tuple(LOSS_BOUNDS), help="default: bf16 on cuda, fp32 on cpu")
