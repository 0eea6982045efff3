from __future__ import annotations

import math

from roll.tools.simulate.simulator import DecodeSpeed, SimulatedEngine


def play(engine: SimulatedEngine, until: float = math.inf) -> list[tuple[float, int]]:
    """Times and requests as they end."""
    ends: list[tuple[float, int]] = []
    engine.start()
    while (now := engine.next_end()) < until:
        engine.advance(now)
        ends += [(now, request) for request in engine.ended()]
        engine.start()
    return ends


def test_requests_that_run_together_end_by_their_length() -> None:
    engine = SimulatedEngine(DecodeSpeed(0.5), slots=4)
    for request, tokens in enumerate((10, 4, 10, 6)):
        engine.put(request, tokens)
    assert play(engine) == [(2.0, 1), (3.0, 3), (5.0, 0), (5.0, 2)]


def test_what_has_no_slot_waits_for_one() -> None:
    engine = SimulatedEngine(DecodeSpeed(1.0), slots=2)
    for request, tokens in enumerate((3, 5, 4)):
        engine.put(request, tokens)
    assert play(engine) == [(3.0, 0), (5.0, 1), (7.0, 2)]


def test_a_larger_batch_takes_longer_for_an_iteration() -> None:
    engine = SimulatedEngine(DecodeSpeed(1.0, doubling_batch=2), slots=2)
    engine.put(0, 4)
    engine.put(1, 8)
    assert play(engine) == [(8.0, 0), (14.0, 1)], "4 iterations of 1 + 2/2, then 4 of 1 + 1/2"


def test_a_paused_engine_stands_still_and_goes_on_where_it_was() -> None:
    engine = SimulatedEngine(DecodeSpeed(1.0), slots=1)
    engine.put(0, 5)
    engine.start()
    engine.advance(2.0)
    engine.paused = True
    assert engine.next_end() == math.inf
    engine.advance(10.0)
    engine.paused = False
    assert engine.next_end() == 13.0
    engine.stretch = 2.0
    assert engine.next_end() == 16.0


def test_an_engine_that_admits_nothing_ends_what_it_has() -> None:
    engine = SimulatedEngine(DecodeSpeed(1.0), slots=1)
    engine.put(0, 1)
    engine.put(1, 1)
    engine.start()
    engine.admitting = False
    engine.advance(1.0)
    assert engine.ended() == [0] and engine.start() == [] and not engine.active
