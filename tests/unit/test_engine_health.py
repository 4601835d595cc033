"""A silent process is dead after a stated time, a busy or paused one is not, and the
message names it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from invrl.engines.fleet.engine_health import (
    Clock,
    engine_death,
    router_death,
    until_silent,
)
from invrl.host.processes.process import (
    STOPPED,
    ServerProcess,
    process_state,
    process_tree,
)


class Time:
    """LogprobPasses only while somebody sleeps, or an answer is waited for."""

    def __init__(self) -> None:
        self.now = 0.0

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)

    def clock(self) -> Clock:
        return Clock(now=lambda: self.now, sleep=self.sleep)


class Asked:
    """Answers as told, the last word for ever. A missing answer takes the whole time
    that is waited for."""

    def __init__(
        self, time: Time, answers: list[bool], *, refused_at_once: bool = False
    ) -> None:
        self.time = time
        self.answers = answers
        self.refused_at_once = refused_at_once
        self.count = 0

    async def __call__(self, deadline_s: float) -> bool:
        self.count += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if not answer and not self.refused_at_once:
            await self.time.sleep(deadline_s)
        return answer


@pytest.mark.parametrize("refused_at_once", [False, True])
async def test_process_counts_as_silent_after_its_timeout(
    refused_at_once: bool,
) -> None:
    time = Time()
    asked = Asked(time, [True, True, False], refused_at_once=refused_at_once)
    await until_silent(asked, timeout_s=30.0, interval_s=5.0, clock=time.clock())
    # Three waits before questions, two of which were answered; then the silence.
    assert time.now == 3 * 5.0 + 30.0
    assert asked.count == 5


async def test_answer_in_between_restarts_the_timeout() -> None:
    time = Time()
    asked = Asked(time, [False, False, True, False, False, True, False])
    await until_silent(asked, timeout_s=30.0, interval_s=5.0, clock=time.clock())
    assert asked.count == 9


async def test_health_check_that_raises_counts_as_unanswered() -> None:
    time = Time()
    count = 0

    async def ask(deadline_s: float) -> bool:
        nonlocal count
        count += 1
        if count in (1, 2):
            raise OSError("too many open files")
        return count < 5

    await until_silent(ask, timeout_s=30.0, interval_s=5.0, clock=time.clock())
    assert count == 7


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A process with a child, both of which wait."""
    wait = "import time; time.sleep(3600)"
    program = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {wait!r}])"
    )
    server = ServerProcess(
        "engine-7", [sys.executable, "-c", program], log=tmp_path / "log"
    )
    server.grace_s = 0.1
    try:
        yield server
    finally:
        server.stop()


class Client:
    def __init__(self, answers: Asked, generates: Asked) -> None:
        self._answers = answers
        self._generates = generates

    async def answers(self, *, deadline_s: float) -> bool:
        return await self._answers(deadline_s)

    async def generates(self, *, deadline_s: float) -> bool:
        return await self._generates(deadline_s)


class Receiver:
    """Paused, or not, each time it is asked; the last word for ever. `loads`: whether
    it does."""

    def __init__(
        self,
        pauses: list[bool] | None = None,
        loads: Callable[[], bool] = lambda: False,
    ) -> None:
        self._pauses = pauses or [False]
        self._loads = loads

    @property
    def is_paused(self) -> bool:
        return self._pauses.pop(0) if len(self._pauses) > 1 else self._pauses[0]

    @property
    def is_loading(self) -> bool:
        return self._loads()


Death = Callable[..., "asyncio.Task[str]"]


@pytest.fixture
def death(server: ServerProcess) -> Death:
    def begin(
        time: Time, answers: Asked, generates: Asked, receiver: Receiver | None = None
    ):
        return asyncio.create_task(
            engine_death(
                process_tree(server.pid),
                Client(answers, generates),
                receiver or Receiver(),
                timeout_s=30.0,
                interval_s=5.0,
                clock=time.clock(),
            )
        )

    return begin


async def test_a_silent_scheduler_is_dead_and_named(
    death: Death, server: ServerProcess
) -> None:
    time = Time()
    reason = await death(time, Asked(time, [False]), Asked(Time(), [True]))
    assert "scheduler has not answered for 30 s" in reason
    assert f"pid {server.pid}" in reason


async def test_answering_scheduler_without_tokens_is_dead_after_a_longer_timeout(
    death: Death,
) -> None:
    time = Time()
    tokens = Asked(time, [True, False])
    answers = Asked(Time(), [True])
    reason = await death(time, answers, tokens)
    assert "no token for 90 s" in reason
    assert tokens.count == 4


