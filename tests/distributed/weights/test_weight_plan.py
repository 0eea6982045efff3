"""Buckets hold every tensor once and in order; duplicate and changed tensors are named."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.configs.devices.parallel_layout import ParallelLayout
from roll.distributed.weights.plan import (
    PlanError,
    WeightSpec,
    check_stages,
    checksum_differences,
    handle_sources,
    make_buckets,
    spec_bytes,
)

shapes = st.lists(st.integers(0, 12), min_size=0, max_size=3).map(tuple)
dtypes = st.sampled_from(["float32", "bfloat16", "float16"])
specs_lists = st.lists(st.tuples(shapes, dtypes), max_size=30).map(
    lambda pairs: [WeightSpec(f"w{index}", shape, dtype) for index, (shape, dtype) in enumerate(pairs)]
)


@settings(deadline=None)
@given(specs_lists, st.integers(1, 4000))
def test_buckets_hold_every_tensor_once_in_order_within_the_size(specs: list[WeightSpec], size: int) -> None:
    buckets = make_buckets(specs, size)
    assert [spec for bucket in buckets for spec in bucket.specs] == specs
    for bucket in buckets:
        assert bucket.specs
        assert len({spec.dtype for spec in bucket.specs}) == 1
        assert bucket.bytes <= size or len(bucket.specs) == 1 or bucket.bytes == spec_bytes(bucket.specs[-1])


@settings(deadline=None)
@given(specs_lists, st.integers(1, 4000))
def test_no_bucket_had_room_for_the_next_tensor(specs: list[WeightSpec], size: int) -> None:
    buckets = make_buckets(specs, size)
    for bucket, after in zip(buckets, buckets[1:], strict=False):
        assert bucket.bytes + spec_bytes(after.specs[0]) > size or bucket.dtype != after.dtype


def test_a_tensor_larger_than_the_bucket_size_has_its_own_bucket() -> None:
    specs = [WeightSpec("a", (10,), "float32"), WeightSpec("b", (1000,), "float32"), WeightSpec("c", (10,), "float32")]
    assert [[spec.name for spec in bucket.specs] for bucket in make_buckets(specs, 100)] == [["a"], ["b"], ["c"]]


def test_a_bucket_without_size_or_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(PlanError, match="bucket size must be at least 1 byte, got 0"):
        make_buckets([], 0)
    with pytest.raises(PlanError, match="w: cannot send dtype int8; supported are"):
        make_buckets([WeightSpec("w", (1,), "int8")], 100)


def test_a_tensor_sent_by_two_stages_is_named() -> None:
    one, two = WeightSpec("embed", (2,), "float32"), WeightSpec("norm", (2,), "float32")
    check_stages([[one], [two]])
    with pytest.raises(PlanError, match="embed is sent by stage 0 and again by stage 1"):
        check_stages([[one], [two, one]])
    with pytest.raises(PlanError, match="stage 1 has no weights to send"):
        check_stages([[one, two], []])


def test_missing_unknown_and_changed_tensors_are_distinguished() -> None:
    assert checksum_differences({"a": "1", "b": "2"}, {"a": "1", "b": "2"}) == []
    assert checksum_differences({"a": "1", "b": "2"}, {"b": "3", "c": "4"}) == [
        "c was not sent",
        "a is not a parameter of the engine",
        "b differs: sent 2, engine holds 3",
    ]


@pytest.mark.parametrize(
    ("layout", "train", "infer", "sources"),
    [
        (ParallelLayout(tensor=2, data=2), [0, 1, 2, 3], [0, 1, 2, 3], [[0, 1, 2, 3]]),
        (ParallelLayout(tensor=2, data=2), [0, 1, 2, 3], [3, 2, 5], [[3, 2, 0]]),
        (ParallelLayout(tensor=2, pipeline=2), [4, 5, 6, 7], [4, 5, 6, 7], [[0, 1, 0, 0], [2, 2, 2, 3]]),
        (ParallelLayout(), [0], [1, 2], [[0, 0]]),
    ],
)
def test_on_gpus_an_engine_rank_reads_from_the_training_rank_on_its_device(layout, train, infer, sources) -> None:
    assert handle_sources(layout, train, infer, "cuda") == sources
    sources = [layout.rank(0, 0, stage) for stage in range(layout.pipeline)]
    assert handle_sources(layout, train, infer, "cpu") == [[source] * len(infer) for source in sources]


def test_an_expert_is_in_one_bucket_apart_from_dense_weights() -> None:
    experts = [WeightSpec(f"{expert}.{part}", (4,), "float32", expert) for expert in "ab" for part in ("up", "down")]
    buckets = make_buckets([WeightSpec("norm", (1,), "float32"), *experts], 40)
    assert [[spec.name for spec in bucket.specs] for bucket in buckets] == [
        ["norm"],
        ["a.up", "a.down"],
        ["b.up", "b.down"],
    ]


@pytest.mark.parametrize(("sent", "message"), [("ab", "c is sent by no stage"), ("abcd", "d is not of the model")])
def test_the_sent_tensors_are_those_of_the_model(sent: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_stages([[WeightSpec(name, (1,), "float32") for name in sent]], frozenset("abc"))
