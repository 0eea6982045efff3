"""Scores the responses of RLVR: which rewards score a sample, their weighted sum, metrics, and query filters."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

from roll.base.errors import RunError
from roll.base.events import EventLog
from roll.configs.scoring.rewards import LARGEST_REWARD, RewardConfig, is_trainable, no_reward, rewards_of
from roll.datasets.records import prefix_errors
from roll.datasets.templates import EncodedPrompt
from roll.datasets.tokenizer import response_text
from roll.pipeline.kinds.scoring_models import ModelScorer, ScoringModels
from roll.rewards.calling import RewardOutcome, RewardRequest
from roll.rollout.filters import QueryFilter
from roll.rollout.types import Group
from roll.usercode.reward_pool import RewardPool


class Scorer:
    """Scores responses with the rewards of their tag: each in its own pool of killable processes, or by a model.

    Attributes:
        stop_token_ids: end a response, besides the tokens that the tokenizer knows.
    """

    def __init__(
        self,
        rewards: dict[str, RewardConfig],
        tokenizer: PreTrainedTokenizerBase,
        models: Mapping[str, ModelScorer] | None = None,
        events: EventLog | None = None,
    ) -> None:
        """Starts no process; `connect` gives `models`, by reward, the engines that score."""
        self.stop_token_ids: frozenset[int] = frozenset()
        self._rewards, self._tokenizer, self._models = rewards, tokenizer, models or {}
        self._pools: dict[str, RewardPool | ModelScorer] = {
            name: self._models.get(name)
            or RewardPool(
                config, None if events is None else partial(events.process_replaced, f"rewards.{name}"), self._decoded
            )
            for name, config in rewards.items()
        }
        self._filters = {name: QueryFilter.from_config(config.query_filter_config) for name, config in rewards.items()}

    def rewards_of(self, tag: str) -> list[str]:
        """Names of the rewards for a tag, whose weighted sum is the score.

        Raises:
            RunError: no reward includes the tag.
        """
        names = rewards_of(self._rewards, tag)
        if not names:
            raise RunError(no_reward(self._rewards, tag))
        return names

    def connect(self, models: ScoringModels) -> None:
        for scorer in self._models.values():
            models.connect(scorer)

    def check(self, prompts: Sequence[EncodedPrompt]) -> None:
        """Tries the chat template of each reward model on the prompts that it scores.

        Raises:
            DatasetError: it cannot be applied to one of them.
        """
        for name, scorer in self._models.items():
            with prefix_errors(f"rewards.{name}.template"):
                scorer.check([prompt.question for prompt in prompts if name in self.rewards_of(prompt.tag)])

    def launch(self) -> None:
        for pool in self._pools.values():
            pool.launch()

    def text(self, response_ids: list[int], stop_strings: Sequence[str] = ()) -> str:
        return response_text(self._tokenizer, response_ids, stop_strings, self.stop_token_ids)

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))

    async def score(self, groups: Sequence[tuple[Group, EncodedPrompt]]) -> None:
        """Sets reward, its parts and metrics of every trajectory, or drops the group with a reason.

        The reward is the sum of weight times score over the rewards of the tag, which run at the same time. Where there
        are several, each score is the metric `<name>`, and the numbers that a reward reports are `<name>/<metric>`. A
        group with a sum beyond LARGEST_REWARD is dropped as `not_finite`.
        """
        outcomes_by_pool = await asyncio.gather(*(self._score(name, groups) for name in self._pools))
        scored = dict(zip(self._pools, outcomes_by_pool, strict=True))
        for index, (group, _) in enumerate(groups):
            parts = {name: scored[name][index] for name in self.rewards_of(group.tag)}
            failure = next(
                ((name, outcome) for name, outcomes in parts.items() for outcome in outcomes if outcome.score is None),
                None,
            )
            if failure is not None:
                name, outcome = failure
                cause = f"reward {name}: {outcome.reason} {outcome.detail or ''}".strip()
                group.drop(f"reward_{outcome.reason}", cause)
                continue
            for position, trajectory in enumerate(group.trajectories):
                of_sample = {name: outcomes[position] for name, outcomes in parts.items()}
                trajectory.reward_parts = {name: part.score or 0.0 for name, part in of_sample.items()}
                weighted = (self._rewards[name].weight * score for name, score in trajectory.reward_parts.items())
                trajectory.turns[0].reward = sum(weighted)
                trajectory.metrics = _metrics_of(of_sample)
            too_large = next((score for score in group.scores if not is_trainable(score)), None)
            if too_large is not None:
                cause = f"the weighted sum of {', '.join(parts)} is {too_large:g}, beyond {LARGEST_REWARD:g} in size"
                group.drop("reward_not_finite", cause)

    async def _score(self, name: str, groups: Sequence[tuple[Group, EncodedPrompt]]) -> dict[int, list[RewardOutcome]]:
        """Outcomes of one reward by the index of the groups that it scores."""
        own = [index for index, (group, _) in enumerate(groups) if name in self.rewards_of(group.tag)]
        requests = [_request(*groups[index]) for index in own]
        return dict(zip(own, await self._pools[name].score(requests) if requests else [], strict=True))

    def filter_reason(self, group: Group) -> tuple[str, str] | None:
        """Drop reason of a scored group without a learning signal, and the path of its filter; None keeps it."""
        for name in self.rewards_of(group.tag):
            reason = self._filters[name].reason(group.scores)
            if reason is not None:
                return reason, f"rewards.{name}.query_filter_config"
        return None

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def _request(group: Group, prompt: EncodedPrompt) -> RewardRequest:
    texts = tuple(trajectory.turns[0].text for trajectory in group.trajectories)
    ids = tuple(tuple(each.ids[each.turns[0].start : each.turns[0].end]) for each in group.trajectories)
    return RewardRequest(
        texts,
        prompt.ground_truth,
        prompt.question,
        prompt.row,
        prompt.tag,
        prompt.id,
        prompt_ids=tuple(prompt.ids),
        response_ids=ids,
    )


def _metrics_of(parts: Mapping[str, RewardOutcome]) -> dict[str, float]:
    """What the rewards of one sample report: the numbers of one reward, or the score and the numbers of each."""
    if len(parts) == 1:
        return dict(next(iter(parts.values())).metrics)
    metrics: dict[str, float] = {}
    for name, part in parts.items():
        metrics[name] = part.score or 0.0
        metrics |= {f"{name}/{key}": value for key, value in part.metrics.items()}
    return metrics
