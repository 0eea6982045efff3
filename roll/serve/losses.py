"""Tinker's losses by name as policy losses of this project, and its data as sequences that are trained on.

Every loss is a sum over tokens, without a divisor. Source: the pages on losses of Tinker's documentation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.algorithms.aggregation import masked
from roll.algorithms.lazy_torch import torch
from roll.algorithms.policy_loss import POLICY_LOSSES, PolicyTokens
from roll.algorithms.policy_loss.cispo import CISPOOptions
from roll.algorithms.policy_loss.gspo import GSPOOptions
from roll.algorithms.policy_loss.ppo import PPOOptions
from roll.algorithms.policy_loss.reinforce import Kimi15Options
from roll.serve.wire import Datum, WireError

if TYPE_CHECKING:
    from torch import Tensor

TARGETS, WEIGHTS, LOG_PROBS, ADVANTAGES = "target_tokens", "weights", "logprobs", "advantages"
RATIO_MASK = "sequence_ratio_mask"
LOW, HIGH, BETA = "clip_low_threshold", "clip_high_threshold", "beta"

Settings = Mapping[str, float]


@dataclass(frozen=True)
class TrainedRow:
    """A datum of n tokens as a sequence of n + 1, whose tokens from the second on are the targets.

    Attributes:
        ids: [n + 1].
        coefficients: weight or advantage of each target, [n].
        base: log-prob of each target by the policy that sampled it, [n]; 0 where the loss has no ratio.
        mask: targets that the loss reads, [n] bool.
        known: targets that are the next token of the input, [n] bool; the log-prob of another one is not computed.
    """

    ids: list[int]
    coefficients: np.ndarray
    base: np.ndarray
    mask: np.ndarray
    known: np.ndarray

    def log_probs(self, computed: Sequence[float]) -> list[float]:
        """The log-probs of the targets, from those of the sequence [n]; 0 where a target is not `known`."""
        kept: list[float] = np.where(self.known, np.asarray(computed, np.float32), np.float32(0)).tolist()
        return kept


@dataclass(frozen=True)
class TinkerLoss:
    """A loss of Tinker.

    Attributes:
        variant: the `pg_variant` with the same formula.
        options: of that variant, from the settings of the loss.
        tensors: that a datum has for it; the first has the coefficients.
        defaults: settings that may be left out.
        required: settings that may not.
        every_token: whether tokens with coefficient 0 have a loss.
    """

    variant: str
    options: Callable[[Settings], Any] = lambda settings: None
    tensors: tuple[str, ...] = (ADVANTAGES, LOG_PROBS)
    defaults: Settings = field(default_factory=dict)
    required: tuple[str, ...] = ()
    every_token: bool = False

    def row(self, datum: Datum, path: str) -> TrainedRow:
        """The datum as a row.

        Raises:
            WireError: a tensor is missing, unknown, not finite or of another length, or a target with a loss is not the
                next token.
        """
        tensors = self._tensors(datum, f"{path}.loss_fn_inputs")
        coefficients, targets = tensors[self.tensors[0]], datum.inputs[TARGETS]
        mask = coefficients != 0
        if RATIO_MASK in tensors:
            outside = mask & (tensors[RATIO_MASK] == 0)
            mask = tensors[RATIO_MASK] != 0
            if outside.any():
                raise WireError(f"{path}.{RATIO_MASK}: leaves out tokens with an advantage; mask these tokens too")
        elif self.every_token:
            mask = np.ones_like(mask)
        known = np.append(targets[:-1] == datum.tokens[1:], True)
        if (mask & ~known).any():
            at = int((mask & ~known).argmax())
            raise WireError(f"{path}.{TARGETS}[{at}]: {targets[at]} is not the next token of the input; only that is")
        base = tensors.get(LOG_PROBS, np.zeros_like(coefficients))
        return TrainedRow([*datum.tokens, int(targets[-1])], coefficients, base, mask, known)

    def _tensors(self, datum: Datum, path: str) -> dict[str, np.ndarray]:
        names, given = (TARGETS, *self.tensors), sorted(datum.inputs)
        if not datum.tokens:
            raise WireError(f"{path}: the datum has no token")
        if sorted(names) != given:
            raise WireError(f"{path}: has {', '.join(given) or 'nothing'}; this loss reads {', '.join(names)}")
        for name, values in datum.inputs.items():
            if len(values) != len(datum.tokens):
                raise WireError(f"{path}.{name}: has {len(values)} values for {len(datum.tokens)} tokens of the input")
            if not np.isfinite(values).all():
                raise WireError(f"{path}.{name}: has a value that is not finite")
        return {name: datum.inputs[name].astype(np.float32) for name in self.tensors}

    def total(self, rows: Sequence[TrainedRow], settings: Settings, log_probs: Sequence[Tensor]) -> Tensor:
        """The loss, 0-d: the sum over all tokens, from the log-probs [n] of the targets of each row."""
        options, losses = self.options(settings), []
        for row, values in zip(rows, log_probs, strict=True):
            tensors = (torch.from_numpy(each)[None] for each in (row.base, row.coefficients, row.mask))
            tokens = PolicyTokens(values[None], *tensors)
            losses.append(masked(POLICY_LOSSES[self.variant](tokens, options).loss, tokens.mask).sum())
        return torch.stack(losses).sum()

    def settings(self, given: Mapping[str, float | str], path: str) -> Settings:
        """The settings with their defaults.

        Raises:
            WireError: one is unknown, missing, or no number that fits.
        """
        known = (*self.defaults, *self.required)
        for name in given:
            if name not in known:
                raise WireError(f"{path}.{name}: is not served; known: {', '.join(known) or 'none'}")
        settings = {**self.defaults, **given}
        for name in known:
            value = settings.get(name)
            if not isinstance(value, float | int) or not _fits(name, value):
                raise WireError(f"{path}.{name}: {value}; give {BOUNDS[name]}")
        return {name: float(value) for name, value in settings.items()}


BOUNDS = {LOW: "a number of at least 0 and below 1", HIGH: "a number above 1", BETA: "a number above 0"}


def _fits(name: str, value: float) -> bool:
    return {LOW: 0 <= value < 1, HIGH: 1 < value, BETA: 0 < value}[name] and math.isfinite(value)


def _ppo(settings: Settings) -> PPOOptions:
    return PPOOptions(pg_clip_low=1 - settings[LOW], pg_clip_high=settings[HIGH] - 1)


def _unclipped(settings: Settings) -> PPOOptions:
    return PPOOptions(pg_clip_low=1.0, pg_clip_high=math.inf)


def _cispo(settings: Settings) -> CISPOOptions:
    return CISPOOptions(cispo_epsilon_low=1 - settings[LOW], cispo_epsilon_high=settings[HIGH] - 1)


def _gspo(settings: Settings) -> GSPOOptions:
    return GSPOOptions(gspo_clip_low=1 - settings[LOW], gspo_clip_high=settings[HIGH] - 1)


CROSS_ENTROPY = "cross_entropy"

TINKER_LOSSES = {
    CROSS_ENTROPY: TinkerLoss("vanilla", tensors=(WEIGHTS,)),
    "importance_sampling": TinkerLoss("ppo", _unclipped),
    "ppo": TinkerLoss("ppo", _ppo, defaults={LOW: 0.8, HIGH: 1.2}),
    "cispo": TinkerLoss("cispo", _cispo, required=(LOW, HIGH)),
    "gspo": TinkerLoss("gspo", _gspo, (ADVANTAGES, LOG_PROBS, RATIO_MASK), required=(LOW, HIGH)),
    "dro": TinkerLoss("kimi15", lambda settings: Kimi15Options(settings[BETA]), required=(BETA,), every_token=True),
}
"""Loss of Tinker -> the policy loss that it is. `cross_entropy` is -w log p, the form of `vanilla`; importance sampling
is -r A, which is PPO without a clip; `dro` is Kimi k1.5."""


def tinker_loss(name: str) -> TinkerLoss:
    """The loss of this name.

    Raises:
        WireError: it is not served.
    """
    if name not in TINKER_LOSSES:
        raise WireError(f"loss_fn: {name} is not served; use {', '.join(TINKER_LOSSES)}")
    return TINKER_LOSSES[name]
