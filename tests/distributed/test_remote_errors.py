"""What the driver learns of an exception in another process."""

from __future__ import annotations

import pickle

import pytest

from roll.base.errors import RunError
from roll.distributed.calls.remote_errors import (
    PROCESS_DIED,
    TIMEOUT,
    CallContext,
    ClusterError,
    Failure,
    failure_of,
    one_line,
)
from roll.pipeline.checkpoint import CheckpointError


def received(*failures: Failure) -> ClusterError:
    """The error of a call of the rollout process and others, after their answers were pickled."""
    context = CallContext("rollouter", "next_batch", {rank: "log rollouter.log" for rank in range(len(failures))})
    return context.failed(pickle.loads(pickle.dumps(failures)))


def raised(error: Exception, rank: int = 0) -> Failure:
    """The failure of a worker that raised this error."""
    try:
        raise error
    except Exception as caught:
        return failure_of(rank, caught)


@pytest.mark.parametrize("kind", [PROCESS_DIED, TIMEOUT, "ValueError"])
def test_a_call_that_failed_within_a_call_fails_as_if_the_driver_had_made_it(kind: str) -> None:
    inner = ClusterError("reward", "compute_values", 2, kind, "reward.compute_values failed\nstack", "gone")
    error = received(raised(inner))
    assert (error.role, error.method, error.rank, error.kind) == ("reward", "compute_values", 2, kind)
    assert (str(error), error.cause, error.process_failed) == (str(inner), "gone", inner.process_failed)


def test_of_several_failures_that_of_a_dead_process_comes_first_also_within_a_call() -> None:
    dead = ClusterError("reward", "compute_values", 2, PROCESS_DIED, "gone")
    assert received(raised(KeyError("lost")), raised(dead, rank=1)).role == "reward"


def test_a_bug_keeps_its_traceback() -> None:
    error = received(raised(KeyError("lost")))
    assert (error.role, error.rank, error.kind) == ("rollouter", 0, "KeyError")
    assert "log rollouter.log" in str(error) and "in raised" in str(error) and error.cause == "'lost'"


def test_an_error_for_the_user_is_its_sentence_alone() -> None:
    sentence = "9 prompts failed, more than max_failure_rate 0 allows"
    error = received(raised(CheckpointError(sentence)), raised(RunError("of another rank"), rank=1))
    assert (str(error), error.cause, error.kind) == (sentence, sentence, "CheckpointError")
    assert one_line(error) == f"rollouter-0: {sentence}" and not error.process_failed
