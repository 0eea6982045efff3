"""Sampling sessions of Tinker: each samples from one version of the weights, and engines have only the newest."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from roll.api.responses import Response
from roll.configs.pipeline import role_seed
from roll.serve.futures import Answer, Futures
from roll.serve.requests import Body, SampleRequest, required_field
from roll.serve.wire import WireError, sample_answer

if TYPE_CHECKING:
    from roll.api.open import OpenRun


@dataclass(frozen=True)
class Sampler:
    """A sampling session.

    Attributes:
        version: of the weights that it samples from; None for the newest.
        path: of the saved weights, if it was made from some.
    """

    version: int | None
    path: str | None = None


class Samplers:
    """The sampling sessions of a server."""

    def __init__(self, run: OpenRun, futures: Futures) -> None:
        self._run, self._futures = run, futures
        self._known: dict[str, Sampler] = {}

    def add(self, sampler: Sampler) -> str:
        """The id of a new session.

        Raises:
            WireError: the engines do not have its weights.
        """
        self._check(sampler)
        sampler_id = f"sampler-{secrets.token_hex(8)}"
        self._known[sampler_id] = sampler
        return sampler_id

    def find(self, sampler_id: str) -> Sampler:
        """The session of this id.

        Raises:
            WireError: there is none.
        """
        if sampler_id not in self._known:
            raise WireError(f"sampling_session_id: {sampler_id} is unknown; make a new SamplingClient")
        return self._known[sampler_id]

    def start(self, body: Body, trained: bool) -> Body:
        """Begins to sample; `trained` says that the trainer's weights are no longer those of the engines.

        A sample that runs during a weight update goes on with the new weights, and has their log-probs.
        """
        sampler_id, number = required_field(body, "sampling_session_id", str), required_field(body, "seq_id", int)
        request_id, config, sampler = f"{sampler_id}:{number}", self._run.config, self.find(sampler_id)
        if request_id not in self._futures:
            self._check(sampler)
        request = SampleRequest.read(body, config.sequence_length or 0, len(self._run.tokenizer))
        if request.prompt_log_probs and trained and request_id not in self._futures:
            raise WireError("prompt_logprobs: the weights have been trained since; save them for sampling first")
        seed = role_seed(config.seed, "tinker", self._run.version, number) if request.seed is None else request.seed
        self._futures.start(request_id, partial(self._sample, request, seed))
        ids = [f"{request_id}:{index}" for index in range(request.count)]
        return {"request_id": request_id, "sample_sequence_ids": ids}

    async def _sample(self, request: SampleRequest, seed: int) -> Answer:
        scored = None
        if request.prompt_log_probs:
            given = Response(request.prompt[:1], request.prompt[1:])
            [log_probs] = await self._run.log_probs_async([given], temperature=1.0)
            scored = [float("nan"), *log_probs.tolist()]
        responses = await self._run.sample_async([request.prompt], request.count, seed=seed, **request.params)
        return sample_answer([(each.ids, each.log_probs, each.finish_reason) for each in responses], scored)

    def _check(self, sampler: Sampler) -> None:
        if sampler.version not in (None, self._run.version):
            raise WireError(
                f"sampling session: it samples from weights {sampler.version}, and the engines have weights "
                f"{self._run.version}, the newest that were saved; make a SamplingClient of these"
            )
