"""Rewards that exist, tell responses apart, and are asked; and names of code that have the form of one."""

from __future__ import annotations

from roll.configs.errors import Report
from roll.configs.pipeline import RewardConfig, RLConfig, RLVRConfig

CLASSES = ("rollouter_class", "trainer_class", "metrics_class", "monitor_class")
"""Keys of `async_training` that name a class."""


def check_rewards(config: RLConfig, report: Report) -> None:
    """Every reward scores something; what names a class or a function does so. Whether it is there, the run asks."""
    for key in CLASSES:
        name = getattr(config.async_training, key)
        if name is not None and not _names_code(name):
            report.error(f"async_training.{key}", f"{name!r} names no class; write module:Class")
    if not isinstance(config, RLVRConfig):
        return
    if not config.rewards:
        report.error("rewards", "is empty, so nothing scores a response; describe one, such as math_rule: {}")
    taken: dict[str, str] = {}
    everything = ""
    for name, reward in config.rewards.items():
        _check_reward(f"rewards.{name}", reward, report)
        owners = [everything] if everything else [taken[tag] for tag in reward.tag_included if tag in taken]
        if everything or (owners and len(owners) == len(reward.tag_included)):
            report.error(
                f"rewards.{name}",
                f"scores nothing: {' and '.join(dict.fromkeys(owners))} before it takes "
                f"{'every tag' if everything else 'its tags'}; change tag_included there, or remove one of them",
            )
        taken = {**dict.fromkeys(reward.tag_included, f"rewards.{name}"), **taken}
        if not reward.tag_included:
            everything = everything or f"rewards.{name}"


def _check_reward(path: str, reward: RewardConfig, report: Report) -> None:
    if not _names_code(reward.function):
        report.error(f"{path}.function", f"{reward.function!r} names no function; write module:function")
    if reward.function == RewardConfig().function and reward.correct_score == reward.wrong_score:
        report.error(
            f"{path}.correct_score",
            f"{reward.correct_score:g} is wrong_score too, so every answer is worth the same and nothing is learned; "
            "use two scores",
        )


def _names_code(name: str) -> bool:
    """Whether it reads `module:name`."""
    module, colon, attribute = name.partition(":")
    return bool(colon and attribute.isidentifier() and all(part.isidentifier() for part in module.split(".")))
