"""The turns of a batch of trajectories, and the trajectories themselves, each counted once.

A sample is a whole trajectory of up to K turns, or one turn of it (step sampling: K is 1, and several samples share a
trajectory). Samples without response tokens are padding and count for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from roll.algorithms.aggregation import EPSILON, deviation, masked, normalize, tells_nothing
from roll.configs.agentic_learning import RewardNormalization

if TYPE_CHECKING:
    from roll.algorithms.advantages import AdvantageConfig, Shaped


@dataclass(frozen=True)
class Turns:
    """What a batch says about turns.

    Attributes:
        turn_index: [B, T] int64, the turn of each response token, from 0 within its sample; -1 elsewhere.
        turn_rewards: [B, K] float32, what the environment gave for each turn; 0 behind the last.
        turn_count: [B] int64.
        state_ids: [B, K] int64, equal where two turns of one group began in the same state; -1 behind the last.
        trajectory_ids: [B] int64. Samples of one trajectory stand in the order of its turns.
        tag_ids: [B] int64, the kind of environment.
    """

    turn_index: Tensor
    turn_rewards: Tensor
    turn_count: Tensor
    state_ids: Tensor
    trajectory_ids: Tensor
    tag_ids: Tensor


TURN_KEYS = tuple(item.name for item in fields(Turns))
"""The tensors of a batch that `read_turns` takes."""


def read_turns(batch: Mapping[str, Tensor]) -> Turns | None:
    """The turns of a batch; None where it has no `turn_index`.

    Raises:
        ValueError: some of the tensors are there and some are not.
    """
    present = set(batch.keys())
    if "turn_index" not in present:
        return None
    missing = [name for name in TURN_KEYS if name not in present]
    if missing:
        raise ValueError(f"the batch has turn_index but not {', '.join(missing)}; turns need all of {TURN_KEYS}")
    return Turns(**{name: batch[name] for name in TURN_KEYS})


def check_turns(turns: Turns, scores: Tensor, groups: Tensor, response_mask: Tensor) -> None:
    """Refuses turns that contradict the rest of the batch.

    Raises:
        ValueError: a response token belongs to no turn, a turn has no finite reward or no state, or samples of one
            trajectory differ in score or group.
    """
    mask = response_mask.bool()
    live = mask.any(-1)
    columns = torch.arange(turns.turn_rewards.shape[1], device=mask.device)
    there = (columns < turns.turn_count[:, None]) & live[:, None]
    turn = turns.turn_index
    _refuse((mask & ((turn < 0) | (turn >= turns.turn_count[:, None]))).any(-1), "have response tokens of no turn")
    _refuse(live & (turns.turn_count > len(columns)), f"have more turns than the {len(columns)} of turn_rewards")
    _refuse((there & ~turns.turn_rewards.isfinite()).any(-1), "have turn_rewards that are not finite")
    _refuse((there & (turns.state_ids < 0)).any(-1), "have turns without a state (state_ids below 0)")
    episodes = episodes_of(mask, turns)
    for name, values in (("scores", scores), ("group_ids", groups)):
        differs = live & (values != episodes.spread(episodes.once(values)))
        _refuse(differs, f"differ in {name} from the first sample of their trajectory")


def _refuse(bad: Tensor, what: str) -> None:
    if bool(bad.any()):
        raise ValueError(f"samples {bad.nonzero().flatten()[:8].tolist()} {what}")


@dataclass(frozen=True)
class Episodes:
    """The E trajectories of a batch, in whatever number of samples each of them stands.

    Attributes:
        rows: [E] int64, the first sample of each.
        of_row: [B] int64, whose each sample is; -1 for padding.
    """

    rows: Tensor
    of_row: Tensor

    def once(self, values: Tensor) -> Tensor:
        """[E] of values [B] on which the samples of a trajectory agree."""
        return values[self.rows]

    def numbers(self, ids: Tensor) -> Tensor:
        """[E] group numbers from 0 on, from ids [B]."""
        return self.once(ids).unique(return_inverse=True)[1]

    def total(self, values: Tensor) -> Tensor:
        """[E] sums of values [B] over the samples of each trajectory."""
        live = self.of_row >= 0
        return values.new_zeros(len(self.rows)).index_add_(0, self.of_row[live], values[live])

    def spread(self, values: Tensor) -> Tensor:
        """[B] from values [E]: each sample has its trajectory's, padding has 0."""
        return torch.cat([values, values.new_zeros(1)])[self.of_row]


