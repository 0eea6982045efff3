"""Engines that do not compute the trainer's model are found before anything is generated for training."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
import torch

from roll.base.errors import RunError
from roll.pipeline.learning.engine_probe import LONGEST_PROMPT, NEW_TOKENS, EngineProbe
from roll.rollout.engine_pool import EngineDownError
from roll.rollout.types import GenerateRequest, GenerateResult, SamplingParams
from tests.configs.samples import RLVR, rlvr
from tests.pipeline.bigram import WORDS, BigramCluster
from tests.pipeline.learning.test_learner import SMALL


class BigramEngines:
    """Engines with a table each, which sample at their own temperature."""

    def __init__(self, *tables: torch.Tensor | None, temperature: float = 1.0) -> None:
        self.tables, self.temperature = tables, temperature
        self.asked: list[GenerateRequest] = []

    @property
    def world_size(self) -> int:
        return len(self.tables)

    async def generate(self, rank: int, requests: list[GenerateRequest], /) -> list[GenerateResult]:
        self.asked += requests
        table = self.tables[rank]
        if table is None:
            raise EngineDownError("it died")
        return [self._response(table, request) for request in requests]

    async def is_serving(self, rank: int, /) -> bool:
        return self.tables[rank] is not None

    def _response(self, table: torch.Tensor, request: GenerateRequest) -> GenerateResult:
        generator = torch.Generator().manual_seed(request.seed or 0)
        log_probs, last, ids, found = (table / self.temperature).log_softmax(-1), request.prompt_ids[-1], [], []
        for _ in range(request.sampling.max_new_tokens):
            token = int(torch.multinomial(log_probs[last].exp(), 1, generator=generator))
            ids.append(token)
            found.append(float(log_probs[last, token]))
            last = token
        return GenerateResult(request.request_id, ids, found, [0] * len(ids), "length")


def compared(folder: Path, engines: BigramEngines, *overrides: str) -> None:
    config = rlvr(folder, *SMALL, f"output_dir={folder}", "platform=cpu", *overrides, text=RLVR)
    probe = EngineProbe(config, engines, {"": BigramCluster()}, SamplingParams(100), WORDS)  # type: ignore[arg-type]

    async def go() -> None:
        await probe.sample()
        await probe.compare()

    asyncio.run(go())


TABLE = BigramCluster().table.detach()
HALF = ("actor_train.model_args.dtype=bf16", "actor_infer.model_args.dtype=bf16")


def stale(share: float) -> torch.Tensor:
    return TABLE + share * torch.randn(TABLE.shape, generator=torch.Generator().manual_seed(3))


def test_every_engine_is_asked_for_short_responses_to_prompts_of_many_lengths(tmp_path):
    engines = BigramEngines(TABLE, TABLE)
    compared(tmp_path, engines)
    lengths = [len(request.prompt_ids) for request in engines.asked]
    assert len(lengths) == 16 and lengths[:8] == lengths[8:] == [LONGEST_PROMPT * i // 8 for i in range(1, 9)]
    assert {request.sampling.max_new_tokens for request in engines.asked} == {NEW_TOKENS}
    assert {token for request in engines.asked for token in request.prompt_ids} == {*range(WORDS)}


def test_an_engine_with_other_weights_is_named_among_several(tmp_path):
    with pytest.raises(
        RunError, match=r"engine 1 and trainer .* by 0\.\d+.*unlike engine 0, engine 2, so check its own weights"
    ):
        compared(tmp_path, BigramEngines(TABLE, stale(0.03), TABLE))


def test_a_bound_that_is_null_is_left_out(tmp_path):
    off = (f"{key}_logprob_mismatch=~" for key in ("mean", "p99", "max"))
    compared(tmp_path, BigramEngines(stale(0.03)), *off)


@pytest.mark.parametrize("temperature", [0.95, 1.05])
@pytest.mark.parametrize("dtypes", [(), HALF])
def test_a_wrong_temperature_is_named_in_fp32_and_half_precision(tmp_path, temperature, dtypes):
    with pytest.raises(RunError, match=f"as at {temperature:g} times the trainer's temperature.*raise the bound"):
        compared(tmp_path, BigramEngines(TABLE, TABLE, temperature=temperature), *dtypes)


def test_an_engine_that_is_down_is_left_out_with_a_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        compared(tmp_path, BigramEngines(None, TABLE))
        compared(tmp_path, BigramEngines(None))
    assert caplog.text.count("engine 0 was not compared with the trainer: it died") == 2
