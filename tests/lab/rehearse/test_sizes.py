"""Layouts, devices and batches of a rehearsal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.configs.devices.parallel_layout import ParallelLayout as Layout
from roll.lab.rehearse.sizes import Placement, SmallBatch, shrink_layouts, smallest_batch
from roll.loading.load import build_config
from tests.configs.samples import MODEL


def placed(
    train: str, infer: str, tensor: int = 1, pipeline: int = 1, engine: int = 1, context: int = 1, **more: Any
) -> Placement:
    """The placement of a recipe with these device mappings and sizes."""
    sizes = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    sizes["context_parallel_size"] = context
    tree = {
        "pretrain": MODEL,
        "response_length": 10,
        "rollout_batch_size": 64,
        "num_return_sequences_in_group": 8,
        "actor_train": {
            "data_args": {"file_name": ["a.jsonl"]},
            "strategy_args": {"strategy_config": sizes},
            "device_mapping": train,
        },
        "actor_infer": {"num_gpus_per_worker": engine, "device_mapping": infer},
        **more,
    }
    return shrink_layouts(build_config(tree).device_roles())


@pytest.mark.parametrize(
    ("recipe", "train", "infer", "first_engine"),
    [
        # 64 devices become six where training and generation are apart
        ({"train": "0-31", "infer": "32-63", "tensor": 4}, Layout(2, 2), Layout(1, 2), 4),
        # at most two engines, so on shared devices each has two
        ({"train": "0-7", "infer": "0-7", "tensor": 2}, Layout(2, 2), Layout(2, 2), 0),
        ({"train": "0", "infer": "0"}, Layout(), Layout(), 0),
        # context parallelism is the last to be lost
        (
            {"train": "0-31", "infer": "32-33", "tensor": 2, "pipeline": 2, "context": 4},
            Layout(2, 1, 1, 2),
            Layout(),
            4,
        ),
        # three sizes and two engines do not fit: data parallelism is lost, and on shared devices nothing
        ({"train": "0-7", "infer": "8-9", "tensor": 2, "pipeline": 2}, Layout(2, 1, 2), Layout(1, 2), 4),
        ({"train": "0-7", "infer": "0-7", "tensor": 2, "pipeline": 2, "engine": 4}, Layout(2, 2, 2), Layout(4, 2), 0),
    ],
)
def test_sizes_above_one_become_two_on_at_most_eight_slots(
    recipe: dict[str, Any], train: Layout, infer: Layout, first_engine: int
) -> None:
    made = placed(**recipe)
    assert made.layouts == {"actor_train": train, "actor_infer": infer}
    assert made.devices["actor_train"] == list(range(train.world_size))
    assert made.devices["actor_infer"] == list(range(first_engine, first_engine + infer.world_size))
    assert made.slots == first_engine + infer.world_size


def test_generation_on_the_first_devices_stays_there() -> None:
    assert placed("4-7", "0-3").devices == {"actor_train": [2, 3], "actor_infer": [0, 1]}


@pytest.mark.parametrize("shared", [True, False])
def test_a_reference_keeps_its_own_sizes(shared: bool) -> None:
    devices = "0-7" if shared else "16-23"
    reference = {
        "device_mapping": devices,
        "strategy_args": {"strategy_config": {"pipeline_model_parallel_size": 2}},
    }
    made = placed("0-7", "8-15", tensor=2, use_kl_loss=True, kl_loss_coef=0.1, reference=reference)
    assert made.layouts["reference"].pipeline == 2
    assert (made.devices["reference"] == made.devices["actor_train"]) == shared


@pytest.mark.parametrize(
    ("sizes", "batch"),
    [
        ((64, 8, 1, 64, 2), SmallBatch(4, 4, 4, 2)),
        ((64, 8, 512, 64, 2), SmallBatch(4, 4, 2, 2)),
        ((1024, 1, 512, 1, 1), SmallBatch(4, 1, 2, 1)),
        ((2, 2, 1, 1, 1), SmallBatch(2, 2, 4, 1)),
        ((1, 1, 2, 2, 2), SmallBatch(8, 1, 1, 2)),
    ],
)
def test_optimizer_steps_and_accumulation_above_one_become_two(sizes: tuple[int, ...], batch: SmallBatch) -> None:
    """Sizes are groups, samples of each, optimizer steps, micro-batches of each, and data-parallel ranks."""
    assert smallest_batch(*sizes) == batch


@given(
    st.tuples(*[st.integers(1, most) for most in (2000, 64, 100, 100)]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 6),
    st.integers(1, 3),
)
def test_a_batch_fills_whole_optimizer_steps(sizes: tuple[int, ...], data_parallel: int, tags: int, turns: int) -> None:
    _, group_size, steps, accumulation = sizes
    made = smallest_batch(*sizes, data_parallel, tags, turns)
    samples, step = made.groups * made.group_size * turns, made.micro_batch * made.accumulation * data_parallel
    assert samples == step * min(steps, 2) and made.accumulation == min(accumulation, 2)
    assert tags <= made.groups <= 32 and samples <= 32 * turns
    assert (made.group_size > 1) == (group_size > 1) and made.group_size <= min(group_size, 4)
