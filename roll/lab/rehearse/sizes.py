"""Sizes of a rehearsal: a parallel size, optimizer steps and micro-batches above 1 become 2, and groups are small."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from roll.configs.agentic import AgenticConfig
from roll.configs.devices.parallel_layout import ParallelLayout
from roll.configs.pipeline import RLConfig
from roll.configs.roles import EngineRoleConfig, RoleConfig

MAX_SLOTS = 8
"""Device slots of a rehearsal in total; each is a process with its own copy of the libraries."""

MAX_ENGINES = 2
"""Two engines show everything that several do: balancing, broadcast, one that is behind."""

LOST = (
    "",
    "engines",
    "data",
    "engines data",
    "engines data pipeline",
    "engines data pipeline tensor",
    "engines data pipeline tensor context",
)
"""Sizes that become 1 until the roles fit `MAX_SLOTS`, those that show least first."""

MAX_GROUPS, MAX_GROUP_SIZE = 4, 4
"""Prompts, or tasks of agents, of a batch, and samples of each; both are powers of two, as the parallel sizes are."""


@dataclass(frozen=True)
class Placement:
    """Layout and devices of every role."""

    layouts: dict[str, ParallelLayout]
    devices: dict[str, list[int]]

    @property
    def slots(self) -> int:
        return len({device for devices in self.devices.values() for device in devices})


def shrink_layouts(roles: Mapping[str, RoleConfig]) -> Placement:
    """The placement of a rehearsal: at most `MAX_SLOTS` devices and `MAX_ENGINES` engines.

    Roles that share a device get equal devices, the others stay apart. A role on more devices than it needs gets more
    data parallelism, or engines with more devices.
    """
    sharing = _sharing(roles)
    for lost in LOST:
        least = {name: _least(role, lost) for name, role in roles.items()}
        sizes = [max(least[name].world_size for name in names) for names in sharing]
        if sum(sizes) <= MAX_SLOTS:
            break
    devices: dict[str, list[int]] = {}
    layouts: dict[str, ParallelLayout] = {}
    start = 0
    for names, size in zip(sharing, sizes, strict=True):
        devices |= {name: list(range(start, start + size)) for name in names}
        layouts |= {name: _filled(roles[name], least[name], size) for name in names}
        start += size
    return Placement({name: layouts[name] for name in roles}, {name: devices[name] for name in roles})


def _sharing(roles: Mapping[str, RoleConfig]) -> list[list[str]]:
    """The roles that share devices, directly or through others, in the order of their devices."""
    groups: list[tuple[set[int], list[str]]] = []
    for name, role in roles.items():
        devices, names = {*role.device_mapping}, [name]
        for group in [group for group in groups if group[0] & devices]:
            groups.remove(group)
            devices, names = devices | group[0], [*group[1], *names]
        groups.append((devices, names))
    return [names for _, names in sorted(groups, key=lambda group: min(group[0]))]


def _least(role: RoleConfig, lost: str) -> ParallelLayout:
    copies = "engines" if isinstance(role, EngineRoleConfig) else "data"
    layout = role.layout
    sizes = {"tensor": layout.tensor, "pipeline": layout.pipeline, copies: layout.data, "context": layout.context}
    tensor, pipeline, data, context = (1 if name in lost.split() else min(size, 2) for name, size in sizes.items())
    return ParallelLayout(tensor=tensor, pipeline=pipeline, data=data, context=context)


def _filled(role: RoleConfig, least: ParallelLayout, size: int) -> ParallelLayout:
    if not isinstance(role, EngineRoleConfig):
        return _with_experts(role.layout, replace(least, data=size // least.model_size))
    engines = min(MAX_ENGINES, size // least.tensor)
    return ParallelLayout(tensor=size // engines, data=engines)


def _with_experts(recipe: ParallelLayout, small: ParallelLayout) -> ParallelLayout:
    """The small layout with the experts on two ranks, where the recipe has them on several and there are as many."""
    own = recipe.expert_tensor and min(recipe.expert_tensor, small.tensor)
    split = replace(small, expert=min(recipe.expert, 2), expert_tensor=own)
    return split if split.expert_copies else replace(split, expert=1)


@dataclass(frozen=True)
class SmallBatch:
    """Sizes of one batch: groups, the samples of each, and the micro-batches of a data-parallel rank."""

    groups: int
    group_size: int
    micro_batch: int
    accumulation: int


def shrink_batch(config: RLConfig, data_parallel: int, turns: int = 1) -> SmallBatch:
    """The batch of a rehearsal on `data_parallel` ranks, with at least one group for every tag of agents.

    Every trajectory has `turns` turns, each of which is a sample with `sample_by: step`.
    """
    agents = config if isinstance(config, AgenticConfig) else None
    return smallest_batch(
        config.groups_per_batch,
        config.num_return_sequences_in_group,
        config.optimizer_steps_per_batch // config.ppo_epochs,
        config.actor_train.training_args.gradient_accumulation_steps,
        data_parallel,
        tags=len(agents.tags_of(agents.train_env_manager)) if agents else 1,
        turns=turns if agents and agents.sample_by == "step" else 1,
    )


def smallest_batch(
    groups: int, group_size: int, steps: int, accumulation: int, data_parallel: int, tags: int = 1, turns: int = 1
) -> SmallBatch:
    """The smallest batch that fills whole optimizer steps: two, or of two micro-batches, where the recipe's has more.

    All sizes are powers of two, so that they divide; `turns` is the number of samples of one trajectory.
    """
    micro_batches = min(steps, 2) * min(accumulation, 2) * data_parallel
    size = min(_power_of_two(group_size + 1) // 2, MAX_GROUP_SIZE)
    small = _power_of_two(max(min(groups, MAX_GROUPS), tags, micro_batches // size))
    return SmallBatch(small, size, small * size * turns // micro_batches, min(accumulation, 2))


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
