"""RLVR: prompts, one response for each sample, scored by rewards. A response is a trajectory of one turn."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from roll.base.errors import RunError
from roll.base.events import EventLog
from roll.base.timers import Timer
from roll.configs.learning.lora import no_policy, policy_of
from roll.configs.pipeline import RLVRConfig, role_seed
from roll.configs.scoring.rewards import domain_of, truths_read
from roll.datasets.batch import Batch
from roll.datasets.prompts import MixedSampler, PromptSampler, load_prompts
from roll.datasets.records import prefix_errors
from roll.datasets.templates import EncodedPrompt
from roll.datasets.tokenizer import encode_data, load_tokenizer
from roll.pipeline.checkpoint import check_sampler
from roll.pipeline.kinds.rl import RLPipeline, WorkerFactory
from roll.pipeline.kinds.scorer import Scorer
from roll.pipeline.kinds.scoring_models import ScoringModels, model_scorers
from roll.pipeline.session import Session
from roll.rollout.engine_pool import EnginePool
from roll.rollout.ledger import GENERATION_FAILED, PromptRequest
from roll.rollout.metrics import reported_metrics, rollout_metrics
from roll.rollout.rollout_batch import batch_of_groups
from roll.rollout.rollout_worker import Purpose, RolloutWorker
from roll.rollout.types import (
    ROUTING_INCOMPLETE,
    GenerateRequest,
    GenerateResult,
    Group,
    SamplingParams,
    Trajectory,
    missing_routing,
)

logger = logging.getLogger(__name__)


class RLVRWorker(RolloutWorker):
    """The rollout worker of prompts with one response for each sample; no Ray worker and no engine (`InferWorker`).

    It draws prompts in a seeded order; a group with a failed response is dropped whole, with a reason.
    """

    work: ClassVar[tuple[str, ...]] = ("generate", "reward")

    def __init__(
        self,
        config: RLVRConfig,
        prompts: dict[Purpose, list[EncodedPrompt]],
        sampling: dict[Purpose, SamplingParams],
        engines: EnginePool,
        scorer: Scorer,
    ) -> None:
        super().__init__(config.samples_multiple, config.async_training.staleness_threshold)
        self._prompts, self._sampling, self._engines, self._scorer = prompts, sampling, engines, scorer
        self._seed, self._group_size = config.seed, config.num_return_sequences_in_group
        self._estimator, self._greedy = config.adv_estimator, config.uses_greedy_responses
        self._rewards = tuple(config.rewards)
        self._uses_parts = config.uses_reward_parts
        self._validation_samples = config.validation.generating_args.num_return_sequences or 1
        self._sampler = make_sampler(config, prompts["train"])
        self._policies = {tag: name for name, policy in config.policies.items() for tag in policy.tags}

    def draw(self, requests: Sequence[PromptRequest]) -> list[Group]:
        """The next prompt for each request."""
        indices = self._sampler.take(len(requests))
        return [
            self._group("train", request.number, at, request.version)
            for request, at in zip(requests, indices, strict=True)
        ]

    def validation_groups(self) -> list[Group]:
        return [self._group("val", number, number) for number in range(len(self._prompts["val"]))]

    def _group(self, purpose: Purpose, number: int, index: int, version: int | None = None) -> Group:
        prompt = self._prompts[purpose][index]
        return Group(number, prompt.tag, index, prompt.id, ground_truth=prompt.ground_truth, version=version)

    async def generate(self, groups: Sequence[Group], purpose: Purpose, timer: Timer) -> None:
        """Generates all responses of all groups in one call, then scores the complete groups in one batch."""
        prompts = [self._prompts[purpose][group.problem] for group in groups]
        requests = [self._requests(group, prompt, purpose) for group, prompt in zip(groups, prompts, strict=True)]
        with timer.measure("generate"):
            results = await self._engines.generate(requests)
        for group in groups:
            group.generated_s = time.time()
        with timer.measure("reward"):
            scorable: list[tuple[Group, EncodedPrompt]] = []
            for group, prompt, asked, responses in zip(groups, prompts, requests, results, strict=True):
                failed = next((each for each in responses if not _is_sample(each)), None)
                if failed is not None:
                    group.drop(GENERATION_FAILED, f"{failed.request_id}: {failed.error or 'the response is empty'}")
                    continue
                if lack := next(filter(None, map(missing_routing, asked, responses)), None):
                    group.drop(ROUTING_INCOMPLETE, lack)
                    continue
                stops = self._sampling[purpose].stop_strings
                texts = [self._scorer.text(response.response_ids, stops) for response in responses]
                pairs = zip(responses, texts, strict=True)
                group.trajectories = [Trajectory.of_response(prompt.ids, response, text) for response, text in pairs]
                group.greedy = group.trajectories.pop() if purpose == "train" and self._greedy else None
                scorable.append((group, prompt))
            await self._score(scorable)

    async def _score(self, groups: Sequence[tuple[Group, EncodedPrompt]]) -> None:
        """Scores groups and their greedy responses in one batch; a group whose greedy response fails is dropped.

        A greedy response is scored as a group of its own, so rewards that compare the responses of a group see samples
        only.
        """
        greedy = [
            (group, prompt, replace(group, trajectories=[group.greedy]))
            for group, prompt in groups
            if group.greedy is not None
        ]
        await self._scorer.score([*groups, *((alone, prompt) for _, prompt, alone in greedy)])
        for group, _, alone in greedy:
            if alone.drop_reason is not None and group.drop_reason is None:
                group.drop(alone.drop_reason, f"greedy response: {alone.failure}")

    def _requests(self, group: Group, prompt: EncodedPrompt, purpose: Purpose) -> list[GenerateRequest]:
        """One request for each response, each with its own seed; the greedy one, if there is one, is the last."""
        sampling, samples = self._sampling[purpose], self._group_size
        if purpose == "val":
            samples = self._validation_samples
        numbered = (purpose, group.number)
        plain = requests_of(prompt.ids, sampling, samples, self._seed, numbered, group.version)
        requests = [replace(request, policy=self.policy_of(group)) for request in plain]
        if purpose == "train" and self._greedy:
            greedy = replace(sampling, temperature=0.0, top_p=1.0, top_k=0, sampling_mask=False, routing=False)
            seed = role_seed(self._seed, purpose, group.number, samples)
            name = f"{purpose}-{group.number}-greedy"
            policy = self.policy_of(group)
            requests.append(GenerateRequest(name, prompt.ids, greedy, seed, group.version, policy=policy))
        return requests

    def policy_of(self, group: Group) -> str:
        return self._policies.get(group.tag, "")

    def filter_reason(self, group: Group) -> tuple[str, str] | None:
        return self._scorer.filter_reason(group)

    def validation_metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        return super().validation_metrics(groups) | reported_metrics(groups, "val")

    def batch(self, groups: Sequence[Group]) -> Batch:
        rewards, policies = self._rewards if self._uses_parts else (), self._policies
        return batch_of_groups(groups, multiple=self._samples_multiple, rewards=rewards, policies=policies)

    def metrics(self, groups: Sequence[Group], version: int) -> dict[str, float]:
        """Those of all groups, and with the name of each policy in front those of its own."""
        found = super().metrics(groups, version) | reported_metrics(groups, "reward")
        for name in sorted({*self._policies.values()} & {*map(self.policy_of, groups)}):
            own = rollout_metrics([group for group in groups if self.policy_of(group) == name], version, 0)
            found |= {f"{name}/{key}": value for key, value in own.items() if key.startswith("rollout/")}
        return found

    def state_dict(self) -> dict[str, Any]:
        """Position in the data, and what the groups that a checkpoint may hold consist of."""
        return {
            "sampler": self._sampler.state_dict(),
            "samples": self._group_size,
            "greedy": self._greedy,
            "rewards": list(self._rewards),
            "policies": self._policies,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`.

        Raises:
            ValueError: it was taken with other data, another seed, or groups of another size, or without the greedy
                responses or scores of rewards that the estimator needs.
        """
        if self._greedy and not state.get("greedy"):
            raise ValueError(
                f"adv_estimator: {self._estimator} cannot continue from a checkpoint whose groups have no "
                "greedy response; use the estimator of that run, or start a new one from its weights"
            )
        missing = [name for name in self._rewards if name not in state.get("rewards", ())]
        if self._uses_parts and missing:
            raise ValueError(
                f"adv_estimator: {self._estimator} cannot continue from a checkpoint whose samples have no "
                f"score of {', '.join(f'rewards.{name}' for name in missing)}; use the estimator and the rewards of "
                "that run, or start a new one from its weights"
            )
        if state["samples"] != self._group_size:
            raise ValueError(
                f"num_return_sequences_in_group: {self._group_size} cannot continue from a checkpoint with groups of "
                f"{state['samples']}; use {state['samples']}"
            )
        if (policies := state.get("policies", {})) != self._policies:
            raise ValueError(
                f"policies: tags {self._policies} cannot continue from a checkpoint with {policies}; use those"
            )
        self._sampler.load_state_dict(state["sampler"])

    def close(self) -> None:
        self._scorer.close()


