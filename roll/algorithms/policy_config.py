"""What the policy loss needs to know, typed and picklable: it travels from the driver to every training rank."""

from __future__ import annotations

from dataclasses import dataclass, fields

from roll.configs.pipeline import RLConfig


@dataclass(frozen=True)
class PolicyLossConfig:
    """Settings of the `policy` loss, under the names and meanings of the YAML keys."""

    pg_variant: str = "ppo"
    pg_clip_low: float = 0.2
    pg_clip_high: float = 0.2
    dual_clip_loss: bool = False
    dual_clip_c: float = 3.0
    loss_agg_mode: str = "seq-mean-token-mean"
    entropy_loss_coef: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    kl_penalty: str = "k3"

    @classmethod
    def from_config(cls, config: RLConfig) -> PolicyLossConfig:
        """The settings of a run; `pg_variant` is actor_train's, all others stand at the top level."""
        shared = {field.name: getattr(config, field.name) for field in fields(cls) if field.name != "pg_variant"}
        return cls(pg_variant=config.actor_train.pg_variant, **shared)

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether the loss differentiates the entropy; without it, one computed under no_grad is enough."""
        return self.entropy_loss_coef != 0.0
