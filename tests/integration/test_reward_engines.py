"""A real SGLang engine that scores sequences: its values are those of transformers for the same folder."""

from __future__ import annotations

import inspect
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from sglang_host import start_host

from roll.configs.pipeline import RLVREngineRewardConfig
from roll.distributed.infer.score_worker import NOTHING_SAMPLED, ScoreWorker
from roll.distributed.worker import WorkerRank
from roll.models.tiny import TINY_SHAPE
from roll.rollout.types import GenerateRequest, GenerateResult
from tests.processes import PATIENCE_S

pytestmark = pytest.mark.integration

POSITIONS = 128
TOLERANCE = 1e-4

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors do not see this folder


class ScoreHost:
    """Calls methods of a worker by name, several at a time."""

    async def make(self, folder: str, tensor_parallel: int, options: dict[str, Any]) -> None:
        """Makes the worker, also in place of one whose engine has ended."""
        config = RLVREngineRewardConfig(
            output_dir=folder, prompt_length=512, response_length=8, deterministic=options.pop("deterministic", False)
        )
        role = config.reward
        role.model_args.model_name_or_path, role.model_args.dtype, role.max_running_requests = folder, "fp32", 8
        role.strategy_args.strategy_config = options
        role.num_gpus_per_worker = tensor_parallel
        self.worker = ScoreWorker(WorkerRank("reward"), role, config)

    async def call(self, method: str, *arguments: Any) -> Any:
        answer = getattr(self.worker, method)(*arguments)
        return await answer if inspect.isawaitable(answer) else answer

    async def set_timeout(self, seconds: float) -> None:
        self.worker.config.generation_timeout_s = seconds

    async def kill_scheduler(self) -> None:
        os.kill(self.worker.engine._schedulers[0], signal.SIGKILL)


class RemoteScores:
    """The actor seen from a test, in which earlier engines have ended."""

    def __init__(self, actor: Any, folder: Path, tensor_parallel: int = 1, **options: Any) -> None:
        self.actor = actor
        ray.get(actor.make.remote(str(folder), tensor_parallel, options), timeout=PATIENCE_S)

    def on_host(self, method: str, *arguments: Any) -> None:
        ray.get(getattr(self.actor, method).remote(*arguments), timeout=PATIENCE_S)

    def __getattr__(self, method: str) -> Any:
        return lambda *arguments: ray.get(self.actor.call.remote(method, *arguments), timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def host(on_ray: None) -> Iterator[Any]:
    host = start_host(ScoreHost)
    yield host
    ray.kill(host)


def write(folder: Path, family: str, kind: str) -> Any:
    """A random model with one output, saved as transformers saves it; norms and biases are random too."""
    import transformers

    model_class = getattr(transformers, f"{family}For{kind}Classification")
    shape = TINY_SHAPE | {"head_dim": 16, "max_position_embeddings": POSITIONS, "pad_token_id": 0, "num_labels": 1}
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**shape, tie_word_embeddings=False)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def sequences() -> list[list[int]]:
    """Sequences of many lengths, up to the last position, some with a prefix of another one."""
    generator = torch.Generator().manual_seed(1)
    lengths = (1, 2, 17, 60, POSITIONS, 33, 5, 100, 64, 65, 90)
    rows = [torch.randint(1, 100, (length,), generator=generator).tolist() for length in lengths]
    return [*rows, rows[7][:50] + rows[2], rows[7][:50], rows[7]]


def requests(rows: list[list[int]]) -> list[GenerateRequest]:
    return [GenerateRequest(str(index), row, NOTHING_SAMPLED) for index, row in enumerate(rows)]


def expected(model: Any, rows: list[list[int]]) -> list[float]:
    with torch.no_grad():
        hidden = [model.base_model(torch.tensor([row])).last_hidden_state[0, -1] for row in rows]
        return [float(model.score(each)) for each in hidden]


@pytest.mark.parametrize(
    ("family", "kind", "options"),
    [
        ("Llama", "Token", {"chunked_prefill_size": 32}),
        ("Qwen2", "Sequence", {"tensor_parallel": 2}),
        ("Qwen3", "Sequence", {"deterministic": True}),
    ],
)
def test_values_are_those_of_transformers(host, tmp_path, family, kind, options):
    """A `...ForTokenClassification` has a bias, a `...ForSequenceClassification` none; one engine dies in between."""
    model, rows = write(tmp_path, family, kind), sequences()
    engine = RemoteScores(host, tmp_path, **options)
    engine.initialize()
    try:
        first: list[GenerateResult] = engine.generate(requests(rows))
        assert [result.error for result in first] == [None] * len(rows)
        assert [result.value for result in first] == pytest.approx(expected(model, rows), abs=TOLERANCE)
        again = engine.generate(requests(rows[::-1]))[::-1]
        assert [result.value for result in again] == pytest.approx([result.value for result in first], abs=TOLERANCE)
        if "deterministic" in options:
            assert again == [*map(_renamed, first, again)], "a score depends on its batch"
            check_late_sequences_and_a_restart(engine, [result.value for result in first])
        [long] = engine.generate(requests([[1] * (POSITIONS + 8)]))
        assert (long.value, long.finish_reason) == (None, "abort") and "longer than the model's context" in long.error
    finally:
        engine.close()


def check_late_sequences_and_a_restart(engine: RemoteScores, values: list[float]) -> None:
    """A late sequence has an error, and an engine that died gives the same values after its restart."""
    engine.on_host("set_timeout", 1e-6)
    late = engine.generate(requests(sequences()))
    assert all("no answer within 1e-06 s" in result.error and result.value is None for result in late)
    engine.on_host("set_timeout", PATIENCE_S)
    assert [result.value for result in engine.generate(requests(sequences()))] == pytest.approx(values, abs=1e-5)
    engine.on_host("kill_scheduler")
    with pytest.raises(ray.exceptions.RayTaskError, match=r"EngineNotRunningError.*killed by SIGKILL"):
        while True:
            engine.generate(requests(sequences()))
    engine.start_again(False)
    assert [result.value for result in engine.generate(requests(sequences()))] == pytest.approx(values, abs=1e-5)


def _renamed(result: GenerateResult, other: GenerateResult) -> GenerateResult:
    return GenerateResult(**{**vars(result), "request_id": other.request_id})


def test_a_folder_without_the_weights_of_its_head_is_refused(host, tmp_path):
    from safetensors.torch import load_file, save_file

    write(tmp_path, "Qwen2", "Sequence")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ray.exceptions.RayTaskError, match=r"scores one token with nan.*value head"):
        RemoteScores(host, tmp_path).initialize()
