"""What a weight update sent, and what a step logs of it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Transfer:
    """What was sent: bytes, checksums by the engine's parameter names where they were requested, the time, metrics."""

    bytes: int
    checksums: dict[str, str]
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class UpdateReport:
    """One successful weight update.

    Attributes:
        version: of the weights.
        seconds: from the start of the update to its end; retries, and waiting for an engine where none ran, included.
        pause_seconds: during which the engines were paused in the successful attempt, from the end of their last step.
        bytes: of weights sent, counted once for all engines.
        transfer_seconds: that sending them took in the successful attempt.
        verified: whether names and checksums were compared.
        attempts: 1 when nothing failed.
        failures: failed attempts of all weight updates so far.
        engines: `faults/...` of the engines, and what else they say of the update.
    """

    version: int
    seconds: float
    pause_seconds: float
    bytes: int
    transfer_seconds: float
    verified: bool
    attempts: int
    failures: int
    engines: dict[str, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """What a step logs, apart from its times."""
        return {
            "weight_update/bytes": float(self.bytes),
            "throughput/weights_gigabytes_per_second": self.bytes / 1e9 / max(self.transfer_seconds, 1e-9),
            "weight_update/verified": float(self.verified),
            "param_sync_requests": float(self.version + 1 + self.failures),
            "param_sync_count": float(self.version + 1),
            "sync_failures": float(self.failures),
            **self.engines,
        }
