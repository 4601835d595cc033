"""Who is silent for too long, seen with a clock that the test turns."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from invrl.gateway.server.processes.heartbeat_page import (
    START_ALLOWANCE_S,
    SUPERVISOR,
    HeartbeatPage,
    SilenceWatch,
    beat_interval_s,
    worker_place,
)
from invrl.types.fleet import EngineLoad, FleetSnapshot
from invrl.types.weights import WeightVersion

TIMEOUT_S = 30.0
PLACES = [worker_place(0), worker_place(1)]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def page() -> Iterator[HeartbeatPage]:
    file = HeartbeatPage.create(workers=2)
    yield HeartbeatPage(file, workers=2)
    os.close(file)


def watched(page: HeartbeatPage) -> tuple[SilenceWatch, Clock]:
    clock = Clock()
    return SilenceWatch(page, PLACES, timeout_s=TIMEOUT_S, clock=clock), clock


def silent_after(
    watch: SilenceWatch, clock: Clock, seconds: float, *, step_s: float = 1.0
) -> list[int]:
    """What the last of several looks finds."""
    silent: list[int] = []
    for _ in range(round(seconds / step_s)):
        clock.now += step_s
        silent = watch.silent()
    return silent


def test_heartbeat_page_also_holds_the_end_of_the_run(page: HeartbeatPage):
    assert not page.run_has_ended()
    for place in (SUPERVISOR, *PLACES):
        page.beat(place)
        page.count_hung(place)
    assert not page.run_has_ended()
    page.end_run()
    assert page.run_has_ended()
    assert [page.beats(place) for place in (SUPERVISOR, *PLACES)] == [1, 1, 1]
    assert [page.hung(place) for place in PLACES] == [1, 1]


def test_turns_that_the_workers_hold_add_up_until_a_worker_is_replaced(
    page: HeartbeatPage,
):
    page.note_held_turns(PLACES[0], 3)
    page.note_held_turns(PLACES[1], 4)
    assert page.held_turns() == 7
    page.start_over(PLACES[0])
    assert page.held_turns() == 4
    assert not page.run_has_ended()


def test_only_a_process_without_beats_is_silent_after_its_timeout(page: HeartbeatPage):
    watch, clock = watched(page)
    for place in PLACES:
        page.beat(place)
    assert watch.silent() == []
    for _ in range(60):
        page.beat(PLACES[1])
        page.beat(SUPERVISOR)
        clock.now += 1.0
        expected = [PLACES[0]] if clock.now - 1000.0 >= TIMEOUT_S else []
        assert watch.silent() == expected
    page.beat(PLACES[0])
    assert watch.silent() == []


def test_first_beat_of_a_process_may_take_longer(page: HeartbeatPage):
    watch, clock = watched(page)
    assert silent_after(watch, clock, START_ALLOWANCE_S - 1) == []
    assert silent_after(watch, clock, 2) == PLACES


def test_successor_of_a_silent_process_starts_with_a_new_timeout(page: HeartbeatPage):
    watch, clock = watched(page)
    page.beat(PLACES[0])
    page.beat(PLACES[1])
    watch.silent()
    page.beat(PLACES[1])
    assert silent_after(watch, clock, TIMEOUT_S - 1) == []
    page.beat(PLACES[1])
    assert silent_after(watch, clock, 1) == [PLACES[0]]
    watch.start_over(PLACES[0])
    assert page.beats(PLACES[0]) == 0
    assert silent_after(watch, clock, 5) == []
    page.beat(PLACES[0])
    page.beat(PLACES[1])
    assert silent_after(watch, clock, TIMEOUT_S + 1) == PLACES


def test_time_in_which_the_watcher_slept_does_not_count(page: HeartbeatPage):
    watch, clock = watched(page)
    for place in PLACES:
        page.beat(place)
    watch.silent()
    clock.now += 3600.0
    assert watch.silent() == []
    clock.now += 3600.0
    assert watch.silent() == []
    assert silent_after(watch, clock, TIMEOUT_S) == PLACES, (
        "it was awake for long enough now"
    )


def test_processes_with_the_same_file_share_the_heartbeat_page(page: HeartbeatPage):
    file = HeartbeatPage.create(workers=2)
    mine = HeartbeatPage(file, workers=2)
    theirs = HeartbeatPage(file, workers=2)
    pid = os.fork()
    if pid == 0:
        theirs.beat(SUPERVISOR)
        theirs.beat(worker_place(1))
        theirs.count_hung(worker_place(1))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    os.close(file)
    assert [mine.beats(place) for place in (SUPERVISOR, *PLACES)] == [1, 0, 1]
    assert [mine.hung(place) for place in PLACES] == [0, 1]


@pytest.mark.parametrize("timeout_s", [0.5, 8.0, 30.0, 3600.0])
def test_beat_interval_is_a_fraction_of_the_timeout(timeout_s: float):
    assert 0 < beat_interval_s(timeout_s) <= timeout_s / 8


def test_each_number_of_the_page_is_its_own(page: HeartbeatPage) -> None:
    page.beat(worker_place(1))
    page.count_hung(worker_place(0))
    page.count_ended(worker_place(1))
    page.count_ended(worker_place(1))
    page.count_wrong_reply(worker_place(0))
    page.count_wrong_reply(worker_place(1))
    page.announce_version(WeightVersion(7))
    places = (SUPERVISOR, worker_place(0), worker_place(1))
    assert [page.beats(place) for place in places] == [0, 0, 1]
    assert [page.hung(place) for place in places] == [0, 1, 0]
    assert [page.ended(place) for place in places] == [0, 0, 2]
    assert page.wrong_replies() == 2
    assert page.newest_version() == 7
    assert page.run_has_ended() is False
    page.end_run()
    assert page.wrong_replies() == 2
    assert page.newest_version() == 7
    assert page.run_has_ended() is True


def test_load_of_the_engines_reaches_the_other_processes(page: HeartbeatPage) -> None:
    assert page.fleet() == FleetSnapshot()
    load = EngineLoad(running=2, kv_tokens=16384, instance="a1")
    for fleet in (
        FleetSnapshot(engines={"engine-0": load, "engine-1": EngineLoad()}),
        FleetSnapshot(engines={"engine-1": load}),
        FleetSnapshot(),
    ):
        page.announce_load(fleet)
        assert page.fleet() == fleet
    assert page.newest_version() == 0
    assert not page.run_has_ended()


def test_load_that_is_being_written_is_not_read(page: HeartbeatPage) -> None:
    before = FleetSnapshot(engines={"engine-0": EngineLoad(running=1)})
    page.announce_load(before)
    assert page.fleet() == before
    page._snapshot[:8] = b"\0" * 8
    assert page.fleet() == before


def test_load_of_too_many_engines_is_not_announced(page: HeartbeatPage) -> None:
    few = FleetSnapshot(engines={"engine-0": EngineLoad()})
    many = FleetSnapshot(engines={f"engine-{n}": EngineLoad() for n in range(5000)})
    page.announce_load(few)
    page.announce_load(many)
    assert page.fleet() == few
