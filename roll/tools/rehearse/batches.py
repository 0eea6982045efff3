"""Small batches with the structure of a recipe's: groups, optimizer steps per batch, accumulated micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll.configs.agentic import AgenticConfig, EnvManagerConfig
from roll.configs.pipeline import RLConfig

if TYPE_CHECKING:
    from roll.rollout.source import SampleBatch

GROUPS = range(4, 9)
"""Prompts of a batch in a rehearsal, unless the recipe has fewer."""

MAX_GROUP_SIZE = 4
"""Samples of a prompt or a task."""

MAX_OPTIMIZER_STEPS = 4
"""Optimizer steps of one pass over a batch; more would only repeat them."""


class AlternatingScores:
    """Adds 0.1 to the score of every other sample: agents with random weights get the same score from most games."""

    def __init__(self, config: RLConfig) -> None:
        pass

    def before_learning(self, batch: SampleBatch, step: int) -> None:
        """Changes `scores` [B]."""
        batch.data.batch["scores"][::2] += 0.1


@dataclass(frozen=True)
class Batch:
    """Sizes of one batch.

    A group has the samples of a prompt or of a task of agents; micro-batches are those of one data-parallel rank.
    """

    groups: int
    group_size: int
    micro_batch: int
    accumulation: int


@dataclass(frozen=True)
class Structure:
    """What the batch of a recipe looks like, apart from its size.

    Attributes:
        samples_per_trajectory: 1, or the turns of a trajectory where each is a sample.
        optimizer_steps: of one pass over the batch.
        accumulates: whether an optimizer step has several micro-batches.
        tags: kinds of groups that a batch should have, at least one group each.
    """

    groups: int
    group_size: int
    samples_per_trajectory: int = 1
    optimizer_steps: int = 1
    accumulates: bool = False
    tags: int = 1


def structure_of(config: RLConfig, turns: int = 1) -> Structure:
    """The structure of a recipe's batch, of trajectories with `turns` turns."""
    by_turn = isinstance(config, AgenticConfig) and config.sample_by == "step"
    return Structure(
        groups=config.groups_per_batch,
        group_size=config.num_return_sequences_in_group,
        samples_per_trajectory=turns if by_turn else 1,
        optimizer_steps=config.optimizer_steps_per_batch // config.ppo_epochs,
        accumulates=config.actor_train.training_args.gradient_accumulation_steps > 1,
        tags=len(config.tags_of(config.train_env_manager)) if isinstance(config, AgenticConfig) else 1,
    )


def shrink_batch(structure: Structure, data_parallel: int) -> Batch:
    """The smallest batch that fills whole optimizer steps and keeps most of the structure.

    Optimizer steps are kept up to `MAX_OPTIMIZER_STEPS`, and accumulation stays above 1 where it was; if both do not
    fit, fewer optimizer steps are made.
    """
    wanted = min(structure.optimizer_steps, MAX_OPTIMIZER_STEPS)
    best: tuple[tuple[int, ...], Batch] | None = None
    for groups, size in _sizes(structure):
        samples = groups * size * structure.samples_per_trajectory
        for steps in range(wanted, 0, -1):
            for accumulation in (2, 3, 4, 1) if structure.accumulates else (1,):
                unit = steps * accumulation * data_parallel
                if samples % unit:
                    continue
                lost = structure.accumulates and accumulation == 1
                grown = max(0, groups - structure.groups)
                cost = (lost, wanted - steps, grown, groups * size, accumulation)
                if best is None or cost < best[0]:
                    best = cost, Batch(groups, size, samples // unit, accumulation)
    if best is not None:
        return best[1]
    groups, size = next(_sizes(structure))  # agents only: their batches are padded
    return Batch(groups, size, 1, 2 if structure.accumulates else 1)


def _sizes(structure: Structure) -> Iterator[tuple[int, int]]:
    size = min(structure.group_size, MAX_GROUP_SIZE)
    if structure.tags > 2:
        size = min(size, 2)
    least = max(min(structure.groups, GROUPS[0]), structure.tags)
    for groups in range(least, max(GROUPS[-1], least) + 1):
        yield groups, size


def shrink_partition(parts: Sequence[int], groups: int) -> list[int]:
    """Shares of `groups` groups in proportion to `parts`, at least 1 each; `groups` is at least their number."""
    shares = [max(1, round(part / sum(parts) * groups)) for part in parts]
    while sum(shares) != groups:
        step = 1 if sum(shares) < groups else -1
        open_shares = [index for index, share in enumerate(shares) if share + step >= 1]
        error = {index: parts[index] / sum(parts) * groups - shares[index] for index in open_shares}
        shares[max(open_shares, key=lambda index: step * error[index])] += step
    return shares


def environment_groups(manager: EnvManagerConfig, tags: int, most: int) -> int:
    """Groups that run at a time in a rehearsal: at most `most`, and one for each tag."""
    return max(tags, min(manager.num_env_groups or most, most))