def make_sampler(config: RLVRConfig, prompts: Sequence[EncodedPrompt]) -> PromptSampler | MixedSampler:
    """The order in which prompts are drawn: that of the files, or in shares of their domains.

    Raises:
        RunError: a domain that prompts are to be drawn from has none.
    """
    data, seed = config.actor_train.data_args, role_seed(config.seed, "prompts")
    if not data.domain_interleave_probs:
        return PromptSampler(len(prompts), seed, data.shuffle)
    indices: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        domain = domain_of(config.rewards, data.domain_interleave_probs, prompt.tag)
        indices.setdefault(domain or "", []).append(index)
    try:
        return MixedSampler(indices, data.domain_interleave_probs, seed, data.shuffle)
    except ValueError as error:
        found = ", ".join(f"{name} ({len(own)})" for name, own in indices.items())
        raise RunError(
            f"actor_train.data_args.domain_interleave_probs: {error}; the files have prompts of {found}"
        ) from None


def requests_of(
    prompt_ids: list[int],
    sampling: SamplingParams,
    count: int,
    seed: int,
    name: tuple[str, int],
    version: int | None,
) -> list[GenerateRequest]:
    """One request for each of `count` responses to a prompt; names and seeds derive from `name` and the seed."""
    purpose, number = name
    return [
        GenerateRequest(
            f"{purpose}-{number}-{index}", prompt_ids, sampling, role_seed(seed, purpose, number, index), version
        )
        for index in range(count)
    ]