def episodes_of(response_mask: Tensor, turns: Turns | None) -> Episodes:
    """The trajectories of a batch with response_mask [B, T]; without turns every sample is one, padding or not."""
    everyone = torch.arange(len(response_mask), device=response_mask.device)
    if turns is None:
        return Episodes(everyone, everyone)
    live = everyone[response_mask.bool().any(-1)]
    ids, episode = turns.trajectory_ids[live].unique(return_inverse=True)
    of_row = torch.full_like(everyone, -1)
    of_row[live] = episode
    first = everyone.new_full((len(ids),), len(everyone)).scatter_reduce_(0, episode, live, "amin")
    return Episodes(first, of_row)


@dataclass(frozen=True)
class TurnList:
    """N turns: those of each sample in order, samples in the batch's order, padding left out.

    Attributes:
        rows: [N] the sample a turn stands in.
        columns: [N] its number within the sample.
        episode: [N] its trajectory, as `Episodes` numbers them.
        position: [N] its number within the trajectory.
        last: [N] bool, whether it is the trajectory's last.
    """

    rows: Tensor
    columns: Tensor
    episode: Tensor
    position: Tensor
    last: Tensor

    @classmethod
    def of(cls, shaped: Shaped, turns: Turns) -> TurnList:
        """The turns of a batch."""
        of_row = shaped.episodes.of_row
        numbers = torch.arange(turns.turn_rewards.shape[1], device=of_row.device)
        there = (numbers < turns.turn_count[:, None]) & (of_row >= 0)[:, None]
        rows, columns = there.nonzero(as_tuple=True)
        episode = of_row[rows]
        order = episode.argsort(stable=True)
        counts = torch.bincount(episode, minlength=len(shaped.episodes.rows))
        position = torch.empty_like(episode)
        position[order] = torch.arange(len(order), device=of_row.device) - (counts.cumsum(0) - counts)[episode[order]]
        return cls(rows, columns, episode, position, position == counts[episode] - 1)

    def totals(self, values: Tensor, episodes: int) -> Tensor:
        """[E] sums of values [N] over the turns of each of E trajectories."""
        return values.new_zeros(episodes).index_add_(0, self.episode, values)

    def discounted(self, rewards: Tensor, gamma: float) -> Tensor:
        """G_k = r_k + gamma G_{k+1} [N] over the turns of each trajectory, from rewards r [N]."""
        if not len(rewards):
            return rewards
        table = rewards.new_zeros(int(self.episode.max()) + 1, int(self.position.max()) + 1)
        table[self.episode, self.position] = rewards
        for k in range(table.shape[1] - 2, -1, -1):
            table[:, k] += gamma * table[:, k + 1]
        return table[self.episode, self.position]


def turn_rewards(shaped: Shaped, turns: Turns, listed: TurnList) -> Tensor:
    """The reward r [N] of each turn less the KL penalty of its tokens."""
    penalties = torch.zeros_like(turns.turn_rewards, dtype=shaped.token_kl.dtype)
    penalties.scatter_add_(1, turns.turn_index.clamp(min=0), masked(shaped.token_kl, shaped.response_mask))
    return (turns.turn_rewards.float() - penalties)[listed.rows, listed.columns]


def on_tokens(values: Tensor, shaped: Shaped, turns: Turns, listed: TurnList) -> Tensor:
    """[B, T] from values of turns [N]: every response token has its turn's, all others have 0."""
    table = values.new_zeros(turns.turn_rewards.shape)
    table[listed.rows, listed.columns] = values
    return masked(table.gather(1, turns.turn_index.clamp(min=0)), shaped.response_mask)


