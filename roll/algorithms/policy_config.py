"""Settings of the policy loss, typed and picklable: the driver sends them to every training rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from roll.configs.pipeline import RLConfig
from roll.configs.policy import PolicyOptions, options_of, proximal_source, ratio_base


@dataclass
class PolicyLossConfig(PolicyOptions):
    """The keys of the policy loss with their defaults, without `auto`, and the two that belong to other sections."""

    pg_variant: str = "ppo"
    ratio_type: Literal["token", "segment", "sequence"] = "token"
    pg_ratio_base: Literal["behavior", "proximal"] = "proximal"
    old_log_probs_source: Literal["behavior", "recompute"] = "recompute"

    @classmethod
    def from_config(cls, config: RLConfig) -> PolicyLossConfig:
        """The settings of a run; one without turns has no `ratio_type`, its ratios are those of tokens."""
        variant = config.actor_train.pg_variant
        source = proximal_source(config, variant, config.async_generation_ratio)
        resolved: dict[str, Any] = {
            "pg_variant": variant,
            "old_log_probs_source": source,
            "pg_ratio_base": ratio_base(config, variant, source),
        }
        return cls(**options_of(cls, config) | resolved)

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether the loss differentiates the entropy; without it, one computed under no_grad is enough."""
        return self.entropy_loss_coef != 0.0

    @property
    def bypass(self) -> bool:
        """Whether there is no proximal policy: the correction compares the current policy with the sampling one."""
        return self.old_log_probs_source == "behavior"

    @property
    def reads_turns(self) -> bool:
        """Whether the loss needs `turn_index`."""
        return self.ratio_type == "segment"

    @property
    def base_key(self) -> str:
        """The tensor of a batch that the ratio is taken against."""
        return "behavior_log_probs" if self.pg_ratio_base == "behavior" else "old_log_probs"
