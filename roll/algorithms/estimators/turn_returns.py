"""Estimators that give all tokens of a turn one advantage.

r_k is the reward of turn k minus the KL penalty of its tokens, and R is the score of the trajectory minus the KL
penalty of all its tokens. `reward_normalization` defines norm(x; groups) = (x - mean) / (std + EPSILON), with mean and
std over the groups, over the batch, or left out; the result is exactly 0 for values that are alone or whose standard
deviation is at most EPSILON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from roll.algorithms.aggregation import EPSILON, group_std, masked, normalize, zero_variance
from roll.algorithms.estimators.base import DiscountOptions, RewardBatch, estimator, given
from roll.algorithms.lazy_torch import Tensor, torch
from roll.algorithms.returns import discounted_sum
from roll.algorithms.turns import Turns, consecutive
from roll.base.schema import option

METHODS: dict[str, dict[str, str | None]] = {
    "identity": {"norm_mean_type": None, "norm_std_type": None},
    "mean": {"norm_mean_type": "group", "norm_std_type": None},
    "mean_std": {"norm_mean_type": "group", "norm_std_type": "group"},
}
"""`method` in recipes of ROLL -> the two types with the same meaning."""


@dataclass
class RewardNormalization:
    """Which rewards are normalised together, and how."""

    grouping: Literal["traj_group_id", "traj_id", "tags", "batch"] = option(
        "traj_group_id",
        "What a group is: trajectories with one initial state, the turns of one trajectory, one tag, or the batch.",
    )
    norm_mean_type: Literal["batch", "group"] | None = option("group", "Subtract this mean; null: none.")
    norm_std_type: Literal["batch", "group"] | None = option(
        "group", "Divide by this standard deviation; null: by none."
    )


def read_normalization(value: Any) -> Any:
    """A `reward_normalization` section with `method` replaced by the two types; any other value unchanged.

    Raises:
        ValueError: the method is unknown, or given together with a type it sets.
    """
    if not isinstance(value, Mapping) or "method" not in value:
        return value
    method = value["method"]
    if method == "asym_clip":
        raise ValueError(
            "method asym_clip is not available: use norm_mean_type: group and norm_std_type: group, and bound the "
            "result with advantage_clip"
        )
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(
            f"method {method!r} is not one of {', '.join(METHODS)}; or give norm_mean_type and norm_std_type"
        )
    both = [name for name in METHODS[method] if name in value]
    if both:
        raise ValueError(f"method {method} is another spelling of {' and '.join(both)}, which is given too; keep one")
    return {key: item for key, item in value.items() if key != "method"} | METHODS[method]


@dataclass
class TurnNormOptions:
    """The key of all of them."""

    reward_normalization: RewardNormalization = option(
        factory=RewardNormalization,
        parse=read_normalization,
        help="Which rewards gigpo, step_reinforce and agentic_reinforce normalise together, and how.",
    )


@dataclass
class TurnReturnOptions(TurnNormOptions):
    """The keys of estimators with a discounted return of turns."""

    step_reward_gamma: float = option(0.95, "Discount from one turn to the one before.", ge=0, le=1)


@dataclass
class GiGPOOptions(TurnReturnOptions):
    """The keys of GiGPO."""

    episode_reward_weight: float = option(1.0, "Weight of the normalised score of the episode.", ge=0)
    step_reward_weight: float = option(1.0, "Weight of the normalised return of the turn.", ge=0)


@dataclass
class AgenticReinforceOptions(DiscountOptions, TurnNormOptions):
    """The keys of REINFORCE over turns with a normalised score."""


@estimator("gigpo", options=GiGPOOptions, needs="turns")
def gigpo(batch: RewardBatch, options: GiGPOOptions) -> tuple[Tensor, Tensor]:
    """A of turn k = w_e norm(R; grouping) + w_s norm(G_k; states), with G_k = r_k + step_reward_gamma G_{k+1}.

    w_e is `episode_reward_weight`, w_s `step_reward_weight`. The first term compares trajectories; the second compares
    turns that began in the same state, and is 0 for a state that only one turn of the group began in. Source: GiGPO
    (Feng et al. 2025, arXiv 2505.10978) section 4.

    Returns:
        Advantages [B, T], and G of each token's turn [B, T].
    """
    turns, listed = _turns(batch)
    returns = listed.discounted(turn_rewards(batch, turns, listed), options.step_reward_gamma)
    norm = options.reward_normalization
    episodes = _normalized(batch.episode_rewards, batch.episodes.per_episode(_group_ids(batch, turns, norm)), norm)
    steps = _normalized(returns, turns.state_ids[listed.rows, listed.columns], norm)
    advantage = options.episode_reward_weight * episodes[listed.episode] + options.step_reward_weight * steps
    return to_tokens(advantage, batch, turns, listed), to_tokens(returns, batch, turns, listed)


@estimator("step_reinforce", options=TurnReturnOptions, needs="turns")
def step_reinforce(batch: RewardBatch, options: TurnReturnOptions) -> tuple[Tensor, Tensor]:
    """A of turn k = norm(G_k; grouping), with G_k = r_k + step_reward_gamma G_{k+1}: REINFORCE over turns.

    Mean and std are over turns, so a long trajectory has more weight in them than a short one. Source: Williams 1992,
    with a turn as the action.

    Returns:
        Advantages [B, T], and G of each token's turn [B, T].
    """
    turns, listed = _turns(batch)
    returns = listed.discounted(turn_rewards(batch, turns, listed), options.step_reward_gamma)
    norm = options.reward_normalization
    advantage = _normalized(returns, _group_ids(batch, turns, norm)[listed.rows], norm)
    return to_tokens(advantage, batch, turns, listed), to_tokens(returns, batch, turns, listed)


@estimator("agentic_reinforce", options=AgenticReinforceOptions, needs="turns")
def agentic_reinforce(batch: RewardBatch, options: AgenticReinforceOptions) -> tuple[Tensor, Tensor]:
    """A of turn k = G_k = r'_k + gamma G_{k+1}, with rewards r' that sum to the normalized score norm(R; grouping).

    r' is r / (std + EPSILON), or r without a std. The last turn also gets the difference between norm(R; grouping) and
    the sum of these: the subtracted mean, and the change made by `reward_clip` or `whiten_rewards`. A trajectory that
    is rewarded only at its end therefore has the normalized score at the last turn and 0 before; with zero variance
    all its rewards are 0. Source: Williams 1992, with a turn as the action.

    Returns:
        Advantages [B, T], and the same tensor as returns.
    """
    turns, listed = _turns(batch)
    norm, scores = options.reward_normalization, batch.episode_rewards
    ids = batch.episodes.per_episode(_group_ids(batch, turns, norm))
    rewards = turn_rewards(batch, turns, listed) * _scale(scores, ids, norm)[listed.episode]
    rest = _normalized(scores, ids, norm) - listed.sum_turns(rewards, len(scores))
    rewards = rewards + torch.where(listed.last, rest[listed.episode], 0.0)
    returns = to_tokens(listed.discounted(rewards, options.gamma), batch, turns, listed)
    return returns, returns


@dataclass(frozen=True)
class TurnList:
    """The N turns of a batch as a flat list: in order within each sample, samples in batch order, without padding.

    Attributes:
        rows: [N] the sample that contains the turn.
        columns: [N] the index of the turn in that sample.
        episode: [N] its trajectory, as numbered by `Episodes`.
        position: [N] the index of the turn in the trajectory.
        last: [N] bool, whether it is the last turn of the trajectory.
    """

    rows: Tensor
    columns: Tensor
    episode: Tensor
    position: Tensor
    last: Tensor

    @classmethod
    def of(cls, batch: RewardBatch, turns: Turns) -> TurnList:
        """The turns of a batch."""
        of_row = batch.episodes.of_row
        numbers = torch.arange(turns.turn_rewards.shape[1], device=of_row.device)
        present = (numbers < turns.turn_count[:, None]) & (of_row >= 0)[:, None]
        rows, columns = present.nonzero(as_tuple=True)
        episode = of_row[rows]
        order = episode.argsort(stable=True)
        counts = torch.bincount(episode, minlength=len(batch.episodes.rows))
        position = torch.empty_like(episode)
        position[order] = torch.arange(len(order), device=of_row.device) - (counts.cumsum(0) - counts)[episode[order]]
        return cls(rows, columns, episode, position, position == counts[episode] - 1)

    def sum_turns(self, values: Tensor, episodes: int) -> Tensor:
        """[E] sums of values [N] over the turns of each of the E trajectories."""
        return values.new_zeros(episodes).index_add_(0, self.episode, values)

    def discounted(self, rewards: Tensor, gamma: float) -> Tensor:
        """Returns G_k = r_k + gamma G_{k+1} [N] within each trajectory, from rewards r [N]."""
        if not len(rewards):
            return rewards
        table = rewards.new_zeros(int(self.episode.max()) + 1, int(self.position.max()) + 1)
        table[self.episode, self.position] = rewards
        return discounted_sum(table, gamma)[self.episode, self.position]


def _turns(batch: RewardBatch) -> tuple[Turns, TurnList]:
    turns = given(batch.turns)
    return turns, TurnList.of(batch, turns)


def turn_rewards(batch: RewardBatch, turns: Turns, listed: TurnList) -> Tensor:
    """The reward r [N] of each turn minus the KL penalty of its tokens."""
    rewards = turns.turn_rewards.float()
    if batch.token_kl is not None:
        kl = masked(batch.token_kl, batch.response_mask)
        rewards = rewards.scatter_add(1, turns.turn_index.clamp(min=0), -kl)
    return rewards[listed.rows, listed.columns]


def to_tokens(values: Tensor, batch: RewardBatch, turns: Turns, listed: TurnList) -> Tensor:
    """[B, T] from values of turns [N]: every response token gets the value of its turn, all other tokens get 0."""
    table = values.new_zeros(turns.turn_rewards.shape)
    table[listed.rows, listed.columns] = values
    return masked(table.gather(1, turns.turn_index.clamp(min=0)), batch.response_mask)


def _group_ids(batch: RewardBatch, turns: Turns, norm: RewardNormalization) -> Tensor:
    """[B] ids that are equal for the samples of one group, as `grouping` defines it."""
    return {
        "traj_group_id": batch.groups,
        "traj_id": turns.trajectory_ids,
        "tags": turns.tag_ids,
        "batch": torch.zeros_like(batch.groups),
    }[norm.grouping]


def _sets(ids: Tensor, norm: RewardNormalization) -> tuple[Tensor | None, Tensor | None]:
    """The numbers [n] of the sets of the mean and of the std, from ids [n] that are equal in a group."""
    groups = consecutive(ids)
    numbers = {"group": groups, "batch": torch.zeros_like(groups), None: None}
    return numbers[norm.norm_mean_type], numbers[norm.norm_std_type]


def _normalized(values: Tensor, ids: Tensor, norm: RewardNormalization) -> Tensor:
    """norm(values [n]; ids [n]), see the module docstring."""
    return normalize(values, *_sets(ids, norm), minimum_std=EPSILON)


def _scale(values: Tensor, ids: Tensor, norm: RewardNormalization) -> Tensor:
    """[n] the factor that `_normalized` applies to the values."""
    if not values.numel():
        return values
    sets = _sets(ids, norm)
    scale = torch.ones_like(values) if sets[1] is None else 1.0 / (group_std(values, sets[1]) + EPSILON)
    return torch.where(zero_variance(values, sets, EPSILON), 0.0, scale)
