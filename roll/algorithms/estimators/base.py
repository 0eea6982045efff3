"""What all advantage estimators share: what they read, what they give, and how one is registered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

from roll.algorithms.aggregation import masked
from roll.algorithms.lazy_torch import Tensor, torch
from roll.algorithms.registry import Algorithm, Registry
from roll.algorithms.returns import response_returns, token_rewards, turn_token_rewards
from roll.algorithms.turns import TURN_KEYS, Episodes, Turns, episodes_of
from roll.base.schema import option

Value = TypeVar("Value")


@dataclass(frozen=True)
class RewardBatch:
    """Input of an estimator, after `reward_clip` and `whiten_rewards`.

    Attributes:
        scores: R_i [B].
        token_kl: [B, T] the KL penalty of each token (coefficient times KL); None without `add_token_level_kl`.
        groups: [B] int64, equal for the samples of one prompt, or of trajectories from one start state.
        response_mask: [B, T] bool.
        turns: of trajectories; None for single-turn responses.
        values: [B, T] of a critic, index t for the tokens before t; None without one.
        baselines: [B] score of the greedy response to each sample's prompt, after the overlong penalty and
            `reward_clip`; None without greedy responses.
        teacher_kl: [B, T] log-prob of the policy minus that of the teacher for each sampled token; None without one.
        reward_parts: [B, R] score of each reward before its weight, without `reward_clip` and `whiten_rewards`; NaN
            where a reward does not score the sample. None if only their sum is known.
        reward_weights: of each reward.
        overlong: [B] what the scores have lost by `overlong_buffer_len` and the penalties of lengths; None: nothing.
        squared_gradients: [B, T] square of the gradient of a token's log-prob with respect to the logits, times that of
            its weight in the loss; None where the probabilities of all tokens are not known.
    """

    scores: Tensor
    token_kl: Tensor | None
    groups: Tensor
    response_mask: Tensor
    turns: Turns | None = None
    values: Tensor | None = None
    baselines: Tensor | None = None
    teacher_kl: Tensor | None = None
    reward_parts: Tensor | None = None
    overlong: Tensor | None = None
    squared_gradients: Tensor | None = None
    reward_weights: tuple[float, ...] = ()

    @cached_property
    def episodes(self) -> Episodes:
        """The units that statistics over scores count: trajectories, or samples if there are no turns."""
        return episodes_of(self.response_mask, self.turns)

    @property
    def episode_rewards(self) -> Tensor:
        """R [E]: the score of each episode minus the KL penalty of its tokens; one without a token has a score too."""
        rewards = self.episodes.per_episode(self.scores)
        return rewards if self.token_kl is None else rewards - self.episode_kl

    @property
    def episode_kl(self) -> Tensor:
        """[E] KL penalty of all tokens of each episode."""
        if self.token_kl is None:
            return torch.zeros_like(self.episodes.per_episode(self.scores))
        return self.episodes.sum_samples(masked(self.token_kl, self.response_mask).sum(-1))

    @property
    def episode_groups(self) -> Tensor:
        """[E] group number of each episode."""
        return self.episodes.group_numbers(self.groups)

    def token_rewards(self) -> Tensor:
        """[B, T] the score at the last token, or the reward of each turn at its last one, minus the KL penalty."""
        if self.turns is None:
            return token_rewards(self.scores, self.token_kl, self.response_mask)
        return turn_token_rewards(self.scores, self.token_kl, self.response_mask, self.turns, self.episodes)


EstimatorFormula = Callable[[RewardBatch, Any], tuple[Tensor, Tensor]]

NEEDS = {
    "turns": f"the turns of trajectories ({', '.join(TURN_KEYS)})",
    "values": "the values of a critic",
    "baselines": "the score of a greedy response to each prompt",
    "teacher_kl": "the log-probs of a teacher",
    "reward_parts": "the score of each reward",
    "squared_gradients": "the log-probs and the sums of squared probabilities of the trainer",
}
"""What a batch may lack, by its attribute."""


@dataclass(frozen=True)
class Estimator(Algorithm):
    """An advantage estimator: f(batch, options) -> advantages [B, T], returns [B, T].

    Attributes:
        needs: the attribute of the batch without which there are no advantages, one of NEEDS; empty: none.
        in_group: it compares a response with the others to its prompt.
        per_response: all tokens of a response have the same advantage.
        whitens: it whitens advantages by definition.
        norm_types: the values of `norm_mean_type` and `norm_std_type` that have an effect.
    """

    needs: Literal["", "turns", "values", "baselines", "teacher_kl", "reward_parts", "squared_gradients"] = ""
    in_group: bool = False
    per_response: bool = False
    whitens: bool = False
    norm_types: tuple[str, ...] = ()

    def __call__(self, batch: RewardBatch, options: Any) -> tuple[Tensor, Tensor]:
        if self.needs and getattr(batch, self.needs) is None:
            raise ValueError(
                f"adv_estimator {self.name} needs {NEEDS[self.needs]}, which this batch lacks; use grpo, rloo or "
                "reinforce"
            )
        result: tuple[Tensor, Tensor] = self.formula(batch, options)
        return result


ADV_ESTIMATORS: Registry[Estimator] = Registry("adv_estimator")


def estimator(name: str, **declared: Any) -> Callable[[EstimatorFormula], Estimator]:
    """Decorator that registers a formula as the `adv_estimator` of this name; `declared` are attributes of it."""
    return lambda formula: ADV_ESTIMATORS.register(name)(Estimator(name, formula, **declared))


@dataclass
class DiscountOptions:
    """The key of estimators with a discounted return to go."""

    gamma: float = option(1.0, "Discount of the return to go.", ge=0, le=1)


def given(value: Value | None) -> Value:
    """The value that the trait `needs` of an estimator promises."""
    assert value is not None
    return value


def by_response(batch: RewardBatch, advantage: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Assigns f(R [E], groups [E]) of each episode to all its tokens; the returns are the undiscounted return to go."""
    mask = batch.response_mask
    per_sample = batch.episodes.to_samples(advantage(batch.episode_rewards, batch.episode_groups))
    return masked(per_sample[:, None], mask), response_returns(batch.scores, batch.token_kl, mask, 1.0)
