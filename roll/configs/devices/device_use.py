"""Which roles have devices, and what roles that share some of them do there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll.base.errors import Finding, error, warning
from roll.configs.devices.parallel_layout import spans
from roll.configs.learning.lora import base_is_reference
from roll.configs.roles import EngineRoleConfig, MegatronRoleConfig, RoleConfig
from roll.configs.scoring.scoring_roles import SCORING_MODELS, ScoringEngineConfig

if TYPE_CHECKING:
    from roll.configs.pipeline import BaseConfig, RLConfig, RLVRConfig

LARGEST_CLUSTER = 65_536
"""More devices than any cluster has: a number above is a slip, and no advice."""


@dataclass(frozen=True)
class Need:
    """What a role other than the policy is needed by.

    Attributes:
        role: its name; a pipeline without the role has no such need.
        needed_by: text of what needs it in a configuration; empty if nothing does.
        unneeded: why nothing needs it otherwise.
    """

    role: str
    needed_by: Callable[[Any], str]
    unneeded: Callable[[Any], str]


def _reference_terms(config: BaseConfig) -> str:
    if not config.uses_reference or base_is_reference(config):
        return ""
    if config.pipeline == "dpo":
        return "pipeline dpo needs it"
    names = ("use_kl_loss", "add_token_level_kl", "use_opd")
    estimator = f"adv_estimator {getattr(config, 'adv_estimator', '')}"
    terms = " and ".join(name for name in names if getattr(config, name, False)) or estimator
    model = "teacher, which is the reference" if getattr(config, "uses_teacher", False) else "reference"
    return f"{terms} needs the {model}"


NEEDS = (
    Need("reference", _reference_terms, lambda config: "neither use_kl_loss nor add_token_level_kl is on"),
    Need(
        "critic",
        lambda config: f"adv_estimator {config.adv_estimator} needs the critic" if config.uses_critic else "",
        lambda config: f"adv_estimator is {config.adv_estimator}",
    ),
    Need(
        "reward",
        lambda config: "a reward_model in rewards needs the model of role reward" if config.uses_reward_model else "",
        lambda config: "no reward is a reward_model",
    ),
    Need(
        "judge",
        lambda config: "an llm_judge without base_url needs it" if config.uses_judge else "",
        lambda config: "no reward is an llm_judge without base_url",
    ),
)
"""The roles that some configurations need."""


def check_device_use(config: BaseConfig) -> Iterator[Finding]:
    """Roles that are needed have devices, in numbers that fit their layout; others have none."""
    policy = ("actor_train", "actor_infer")
    for role in (name for name in policy if hasattr(config, name)):
        if not getattr(config, role).device_mapping:
            yield error(f"{role}.device_mapping", "is empty; list the devices of this role, such as list(range(0,8))")
    shared = f"such as {spans(config.actor_train.device_mapping)}, the devices of actor_train, to share them"
    for need in NEEDS:
        worker: RoleConfig | None = getattr(config, need.role, None)
        if worker is None:
            continue
        needed_by = need.needed_by(config)
        if worker.device_mapping and not needed_by:
            yield warning(need.role, f"is configured but not used: {need.unneeded(config)}; it is not loaded")
        elif needed_by and not worker.device_mapping and need.role != "judge":  # a judge may have an endpoint instead
            yield error(f"{need.role}.device_mapping", f"is empty, but {needed_by}; set its devices, {shared}")
    for role, worker in config.device_roles().items():
        yield from _check_divides(role, worker)


def _check_divides(role: str, worker: RoleConfig) -> Iterator[Finding]:
    count, path = len(worker.device_mapping), f"{role}.device_mapping"
    layout = worker.layout
    tensor, size = layout.tensor, layout.model_size
    if count % size == 0:
        return
    below = count // size * size
    multiples = f"{below} or {below + size}" if below else str(size)
    if size > LARGEST_CLUSTER:
        yield error(path, f"{count} devices cannot hold {size:,} parallel ranks of one model; use at most {count}")
    elif isinstance(worker, EngineRoleConfig):
        yield error(path, f"{count} devices cannot hold engines of num_gpus_per_worker {tensor}; use {multiples}")
    else:
        sizes = f"tensor parallel {tensor}"
        sizes += f" x context parallel {layout.context}" if layout.context > 1 else ""
        sizes += f" x pipeline parallel {layout.pipeline}" if layout.pipeline > 1 else ""
        yield error(path, f"{count} devices cannot hold {sizes}; use {multiples}")


def check_shared_devices(config: RLConfig) -> Iterator[Finding]:
    """Trainer and engines that share devices take turns on them; engines that run ahead share all of a role's or none.

    Models that score with engines of their own keep their memory there.
    """
    ratio = f"async_generation_ratio {config.async_generation_ratio:g}"
    runs_ahead = config.async_generation_ratio > 0
    if runs_ahead and config.shares_devices:
        yield warning(
            "async_generation_ratio",
            f"{config.async_generation_ratio:g} lets actor_infer and actor_train compute at the same time on the "
            "devices they share, so each is slower; give them separate devices",
        )
    if config.is_offload_states and not config.shares_devices:
        yield warning("is_offload_states", "has no effect: actor_train and actor_infer have devices of their own")
    elif config.is_offload_states and runs_ahead:
        yield warning("is_offload_states", f"has no effect: with {ratio} the engines generate while actor_train trains")
    training, sampling = config.actor_train.model_args.dtype, config.actor_infer.model_args.dtype
    if training != sampling:
        yield warning(
            "actor_infer.model_args.dtype",
            f"{sampling} samples while actor_train computes in {training}: their log-probs differ by rounding; "
            f"use {training}",
        )
    for role, worker in config.device_roles().items():
        if runs_ahead and isinstance(worker, MegatronRoleConfig):
            yield from _check_overlap(config, role)
        if isinstance(worker, ScoringEngineConfig):
            yield from _check_scoring_devices(config, role)


def check_reward_model_devices(config: RLVRConfig) -> Iterator[Finding]:
    """A reward model on Megatron ranks does not compute where engines that run ahead generate."""
    same = set(config.reward.device_mapping) == set(config.actor_infer.device_mapping)
    is_megatron = isinstance(config.reward, MegatronRoleConfig)
    if config.uses_reward_model and same and is_megatron and config.async_generation_ratio > 0:
        yield warning(
            "reward.device_mapping",
            f"is that of actor_infer, and with async_generation_ratio {config.async_generation_ratio:g} engines and "
            "reward model compute there at the same time; give the reward model other devices",
        )


def _check_scoring_devices(config: RLConfig, scoring: str) -> Iterator[Finding]:
    """Engines that score keep their memory on devices that they share, and above ratio 0 compute beside the others."""
    devices, what = {*config.device_roles()[scoring].device_mapping}, SCORING_MODELS[scoring]
    for role, worker in config.device_roles().items():
        shared = sorted(devices & {*worker.device_mapping})
        if role == scoring or not shared:
            continue
        overlap = f"overlaps {role}.device_mapping in {_short(shared)}"
        if config.async_generation_ratio > 0:
            taken = {device for other in config.device_roles().values() for device in other.device_mapping}
            outside = spans(range(max(taken) + 1, max(taken) + 1 + len(devices)))
            ratio = f"async_generation_ratio {config.async_generation_ratio:g}"
            yield error(
                f"{scoring}.device_mapping",
                f"{overlap}, and with {ratio} both compute there at the same time; write devices outside, such as "
                f"{outside}",
            )
        else:
            yield warning(
                f"{scoring}.device_mapping",
                f"{overlap}: {what} stays in their memory, so set {scoring}.strategy_args.strategy_config."
                "mem_fraction_static to its share; or write other devices",
            )
        return


def _check_overlap(config: RLConfig, role: str) -> Iterator[Finding]:
    """Engines that generate while a role computes share all its devices, which is slow, or none."""
    one, other = getattr(config, role).device_mapping, config.actor_infer.device_mapping
    shared = sorted(set(one) & set(other))
    if not shared or one == other:
        return
    path, ratio = "actor_infer.device_mapping", f"async_generation_ratio {config.async_generation_ratio:g}"
    if set(one) == set(other):
        yield error(path, f"lists the devices of {role} in another order; to share them write {spans(one)}")
        return
    outside = spans(range(max(one) + 1, max(one) + 1 + len(other)))
    yield error(
        path,
        f"overlaps {role}.device_mapping in {_short(shared)}, and with {ratio} both compute there at the same time: "
        f"write devices outside, such as {outside}, to separate them, or set the ratio to 0, where they take turns",
    )


def _short(ranks: list[int]) -> str:
    names = ", ".join(str(rank) for rank in ranks[:4])
    return f"device{'s' if len(ranks) > 1 else ''} {names}" + (", ..." if len(ranks) > 4 else "")
