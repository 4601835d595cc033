"""A concurrency that follows the load of the engines."""

from __future__ import annotations

from collections import deque

import pytest
from msgspec import structs

from invrl.rollout.dispatch.auto_concurrency import AutoConcurrency
from invrl.types.fleet import EngineLoad, FleetSnapshot


def fleet(use: float, *, engines: int = 1, waiting: int = 0) -> FleetSnapshot:
    load = EngineLoad(kv_tokens=1000, kv_use=use, waiting=waiting)
    return FleetSnapshot(engines={f"engine-{n}": load for n in range(engines)})


def limits(
    concurrency: AutoConcurrency,
    seconds: int,
    *,
    holds: int,
    engines: int = 1,
    work: int = 10_000,
    delay_s: int = 0,
) -> list[int]:
    """Limits over time. An engine is full with `holds` rollouts; its load follows after
    `delay_s`. The buffer admits `work` rollouts."""
    limit = concurrency.limit
    earlier = deque([0] * (delay_s + 1), maxlen=delay_s + 1)
    seen: list[int] = []
    for _ in range(seconds):
        running = min(limit, work)
        earlier.append(running)
        use = min(1.0, earlier[0] / (holds * engines))
        limit = concurrency.update(fleet(use, engines=engines), running=running)
        seen.append(limit)
    return seen


@pytest.mark.parametrize("start", [1, 32, 500])
@pytest.mark.parametrize(("holds", "engines"), [(40, 1), (100, 4)])
def test_concurrency_converges_to_what_the_engines_hold(
    start: int, holds: int, engines: int
) -> None:
    concurrency = AutoConcurrency(start, most=1024)
    settled = limits(concurrency, 4000, holds=holds, engines=engines)[-1000:]
    full = holds * engines
    assert min(settled) >= int(0.75 * 0.95 * full)
    assert max(settled) <= 0.95 * full + engines


def test_late_load_makes_it_overshoot_by_the_increases_of_the_delay() -> None:
    concurrency = AutoConcurrency(32, most=1024)
    settled = limits(concurrency, 4000, holds=100, delay_s=30)[-1000:]
    assert min(settled) >= 60
    assert max(settled) <= 100 + 30 / 5


def test_concurrency_starts_at_the_constant_and_stays_without_figures() -> None:
    concurrency = AutoConcurrency(32, most=1024)
    assert concurrency.limit == 32
    blind = FleetSnapshot(engines={"engine-0": EngineLoad(kv_use=1.0, waiting=9)})
    for snapshot in (FleetSnapshot(), blind):
        for _ in range(100):
            assert concurrency.update(snapshot, running=32) == 32


def test_concurrency_does_not_rise_while_the_gate_holds_turns() -> None:
    """Their sessions fill the caches, although their tokens are in no running
    request."""
    concurrency = AutoConcurrency(32, most=1024)
    room = fleet(0.1)
    for _ in range(100):
        limit = concurrency.update(structs.replace(room, held_turns=1), running=32)
        assert limit == 32
    assert concurrency.update(room, running=32) == 33


def test_concurrency_is_never_below_one() -> None:
    concurrency = AutoConcurrency(2, most=1024)
    for _ in range(100):
        concurrency.update(fleet(1.0, waiting=5), running=concurrency.limit)
    assert concurrency.limit == 1


def test_concurrency_does_not_exceed_the_admitted_work_or_the_most() -> None:
    of_work = limits(AutoConcurrency(32, most=1024), 2000, holds=10_000, work=50)
    assert max(of_work) == 51
    of_slots = limits(AutoConcurrency(32, most=64), 2000, holds=10_000)
    assert of_slots[-1] == 64


def test_concurrency_falls_with_an_engine_that_leaves_and_recovers() -> None:
    concurrency = AutoConcurrency(32, most=1024)
    with_both = limits(concurrency, 3000, holds=100, engines=2)[-1]
    with_one = limits(concurrency, 1, holds=100, engines=1)[0]
    assert with_one <= with_both / 2
    assert max(limits(concurrency, 500, holds=100, engines=1)) <= 96
    assert limits(concurrency, 3000, holds=100, engines=2)[-1] >= 140


def test_engine_that_is_full_for_a_moment_lowers_nothing() -> None:
    concurrency = AutoConcurrency(32, most=1024)
    for _ in range(50):
        for snapshot in (fleet(0.9, waiting=3), fleet(1.0), fleet(0.9)):
            assert concurrency.update(snapshot, running=32) == 32


def test_decrease_waits_until_the_last_one_has_taken_effect() -> None:
    concurrency = AutoConcurrency(40, most=1024)
    seen = [concurrency.update(fleet(1.0), running=40) for _ in range(3)]
    assert seen == [40, 40, 30]
    for running in range(40, 30, -1):
        assert concurrency.update(fleet(1.0), running=running) == 30
    assert concurrency.update(fleet(1.0), running=30) == 22
