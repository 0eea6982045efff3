"""Which worker hosts which environment: in whatever order things happen, no worker leaks or is killed in use."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from roll.pipeline.agentic.environments.fleet import Fleet

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["fill", "up", "up", "not_started", "place", "place", "place", "leave", "hung", "died"]),
        st.integers(0, 50),
    ),
    max_size=60,
)
CAPACITY = 3


class Followed:
    """A fleet beside a plain account of what it was told and what it did."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.fleet = Fleet(size, CAPACITY, self.start, self.kill)
        self.starting: list[int] = []
        self.taking: list[int] = []
        self.retired: list[int] = []
        self.killed: list[int] = []
        self.started = 0
        self.envs: dict[int, int | None] = {}
        self.next_env = 0

    def start(self, worker: int) -> None:
        assert worker == self.started, "every worker is started once"
        self.started += 1
        self.starting.append(worker)

    def kill(self, worker: int) -> None:
        assert worker not in self.killed, "every worker is killed once"
        self.killed.append(worker)

    def hosted_by(self, worker: int) -> list[int]:
        return [env for env, host in self.envs.items() if host == worker]

    def happen(self, event: str, pick: int) -> None:
        workers = [*self.starting, *self.taking, *self.retired]
        placed = [env for env, host in self.envs.items() if host is not None]
        if event == "fill":
            self.fleet.fill()
            assert len(self.starting) + len(self.taking) == self.size
        elif event == "up" and self.starting:
            worker = self.starting.pop(pick % len(self.starting))
            self.taking.append(worker)
            self.fleet.up(worker)
        elif event == "not_started" and self.starting:
            worker = self.starting.pop(pick % len(self.starting))
            self.fleet.not_started(worker)
            assert self.killed[-1] == worker
        elif event == "place":
            self.place()
        elif event in ("leave", "hung") and placed:
            self.go(event, placed[pick % len(placed)])
        elif event == "died" and workers:
            self.die(workers[pick % len(workers)])

    def place(self) -> None:
        lengths = {worker: len(self.hosted_by(worker)) for worker in self.taking}
        room = [worker for worker in self.taking if lengths[worker] < CAPACITY]
        assert self.fleet.full == (bool(self.taking) and not room)
        worker = self.fleet.place(self.next_env)
        assert (worker in room) if room else worker is None
        if worker is not None:
            assert lengths[worker] == min(lengths.values()), "the one with the fewest"
            self.envs[self.next_env] = worker
            self.next_env += 1

    def go(self, event: str, env: int) -> None:
        worker = self.envs.pop(env)
        assert worker is not None
        if event == "hung" and worker in self.taking:
            self.taking.remove(worker)
            self.retired.append(worker)
        self.fleet.leave(env) if event == "leave" else self.fleet.hung(env)
        empty = worker in self.retired and not self.hosted_by(worker)
        assert (worker in self.killed) == empty, "a retired worker is killed as soon as it is empty, not before"
        if empty:
            self.retired.remove(worker)

    def die(self, worker: int) -> None:
        for phase in (self.starting, self.taking, self.retired):
            if worker in phase:
                phase.remove(worker)
        for env in self.hosted_by(worker):
            self.envs[env] = None
        self.fleet.died(worker)
        assert worker in self.killed

    def check(self) -> None:
        there = {*self.starting, *self.taking, *self.retired}
        assert set(range(self.started)) - set(self.killed) == there, "started, and neither known nor killed"
        assert len(self.starting) + len(self.taking) <= self.size
        assert all(self.hosted_by(worker) for worker in self.retired)
        assert all(self.fleet.worker_of(env) == host for env, host in self.envs.items()), "moved by another's fault"


@settings(max_examples=1500, deadline=None)
@given(st.integers(1, 4), EVENTS)
def test_any_order_of_events(size: int, events: list[tuple[str, int]]) -> None:
    followed = Followed(size)
    for event, pick in events:
        followed.happen(event, pick)
        followed.check()
    followed.fleet.close()
    assert sorted(followed.killed) == list(range(followed.started))


def test_a_worker_in_which_a_call_hangs_takes_no_more_and_outlives_only_its_others() -> None:
    started: list[int] = []
    killed: list[int] = []
    fleet = Fleet(1, CAPACITY, started.append, killed.append)
    fleet.fill()
    fleet.up(0)
    assert [fleet.place(env) for env in (7, 8)] == [0, 0]
    fleet.hung(7)
    assert (started, killed) == ([0, 1], [])
    assert fleet.place(9) is None
    fleet.up(1)
    assert fleet.place(9) == 1
    fleet.leave(8)
    assert killed == [0]


def test_a_worker_that_does_not_start_is_tried_again_only_when_one_is_needed() -> None:
    started: list[int] = []
    killed: list[int] = []
    fleet = Fleet(2, CAPACITY, started.append, killed.append)
    fleet.fill()
    fleet.not_started(0)
    assert (started, killed) == ([0, 1], [0])
    fleet.fill()
    assert started == [0, 1, 2]