def gigpo(shaped: Shaped, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """A of turn k = w_e norm(R; grouping) + w_s norm(G_k; states), with G_k = r_k + step_reward_gamma G_{k+1}.

    w_e is `episode_reward_weight`, w_s `step_reward_weight`. The first term compares whole episodes; the second what
    became of turns that began in the same state, so a turn whose state nobody else of its group met has none. Source:
    GiGPO (Feng et al. 2025, arXiv 2505.10978).

    Returns:
        Advantages [B, T], and G of each token's turn [B, T].

    Raises:
        ValueError: the batch has no turns.
    """
    turns, listed = _turns(shaped, "gigpo")
    returns = listed.discounted(turn_rewards(shaped, turns, listed), config.step_reward_gamma)
    norm = config.reward_normalization
    episodes = _normalized(shaped.episode_rewards, shaped.episodes.once(_group_ids(shaped, turns, norm)), norm)
    steps = _normalized(returns, turns.state_ids[listed.rows, listed.columns], norm)
    worth = config.episode_reward_weight * episodes[listed.episode] + config.step_reward_weight * steps
    return on_tokens(worth, shaped, turns, listed), on_tokens(returns, shaped, turns, listed)


def step_reinforce(shaped: Shaped, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """A of turn k = norm(G_k; grouping), with G_k = r_k + step_reward_gamma G_{k+1}: REINFORCE over turns.

    The normalisation is over turns, so a long trajectory counts for more than a short one. Source: Williams 1992, with
    a turn as the action.

    Returns:
        Advantages [B, T], and G of each token's turn [B, T].

    Raises:
        ValueError: the batch has no turns.
    """
    turns, listed = _turns(shaped, "step_reinforce")
    returns = listed.discounted(turn_rewards(shaped, turns, listed), config.step_reward_gamma)
    norm = config.reward_normalization
    worth = _normalized(returns, _group_ids(shaped, turns, norm)[listed.rows], norm)
    return on_tokens(worth, shaped, turns, listed), on_tokens(returns, shaped, turns, listed)


def agentic_reinforce(shaped: Shaped, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """A of turn k = G_k = r'_k + gamma G_{k+1}, with rewards r' that sum to the normalised score norm(R; grouping).

    r' is r / (std + EPSILON), or r where nothing is divided by; the last turn has the rest of the score besides: its
    mean, and what `reward_clip` or `whiten_rewards` made of it. So an episode rewarded at its end alone has the
    normalised score there and 0 before, and one that tells nothing apart has 0 throughout. Source: Williams 1992, with
    a turn as the action.

    Returns:
        Advantages [B, T], and the same as returns.

    Raises:
        ValueError: the batch has no turns.
    """
    turns, listed = _turns(shaped, "agentic_reinforce")
    norm, scores = config.reward_normalization, shaped.episode_rewards
    ids = shaped.episodes.once(_group_ids(shaped, turns, norm))
    rewards = turn_rewards(shaped, turns, listed) * _scale(scores, ids, norm)[listed.episode]
    rest = _normalized(scores, ids, norm) - listed.totals(rewards, len(scores))
    rewards = rewards + torch.where(listed.last, rest[listed.episode], 0.0)
    returns = on_tokens(listed.discounted(rewards, config.gamma), shaped, turns, listed)
    return returns, returns


def _turns(shaped: Shaped, name: str) -> tuple[Turns, TurnList]:
    if shaped.turns is None:
        raise ValueError(
            f"adv_estimator {name} needs the turns of trajectories ({', '.join(TURN_KEYS)}), which this batch has not; "
            "use grpo or reinforce for responses of one turn"
        )
    return shaped.turns, TurnList.of(shaped, shaped.turns)


def _group_ids(shaped: Shaped, turns: Turns, norm: RewardNormalization) -> Tensor:
    """[B] equal for the samples that `grouping` puts together."""
    return {
        "traj_group_id": shaped.groups,
        "traj_id": turns.trajectory_ids,
        "tags": turns.tag_ids,
        "batch": torch.zeros_like(shaped.groups),
    }[norm.grouping]


def _normalized(values: Tensor, ids: Tensor, norm: RewardNormalization) -> Tensor:
    """norm(values [n]; ids [n]), see above."""
    groups = ids.unique(return_inverse=True)[1]
    return normalize(values, groups, norm.norm_mean_type, norm.norm_std_type, least_std=EPSILON)


def _scale(values: Tensor, ids: Tensor, norm: RewardNormalization) -> Tensor:
    """[n] what `_normalized` multiplies its values by."""
    if not values.numel():
        return values
    groups = ids.unique(return_inverse=True)[1]
    scale = torch.ones_like(values)
    if norm.norm_std_type is not None:
        scale = scale / deviation(values, groups, norm.norm_std_type)
    return torch.where(tells_nothing(values, groups, (norm.norm_mean_type, norm.norm_std_type), EPSILON), 0.0, scale)
