"""RLVR's way to samples: prompts go to the engines, responses to the rewards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from roll.configs.pipeline import RLVRConfig
from roll.configs.seeds import role_seed
from roll.datasets.prompts import PromptSampler
from roll.datasets.templates import EncodedPrompt
from roll.distributed.protocol import DataProto
from roll.pipeline.engine_pool import EnginePool
from roll.pipeline.errors import RunError
from roll.pipeline.rlvr.batch import batch_of_groups, rollout_metrics, validation_metrics
from roll.pipeline.rlvr.groups import Group
from roll.pipeline.rlvr.scoring import Scorer
from roll.pipeline.rollout_types import Meter
from roll.rollout.policy import Ticket
from roll.rollout.types import SamplingParams


class RLVRProducer:
    """Draws prompts in a seeded order; a group of which any response failed is dropped whole, with a reason."""

    work = ("generate", "reward")

    def __init__(
        self,
        config: RLVRConfig,
        prompts: list[EncodedPrompt],
        validation_prompts: list[EncodedPrompt],
        engines: EnginePool,
        scorer: Scorer,
        sampling: SamplingParams,
        validation_sampling: SamplingParams,
    ) -> None:
        """Takes the prompts already encoded and the way to the engines and rewards."""
        self._config = config
        self._prompts = prompts
        self._validation_prompts = validation_prompts
        self._engines = engines
        self._scorer = scorer
        self._sampling = sampling
        self._validation_sampling = validation_sampling
        data_args = config.actor_train.data_args
        self._sampler = PromptSampler(len(prompts), role_seed(config.seed, "prompts"), data_args.shuffle)
        self.last_failure: str | None = None
        """What the last group was dropped for: reward and reason, or what the engine said."""

    def draw(self, tickets: Iterable[Ticket]) -> list[Group]:
        """The next prompt for each ticket."""
        numbers = [ticket.number for ticket in tickets]
        indices = self._sampler.take(len(numbers))
        return [Group(number, index, self._prompts[index]) for number, index in zip(numbers, indices, strict=True)]

    async def produce(self, items: list[Group], meter: Meter) -> None:
        """Generates all responses of all groups, then scores those that are whole."""
        config = self._config
        requests = [
            group.requests("train", config.num_return_sequences_in_group, self._sampling, config.seed)
            for group in items
        ]
        with meter.measure("generate"):
            for group, results in zip(items, await self._engines.generate(requests), strict=True):
                group.results = results
                failed = next((result for result in results if result.finish_reason == "abort"), None)
                if failed is not None:
                    group.drop_reason = "generation_failed"
                    self.last_failure = f"generation: {failed.error}"
        with meter.measure("reward"):
            whole = [group for group in items if group.drop_reason is None]
            await self._scorer.score(whole)
        if any(group.drop_reason is not None for group in whole):
            self.last_failure = self._scorer.last_failure

    def filtered(self, item: Group) -> tuple[str, str] | None:
        """What the filter of the group's reward says."""
        return self._scorer.filtered(item)

    async def validate(self, version: int) -> dict[str, float]:
        """`val/<tag>/score`, `val/score` and lengths over the validation prompts, with the same seeds every time.

        Raises:
            RunError: a response could not be generated or scored; a score over a part would not be comparable.
        """
        args = self._config.validation.generating_args
        groups = [Group(number, number, prompt) for number, prompt in enumerate(self._validation_prompts)]
        samples = args.num_return_sequences or 1
        requests = [group.requests("val", samples, self._validation_sampling, self._config.seed) for group in groups]
        for group, results in zip(groups, await self._engines.generate(requests), strict=True):
            group.results = results
            failed = next((result for result in results if result.finish_reason == "abort"), None)
            if failed is not None:
                raise RunError(f"validation prompt {group.prompt.id}: {failed.error or 'generation was aborted'}")
        await self._scorer.score(groups)
        unscored = next((group for group in groups if group.drop_reason is not None), None)
        if unscored is not None:
            raise RunError(
                f"validation prompt {unscored.prompt.id}: {unscored.drop_reason}: {self._scorer.last_failure}"
            )
        return validation_metrics(groups)

    def batch(self, items: list[Group]) -> DataProto:
        """One row for each response."""
        return batch_of_groups(items)

    def metrics(self, items: list[Group], version: int) -> dict[str, float]:
        """`rollout/...` and `staleness/...`."""
        return rollout_metrics(items, version)

    def encode(self, item: Group) -> dict[str, Any]:
        """A group as plain values."""
        return item.state_dict()

    def decode(self, state: dict[str, Any]) -> Group:
        """The group that `encode` was given."""
        return Group.from_state(state, self._prompts)

    def state_dict(self) -> dict[str, Any]:
        """The data cursor, and the size of the groups that a checkpoint may hold."""
        return {"sampler": self._sampler.state_dict(), "samples": self._config.num_return_sequences_in_group}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`.

        Raises:
            ValueError: it was taken with other data, another seed, or groups of another size.
        """
        samples = self._config.num_return_sequences_in_group
        if state["samples"] != samples:
            raise ValueError(
                f"num_return_sequences_in_group: {samples} cannot go on from a checkpoint with groups of "
                f"{state['samples']}; use {state['samples']}"
            )
        self._sampler.load_state_dict(state["sampler"])

    def close(self) -> None:
        """Ends the reward processes."""
        self._scorer.close()
