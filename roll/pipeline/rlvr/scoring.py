"""Scores of whole groups: each response goes to the reward its tag names."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from roll.configs.errors import RunError
from roll.configs.pipeline import QueryFilterConfig, RewardConfig
from roll.pipeline.rlvr.groups import Group
from roll.rewards.pool import RewardPool
from roll.rollout.filters import QueryFilter


class Scorer:
    """One pool of killable processes for each reward; a response it cannot score drops its group with the reason."""

    def __init__(self, rewards: dict[str, RewardConfig], tokenizer: PreTrainedTokenizerBase) -> None:
        """Starts the pools; the first reward whose `tag_included` has the tag, or is empty, scores a sample."""
        self._rewards = rewards
        self._pools = {name: RewardPool(config) for name, config in rewards.items()}
        self._filters = {name: query_filter(config.query_filter_config) for name, config in rewards.items()}
        self._tokenizer = tokenizer
        self.last_failure: str | None = None
        """Reward and reason of the last sample that could not be scored."""

    def reward_of(self, tag: str) -> str:
        """The name of the reward for a tag.

        Raises:
            RunError: no reward includes the tag.
        """
        for name, config in self._rewards.items():
            if not config.tag_included or tag in config.tag_included:
                return name
        known = {name: config.tag_included for name, config in self._rewards.items()}
        raise RunError(f"no reward scores samples tagged {tag!r}; rewards and their tag_included: {known}")

    def filtered(self, group: Group) -> tuple[str, str] | None:
        """Why a scored group is not worth learning from, and the filter's path; None keeps it."""
        name = self.reward_of(group.prompt.tag)
        reason = self._filters[name].reason(group.scores)
        return None if reason is None else (reason, f"rewards.{name}.query_filter_config")

    async def self_test(self) -> None:
        """Runs every reward on known pairs, so that a broken one ends the run before step 1."""
        for pool in self._pools.values():
            await pool.self_test()

    async def score(self, groups: list[Group]) -> None:
        """Fills `scores` of every group, or its `drop_reason`."""
        for name, pool in self._pools.items():
            mine = [group for group in groups if self.reward_of(group.prompt.tag) == name]
            items = [
                (self._text(result.response_ids), group.prompt.ground_truth)
                for group in mine
                for result in group.results
            ]
            outcomes = iter(await pool.score(items) if items else [])
            for group in mine:
                scored = [next(outcomes) for _ in group.results]
                failed = next((outcome for outcome in scored if outcome.score is None), None)
                if failed is None:
                    group.scores = [outcome.score for outcome in scored if outcome.score is not None]
                else:
                    group.drop_reason = f"reward_{failed.reason}"
                    self.last_failure = f"reward {name}: {failed.reason} {failed.detail or ''}".strip()

    def _text(self, response_ids: list[int]) -> str:
        return str(self._tokenizer.decode(response_ids, skip_special_tokens=True))

    def close(self) -> None:
        """Ends every pool."""
        for pool in self._pools.values():
            pool.close()


def query_filter(config: QueryFilterConfig) -> QueryFilter:
    """The filter of a reward; thresholds that are not given have the type's own values."""
    given = {name: value for name, value in vars(config.filter_args).items() if value is not None}
    return QueryFilter.from_config({"type": config.type, "filter_args": given})
