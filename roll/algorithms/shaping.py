"""Shapes scores before the advantage estimator (length penalties, clipping, normalisation), and weights samples.

Statistics count every trajectory once, and no padding (`Episodes`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from roll.algorithms.aggregation import EPSILON, constant_group, group_mean, group_std, whiten
from roll.algorithms.estimators.returns_to_go import RUNNING, RUNNING_TAG
from roll.algorithms.lazy_torch import Tensor, torch
from roll.algorithms.turns import Episodes

if TYPE_CHECKING:
    from roll.algorithms.advantages import AdvantageSettings


# Length penalties


def length_penalties(
    scores: Tensor, lengths: Tensor, groups: Tensor, episodes: Episodes, config: AdvantageSettings
) -> tuple[Tensor, dict[str, float]]:
    """What scores lose [B] by `overlong_buffer_len`, `length_penalty_per_token` and `length_reward_coef`, and metrics.

    The raw rewards, `scores` [B], say whether a response is correct.
    """
    total = overlong_penalty(lengths, config)
    metrics: dict[str, float] = {}
    if config.overlong_buffer_len is not None:
        metrics["advantage/overlong_penalty"] = float(total.mean())
    if config.length_penalty_per_token:
        cost = token_penalty(lengths, config)
        total = total + cost
        metrics["advantage/length_penalty"] = _mean(cost, episodes)
    if config.length_reward_coef:
        reward = length_reward(
            episodes.sum_samples(lengths),
            episodes.per_episode(scores) > config.length_reward_threshold,
            episodes.group_numbers(groups),
        )
        gain = episodes.to_samples(config.length_reward_coef * reward)
        total = total - gain
        metrics["advantage/length_reward"] = _mean(gain, episodes)
    return total, metrics


def overlong_penalty(lengths: Tensor, config: AdvantageSettings) -> Tensor:
    """Length penalty [B] of responses of `lengths` [B] tokens, subtracted from scores; 0 without `overlong_buffer_len`.

    It rises evenly from 0, `overlong_buffer_len` tokens before `response_length`, to `overlong_penalty_factor` there.
    Source: DAPO (arXiv 2503.14476) eq. 13, soft overlong punishment.
    """
    if config.overlong_buffer_len is None or config.response_length is None:
        return torch.zeros_like(lengths, dtype=torch.float32)
    beyond = lengths - (config.response_length - config.overlong_buffer_len)
    return config.overlong_penalty_factor * (beyond / config.overlong_buffer_len).clamp(0, 1)


def token_penalty(lengths: Tensor, config: AdvantageSettings) -> Tensor:
    """`length_penalty_per_token` times the number of response tokens, [B] float32 from lengths [B]."""
    return config.length_penalty_per_token * lengths.float()


def length_reward(lengths: Tensor, correct: Tensor, groups: Tensor) -> Tensor:
    """Reward of short responses among those to the same prompt, [E] float32 from -0.5 to 0.5.

    l = 0.5 - (length - shortest) / (longest - shortest) over the group; a correct response gets l, another one
    min(0, l), so that a wrong answer gains nothing by being short. 0 where all lengths of a group are equal. Source:
    Kimi k1.5 (arXiv 2501.12599) section 2.3.3.
    """
    tokens = lengths.float()
    size = int(groups.max()) + 1 if groups.numel() else 0
    longest = tokens.new_full((size,), -torch.inf).scatter_reduce_(0, groups, tokens, "amax")[groups]
    shortest = tokens.new_full((size,), torch.inf).scatter_reduce_(0, groups, tokens, "amin")[groups]
    reward = 0.5 - (tokens - shortest) / (longest - shortest).clamp(min=1)
    reward = torch.where(correct, reward, reward.clamp(max=0))
    return torch.where(longest == shortest, 0.0, reward)


def _mean(values: Tensor, episodes: Episodes) -> float:
    kept = episodes.per_episode(values)
    return float(kept.mean()) if len(kept) else 0.0


# Clipping and whitening


def clip_scores(scores: Tensor, config: AdvantageSettings) -> Tensor:
    """The scores [B], clipped to +- `reward_clip`."""
    return scores if config.reward_clip is None else scores.clamp(-config.reward_clip, config.reward_clip)


def shape_scores(scores: Tensor, episodes: Episodes, config: AdvantageSettings) -> Tensor:
    """The scores [B] after `reward_clip` and `whiten_rewards`."""
    scores = clip_scores(scores, config)
    if config.whiten_rewards:
        per_episode = episodes.per_episode(scores)
        scores = episodes.to_samples(whiten(per_episode, torch.ones_like(per_episode, dtype=torch.bool)))
    return scores


# Normalisation by tag and by statistics over the run


@dataclass(frozen=True)
class ScoreStatistics:
    """Number and mean of scores, and the sum of their squared distances from the mean.

    `merged` adds those of another set, so the statistics of a run need no score of earlier batches.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, scores: Tensor) -> ScoreStatistics:
        """Those of scores [n], in float64."""
        if not scores.numel():
            return cls()
        values = scores.double()
        return cls(values.numel(), float(values.mean()), float((values - values.mean()).square().sum()))

    def merged(self, other: ScoreStatistics) -> ScoreStatistics:
        """Those of both sets together. Source: Chan, Golub and LeVeque 1983, for two sets at once."""
        count = self.count + other.count
        if not self.count or not other.count:
            return self if self.count else other
        distance, share = other.mean - self.mean, other.count / count
        squares = self.squares + other.squares + distance**2 * self.count * share
        return ScoreStatistics(count, self.mean + distance * share, squares)

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 0 for fewer than two scores."""
        return (self.squares / (self.count - 1)) ** 0.5 if self.count > 1 else 0.0


@dataclass(frozen=True)
class RunStatistics:
    """Statistics of the scores of a run so far; empty where the configuration does not read them.

    Attributes:
        all_tags: of all scores, for `running`.
        by_tag: of the scores of each tag, by its name, for `running_tag`; a tag that had no score yet is missing.
    """

    all_tags: ScoreStatistics = field(default_factory=ScoreStatistics)
    by_tag: Mapping[str, ScoreStatistics] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """Both, JSON-able."""
        by_tag = {tag: asdict(statistics) for tag, statistics in self.by_tag.items()}
        return {"score_statistics": asdict(self.all_tags), "tag_score_statistics": by_tag}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RunStatistics:
        """Those of `state_dict`; empty ones for an entry that is missing."""
        by_tag = {tag: ScoreStatistics(**each) for tag, each in state.get("tag_score_statistics", {}).items()}
        return cls(ScoreStatistics(**state.get("score_statistics", {})), by_tag)


def normalize_scores(
    scores: Tensor,
    sets: Mapping[str, Tensor],
    types: tuple[str | None, str | None],
    running: Mapping[str, Sequence[ScoreStatistics]],
) -> Tensor:
    """(x - mean) / (std + EPSILON), [E] from scores [E]; exactly 0 where one of the sets has equal scores only.

    Args:
        scores: [E] of each episode.
        sets: numbers [E] of the set of each score, by the name of the type.
        types: the set whose mean is subtracted and the one whose unbiased standard deviation divides, two of `sets`;
            None leaves that out.
        running: of the types that have statistics of the run, those of each set by its number. A deviation of at most
            EPSILON counts as that of equal scores.
    """
    mean_type, std_type = types
    if not len(scores):
        return scores
    known = {
        kind: scores.new_tensor([[each.mean, each.std] for each in statistics])[sets[kind]].unbind(-1)
        for kind, statistics in running.items()
    }
    result = scores
    if mean_type is not None:
        result = result - (known[mean_type][0] if mean_type in known else group_mean(scores, sets[mean_type]))
    if std_type is not None:
        std = known[std_type][1] if std_type in known else group_std(scores, sets[std_type])
        result = result / (std + EPSILON)
    equal = torch.zeros_like(scores, dtype=torch.bool)
    for kind in types:
        if kind in known:
            equal |= known[kind][1] <= EPSILON
        elif kind is not None:
            equal |= constant_group(scores, sets[kind])
    return torch.where(equal, 0.0, result)


def apply_norm(
    scores: Tensor,
    groups: Tensor,
    tags: Tensor | None,
    episodes: Episodes,
    config: AdvantageSettings,
    before: RunStatistics,
    tag_names: Sequence[str] | None = None,
) -> tuple[Tensor, RunStatistics, dict[str, float]]:
    """Scores [B] after `norm_mean_type` and `norm_std_type`, the statistics of the run with this batch, and metrics.

    The batch counts in the statistics that normalise it, so the first batch of a run, or of a tag, has some.

    Raises:
        ValueError: scores are to be normalised by tag, and the tags [B] or, with `running_tag`, their names [B] are
            not known.
    """
    types = config.norm_types
    if types == (None, None):
        return scores, before, {}
    values = episodes.per_episode(scores)
    whole = torch.zeros_like(episodes.rows)
    sets = {"batch": whole, "group": episodes.group_numbers(groups), RUNNING: whole}
    if tags is not None:
        sets["tag"] = sets[RUNNING_TAG] = episodes.group_numbers(tags)
    missing = "tag" in types and tags is None
    if missing or (RUNNING_TAG in types and (tags is None or tag_names is None)):
        raise ValueError(
            "norm_mean_type and norm_std_type tag and running_tag need the tag of each sample, which this batch lacks"
        )
    metrics: dict[str, float] = {}
    running: dict[str, Sequence[ScoreStatistics]] = {}
    all_tags, by_tag = ScoreStatistics(), dict(before.by_tag if RUNNING_TAG in types else {})
    if RUNNING in types:
        all_tags = before.all_tags.merged(ScoreStatistics.of(values))
        running[RUNNING] = [all_tags]
        metrics |= {"advantage/running_score_mean": all_tags.mean, "advantage/running_score_std": all_tags.std}
    if RUNNING_TAG in types and tag_names is not None:
        rows = dict(zip(sets["tag"].tolist(), episodes.rows.tolist(), strict=True))
        names = [tag_names[rows[number]] for number in range(len(rows))]
        for number, name in enumerate(names):
            scores_of_tag = ScoreStatistics.of(values[sets["tag"] == number])
            by_tag[name] = by_tag.get(name, ScoreStatistics()).merged(scores_of_tag)
        running[RUNNING_TAG] = [by_tag[name] for name in names]
        for name, each in by_tag.items():
            metrics[f"advantage/running_score_mean/{name}"] = each.mean
            metrics[f"advantage/running_score_std/{name}"] = each.std
    normalised = normalize_scores(values, sets, types, running)
    return episodes.to_samples(normalised), RunStatistics(all_tags, by_tag), metrics


# Weights of samples


def sample_weights(
    scores: Tensor,
    groups: Tensor,
    lengths: Tensor,
    learned: Tensor | None,
    episodes: Episodes,
    config: AdvantageSettings,
) -> tuple[Tensor | None, dict[str, float]]:
    """Factors [B] of the advantages after `difficulty_loss_weight` and `length_loss_weight`, and metrics.

    With both on, a factor is the product of the two, divided by its mean over the episodes that stay in the loss. None
    with both off. `learned` [B] are the samples that stay in the loss; None: all. Padding has weight 0.
    """
    found: list[Tensor] = []
    metrics: dict[str, float] = {}
    if config.difficulty_loss_weight:
        difficulty = 1 - group_mean(episodes.per_episode(scores), episodes.group_numbers(groups)).clamp(0, 1)
        metrics["advantage/difficulty"] = float(difficulty.mean()) if len(difficulty) else 0.0
        easy, hard = config.difficulty_weight_easy, config.difficulty_weight_hard
        found.append(_with_mean_1(easy + (hard - easy) * difficulty, learned, episodes))
        metrics |= _bounds("advantage/difficulty_weight", found[-1])
    if config.length_loss_weight:
        found.append(_with_mean_1(_length_weights(lengths, learned, episodes, config), learned, episodes))
        metrics |= _bounds("advantage/length_weight", found[-1])
    if not found:
        return None, metrics
    weights = found[0] if len(found) == 1 else _with_mean_1(found[0] * found[1], learned, episodes)
    return episodes.to_samples(weights), metrics


def _with_mean_1(weights: Tensor, learned: Tensor | None, episodes: Episodes) -> Tensor:
    """Weights [E] divided by their mean over the episodes that stay in the loss; all 0 if that is 0.

    So the size of an update does not depend on how difficult, or how long, the responses of a batch are.
    """
    kept = weights if learned is None else weights[episodes.per_episode(learned)]
    mean = float(kept.mean()) if len(kept) else 0.0
    return weights / mean if mean > 0 else torch.zeros_like(weights)


def _bounds(name: str, weights: Tensor) -> dict[str, float]:
    low, high = (float(bound) for bound in torch.aminmax(weights)) if len(weights) else (0.0, 0.0)
    return {f"{name}_min": low, f"{name}_max": high}


def _length_weights(lengths: Tensor, learned: Tensor | None, episodes: Episodes, config: AdvantageSettings) -> Tensor:
    """W = short + (long - short) p [E] with p = (length - shortest) / (longest - shortest) of what stays in the loss.

    Others are cut to this range. Where all have one length, all weights are equal.
    """
    tokens = episodes.sum_samples(lengths).float()
    kept = tokens if learned is None else tokens[episodes.per_episode(learned)]
    shortest, longest = torch.aminmax(kept) if len(kept) else (tokens.new_zeros(()), tokens.new_zeros(()))
    fraction = ((tokens - shortest) / (longest - shortest).clamp(min=1)).clamp(0, 1)
    fraction = torch.where(longest == shortest, 0.5, fraction)
    short, long = config.length_weight_short, config.length_weight_long
    return short + (long - short) * fraction
