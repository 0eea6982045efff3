"""Responses of a caller as rows of a batch, and values per id there and back."""

from __future__ import annotations

import pytest
import torch

from roll.api.responses import Response, ResponseRows
from roll.base.errors import RunError

FIRST = Response([5, 6], [7, 8, 9], [-0.5, -0.25, -1.0], [0, 0, 1], group=3)
OTHER = Response([5], [4], [-0.125], [1], group=9, finish_reason="length")
SECOND = Response([5, 6], [2, 3, 4, 5], [-1.0, 0.0, 0.0, -2.0], [0, 0, 0, 0], group=3, mask=[True, False, False, True])


def test_values_of_responses_come_back_in_their_order_from_the_rows_of_their_groups():
    responses = [FIRST, OTHER, SECOND]
    rows = ResponseRows.of(responses, multiple=4, scores=[1.0, 2.0, 3.0])
    batch = rows.data.batch
    assert len(rows.data) == 4
    assert batch["group_ids"].tolist()[:3] == [0, 0, 1] and rows.rows == [0, 2, 1]
    assert batch["scores"][rows.rows].tolist() == [1.0, 2.0, 3.0]
    assert batch["truncated"][rows.rows].tolist() == [False, True, False]
    values = [torch.tensor([1.0, 2.0, 3.0]), 4.0, [5.0, 6.0, 7.0, 8.0]]
    found = rows.collect(rows.spread("values", values))
    assert [each.tolist() for each in found] == [[1.0, 2.0, 3.0], [4.0], [5.0, 6.0, 7.0, 8.0]]
    behavior = rows.collect(batch["behavior_log_probs"] * batch["response_mask"])
    assert [each.tolist() for each in behavior] == [response.log_probs for response in responses]


def test_only_the_ids_of_the_mask_are_learned_from():
    rows = ResponseRows.of([SECOND], multiple=1)
    assert rows.data.batch["input_ids"].tolist() == [[5, 6, 2, 3, 4, 5]]
    assert rows.data.batch["response_mask"].tolist() == [[False, False, True, False, False, True]]
    assert rows.data.batch["turn_count"].tolist() == [2]


def test_a_response_that_was_not_sampled_has_no_log_probs_and_its_last_ids_may_be_context():
    written = Response([1], [2, 3, 4], mask=[True, True, False])
    rows = ResponseRows.of([written, Response([1], [2, 3, 4])], multiple=1)
    assert rows.data.batch["response_mask"].sum(-1).tolist() == [2, 3]
    table = rows.spread("values", [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert [each.tolist() for each in rows.collect(table)] == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    alone = ResponseRows.of([written], multiple=1)
    assert [each.tolist() for each in alone.collect(alone.spread("values", [[1.0, 2.0, 3.0]]))] == [[1.0, 2.0, 0.0]]


@pytest.mark.parametrize(
    "response, message",
    [
        (Response([1], [2, 3], [0.5]), r"^responses\[0\]\.log_probs: 1 values for 2 ids; give one for each id$"),
        (Response([1], [2, 3], mask=[True]), r"^responses\[0\]\.mask: 1 values for 2 ids"),
        (Response([1], [2], mask=[False]), r"^responses\[0\]\.ids: no id is learned; leave it out$"),
        (Response([], [2]), r"^responses\[0\]\.prompt_ids: is empty"),
    ],
)
def test_a_response_that_cannot_be_learned_from_is_named(response, message):
    with pytest.raises(RunError, match=message):
        ResponseRows.of([response], multiple=1)


def test_values_must_be_as_many_as_responses_or_ids():
    rows = ResponseRows.of([FIRST, OTHER], multiple=1)
    with pytest.raises(RunError, match=r"^advantages: 1 for 2 responses; give one for each$"):
        rows.spread("advantages", [1.0])
    with pytest.raises(RunError, match=r"^advantages\[0\]: shape \[2\] for 3 ids"):
        rows.spread("advantages", [[1.0, 2.0], 1.0])
    with pytest.raises(RunError, match="^responses: there are none"):
        ResponseRows.of([], multiple=1)
