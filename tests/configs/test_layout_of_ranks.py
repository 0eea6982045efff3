from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from roll.configs.parallel_layout import ParallelLayout, RankCoordinates
from tests.configs.samples import rlvr

SIZES = st.integers(1, 6)


@given(SIZES, SIZES, SIZES)
def test_every_rank_has_its_own_place(tensor: int, data: int, pipeline: int) -> None:
    layout = ParallelLayout(tensor, data, pipeline)
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert len(set(places)) == layout.world_size
    assert [layout.rank(at.tensor, at.data, at.pipeline) for at in places] == list(range(layout.world_size))


def test_tensor_is_fastest_then_data_then_pipeline() -> None:
    layout = ParallelLayout(tensor=2, data=2, pipeline=2)
    assert layout.coordinates(1) == RankCoordinates(tensor=1, data=0, pipeline=0)
    assert layout.coordinates(2) == RankCoordinates(tensor=0, data=1, pipeline=0)
    assert layout.coordinates(4) == RankCoordinates(tensor=0, data=0, pipeline=1)


def test_layouts_follow_from_devices_and_sizes(tmp_path: Path) -> None:
    config = rlvr(tmp_path, "actor_infer.num_gpus_per_worker=2")
    assert config.actor_train.layout == ParallelLayout(tensor=2, data=8, pipeline=1)
    assert config.actor_infer.layout == ParallelLayout(tensor=2, data=4, pipeline=1)


def test_a_reference_that_nothing_uses_owns_no_devices(tmp_path: Path) -> None:
    assert set(rlvr(tmp_path, "reference.device_mapping=0-15").device_roles()) == {"actor_train", "actor_infer"}
    used = rlvr(tmp_path, "reference.device_mapping=0-15", "use_kl_loss=true", "kl_loss_coef=0.01")
    assert set(used.device_roles()) == {"actor_train", "actor_infer", "reference"}
