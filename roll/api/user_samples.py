"""Where the samples of a run with a loop of the caller come from: prompts, requests to the engines, and rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any

from transformers import PreTrainedTokenizerBase

from roll.api.responses import Response
from roll.base.errors import RunError
from roll.configs.arguments import LONGEST_SAMPLING_MASK
from roll.datasets.prompts import MixedSampler, PromptSampler, Question
from roll.datasets.stop_strings import divide_stops
from roll.datasets.templates import EncodedPrompt, PromptEncoder
from roll.datasets.tokenizer import response_text
from roll.pipeline.kinds.rlvr import requests_of
from roll.pipeline.kinds.scorer import Scorer
from roll.rollout.engine_pool import EnginePool
from roll.rollout.source import SampleBatch
from roll.rollout.types import GenerateRequest, GenerateResult, Group, SamplingParams, missing_routing

AnyPrompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | EncodedPrompt
"""A text or messages, which the chat template of the run is applied to; token ids; or a prompt of the run's data."""

OWN = "user"
"""In names of requests with a seed of the caller."""


@dataclass
class UserSamples:
    """A `SampleSource` from which no batch is taken: the caller asks for responses.

    Attributes:
        numbered: prompts that were sampled so far; requests have names and seeds by it, as those of `roll run`.
        version: of the weights that the engines have.
    """

    pool: EnginePool
    tokenizer: PreTrainedTokenizerBase
    encoder: PromptEncoder
    sampling: SamplingParams
    seed: int
    longest: int
    prompts: Sequence[EncodedPrompt]
    sampler: PromptSampler | MixedSampler | None
    scorer: Scorer | None
    numbered: int = 0
    version: int = 0

    def next_prompts(self, count: int) -> list[EncodedPrompt]:
        """The next prompts of the data in the order of `roll run`.

        Raises:
            RunError: the run has no data.
        """
        if self.sampler is None:
            raise RunError("next_prompts: actor_train.data_args.file_name is not set; name a file, or sample your own")
        return [self.prompts[index] for index in self.sampler.take(count)]

    async def sample(
        self, prompts: Sequence[AnyPrompt], count: int, seed: int | None, params: Mapping[str, Any]
    ) -> list[Response]:
        """`count` responses to each prompt; see `Verbs.sample`."""
        if isinstance(prompts, str) or count < 1:
            what = f"n: {count} is not at least 1" if count < 1 else "prompts: is one text; give a list"
            raise RunError(f"sample: {what}")
        sampling, first = self._sampling(params), self.numbered
        encoded = [self._encoded(number, prompt, sampling) for number, prompt in enumerate(prompts)]
        self.numbered += len(encoded)
        requests = []
        for index, prompt in enumerate(encoded):
            name = ("train", first + index) if seed is None else (OWN, index)
            own = self.seed if seed is None else seed
            requests.append(requests_of(prompt.ids, sampling, count, own, name, self.version))
        results = await self.pool.generate(requests)
        return [
            self._response(request, result, prompt, first + index)
            for index, (prompt, asked, answers) in enumerate(zip(encoded, requests, results, strict=True))
            for request, result in zip(asked, answers, strict=True)
        ]

    def _sampling(self, params: Mapping[str, Any]) -> SamplingParams:
        known = {item.name for item in fields(SamplingParams)} - {"sampling_mask", "routing", "stop_strings"}
        if wrong := sorted(params.keys() - known - {"stop"}):
            raise RunError(f"sample: {wrong[0]} is no sampling parameter; use {', '.join(sorted(known | {'stop'}))}")
        changed = replace(self.sampling, **{name: value for name, value in params.items() if name != "stop"})
        if "stop" in params:
            given = params["stop"]
            tokens, strings = divide_stops(self.tokenizer, [given] if isinstance(given, str) else given)
            changed = replace(changed, stop_token_ids=(*changed.stop_token_ids, *tokens), stop_strings=strings)
        masks = self.sampling.sampling_mask and 1 < changed.top_k <= LONGEST_SAMPLING_MASK
        return replace(changed, stop_token_ids=tuple(changed.stop_token_ids), sampling_mask=masks)

    def _encoded(self, number: int, prompt: AnyPrompt, sampling: SamplingParams) -> EncodedPrompt:
        if isinstance(prompt, EncodedPrompt):
            found = prompt
        elif isinstance(prompt, str):
            found = self._templated(Question(text=prompt))
        else:
            parts: Sequence[Any] = prompt
            if parts and isinstance(parts[0], Mapping):
                found = self._templated(Question(messages=tuple(map(dict, parts))))
            else:
                found = EncodedPrompt("", "", [int(each) for each in parts], None)
        tokens, room = len(found.ids), self.longest - sampling.max_new_tokens
        if not 0 < tokens <= room:
            most = f"{tokens} tokens and max_new_tokens {sampling.max_new_tokens} are not within {self.longest}"
            raise RunError(f"prompts[{number}]: {most}; shorten it, lower max_new_tokens, or raise prompt_length")
        return found

    def _templated(self, question: Question) -> EncodedPrompt:
        return EncodedPrompt("", "", self.encoder.encode([question])[0], None, question)

    def _response(
        self, request: GenerateRequest, result: GenerateResult, prompt: EncodedPrompt, number: int
    ) -> Response:
        problem = result.error if result.finish_reason == "abort" else missing_routing(request, result)
        if problem is not None or not result.response_ids:
            raise RunError(f"sample: {request.request_id} failed: {problem or 'the response is empty'}")
        sampling = request.sampling
        return Response(
            list(request.prompt_ids), result.response_ids, result.log_probs, result.versions,
            response_text(self.tokenizer, result.response_ids, sampling.stop_strings, sampling.stop_token_ids),
            "length" if result.finish_reason == "length" else "stop", number,
            prompt=prompt, sampling_mask=result.sampling_mask, routing=result.routing,
        )  # fmt: skip

    async def score(self, responses: Sequence[Response]) -> list[float]:
        """The rewards of the configuration for responses to prompts of its data.

        Raises:
            RunError: the run has no data, a response belongs to none of it, or a reward failed.
        """
        if self.scorer is None:
            raise RunError("score: actor_train.data_args.file_name is not set, so nothing is known of the prompts")
        pairs = []
        for number, own in groupby(enumerate(responses), lambda each: each[1].group):
            members = list(own)
            first, prompt = members[0][0], members[0][1].prompt
            if prompt is None or not prompt.tag:
                raise RunError(f"responses[{first}].prompt: is not of the run's data; score it yourself")
            trajectories = [response.trajectory(f"responses[{index}]") for index, response in members]
            pairs.append((Group(number, prompt.tag, number, prompt.id, trajectories), prompt))
        self.scorer.launch()
        await self.scorer.score(pairs)
        if failed := next((group for group, _ in pairs if group.drop_reason is not None), None):
            raise RunError(f"score: {failed.name}: {failed.failure}")
        return [trajectory.score for group, _ in pairs for trajectory in group.trajectories]

    async def next_batch(self) -> SampleBatch | None:
        return None

    async def stop(self) -> None:
        """Nothing runs that the caller has not asked for."""

    async def advance(self, version: int) -> None:
        self.version = version

    async def validate(self) -> dict[str, float]:
        return {}

    async def state_dict(self) -> dict[str, Any]:
        """The number of prompts, and the position in the data."""
        sampler = {} if self.sampler is None else {"sampler": self.sampler.state_dict()}
        return {"prompts": self.numbered, "worker": sampler}

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`; of a checkpoint of `roll run` the prompts that it has submitted count."""
        policy = state.get("policy", {})
        self.numbered = int(state["prompts"] if "prompts" in state else policy["submitted"])
        if self.sampler is not None and "sampler" in state["worker"]:
            self.sampler.load_state_dict(state["worker"]["sampler"])

    async def health(self) -> dict[str, Any]:
        return {"prompts": self.numbered}
