"""A Ray actor that owns one engine, and the references its answers are compared with."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import ray
import torch

from roll.configs.pipeline import RLVRConfig
from roll.configs.roles import ActorInferConfig
from roll.distributed.infer.infer_worker import InferWorker
from roll.distributed.infer.sglang_generation import Generation
from roll.distributed.processes import log_file, print_to
from roll.distributed.weights.plan import WeightSpec
from roll.distributed.weights.shm_buckets import tensor_locations, views_of
from roll.distributed.worker import WorkerRank
from roll.platforms.cpu.shared_memory import SharedMemory, make_handle
from roll.rollout.types import GenerateRequest, GenerateResult, SamplingParams
from tests.processes import PATIENCE_S

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors do not see this folder


class EngineHost:
    """Calls methods of a worker by name, several at a time."""

    async def make(self, folder: str, tensor_parallel: int, options: dict[str, Any]) -> None:
        """Makes the worker, also in place of one whose engine has ended."""
        worker = ActorInferConfig(num_gpus_per_worker=tensor_parallel, max_running_requests=32)
        worker.model_args.model_name_or_path, worker.model_args.dtype = folder, options.pop("dtype", "fp32")
        routing = options.pop("routing", False)
        rank = replace(WorkerRank("actor_infer"), cores=options.pop("cores", ()))
        worker.strategy_args.strategy_config = {"disable_radix_cache": False, **options}
        pipeline = RLVRConfig(
            output_dir=folder, prompt_length=56, response_length=2000, deterministic=True, sync_timeout_s=600
        )
        pipeline.actor_train.router_replay.mode = "R3" if routing else "disable"
        self.worker = InferWorker(rank, worker, pipeline)

    async def call(self, method: str, *arguments: Any) -> Any:
        answer = getattr(self.worker, method)(*arguments)
        return await answer if inspect.isawaitable(answer) else answer

    async def print_to_log(self) -> None:
        """Writes the output of this process and the engine's to the log that errors name, as in a run."""
        print_to(log_file(self.worker.pipeline_config, self.worker.rank.process_name))

    async def generate_within(self, requests: list[GenerateRequest], timeout_s: float) -> list[GenerateResult]:
        version = self.worker.receiver.version
        engine, running = self.worker.engine, self.worker.config.max_running_requests
        generation = Generation(
            engine, timeout_s, deterministic=False, running=running, newer=None, ahead=0, version=lambda: version
        )
        return await generation.generate(requests)

    async def score(self, rows: list[list[int]]) -> list[list[float]]:
        """Log-probs of given tokens, of each sequence from its second one on."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        sampling = {"max_new_tokens": 1, "temperature": 1.0}
        request = GenerateReqInput(input_ids=rows, sampling_params=sampling, return_logprob=True, logprob_start_len=0)
        answers = await anext(self.worker.engine.manager.generate_request(request))
        return [[value for value, *_ in answer["meta_info"]["input_token_logprobs"][1:]] for answer in answers]

    async def sampled_tokens(self, requests: list[GenerateRequest]) -> list[int]:
        """Tokens of each answer as SGLang sends them, before anything is cut."""
        generation, lengths = self.worker.generation, []
        attempt = generation._attempt

        async def count(*arguments: Any) -> Any:
            result, interrupted = await attempt(*arguments)
            lengths.append(len(result.response_ids))
            return result, interrupted

        generation._attempt = count
        try:
            await self.worker.generate(requests)
        finally:
            del generation._attempt
        return lengths

    async def outputs_of(self, requests: list[GenerateRequest]) -> tuple[list[int], int]:
        """Tokens of each answer, and the messages with tokens that the scheduler sends for them."""
        manager = self.worker.engine.manager
        handle, messages = manager._handle_batch_output, 0

        async def count(message: Any) -> None:
            nonlocal messages
            messages += 1
            await handle(message)

        manager._handle_batch_output = count
        try:
            answers = await self.worker.generate(requests)
        finally:
            del manager._handle_batch_output
        return [len(answer.response_ids) for answer in answers], messages

    async def cpu_seconds(self, wall_s: float) -> float:
        """What the engine's processes compute while nothing is asked of them."""
        processes = [psutil.Process(pid) for pid in self.worker.engine.processes()]
        before = sum(sum(process.cpu_times()[:2]) for process in processes)
        await asyncio.sleep(wall_s)
        return sum(sum(process.cpu_times()[:2]) for process in processes) - before

    async def shared_files(self) -> set[Path]:
        return self.worker.engine._shared_files

    async def affinities(self) -> tuple[set[int], list[set[int]]]:
        """Cores of this process, and of the schedulers."""
        return os.sched_getaffinity(0), [os.sched_getaffinity(pid) for pid in self.worker.engine._schedulers]

    async def start(self, asked: list[GenerateRequest], marks: int) -> None:
        """Starts a call, and waits until its requests have 50 tokens each.

        Shorter requests that run beside them tell when they have so many: `marks` of them, of 50 tokens, 100 tokens...
        """
        self.count, self.ended = len(asked), asyncio.Semaphore(0)
        answer = self.worker.generation._answer

        async def noticed(request: GenerateRequest, name: str) -> GenerateResult:
            result = await answer(request, name)
            self.ended.release()
            return result

        shorter = [request for mark in range(marks) for request in requests(1, 50 * (mark + 1))]
        self.worker.generation._answer = noticed
        self.asked = asyncio.create_task(self.worker.generate([*asked, *shorter]))
        await self.until_next_mark()
        del self.worker.generation._answer

    async def until_next_mark(self) -> None:
        """Waits until the requests have 50 tokens more."""
        await asyncio.wait([self.asked, asyncio.ensure_future(self.ended.acquire())], return_when="FIRST_COMPLETED")
        assert not self.asked.done(), "it finished before it was seen to run"

    async def answers(self) -> list[GenerateResult]:
        """Of the call that was started last, without those of the shorter requests."""
        return (await self.asked)[: self.count]

    async def scheduler_ids(self) -> list[int]:
        return self.worker.engine._schedulers

    async def cancel(self, requests: list[GenerateRequest]) -> None:
        """Cancels a call in the middle of its generation."""
        await self.start(requests, 1)
        self.asked.cancel()


