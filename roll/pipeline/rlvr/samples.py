"""The RLVR sample source: prompts go to the engines, responses to the rewards, whole scored groups into a batch."""

from __future__ import annotations

import time
from typing import Any

from roll.configs.pipeline import RLVRConfig
from roll.configs.seeds import role_seed
from roll.datasets.sampler import PromptSampler
from roll.datasets.templates import EncodedPrompt
from roll.pipeline.clock import StepClock
from roll.pipeline.engine_pool import EnginePool
from roll.pipeline.errors import RunError
from roll.pipeline.interfaces import SampleBatch
from roll.pipeline.rlvr.batch import batch_of_groups, rollout_metrics
from roll.pipeline.rlvr.groups import Group
from roll.pipeline.rlvr.scoring import Scorer
from roll.rollout.ledger import Ledger
from roll.rollout.types import SamplingParams


class RLVRSamples:
    """Generates each batch when it is asked for, with the weights published last (synchronous training).

    A group of which any response failed is dropped whole, with a reason, and a fresh prompt takes its place.
    """

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
        self._ledger = Ledger()

    async def next_batch(self, version: int, clock: StepClock) -> SampleBatch:
        """`rollout_batch_size` whole groups, in the order their prompts were drawn.

        Raises:
            RunError: more prompts than `max_failure_rate` allows were dropped; the reasons are counted.
        """
        wanted = self._config.rollout_batch_size
        dropped_before = dict(self._ledger.dropped)
        groups: list[Group] = []
        while len(groups) < wanted:
            fresh = self._draw(wanted - len(groups))
            await self._fill(fresh, clock)
            groups += [group for group in fresh if group.drop_reason is None]
            self._check_failures(dropped_before)
        self._ledger.consume(wanted)
        metrics = rollout_metrics(groups, version, clock.seconds("generate"))
        metrics |= self._ledger.metrics() | self._ledger.queue_metrics(self._config.num_return_sequences_in_group)
        return SampleBatch(batch_of_groups(groups), metrics)

    def _draw(self, count: int) -> list[Group]:
        first = self._ledger.submitted
        groups = [Group(first + i, self._prompts[index]) for i, index in enumerate(self._sampler.take(count))]
        self._ledger.submit(count)
        return groups

    async def _fill(self, groups: list[Group], clock: StepClock) -> None:
        """Generates and scores; every group ends as finished or dropped in the ledger."""
        config = self._config
        requests = [
            group.requests("train", config.num_return_sequences_in_group, self._sampling, config.seed)
            for group in groups
        ]
        with clock.measure("generate"):
            for group, results in zip(groups, await self._engines.generate(requests), strict=True):
                group.results = results
                if any(result.finish_reason == "abort" for result in results):
                    group.drop_reason = "generation_failed"
        with clock.measure("reward"):
            await self._scorer.score([group for group in groups if group.drop_reason is None])
        for group in groups:
            if group.drop_reason is None:
                self._ledger.finish()
            else:
                self._ledger.drop(group.drop_reason)

    def _check_failures(self, before: dict[str, int]) -> None:
        now = self._ledger.dropped
        lost = {reason: count - before.get(reason, 0) for reason, count in now.items() if count > before.get(reason, 0)}
        limit = self._config.max_failure_rate * self._config.rollout_batch_size
        if sum(lost.values()) > limit:
            detail = self._scorer.last_failure or "see the engine's log"
            raise RunError(
                f"{sum(lost.values())} prompts of one batch were dropped {lost}, more than max_failure_rate "
                f"{self._config.max_failure_rate} of {self._config.rollout_batch_size} allows; last cause: {detail}"
            )

    async def validate(self, version: int) -> dict[str, float]:
        """`val/<tag>/score`, `val/score` and lengths over the validation prompts, with the same seeds every time.

        Raises:
            RunError: a response could not be generated or scored; a score over a part would not be comparable.
        """
        args = self._config.validation.generating_args
        start = time.perf_counter()
        groups = [Group(number, prompt) for number, prompt in enumerate(self._validation_prompts)]
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
        return {**validation_metrics(groups), "val/seconds": time.perf_counter() - start}

    def state_dict(self) -> dict[str, Any]:
        """The data cursor and the ledger; between steps nothing is in flight."""
        return {"sampler": self._sampler.state_dict(), "ledger": self._ledger.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`."""
        self._sampler.load_state_dict(state["sampler"])
        self._ledger = Ledger.from_state(state["ledger"])

    async def close(self) -> None:
        """Ends the reward processes."""
        self._scorer.close()


def validation_metrics(groups: list[Group]) -> dict[str, float]:
    """Mean score over all responses, and by tag."""
    by_tag: dict[str, list[float]] = {}
    for group in groups:
        by_tag.setdefault(group.prompt.tag, []).extend(group.scores)
    every = [score for scores in by_tag.values() for score in scores]
    lengths = [len(result.response_ids) for group in groups for result in group.results]
    metrics = {f"val/{tag}/score": sum(scores) / len(scores) for tag, scores in sorted(by_tag.items())}
    return {**metrics, "val/score": sum(every) / len(every), "val/response_length_mean": sum(lengths) / len(lengths)}