async def test_a_paused_engine_is_not_expected_to_make_tokens(death: Death) -> None:
    """Its scheduler is asked all the same: that one is silent in the end."""
    time = Time()
    tokens = Asked(time, [False])
    answers = Asked(time, [True] * 50 + [False])
    reason = await death(time, answers, tokens, Receiver([True]))
    assert "scheduler has not answered" in reason
    assert tokens.count == 0


async def test_pause_that_began_during_a_health_check_does_not_count_against_the_engine(
    death: Death,
) -> None:
    time = Time()
    tokens = Asked(time, [False])
    answers = Asked(time, [True] * 50 + [False])
    reason = await death(time, answers, tokens, Receiver([False, True] * 40 + [True]))
    assert "scheduler has not answered" in reason
    assert tokens.count > 3


@pytest.mark.parametrize("paused", [True, False], ids=["in an update", "a new engine"])
async def test_silence_of_a_scheduler_that_loads_weights_is_excused(
    death: Death, paused: bool
) -> None:
    """For ten times the timeout here. The call ends while the 30th question waits,
    which is excused too; then three questions are unanswered, as ever."""
    time = Time()
    answers = Asked(time, [False])
    receiver = Receiver([paused], loads=lambda: answers.count < 30)
    reason = await death(time, answers, Asked(Time(), [not paused]), receiver)
    assert "scheduler has not answered for 30 s" in reason
    assert answers.count == 33


async def test_stopped_process_is_dead_even_while_it_loads_weights(
    death: Death, server: ServerProcess
) -> None:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        while process_state(psutil.Process(server.pid)) != STOPPED:
            await asyncio.sleep(0.01)
        time = Time()
        reason = await death(
            time,
            Asked(time, [False]),
            Asked(time, [False]),
            Receiver([True], loads=lambda: True),
        )
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert "has not answered for 30 s" in reason
    assert f"pid {server.pid}: stopped" in reason


async def test_dead_process_is_found_although_the_engine_answers(
    death: Death, server: ServerProcess
) -> None:
    time = Time()
    dying = death(time, Asked(Time(), [True]), Asked(Time(), [True]))
    server.stop()
    reason = await dying
    assert "a process of it has ended" in reason
    assert f"pid {server.pid}: ended" in reason


@pytest.mark.parametrize("which", ["itself", "its child"])
async def test_stopped_process_is_dead_although_the_engine_answers(
    death: Death, server: ServerProcess, which: str
) -> None:
    """The detokenizer, say: the scheduler knows nothing of it."""
    child = await _child_of(server.pid)
    pid = server.pid if which == "itself" else child
    os.kill(pid, signal.SIGSTOP)
    try:
        while (
            process_state(psutil.Process(pid)) != STOPPED
        ):  # the kernel takes a moment
            await asyncio.sleep(0.01)
        time = Time()
        reason = await death(time, Asked(Time(), [True]), Asked(Time(), [True]))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert "has not answered for 30 s" in reason
    assert f"pid {pid}: stopped" in reason


async def test_silent_router_is_dead(server: ServerProcess) -> None:
    time = Time()
    asked = Asked(time, [True, False])
    reason = await router_death(
        process_tree(server.pid),
        asked,
        timeout_s=30.0,
        interval_s=5.0,
        clock=time.clock(),
    )
    assert "not answered for 30 s" in reason


async def test_process_that_ended_before_its_watch_is_dead_at_once() -> None:
    time = Time()
    client = Client(Asked(Time(), [True]), Asked(Time(), [True]))
    clock = time.clock()
    engine = await engine_death(
        [], client, Receiver(), timeout_s=30.0, interval_s=5.0, clock=clock
    )
    assert "has ended" in engine
    router = await router_death(
        [], Asked(Time(), [True]), timeout_s=30.0, interval_s=5.0, clock=clock
    )
    assert "has ended" in router


async def _child_of(pid: int) -> int:
    while not (children := psutil.Process(pid).children()):
        await asyncio.sleep(0.01)
    return children[0].pid


async def test_external_engine_is_dead_only_by_its_silence() -> None:
    time = Time()
    answers = Asked(time, [True, True, False])
    client = Client(answers, Asked(Time(), [True]))
    clock = time.clock()
    reason = await engine_death(
        None, client, Receiver(), timeout_s=30.0, interval_s=5.0, clock=clock
    )
    assert reason == "its scheduler has not answered for 30 s"
    assert answers.count == 5
