"""Batches of multi-turn trajectories, and the advantage estimators that assign one advantage to all tokens of a turn.

A sample is a whole trajectory of up to K turns, or a single turn of one (step sampling: K is 1, and several samples
belong to one trajectory). Samples without response tokens are padding and are ignored.

In the estimators, r_k is the reward of turn k minus the KL penalty of its tokens, and R is the score of the trajectory
minus the KL penalty of all its tokens. `reward_normalization` defines norm(x; groups) = (x - mean) / (std + EPSILON),
with mean and std over the groups, over the batch, or left out; the result is exactly 0 for values that are alone or
whose standard deviation is at most EPSILON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from roll.algorithms.aggregation import EPSILON, masked, normalize, std_divisor, zero_variance
from roll.algorithms.lazy_torch import Tensor, torch
from roll.algorithms.returns import discounted_sum
from roll.algorithms.turn_options import RewardNormalization

if TYPE_CHECKING:
    from roll.algorithms.adv_estimators import RewardBatch
    from roll.algorithms.advantages import AdvantageSettings


@dataclass(frozen=True)
class Turns:
    """Tensors that describe the turns of a batch.

    Attributes:
        turn_index: [B, T] int64, the turn of each response token, counted from 0 in its sample; -1 elsewhere.
        turn_rewards: [B, K] float32, the environment's reward for each turn; 0 after the last.
        turn_count: [B] int64.
        state_ids: [B, K] int64, equal for turns of one group that began in the same state; -1 after the last.
        trajectory_ids: [B] int64; the samples of one trajectory are in the order of its turns.
        tag_ids: [B] int64, the environment tag.
    """

    turn_index: Tensor
    turn_rewards: Tensor
    turn_count: Tensor
    state_ids: Tensor
    trajectory_ids: Tensor
    tag_ids: Tensor


TURN_KEYS = tuple(item.name for item in fields(Turns))
"""Names of the batch tensors that `read_turns` reads."""


def read_turns(batch: Mapping[str, Tensor]) -> Turns | None:
    """The turns of a batch; None if it has no `turn_index`.

    Raises:
        ValueError: only some of the tensors are present.
    """
    present = set(batch.keys())
    if "turn_index" not in present:
        return None
    missing = [name for name in TURN_KEYS if name not in present]
    if missing:
        raise ValueError(f"the batch has turn_index but not {', '.join(missing)}; turns need all of {TURN_KEYS}")
    return Turns(**{name: batch[name] for name in TURN_KEYS})


def check_turns(turns: Turns, scores: Tensor, groups: Tensor, response_mask: Tensor) -> None:
    """Checks that the turns are consistent with the rest of the batch.

    Raises:
        ValueError: a response token belongs to no turn, a turn has no finite reward or no state, or samples of one
            trajectory differ in score or group.
    """
    mask = response_mask.bool()
    live = mask.any(-1)
    columns = torch.arange(turns.turn_rewards.shape[1], device=mask.device)
    present = (columns < turns.turn_count[:, None]) & live[:, None]
    turn = turns.turn_index
    _refuse((mask & ((turn < 0) | (turn >= turns.turn_count[:, None]))).any(-1), "have response tokens of no turn")
    _refuse(live & (turns.turn_count > len(columns)), f"have more turns than the {len(columns)} of turn_rewards")
    _refuse((present & ~turns.turn_rewards.isfinite()).any(-1), "have turn_rewards that are not finite")
    _refuse((present & (turns.state_ids < 0)).any(-1), "have turns without a state (state_ids below 0)")
    episodes = episodes_of(mask, turns)
    for name, values in (("scores", scores), ("group_ids", groups)):
        differs = live & (values != episodes.to_samples(episodes.per_episode(values)))
        _refuse(differs, f"differ in {name} from the first sample of their trajectory")


def _refuse(bad: Tensor, what: str) -> None:
    if bool(bad.any()):
        raise ValueError(f"samples {bad.nonzero().flatten()[:8].tolist()} {what}")


@dataclass(frozen=True)
class Episodes:
    """The E episodes of a batch: its trajectories, or its samples if it has no turns.

    Attributes:
        rows: [E] int64, the first sample of each episode.
        of_row: [B] int64, the episode of each sample; -1 for padding.
    """

    rows: Tensor
    of_row: Tensor

    def per_episode(self, values: Tensor) -> Tensor:
        """[E] from values [B] that are equal for all samples of an episode."""
        return values[self.rows]

    def group_numbers(self, ids: Tensor) -> Tensor:
        """[E] group numbers from 0, from ids [B]."""
        return _consecutive(self.per_episode(ids))

    def sum_samples(self, values: Tensor) -> Tensor:
        """[E] sums of values [B] over the samples of each episode."""
        live = self.of_row >= 0
        return values.new_zeros(len(self.rows)).index_add_(0, self.of_row[live], values[live])

    def to_samples(self, values: Tensor) -> Tensor:
        """[B] from values [E]: each sample gets the value of its episode, padding gets 0."""
        return torch.cat([values, values.new_zeros(1)])[self.of_row]


def episodes_of(response_mask: Tensor, turns: Turns | None) -> Episodes:
    """The episodes of a batch with response_mask [B, T]; without turns every sample is one, including padding."""
    samples = torch.arange(len(response_mask), device=response_mask.device)
    if turns is None:
        return Episodes(samples, samples)
    live = samples[response_mask.bool().any(-1)]
    episode = _consecutive(turns.trajectory_ids[live])
    of_row = torch.full_like(samples, -1)
    of_row[live] = episode
    count = int(episode.max()) + 1 if len(episode) else 0
    first = samples.new_full((count,), len(samples)).scatter_reduce_(0, episode, live, "amin")
    return Episodes(first, of_row)


def _consecutive(ids: Tensor) -> Tensor:
    """Numbers from 0 without gaps, in the order of the ids [n]; equal where the ids are equal."""
    numbers: Tensor = torch.unique(ids, return_inverse=True)[1]
    return numbers


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


def gigpo(batch: RewardBatch, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """A of turn k = w_e norm(R; grouping) + w_s norm(G_k; states), with G_k = r_k + step_reward_gamma G_{k+1}.

    w_e is `episode_reward_weight`, w_s `step_reward_weight`. The first term compares trajectories; the second compares
    turns that began in the same state, and is 0 for a state that only one turn of the group began in. Source: GiGPO
    (Feng et al. 2025, arXiv 2505.10978) section 4.

    Returns:
        Advantages [B, T], and G of each token's turn [B, T].

    Raises:
        ValueError: the batch has no turns.
    """
    turns, listed = _turns(batch, "gigpo")
    returns = listed.discounted(turn_rewards(batch, turns, listed), config.step_reward_gamma)
    norm = config.reward_normalization
    episodes = _normalized(batch.episode_rewards, batch.episodes.per_episode(_group_ids(batch, turns, norm)), norm)
    steps = _normalized(returns, turns.state_ids[listed.rows, listed.columns], norm)
    advantage = config.episode_reward_weight * episodes[listed.episode] + config.step_reward_weight * steps
    return to_tokens(advantage, batch, turns, listed), to_tokens(returns, batch, turns, listed)


def step_reinforce(batch: RewardBatch, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """A of turn k = norm(G_k; grouping), with G_k = r_k + step_reward_gamma G_{k+1}: REINFORCE over turns.

    Mean and std are over turns, so a long trajectory has more weight in them than a short one. Source: Williams 1992,
    with a turn as the action.

    Returns:
        Advantages [B, T], and G of each token's turn [B, T].

    Raises:
        ValueError: the batch has no turns.
    """
    turns, listed = _turns(batch, "step_reinforce")
    returns = listed.discounted(turn_rewards(batch, turns, listed), config.step_reward_gamma)
    norm = config.reward_normalization
    advantage = _normalized(returns, _group_ids(batch, turns, norm)[listed.rows], norm)
    return to_tokens(advantage, batch, turns, listed), to_tokens(returns, batch, turns, listed)


def agentic_reinforce(batch: RewardBatch, config: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """A of turn k = G_k = r'_k + gamma G_{k+1}, with rewards r' that sum to the normalized score norm(R; grouping).

    r' is r / (std + EPSILON), or r without a std. The last turn also gets the difference between norm(R; grouping) and
    the sum of these: the subtracted mean, and the change made by `reward_clip` or `whiten_rewards`. A trajectory that
    is rewarded only at its end therefore has the normalized score at the last turn and 0 before; with zero variance
    all its rewards are 0. Source: Williams 1992, with a turn as the action.

    Returns:
        Advantages [B, T], and the same tensor as returns.

    Raises:
        ValueError: the batch has no turns.
    """
    turns, listed = _turns(batch, "agentic_reinforce")
    norm, scores = config.reward_normalization, batch.episode_rewards
    ids = batch.episodes.per_episode(_group_ids(batch, turns, norm))
    rewards = turn_rewards(batch, turns, listed) * _scale(scores, ids, norm)[listed.episode]
    rest = _normalized(scores, ids, norm) - listed.sum_turns(rewards, len(scores))
    rewards = rewards + torch.where(listed.last, rest[listed.episode], 0.0)
    returns = to_tokens(listed.discounted(rewards, config.gamma), batch, turns, listed)
    return returns, returns


def _turns(batch: RewardBatch, name: str) -> tuple[Turns, TurnList]:
    if batch.turns is None:
        raise ValueError(
            f"adv_estimator {name} needs the turns of trajectories ({', '.join(TURN_KEYS)}), which this batch lacks; "
            "use grpo or reinforce for single-turn responses"
        )
    return batch.turns, TurnList.of(batch, batch.turns)


def _group_ids(batch: RewardBatch, turns: Turns, norm: RewardNormalization) -> Tensor:
    """[B] ids that are equal for the samples of one group, as `grouping` defines it."""
    return {
        "traj_group_id": batch.groups,
        "traj_id": turns.trajectory_ids,
        "tags": turns.tag_ids,
        "batch": torch.zeros_like(batch.groups),
    }[norm.grouping]


def _normalized(values: Tensor, ids: Tensor, norm: RewardNormalization) -> Tensor:
    """norm(values [n]; ids [n]), see the module docstring."""
    return normalize(values, _consecutive(ids), norm.norm_mean_type, norm.norm_std_type, minimum_std=EPSILON)


def _scale(values: Tensor, ids: Tensor, norm: RewardNormalization) -> Tensor:
    """[n] the factor that `_normalized` applies to the values."""
    if not values.numel():
        return values
    groups = _consecutive(ids)
    scale = torch.ones_like(values)
    if norm.norm_std_type is not None:
        scale = scale / std_divisor(values, groups, norm.norm_std_type)
    flat = zero_variance(values, groups, (norm.norm_mean_type, norm.norm_std_type), EPSILON)
    return torch.where(flat, 0.0, scale)