class Sender:
    """A process that shares tensors with engines, as a training worker does; it keeps the last ones."""

    def share(self, tensors: dict[str, torch.Tensor]) -> bytes:
        specs = [WeightSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()]
        self.memory = SharedMemory.create(sum(tensor.nbytes for tensor in tensors.values()))
        for name, view in views_of(self.memory.tensor, specs):
            view.copy_(tensors[name])
        return make_handle(self.memory, tensor_locations(specs))


def start_host(cls: type) -> ray.actor.ActorHandle:
    """A process that has imported SGLang, for one engine after another."""
    return ray.remote(max_concurrency=16, num_cpus=0)(cls).remote()


class RemoteEngine:
    """The actor seen from a test: `engine.pause("retract")` waits, `engine.start_generate(...)` until it runs.

    `actor` is one in which earlier engines have ended.
    """

    def __init__(
        self, folder: Path, tensor_parallel: int = 1, actor: ray.actor.ActorHandle | None = None, **options: Any
    ) -> None:
        self.actor = actor or start_host(EngineHost)
        ray.get(self.actor.make.remote(str(folder), tensor_parallel, options), timeout=PATIENCE_S)

    def __getattr__(self, method: str) -> Any:
        return lambda *arguments: ray.get(self.actor.call.remote(method, *arguments), timeout=PATIENCE_S)

    def cancel_generate(self, requests: list[GenerateRequest]) -> None:
        ray.get(self.actor.cancel.remote(requests), timeout=PATIENCE_S)

    def start_generate(self, requests: list[GenerateRequest], marks: int = 1) -> ray.ObjectRef:
        ray.get(self.actor.start.remote(requests, marks), timeout=PATIENCE_S)
        return self.actor.answers.remote()

    def until_next_mark(self) -> None:
        ray.get(self.actor.until_next_mark.remote(), timeout=PATIENCE_S)

    def shared_files(self) -> set[Path]:
        return ray.get(self.actor.shared_files.remote(), timeout=PATIENCE_S)

    def scheduler_ids(self) -> list[int]:
        return ray.get(self.actor.scheduler_ids.remote(), timeout=PATIENCE_S)

    def affinities(self) -> tuple[set[int], list[set[int]]]:
        return ray.get(self.actor.affinities.remote(), timeout=PATIENCE_S)

    def score(self, rows: list[list[int]]) -> list[list[float]]:
        return ray.get(self.actor.score.remote(rows), timeout=PATIENCE_S)

    def outputs_of(self, requests: list[GenerateRequest]) -> tuple[list[int], int]:
        return ray.get(self.actor.outputs_of.remote(requests), timeout=PATIENCE_S)

    def sampled_tokens(self, requests: list[GenerateRequest]) -> list[int]:
        return ray.get(self.actor.sampled_tokens.remote(requests), timeout=PATIENCE_S)

    def cpu_seconds(self, wall_s: float) -> float:
        return ray.get(self.actor.cpu_seconds.remote(wall_s), timeout=PATIENCE_S)

    def generate_within(self, requests: list[GenerateRequest], timeout_s: float) -> list[GenerateResult]:
        return ray.get(self.actor.generate_within.remote(requests, timeout_s), timeout=PATIENCE_S)


def requests(count: int, tokens: int, temperature: float = 1.0, first_seed: int = 0) -> list[GenerateRequest]:
    """Requests with prompts of different lengths that share their beginning in pairs."""
    sampling = SamplingParams(tokens, temperature)
    return [
        GenerateRequest(f"r{i}", [4, 9 + i // 2, *range(10, 12 + 3 * (i % 5))], sampling, seed=first_seed + i)
        for i in range(count)
    ]


@torch.no_grad()
def reference(model: torch.nn.Module, request: GenerateRequest, response: Sequence[int]) -> torch.Tensor:
    """Log-probs [response] that transformers gives, at the request's temperature."""
    prompt = request.prompt_ids
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].float()
    log_probs = torch.log_softmax(logits / request.sampling.temperature, -1)
    return log_probs.gather(-1, torch.tensor(response)[:, None])[:, 0]


def largest_difference(model: torch.nn.Module, asked: list[GenerateRequest], answers: list[GenerateResult]) -> float:
    """Largest absolute difference of any token's log-prob from the reference."""
    return max(
        (reference(model, request, answer.response_ids) - torch.tensor(answer.log_probs)).abs().max().item()
        for request, answer in zip(asked, answers, strict=True)
    )
