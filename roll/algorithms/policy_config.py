"""What the policy loss needs to know, typed and picklable: it travels from the driver to every training rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from roll.configs.agentic_learning import keys_of
from roll.configs.pipeline import RLConfig
from roll.configs.policy import CorrectionOptions, proximal_source, ratio_base


@dataclass(frozen=True)
class PolicyLossConfig:
    """Settings of the `policy` loss, under the names and meanings of the YAML keys, none of them `auto`."""

    pg_variant: str = "ppo"
    pg_ratio_base: str = "proximal"
    old_log_probs_source: str = "recompute"
    ratio_type: str = "token"
    correction: CorrectionOptions = field(default_factory=CorrectionOptions)
    pg_clip_low: float = 0.2
    pg_clip_high: float = 0.2
    dual_clip_loss: bool = False
    dual_clip_c: float = 3.0
    gspo_clip_low: float = 3e-4
    gspo_clip_high: float = 4e-4
    tis_lower_bound: float = 0.0
    tis_upper_bound: float = 1.0
    topr_positive_weight: float = 1.0
    topr_negative_weight: float = 1.0
    topr_level: str = "token"
    cispo_epsilon_low: float = 0.1
    cispo_epsilon_high: float = 0.1
    cispo_use_unified_mask: bool = False
    kimi15_tau: float = 0.1
    loss_agg_mode: str = "seq-mean-token-mean"
    entropy_loss_coef: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    kl_penalty: str = "k3"

    @classmethod
    def from_config(cls, config: RLConfig) -> PolicyLossConfig:
        """The settings of a run; `pg_variant` is actor_train's, all others stand at the top level.

        A run without turns has no `ratio_type`; its ratios are those of tokens.
        """
        variant = config.actor_train.pg_variant
        source = proximal_source(config, variant, config.async_generation_ratio)
        settled: dict[str, Any] = {
            "pg_variant": variant,
            "old_log_probs_source": source,
            "pg_ratio_base": ratio_base(config, variant, source),
        }
        shared = {name: getattr(config, name) for name in keys_of(cls, config) if name not in settled}
        return cls(**settled, **shared)

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
