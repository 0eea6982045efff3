"""Which old log-probs of a batch need a pass of their own before the training pass."""

from __future__ import annotations

from roll.algorithms.options.policy_options import known_losses
from roll.configs.pipeline import LearnerOptions, RLConfig


def needs_old_log_probs(config: LearnerOptions) -> bool:
    """Whether something reads the old log-probs of a batch before its training pass.

    Such are a KL term in the reward, a teacher, an estimator of the optimal baseline, what a correction decides over
    the whole batch, samples that are left out of the loss (metrics count them too), losses of chosen tokens, and the
    training pass itself with `router_replay.mode: R2`.
    """
    rewards = config.add_token_level_kl or config.uses_teacher or config.uses_sum_pi_squared
    whole_batch = config.correction.renormalize or config.correction.reads_batch
    masks = config.max_len_mask or config.difficulty_mask
    chosen_tokens = any(loss.choose for loss in known_losses(config.actor_train.pg_variant))
    replay = config.actor_train.router_replay.pass_records
    return bool(rewards or whole_batch or masks or chosen_tokens or replay)


def training_gives_old_log_probs(config: LearnerOptions) -> bool:
    """Whether the first optimizer step of a batch gives the old log-probs of its samples, from a run's second step on.

    Before that optimizer step the old policy is the current one. False where something reads old log-probs earlier, or
    where those of the engine are taken.
    """
    return config.old_log_probs_source != "behavior" and not needs_old_log_probs(config)


def samples_with_own_pass(config: RLConfig) -> int:
    """Samples of a batch, masked ones too, whose old log-probs take a pass of their own from a run's second step on."""
    if config.old_log_probs_source == "behavior":
        return 0
    given = config.actor_train.samples_per_optimizer_step if training_gives_old_log_probs(config) else 0
    return config.filled_samples_per_batch - given
