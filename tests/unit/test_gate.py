"""The gate before each turn: which turns its policy holds, and what becomes of them."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
from fakes import FakeEngine, random_reply
from gate_policies import hold_all
from running_gateway import ASK, running
from streamed import collect, generate
from virtual_agents import open_record

from invrl.engines.client.generation import (
    GenerateChunk,
    GenerateEnd,
    GenerateRequest,
)
from invrl.engines.client.sglang_client import EngineLimits, SglangClient
from invrl.engines.fleet.load_watch import LoadWatch
from invrl.engines.inside_sglang.engine_instance import (
    INSTANCE_HEADER,
    NAME_VARIABLE,
    NamedReplies,
)
from invrl.errors import PluginError, ServerError
from invrl.gateway.gate.gate import _REVIEW_PAUSE_S, Gate, GatedSampler
from invrl.gateway.gate.policies import gate_policy, program
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.session_record import SessionRecord
from invrl.run.plan.jumping_clock import run_jumping
from invrl.types.fleet import EngineLoad, FleetSnapshot, LiveSession, TurnPlan
from invrl.types.sessions import Sampling

HOLD = TurnPlan(hold=True)
_NUMBERS = itertools.count()


def fleet_of(*kv_tokens: int | None) -> FleetSnapshot:
    """Engines with these KV caches, named e0, e1, ..."""
    engines: dict[str, EngineLoad] = {}
    for number, tokens in enumerate(kv_tokens):
        name = f"e{number}"
        engines[name] = EngineLoad(kv_tokens=tokens, instance=f"start-of-{name}")
    return FleetSnapshot(engines=engines)


def live(
    session_id: str,
    tokens: int,
    state: Literal["idle", "running", "waiting"] = "waiting",
    *,
    group: int = 0,
    engine: str | None = "e0",
) -> LiveSession:
    """A session of the group that was opened as number `group`."""
    return LiveSession(
        id=session_id,
        group_id=f"g{group}",
        group_opened_at=float(group),
        state=state,
        tokens=tokens,
        engine=engine,
    )


# ----------------------------------------------------------------- the policy `program`


def test_no_turn_is_held_while_all_sessions_fit() -> None:
    sessions = [live("a", 300), live("b", 300, "idle"), live("c", 300, "running")]
    assert program(fleet_of(1000), sessions) == {}


def test_sessions_of_the_youngest_group_are_held_first() -> None:
    sessions = [
        live("young", 300, group=3),
        live("old", 500, group=1),
        live("middle", 300, "idle", group=2),
    ]
    assert program(fleet_of(1000), sessions) == {"young": HOLD}


def test_running_session_keeps_its_room_whatever_its_age() -> None:
    sessions = [live("old", 500, group=1), live("young", 600, "running", group=2)]
    assert program(fleet_of(1000), sessions) == {"old": HOLD}


def test_held_turn_passes_once_an_older_session_has_ended() -> None:
    young = live("young", 600, group=2)
    assert program(fleet_of(1000), [live("old", 500), young]) == {"young": HOLD}
    assert program(fleet_of(1000), [young]) == {}


def test_held_session_gets_a_place_only_with_room_for_growth() -> None:
    old = live("old", 500, "idle", group=1)
    fits = live("young", 350, group=2)
    assert program(fleet_of(1000), [old, fits]) == {}
    held = replace(fits, is_held=True)
    assert program(fleet_of(1000), [old, held]) == {"young": HOLD}
    assert program(fleet_of(1000), [old, replace(held, tokens=300)]) == {}


def test_younger_session_does_not_take_the_room_that_a_held_one_waits_for() -> None:
    sessions = [
        live("first", 600, "idle", group=1),
        live("held", 500, group=2),
        live("small", 10, group=3),
    ]
    assert program(fleet_of(1000), sessions) == {"held": HOLD, "small": HOLD}


def test_session_that_grows_does_not_lose_its_place_to_one_of_its_group() -> None:
    sessions = [live("a", 300, "idle"), live("b", 400)]
    assert program(fleet_of(600), sessions) == {"b": HOLD}
    grown = [live("a", 500), live("b", 400)]
    assert program(fleet_of(600), grown) == {"b": HOLD}


def test_held_session_moves_to_the_engine_with_the_most_room() -> None:
    sessions = [
        live("old", 800, "idle", group=1),
        live("young", 300, group=2),
        live("elsewhere", 500, "idle", group=1, engine="e1"),
        live("further", 100, "idle", group=1, engine="e2"),
    ]
    plans = program(fleet_of(1000, 1000, 1000), sessions)
    assert plans == {"young": TurnPlan(engine="e2")}
    assert program(fleet_of(1000, 600, 300), sessions) == {"young": HOLD}


def test_session_without_an_engine_gets_the_emptiest_one() -> None:
    sessions = [
        live("old", 800, "idle", engine="e0"),
        live("new", 100, group=1, engine=None),
    ]
    assert program(fleet_of(1000, 1000), sessions) == {"new": TurnPlan(engine="e1")}


def test_session_that_is_larger_than_the_cache_passes_alone() -> None:
    huge = live("huge", 5000)
    assert program(fleet_of(1000), [huge]) == {}
    sessions = [live("old", 100, "idle"), live("huge", 5000, group=1)]
    assert program(fleet_of(1000), sessions) == {"huge": HOLD}


@pytest.mark.parametrize("fleet", [FleetSnapshot(), fleet_of(None), fleet_of(0)])
def test_no_turn_is_held_without_the_size_of_the_kv_cache(fleet: FleetSnapshot) -> None:
    sessions = [live("a", 10**9), live("b", 10**9, engine=None)]
    assert program(fleet, sessions) == {}


def test_policy_is_loaded_by_its_import_path() -> None:
    assert gate_policy("program") is program
    assert gate_policy("gate_policies:hold_all") is hold_all
    with pytest.raises(PluginError, match=r"gate\.policy.*program"):
        gate_policy("progam")
    with pytest.raises(PluginError, match="does not take the call"):
        gate_policy("gate_policies:without_sessions")


# ----------------------------------------------------------------- the gate


@dataclass
class TimedSampler:
    """Takes a second for each generation, on the engine `e0`, or on that of the session
    whose key the request has."""

    engines: dict[str, str] = field(default_factory=dict)
    requests: list[GenerateRequest] = field(default_factory=list)
    ended_at: list[float] = field(default_factory=list)

    async def stream(
        self, request: GenerateRequest
    ) -> AsyncGenerator[GenerateChunk | GenerateEnd, None]:
        self.requests.append(request)
        await asyncio.sleep(1.0)
        self.ended_at.append(asyncio.get_running_loop().time())
        yield GenerateChunk(
            ids_T=np.zeros(10, np.int32), logprobs_T=np.zeros(10, np.float32), spans=()
        )
        yield GenerateEnd(
            spans=(),
            finish_reason="length",
            matched_stop=None,
            cached_tokens=0,
            engine="start-of-" + self.engines.get(request.routing_key, "e0"),
        )


def request_of(session_id: str, tokens: int = 100) -> GenerateRequest:
    return GenerateRequest(
        rid=f"turn-{next(_NUMBERS)}-of-{session_id}",
        input_ids_T=np.zeros(tokens, np.int32),
        sampling=Sampling(max_new_tokens=10),
        routing_key=session_id,
    )


@dataclass
class Gated:
    """A gate with sessions `a`, `b`, `c` of groups 0, 1, 2, and the sampler behind
    it."""

    policy: Any
    fleet: FleetSnapshot = field(default_factory=lambda: fleet_of(1000))
    max_hold_s: float = 60.0
    share: float = 1.0
    held_turns: list[int] = field(default_factory=list)
    sends_priority: bool = False
    records: list[SessionRecord] = field(
        default_factory=lambda: [
            open_record(session_id, group, 100.0 + group)
            for group, session_id in enumerate("abc")
        ]
    )
    engines: TimedSampler = field(default_factory=TimedSampler)

    def __post_init__(self) -> None:
        self.gate = Gate(
            self.policy,
            max_hold_s=self.max_hold_s,
            open_sessions=lambda: self.records,
            read_fleet=lambda: self.fleet,
            share=lambda: self.share,
            sends_priority=self.sends_priority,
            note_held_turns=self.held_turns.append,
        )
        self.sampler = GatedSampler(self.engines, self.gate)

    def run(self, work: Coroutine[Any, Any, object]) -> None:
        async def followed() -> None:
            following = asyncio.create_task(self.gate.follow())
            await work
            following.cancel()

        run_jumping(followed())


def test_held_turn_is_sampled_after_the_longest_hold() -> None:
    gated = Gated(hold_all, max_hold_s=60.0)
    gated.run(generate(gated.sampler, request_of("a")))
    assert gated.engines.ended_at == [61.0]
    held_s = 60.0 - _REVIEW_PAUSE_S
    assert gated.gate.metrics() == {
        "turns_held": 1,
        "seconds_held": pytest.approx(held_s),
    }
    assert [record.held_s for record in gated.records] == [
        pytest.approx(held_s),
        0.0,
        0.0,
    ]


def test_time_of_a_held_turn_is_counted_while_it_is_held() -> None:
    gated = Gated(hold_all)

    async def work() -> None:
        held = asyncio.create_task(generate(gated.sampler, request_of("b")))
        await asyncio.sleep(30.5)
        assert gated.records[1].held_s == pytest.approx(30.0, abs=0.1)
        await held

    gated.run(work())


def test_parent_of_two_sessions_that_are_held_at_a_time_is_held_once() -> None:
    gated = Gated(hold_all)
    parent, *children = gated.records
    for child in children:
        child.parent = parent

    async def work() -> None:
        async with asyncio.TaskGroup() as turns:
            for session_id in "bc":
                turns.create_task(generate(gated.sampler, request_of(session_id)))

    gated.run(work())
    held_s = pytest.approx(60.0 - _REVIEW_PAUSE_S)
    assert [record.held_s for record in gated.records] == [held_s] * 3


def test_number_of_held_turns_is_noted() -> None:
    gated = Gated(hold_all, max_hold_s=10.0)

    async def work() -> None:
        async with asyncio.TaskGroup() as turns:
            for session_id in "ab":
                turns.create_task(generate(gated.sampler, request_of(session_id)))
        await asyncio.sleep(2.0)

    gated.run(work())
    assert max(gated.held_turns) == 2
    assert gated.held_turns[-1] == 0


def test_retry_of_a_client_that_disconnected_does_not_begin_a_new_hold() -> None:
    gated = Gated(hold_all, max_hold_s=60.0)

    async def work() -> None:
        first = asyncio.create_task(generate(gated.sampler, request_of("a")))
        await asyncio.sleep(40.0)
        first.cancel()
        await asyncio.sleep(5.0)
        await generate(gated.sampler, request_of("a"))
        await generate(gated.sampler, request_of("a"))

    gated.run(work())
    # The next turn has a whole hold again.
    assert gated.engines.ended_at == [61.0, 122.0]
    assert gated.gate.metrics()["turns_held"] == 2


def test_turn_that_is_not_held_counts_as_such() -> None:
    gated = Gated(program)
    gated.run(generate(gated.sampler, request_of("a")))
    assert gated.engines.ended_at[0] < 1.1
    assert gated.gate.metrics() == {"turns_held": 0, "seconds_held": 0.0}


def test_held_turn_passes_as_soon_as_another_session_is_closed() -> None:
    gated = Gated(program, fleet=fleet_of(150))

    async def work() -> None:
        await generate(gated.sampler, request_of("a"))
        held = asyncio.create_task(generate(gated.sampler, request_of("b")))
        await asyncio.sleep(20.0)
        assert len(gated.engines.requests) == 1
        del gated.records[0]
        await held

    gated.run(work())
    assert 21.0 < gated.engines.ended_at[1] < 24.0


def test_cancelled_turn_leaves_the_gate() -> None:
    asked: list[list[str]] = []

    def hold(
        fleet: FleetSnapshot, sessions: Sequence[LiveSession]
    ) -> Mapping[str, TurnPlan]:
        asked.append([one.id for one in sessions if one.state == "waiting"])
        return hold_all(fleet, sessions)

    gated = Gated(hold)

    async def work() -> None:
        held = [
            asyncio.create_task(generate(gated.sampler, request_of(session_id)))
            for session_id in "ab"
        ]
        await asyncio.sleep(3.0)
        held[0].cancel()
        await asyncio.wait(held)

    gated.run(work())
    assert asked[0] == ["a", "b"]
    assert asked[-1] == ["b"]
    assert len(gated.engines.requests) == 1


def test_session_that_samples_already_is_not_held() -> None:
    gated = Gated(hold_all, max_hold_s=10.0)

    async def work() -> None:
        first = asyncio.create_task(generate(gated.sampler, request_of("a")))
        await asyncio.sleep(10.5)
        second = asyncio.create_task(generate(gated.sampler, request_of("a")))
        await asyncio.gather(first, second)

    gated.run(work())
    assert gated.engines.ended_at == [11.0, 11.5]


def test_further_attempt_at_a_turn_does_not_wait_again() -> None:
    gated = Gated(hold_all, max_hold_s=10.0)
    first = request_of("a")
    again = msgspec.structs.replace(first, rid=f"again-1-{first.rid}")

    async def work() -> None:
        await generate(gated.sampler, first)
        await generate(gated.sampler, again)

    gated.run(work())
    assert gated.engines.ended_at == [11.0, 12.0]
    assert gated.gate.metrics()["turns_held"] == 1


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (None, "not a mapping"),
        (["a"], "not a mapping"),
        ({"a": True}, "not a TurnPlan"),
        ({"a": TurnPlan(engine="e7")}, "engines: e0"),
    ],
)
def test_policy_that_answers_nonsense_is_not_asked_again(
    answer: object, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    calls = 0

    def policy(fleet: FleetSnapshot, sessions: Sequence[LiveSession]) -> object:
        nonlocal calls
        calls += 1
        return answer

    gated = Gated(policy)

    async def work() -> None:
        for session_id in "aab":
            await generate(gated.sampler, request_of(session_id))

    gated.run(work())
    assert calls == 1
    assert len(gated.engines.ended_at) == 3
    [warning] = [
        record for record in caplog.records if record.levelno == logging.WARNING
    ]
    assert fault in warning.getMessage()


def test_policy_that_raises_lets_all_turns_pass(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def policy(
        fleet: FleetSnapshot, sessions: Sequence[LiveSession]
    ) -> Mapping[str, TurnPlan]:
        raise ZeroDivisionError("no sessions")

    gated = Gated(policy)

    async def work() -> None:
        for session_id in "ab":
            await generate(gated.sampler, request_of(session_id))

    gated.run(work())
    assert len(gated.engines.ended_at) == 2
    warnings = [
        record for record in caplog.records if record.levelno == logging.WARNING
    ]
    assert len(warnings) == 1
    assert "ZeroDivisionError" in warnings[0].getMessage()


def test_gate_says_once_that_it_is_blind(caplog: pytest.LogCaptureFixture) -> None:
    fleet = FleetSnapshot(engines=fleet_of(None).engines, silent=("external-0",))
    gated = Gated(program, fleet=fleet)

    async def work() -> None:
        for session_id in "ab":
            await generate(gated.sampler, request_of(session_id, 10**6))

    gated.run(work())
    assert len(gated.engines.ended_at) == 2
    assert [record.getMessage() for record in caplog.records] == [
        f"the gate is blind for {name}, which does not report its KV cache: it holds no turn there"
        for name in ("e0", "external-0")
    ]


def test_moved_session_is_sent_with_a_key_that_its_new_engine_has() -> None:
    def to_e1(
        fleet: FleetSnapshot, sessions: Sequence[LiveSession]
    ) -> Mapping[str, TurnPlan]:
        return {"a": TurnPlan(engine="e1")}

    sampler = TimedSampler(engines={"b": "e1"})
    gated = Gated(to_e1, fleet=fleet_of(1000, 1000), engines=sampler)

    async def work() -> None:
        for session_id in "aba":
            await generate(gated.sampler, request_of(session_id))

    gated.run(work())
    # The first time no session is known to be at e1.
    assert [sent.routing_key for sent in sampler.requests] == ["a", "b", "b"]
    assert sampler.requests[2].rid.endswith("-of-a")


def test_policy_sees_what_each_session_does() -> None:
    seen: list[Sequence[LiveSession]] = []

    def policy(
        fleet: FleetSnapshot, sessions: Sequence[LiveSession]
    ) -> Mapping[str, TurnPlan]:
        seen.append(sessions)
        return {}

    gated = Gated(policy, fleet=fleet_of(1000, 1000))

    async def work() -> None:
        await generate(gated.sampler, request_of("a", 100))
        running = asyncio.create_task(generate(gated.sampler, request_of("b", 200)))
        await asyncio.sleep(0.5)
        await generate(gated.sampler, request_of("c", 300))
        await running

    gated.run(work())
    assert [
        (session.id, session.state, session.tokens, session.engine)
        for session in seen[-1]
    ] == [
        ("a", "idle", 110, "e0"),
        ("b", "running", 200, None),
        ("c", "waiting", 300, None),
    ]
    assert [session.group_opened_at for session in seen[-1]] == [100.0, 101.0, 102.0]


def test_worker_has_its_share_of_the_kv_cache() -> None:
    seen: list[FleetSnapshot] = []

    def policy(
        fleet: FleetSnapshot, sessions: Sequence[LiveSession]
    ) -> Mapping[str, TurnPlan]:
        seen.append(fleet)
        return {}

    gated = Gated(policy, fleet=fleet_of(1000), share=0.25)
    gated.run(generate(gated.sampler, request_of("a")))
    assert seen[0].engines["e0"].kv_tokens == 250


@pytest.mark.parametrize("sends_priority", [False, True])
def test_older_groups_have_a_larger_priority_where_engines_have_it(
    sends_priority: bool,
) -> None:
    gated = Gated(program, sends_priority=sends_priority)
    gated.records.append(open_record("d", 0, 500.0))

    async def work() -> None:
        for session_id in "abcd":
            await generate(gated.sampler, request_of(session_id))

    gated.run(work())
    priorities = [sent.priority for sent in gated.engines.requests]
    expected = [-100, -101, -102, -100] if sends_priority else [None] * 4
    assert priorities == expected


async def test_stream_of_a_held_turn_gets_keep_alives(
    tmp_path: Path, model: Path, renderer: Renderer
) -> None:
    gate = {"policy": "gate_policies:hold_all", "max_hold_s": 0.3}
    async with running(
        tmp_path, model, renderer, gate=gate, keep_alive_s=0.02
    ) as gateway:
        [session] = await gateway.open()
        body = {"model": "tiny", "messages": [ASK], "stream": True}
        url = session.base_url + "/chat/completions"
        answer = await gateway.http.post(url, json=body)
        before, _, after = answer.text.partition("data: ")
        assert before.count(":") > 2
        assert "[DONE]" in after
        metrics = (await gateway.env("/metrics")).json()
        worker = metrics["workers"]["0"]
        assert worker["gate"]["turns_held"] == 1
        assert worker["gate"]["seconds_held"] > 0.0
        [turn] = gateway.turns(session)
        assert turn.session_id == session.id


# ----------------------------------------------------------------- the load of engines


@pytest.mark.parametrize("header", [{}, {INSTANCE_HEADER: "a1"}])
async def test_reply_has_the_name_of_its_engine(header: dict[str, str]) -> None:
    limits = EngineLimits(vocab_size=512, context_length=1024)
    async with (
        FakeEngine(random_reply()) as engine,
        SglangClient(engine.url, limits=limits) as client,
    ):
        engine.headers = header
        generated = await generate(client, request_of("a"))
        assert generated.engine == header.get(INSTANCE_HEADER)
        chunks, _ = await collect(client.stream(request_of("b")))
        assert {chunk.engine for chunk in chunks} == {header.get(INSTANCE_HEADER)}


async def test_engine_names_each_of_its_starts_in_its_replies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(NAME_VARIABLE, "engine-7")
    sent: list[dict[str, Any]] = []

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body"})

    async def receive() -> dict[str, Any]:
        return {}

    async def send(message: Any) -> None:
        sent.append(message)

    for layer in (NamedReplies(answer), NamedReplies(answer)):
        await layer({"type": "http"}, receive, send)
    (first, first_name), (second, second_name) = (
        message["headers"] for message in sent[::2]
    )
    assert first == second == (b"a", b"b")
    assert first_name[0] == second_name[0] == INSTANCE_HEADER.encode()
    assert first_name[1] != second_name[1]
    assert first_name[1].startswith(b"engine-7.")


@dataclass
class ScriptedLoad:
    """Returns, or raises, these answers in turn."""

    answers: list[EngineLoad | Exception]

    async def load(self, *, deadline_s: float) -> EngineLoad:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_load_of_an_engine_counts_until_its_next_answer() -> None:
    loads = [EngineLoad(running=number) for number in range(3)]
    late = ServerError("late")
    clients = {
        "steady": ScriptedLoad([loads[0], loads[1], loads[2]]),
        "late": ScriptedLoad([loads[0], late, loads[2]]),
        "external": ScriptedLoad([late, late, late]),
    }
    watch = LoadWatch(lambda: clients)
    seen: list[FleetSnapshot] = []

    async def work() -> None:
        following = asyncio.create_task(watch.follow())
        for _ in range(3):
            await asyncio.sleep(0.5)
            seen.append(watch.snapshot)
            await asyncio.sleep(0.5)
        following.cancel()

    run_jumping(work())
    assert [snapshot.engines for snapshot in seen] == [
        {"steady": loads[0], "late": loads[0]},
        {"steady": loads[1], "late": loads[0]},
        {"steady": loads[2], "late": loads[2]},
    ]
    assert {snapshot.silent for snapshot in seen} == {("external",)}
