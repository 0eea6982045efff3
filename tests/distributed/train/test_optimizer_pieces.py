"""Ranges of a flat array as rectangles, and how they are read at another division."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.distributed.train.checkpoint.optimizer_pieces import Piece, boxes, load_pieces, save_pieces


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_rectangles_are_the_range_in_order(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    found = []
    for offsets, sizes in boxes(start, stop, shape):
        assert len(offsets) == len(sizes) == len(shape) and min(sizes) > 0
        found.append(whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].reshape(-1))
    assert torch.equal(torch.cat(found) if found else whole.new_empty(0), whole.view(-1)[start:stop])
    assert len(found) <= 2 * len(shape) - 1


def pieces(flat: torch.Tensor, shape: tuple[int, ...], cuts: list[int]) -> list[Piece]:
    """The parts of a parameter between the cuts, as views of `flat`."""
    made = []
    for start, stop in zip([0, *cuts], [*cuts, flat.numel()], strict=True):
        at = start
        for offsets, sizes in boxes(start, stop, shape):
            count = math.prod(sizes)
            made.append(Piece("exp_avg.weight", offsets, sizes, shape, flat[at : at + count].view(sizes), True))
            at += count
    return made


@given(st.lists(st.integers(0, 60), max_size=4), st.lists(st.integers(0, 60), max_size=4))
def test_what_was_written_in_some_pieces_is_read_in_others(cuts: list[int], others: list[int]) -> None:
    import tempfile

    written, read = torch.randn(60), torch.zeros(60)
    with tempfile.TemporaryDirectory() as folder:
        save_pieces(Path(folder), pieces(written, (5, 4, 3), sorted(cuts)))
        load_pieces(Path(folder), pieces(read, (5, 4, 3), sorted(others)))
    assert torch.equal(written, read)


def test_a_state_that_was_not_written_is_zero_and_another_shape_is_an_error(tmp_path: Path) -> None:
    save_pieces(tmp_path, pieces(torch.ones(12), (3, 4), []))
    later = torch.full((12,), 7.0)
    moment = Piece("exp_avg_sq.weight", (0, 0), (3, 4), (3, 4), later.view(3, 4), True)
    load_pieces(tmp_path, [moment])
    assert not later.any()
    with pytest.raises(ValueError, match=r"exp_avg.weight has shape \(3, 4\) there; this run needs \(4, 3\)"):
        load_pieces(tmp_path, pieces(torch.ones(12), (4, 3), []))
