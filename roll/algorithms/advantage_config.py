"""What advantages need to know of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from roll.configs.agentic_learning import RewardNormalization, keys_of
from roll.configs.pipeline import RLConfig


@dataclass(frozen=True)
class AdvantageConfig:
    """Settings of the advantages, under the names and meanings of the YAML keys."""

    adv_estimator: str = "grpo"
    grpo_norm_by_std: bool = True
    norm_mean_type: str | None = None
    norm_std_type: str | None = None
    gamma: float = 1.0
    reward_clip: float | None = None
    advantage_clip: float | None = None
    whiten_rewards: bool = False
    whiten_advantages: bool = False
    add_token_level_kl: bool = False
    kl_penalty: str = "k3"
    reward_normalization: RewardNormalization = field(default_factory=RewardNormalization)
    episode_reward_weight: float = 1.0
    step_reward_weight: float = 1.0
    step_reward_gamma: float = 0.95

    @classmethod
    def from_config(cls, config: RLConfig) -> AdvantageConfig:
        """The settings of a run; those of turns are the defaults where it has none."""
        return cls(**{name: getattr(config, name) for name in keys_of(cls, config)})