def _is_sample(result: GenerateResult) -> bool:
    return result.finish_reason != "abort" and bool(result.response_ids)


class RLVRPipeline(RLPipeline[RLVRConfig]):
    """Samples are single responses to prompts."""

    def __init__(self, config: RLVRConfig) -> None:
        super().__init__(config)
        self._scorer: Scorer | None = None

    async def prepare(self) -> None:
        """Reads and encodes the prompts.

        Raises:
            RunError: a tag that no reward scores, no validation prompts though eval_steps is set, a stop string that is
                not one token, a model that scores without a tokenizer, a checkpoint of other prompts.
            DatasetError: the tokenizer of such a model lacks the chat template.
        """
        await super().prepare()
        config = self._config
        train = self._read("actor_train", config.actor_train.data_args.file_name)
        val = self._read("validation", config.validation.data_args.file_name) if config.eval_steps else []
        self._prompts: dict[Purpose, list[EncodedPrompt]] = {"train": train, "val": val}
        self._scorer = scorer = Scorer(
            config.rewards, self._tokenizer, model_scorers(config), EventLog(config.output_dir)
        )
        for tag in sorted({prompt.tag for prompt in [*train, *val]}):
            scorer.rewards_of(tag)
            if policy_of(config.policies, tag) is None:
                raise RunError(f"policies: {no_policy(config.policies, tag)}")
        scorer.check([*train, *val])
        check_sampler(config, make_sampler(config, train).load_state_dict)

    def _read(self, role: str, files: list[str]) -> list[EncodedPrompt]:
        args = getattr(self._config, role).data_args
        if not files:
            raise RunError(f"{role}.data_args.file_name: is not set")
        prompts = load_prompts(files, args, partial(truths_read, self._config.rewards))
        with prefix_errors(f"{role} ({', '.join(files)})"):
            encoded, dropped = encode_data(self._config, args, prompts, self._tokenizer)
        if dropped:
            logger.warning(
                "%s: %d of %d prompts are longer than prompt_length %d and were dropped",
                role,
                dropped,
                len(prompts),
                self._config.prompt_length,
            )
            if role == "actor_train" and len(encoded) < self._config.rollout_batch_size:
                logger.warning("%d prompts are left: every batch repeats some", len(encoded))
        return encoded

    def worker_factory(self, session: Session, own_process: bool) -> WorkerFactory:
        """Starts the rewards; a worker in a separate process starts its own."""
        scorer, models = self._scorer, ScoringModels.of(session, self._config)
        assert scorer is not None, "prepare comes first"
        if own_process:
            scorer = None
        else:
            scorer.connect(models)
            scorer.launch()
        return partial(make_rlvr_worker, self._config, self._prompts, self._sampling, scorer, models)

    async def close(self) -> None:
        if self._scorer is not None:
            self._scorer.close()


def make_rlvr_worker(
    config: RLVRConfig,
    prompts: dict[Purpose, list[EncodedPrompt]],
    sampling: dict[Purpose, SamplingParams],
    scorer: Scorer | None,
    models: ScoringModels,
    engines: EnginePool,
) -> RLVRWorker:
    """The rollout worker; without a scorer it starts the rewards itself, and connects the models of the run."""
    if scorer is None:
        tokenizer = load_tokenizer(config.actor_train.model_args.model_name_or_path)
        scorer = Scorer(config.rewards, tokenizer, model_scorers(config), EventLog(config.output_dir))
        scorer.connect(models)
    scorer.stop_token_ids = frozenset(number for each in sampling.values() for number in each.stop_token_ids)
    return RLVRWorker(config, prompts, sampling, engines, scorer)
