"""Throughput of a step, and the operations of training as a share of what the devices could do (MFU)."""

from __future__ import annotations

from collections.abc import Mapping

from tensordict import TensorDict

from roll.configs.roles import RoleConfig
from roll.models.families.shape import ModelShape

TRAINER_WORK = ("time/old_log_probs", "time/train")
"""Times in which actor_train computes."""

PEAK_TFLOPS = "perf/peak_tflops"


class Performance:
    """The `throughput/...` and `perf/...` of the steps of a run.

    Args:
        roles: that own devices, by name.
        shape: of the model of actor_train, where it is known.
        passes: over each batch.
    """

    def __init__(self, roles: Mapping[str, RoleConfig], shape: ModelShape | None, passes: int = 1) -> None:
        self._devices = len({rank for role in roles.values() for rank in role.device_mapping}) or 1
        self._trainer, self._shape, self._passes = roles.get("actor_train"), shape, passes

    def metrics(self, batch: TensorDict, times: Mapping[str, float], peak_tflops: float | None) -> dict[str, float]:
        """The metrics of one step.

        Args:
            batch: `attention_mask` [B, T] of the samples, and `response_mask` [B, T] where only some tokens are scored.
            times: `time/...` of the step in seconds, `time/step` among them.
            peak_tflops: of a device of actor_train, where it is known.
        """
        step, lengths = max(times["time/step"], 1e-9), batch["attention_mask"].sum(-1).double()
        found = {
            "throughput/tokens_per_second": float(lengths.sum()) / step / self._devices,
            "throughput/trainer_idle": max(0.0, 1 - sum(times.get(name, 0.0) for name in TRAINER_WORK) / step),
        }
        seconds = times.get("time/train", 0.0)
        if self._shape is None or self._trainer is None or not seconds:
            return found
        scored = 0.0 if self._trainer.value_head else float(batch.get("response_mask", batch["attention_mask"]).sum())
        operations = self._shape.training_operations(float(lengths.sum()), float(lengths.square().sum()), scored)
        devices = len(self._trainer.device_mapping) or 1
        found["perf/tflops_per_device"] = tflops = self._passes * operations / seconds / devices / 1e12
        return found | ({"perf/mfu": tflops / peak_tflops} if peak_tflops else {})
