"""A router that replays has the experts of one micro-batch, and once more those of earlier ones in backward passes."""

from __future__ import annotations

import torch

from roll.distributed.train.experts.router_replay import LayerReplay

SCORES = torch.tensor([[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]])


def asked(replay: LayerReplay) -> list[list[int]]:
    values, ids = replay.get_replay_topk(SCORES, 2, None, None, lambda scores, k, *_: torch.topk(scores, k, dim=1))
    assert torch.equal(values, SCORES.gather(1, ids))
    return ids.tolist()


def test_without_experts_it_chooses_them_itself() -> None:
    replay = LayerReplay()
    assert asked(replay) == [[0, 1], [3, 2]] and asked(replay) == [[0, 1], [3, 2]]
    assert replay.agreement.tolist() == [0, 0]


def test_recomputation_reads_the_experts_of_micro_batches_in_their_order() -> None:
    replay = LayerReplay()
    first, second = torch.tensor([[0, 2], [1, 3]], dtype=torch.uint8), torch.tensor([[1, 0], [2, 3]], dtype=torch.uint8)
    both = torch.tensor([True, True])
    replay.set(first, both, recomputes=True)
    assert asked(replay) == first.tolist()
    replay.set(second, both, recomputes=True)
    assert asked(replay) == second.tolist()
    assert asked(replay) == first.tolist(), "the backward pass of the first"
    assert asked(replay) == second.tolist()
    assert replay.agreement.tolist() == [2, 4], "the experts of the second are its own, in another order"
    replay.clear()
    assert asked(replay) == [[0, 1], [3, 2]]


def test_tokens_without_recorded_experts_do_not_count() -> None:
    replay = LayerReplay()
    replay.set(torch.tensor([[0, 1], [0, 1]]), torch.tensor([True, False]), recomputes=False)
    asked(replay)
    assert replay.agreement.tolist() == [1, 1]
