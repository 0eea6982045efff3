"""Errors in the inputs of a run are reported before any process starts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from examples.tiny_math.prepare import make_tokenizer
from roll.configs.pipeline import RLVRConfig, role_seed
from roll.datasets.prompts import PromptSampler
from roll.datasets.records import DatasetError
from roll.pipeline.checkpoint import FILE_NAME as STATE_FILE
from roll.pipeline.checkpoint import CheckpointError, PipelineState, checkpoints_of
from roll.pipeline.kinds.rlvr import RLVRPipeline
from tests.configs.samples import MODEL, rlvr
from tests.datasets.files import jsonl, row


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Config and tokenizer, without weights."""
    folder = tmp_path / "model"
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(Path(MODEL, "config.json").read_text())
    return folder


def prepared(config: RLVRConfig) -> None:
    asyncio.run(RLVRPipeline(config).prepare())


def test_prompts_of_which_none_fits_are_reported_with_role_and_file(tmp_path: Path, model: Path) -> None:
    file = jsonl(tmp_path, row(1, prompt=[{"role": "user", "content": "1" * 30}]))
    with pytest.raises(DatasetError) as caught:
        prepared(rlvr(tmp_path, f"pretrain={model}", f"actor_train.data_args.file_name={file}", "prompt_length=24"))
    assert str(caught.value).startswith(f"actor_train ({file}): prompt_length: all 1 prompts are longer than 24 tokens")


def save(config: RLVRConfig, step: int, prompts: int) -> Path:
    """A checkpoint of a run with so many prompts."""
    sampler = PromptSampler(prompts, role_seed(config.seed, "prompts"), True)

    async def write(folder: Path) -> None:
        PipelineState(step, samples={"worker": {"sampler": sampler.state_dict()}}).save(folder)

    async def complete() -> Path:
        await checkpoints_of(config).write(step, write)
        return await checkpoints_of(config).complete_step(step)

    return asyncio.run(complete())


def test_a_checkpoint_of_other_prompts_is_refused(tmp_path: Path, model: Path) -> None:
    """However it is named; one of the same prompts is taken, also where the newest is damaged."""
    file = jsonl(tmp_path, *map(row, range(3)))
    given = [f"pretrain={model}", f"actor_train.data_args.file_name={file}", f"output_dir={tmp_path}", "eval_steps=0"]
    same, other = save(config := rlvr(tmp_path, *given), 1, prompts=3), save(config, 2, prompts=2)
    for choice in (other, tmp_path, "true"):
        with pytest.raises(CheckpointError, match=f"{other} does not fit this run: .*: size was 2 and is 3"):
            prepared(rlvr(tmp_path, *given, f"resume_from_checkpoint={choice}"))
    prepared(rlvr(tmp_path, *given, f"resume_from_checkpoint={same}"))
    (other / STATE_FILE).write_text("")
    prepared(rlvr(tmp_path, *given, "resume_from_checkpoint=true"))


def test_too_few_prompts_after_long_ones_were_dropped_are_reported(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = jsonl(tmp_path, row(1), row(2, prompt="1+1=" * 2000))
    given = (f"pretrain={model}", f"actor_train.data_args.file_name={file}", "eval_steps=0")
    pipeline = RLVRPipeline(rlvr(tmp_path, *given))

    async def prepare_and_close() -> None:
        try:
            await pipeline.prepare()
        finally:
            await pipeline.close()

    asyncio.run(prepare_and_close())
    assert "1 prompts are left: every batch repeats some" in caplog.text
