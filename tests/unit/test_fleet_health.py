"""The health check judges engines only while they may generate."""

from __future__ import annotations

from dataclasses import dataclass, field

from invrl.rollout.fleet import HealthCheck


@dataclass
class Engine:
    """Server, client and receiver at once."""

    answers: list[bool] = field(default_factory=list)
    is_alive: bool = True
    pauses: list[bool] = field(default_factory=list)

    def alive(self) -> bool:
        return self.is_alive

    @property
    def is_paused(self) -> bool:
        return self.pauses.pop(0) if self.pauses else False

    async def generates(self, *, deadline_s: float) -> bool:
        return self.answers.pop(0)

    @property
    def server(self) -> Engine:
        return self

    client = receiver = server


async def rounds(engine: Engine, count: int) -> list[dict[str, str]]:
    check = HealthCheck(deadline_s=1.0, failures=2)
    return [await check.round({"engine-0": engine}) for _ in range(count)]


async def test_only_failures_in_a_row_count() -> None:
    assert await rounds(Engine(answers=[False, True, False]), 3) == [{}, {}, {}]
    first, second = await rounds(Engine(answers=[False, False]), 2)
    assert first == {}
    assert "no token" in second["engine-0"]


async def test_a_dead_process_leaves_at_once() -> None:
    assert "ended" in (await rounds(Engine(is_alive=False), 1))[0]["engine-0"]


async def test_a_paused_engine_is_not_asked() -> None:
    assert await rounds(Engine(pauses=[True, True]), 2) == [{}, {}]


async def test_a_pause_that_began_while_asking_proves_nothing() -> None:
    engine = Engine(answers=[False] * 3, pauses=[False, True] * 3)
    assert await rounds(engine, 3) == [{}, {}, {}]
