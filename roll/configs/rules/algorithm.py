"""Estimators, losses and KL terms that exist and fit together."""

from __future__ import annotations

from collections.abc import Sequence

from roll.configs.agentic import AgenticConfig
from roll.configs.errors import Report
from roll.configs.names import ADV_ESTIMATORS, GROUP_ESTIMATORS, PG_VARIANTS, TURN_ESTIMATORS
from roll.configs.pipeline import RLConfig, RLVRConfig
from roll.configs.suggestions import nearest


def check_algorithm(config: RLConfig, report: Report) -> None:
    """Names are known, groups are large enough, and terms that are on have a weight."""
    check_name("adv_estimator", config.adv_estimator, ADV_ESTIMATORS, report)
    check_name("actor_train.pg_variant", config.actor_train.pg_variant, PG_VARIANTS, report)
    if config.adv_estimator in TURN_ESTIMATORS and isinstance(config, RLVRConfig):
        report.error(
            "adv_estimator",
            f"{config.adv_estimator} is for trajectories of several turns, and a response of pipeline rlvr is one; use "
            "grpo or reinforce",
        )
    group = config.num_return_sequences_in_group
    if config.adv_estimator in GROUP_ESTIMATORS and group == 1:
        report.error(
            "train_env_manager.group_size" if isinstance(config, AgenticConfig) else "num_return_sequences_in_group",
            f"1 gives every sample of {config.adv_estimator} advantage 0, so nothing is learned; use at least 2, "
            "or adv_estimator reinforce",
        )
    if config.adv_estimator == "lite_ppo" and config.loss_agg_mode != "token-mean":
        report.warn("loss_agg_mode", f"{config.loss_agg_mode} is not what lite_ppo was made for; use token-mean")
    if not config.is_num_return_sequences_expand and group > 1:
        report.error(
            "is_num_return_sequences_expand",
            "false is not available: each sample is a request with its own seed; set it to true or leave it out",
        )
    if config.use_kl_loss and config.kl_loss_coef == 0:
        report.error("kl_loss_coef", "0 turns off the KL that use_kl_loss asks for; use a weight such as 0.001")
    if config.add_token_level_kl and config.init_kl_coef == 0:
        report.error("init_kl_coef", "0 turns off the KL that add_token_level_kl asks for; use a weight such as 0.001")
    if config.adv_estimator in GROUP_ESTIMATORS and config.add_token_level_kl:
        report.warn(
            "add_token_level_kl",
            f"with {config.adv_estimator} the KL of a response is summed into its one score; use_kl_loss keeps it per "
            "token",
        )
    _check_old_log_probs(config, report)


def check_name(path: str, name: str, known: Sequence[str], report: Report) -> None:
    """An error that lists the known names where `name` is none of them."""
    if name not in known:
        like = nearest(name, known)
        hint = f"; did you mean {like}?" if like else ""
        report.error(path, f"{name!r} is not known; known: {', '.join(known)}{hint}")


def _check_old_log_probs(config: RLConfig, report: Report) -> None:
    if config.old_log_probs_source != "behavior" or config.async_generation_ratio > 0:
        return
    report.warn(
        "old_log_probs_source",
        "behavior in synchronous training takes the engine's log-probs for those of the trainer, so the first ratio is "
        "not exactly 1; auto recomputes them",
    )
