"""The gate before each turn: asks a policy which waiting turns may be sampled, and where.

`GatedSampler` stands in front of the engines, so a generation does not know of the gate:
a held turn is a generation that samples nothing yet, and its stream gets keep-alives.
Invariants: a turn waits at most `max_hold_s`; a policy that fails once is not asked
again, and every turn passes from then on.

Each worker of the gateway decides for its own sessions. Its share of every engine's KV
cache is its share of the gateway's open sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from invrl.engines.client.generation import (
    GenerateChunk,
    GenerateEnd,
    GenerateRequest,
)
from invrl.gateway.session_record import SessionRecord
from invrl.gateway.turns.generation import Sampler
from invrl.interfaces import GatePolicy
from invrl.types.fleet import EngineLoad, FleetSnapshot, LiveSession, TurnPlan

_log = logging.getLogger(__name__)
_REVIEW_PAUSE_S = 0.02
"""Time in which requests are gathered before the policy decides on all of them: it
looks at every session."""
_REFRESH_S = 1.0
"""Pause between two looks at the load of the engines."""
_PASS = TurnPlan()


@dataclass(slots=True, eq=False)
class _Waiting:
    """A turn that waits at the gate."""

    tokens: int
    """Tokens of its prompt."""
    plan: asyncio.Future[TurnPlan]


@dataclass(slots=True, eq=False)
class _Place:
    """Where a session's cache is, and what the session does."""

    tokens: int = 0
    """Tokens of its last turn: of its prompt, and once it has ended of its reply."""
    instance: str | None = None
    """Start of the engine that sampled it."""
    routing_key: str | None = None
    """Key of another session that the router sends to the same engine. None: its own."""
    turn_id: str | None = None
    """Last turn that passed. The ids of its further attempts begin with it."""
    num_running: int = 0
    waiting: list[_Waiting] = field(default_factory=list)
    waiting_since: float | None = None
    """Time at which its next turn came to the gate. It and the next field outlive a
    client that disconnects: the client's retry does not begin a new hold."""
    is_held: bool = False
    """Whether its next turn has been held."""


class Gate:
    """Holds the turns of one worker's sessions back as `policy` decides."""

    def __init__(
        self,
        policy: GatePolicy,
        *,
        max_hold_s: float,
        open_sessions: Callable[[], Sequence[SessionRecord]],
        read_fleet: Callable[[], FleetSnapshot],
        share: Callable[[], float] = lambda: 1.0,
        sends_priority: bool = False,
        note_held_turns: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`open_sessions`: of this worker. `read_fleet`: returns the newest load of the
        engines. `share`: this worker's share of the gateway's sessions.
        `sends_priority`: engines sample requests of older groups first.
        `note_held_turns` is called with the number of turns that are held."""
        self._policy: GatePolicy | None = policy
        self._max_hold_s = max_hold_s
        self._open_sessions = open_sessions
        self._read_fleet = read_fleet
        self._share = share
        self._sends_priority = sends_priority
        self._note_held_turns = note_held_turns
        self._fleet = read_fleet()
        self._places: dict[str, _Place] = {}
        self._keys: dict[str, str] = {}
        """Key that the router sends to each engine, by the engine's instance."""
        self._review: asyncio.TimerHandle | None = None
        self._reported_blind: set[str] = set()
        self._counted_at = 0.0
        """Time up to which the time of held turns has been counted."""
        self.turns_held = 0
        self.seconds_held = 0.0

    def metrics(self) -> Mapping[str, float]:
        """Return the number of held turns that have passed, and the seconds for which
        they were held."""
        return {"turns_held": self.turns_held, "seconds_held": self.seconds_held}

    async def follow(self) -> None:
        """Read the load of the engines once a second, until cancelled."""
        while True:
            await asyncio.sleep(_REFRESH_S)
            self._fleet = self._read_fleet()
            self._review_soon()

    @contextlib.asynccontextmanager
    async def turn(self, request: GenerateRequest) -> AsyncIterator[GatedTurn]:
        """Wait until the turn of `request` may be sampled, and surround its sampling.
        Yields the request to send. Another attempt at the same turn does not wait."""
        session_id = request.routing_key
        place = self._places.setdefault(session_id, _Place())
        if place.turn_id is None or not request.rid.endswith(place.turn_id):
            plan = await self._wait(place, len(request.input_ids_T))
            place.turn_id = request.rid
            place.waiting_since = None
            self.turns_held += place.is_held
            place.is_held = False
            if plan.engine is not None:
                place.routing_key = self._key_of(plan.engine)
        turn = GatedTurn(
            msgspec.structs.replace(
                request,
                routing_key=place.routing_key or session_id,
                priority=self._priority(session_id),
            )
        )
        place.num_running += 1
        place.tokens = len(request.input_ids_T)
        try:
            yield turn
        finally:
            place.num_running -= 1
            place.tokens = len(request.input_ids_T) + turn.num_sampled
            if turn.instance is not None:
                place.instance = turn.instance
                self._keep_key(turn.request.routing_key, turn.instance)
            self._review_soon()

    async def _wait(self, place: _Place, tokens: int) -> TurnPlan:
        """Wait until the policy lets the turn pass, at most `max_hold_s` after the
        first try of the session's next turn. A session that already samples is not
        held."""
        if self._policy is None or place.num_running:
            return _PASS
        loop = asyncio.get_running_loop()
        waiting = _Waiting(tokens, loop.create_future())
        place.waiting.append(waiting)
        if place.waiting_since is None:
            place.waiting_since = loop.time()
        self._review_soon()
        passes_at = place.waiting_since + self._max_hold_s
        limit = loop.call_at(passes_at, _resolve, waiting.plan, _PASS)
        try:
            return await waiting.plan
        finally:
            limit.cancel()
            self._count_held()
            place.waiting.remove(waiting)

    def _count_held(self) -> None:
        """Count the time since the last call for the sessions whose turns are held, and
        for their parents."""
        now = asyncio.get_running_loop().time()
        elapsed_s = now - self._counted_at
        self._counted_at = now
        held = {
            session_id
            for session_id, place in self._places.items()
            if place.is_held and place.waiting
        }
        self._note_held_turns(len(held))
        self.seconds_held += len(held) * elapsed_s
        waits: dict[str, SessionRecord] = {}
        for record in self._open_sessions() if held else ():
            if record.session.id in held:
                waits |= {one.session.id: one for one in record.ancestry()}
        for record in waits.values():
            record.held_s += elapsed_s

    def _review_soon(self) -> None:
        if self._review is None:
            loop = asyncio.get_running_loop()
            self._review = loop.call_later(_REVIEW_PAUSE_S, self._decide)

    def _decide(self) -> None:
        """Let those waiting turns pass that the policy does not hold."""
        self._review = None
        self._count_held()
        records = self._open_sessions()
        self._forget_closed(records)
        if not any(place.waiting for place in self._places.values()):
            return
        plans = self._ask_policy(records)
        for session_id, place in self._places.items():
            plan = plans.get(session_id, _PASS)
            if plan.hold and place.waiting:
                place.is_held = True
                continue
            for waiting in place.waiting:
                _resolve(waiting.plan, plan)

    def _forget_closed(self, records: Sequence[SessionRecord]) -> None:
        """Forget sessions that are closed and sample nothing."""
        open_ids = {record.session.id for record in records}
        self._places = {
            session_id: place
            for session_id, place in self._places.items()
            if session_id in open_ids or place.waiting or place.num_running
        }

    def _ask_policy(self, records: Sequence[SessionRecord]) -> Mapping[str, TurnPlan]:
        """Return the policy's plans. The first time that it raises or returns something
        else, warn, and do without it from then on."""
        if self._policy is None:
            return {}
        self._report_blind()
        fleet = self._own_share()
        sessions = self._live_sessions(records)
        try:
            plans = self._policy(fleet, sessions)
            fault = _fault_of(plans, fleet)
        except Exception as error:
            _log.exception("the gate's policy failed")
            plans = {}
            fault = f"it raised {type(error).__name__}: {error}"
        if fault:
            _log.warning(
                "the gate's policy (gate.policy) is not asked again, and holds no turn: %s",
                fault,
            )
            self._policy = None
            return {}
        return plans

    def _own_share(self) -> FleetSnapshot:
        """Return the fleet with this worker's part of each KV cache."""
        share = self._share()
        engines: dict[str, EngineLoad] = {}
        for name, load in self._fleet.engines.items():
            if load.kv_tokens:
                load = msgspec.structs.replace(
                    load, kv_tokens=int(share * load.kv_tokens)
                )
            engines[name] = load
        return FleetSnapshot(engines=engines, silent=self._fleet.silent)

    def _live_sessions(self, records: Sequence[SessionRecord]) -> list[LiveSession]:
        opened_at = _group_openings(records)
        sessions: list[LiveSession] = []
        for record in records:
            session = record.session
            place = self._places.get(session.id, _Place())
            tokens = place.tokens
            state = "idle"
            if place.num_running:
                state = "running"
            elif place.waiting:
                state = "waiting"
                tokens = max(waiting.tokens for waiting in place.waiting)
            sessions.append(
                LiveSession(
                    id=session.id,
                    group_id=session.group_id,
                    group_opened_at=opened_at[session.group_id],
                    state=state,
                    tokens=tokens,
                    engine=self._fleet.engine_of(place.instance),
                    is_held=place.is_held,
                )
            )
        return sessions

    def _report_blind(self) -> None:
        """Log once for each engine that it does not report its KV cache."""
        loads = self._fleet.engines.items()
        unknown = [name for name, load in loads if not load.kv_tokens]
        for name in (*unknown, *self._fleet.silent):
            if name not in self._reported_blind:
                self._reported_blind.add(name)
                _log.warning(
                    "the gate is blind for %s, which does not report its KV cache: it holds no turn there",
                    name,
                )

    def _key_of(self, engine: str) -> str | None:
        """Return a key that the router sends to this engine; None if none is known."""
        load = self._fleet.engines.get(engine)
        if load is None or load.instance is None:
            return None
        return self._keys.get(load.instance)

    def _keep_key(self, key: str, instance: str) -> None:
        """Keep a key that the router has sent to this engine, and to no other since."""
        self._keys = {other: sent for other, sent in self._keys.items() if sent != key}
        self._keys[instance] = key

    def _priority(self, session_id: str) -> int | None:
        """Return a larger number for an older group; None if engines ignore it."""
        if not self._sends_priority:
            return None
        records = self._open_sessions()
        opened_at = _group_openings(records)
        for record in records:
            if record.session.id == session_id:
                return -int(opened_at[record.session.group_id])
        return None


@dataclass(slots=True, eq=False)
class GatedTurn:
    """A turn that has passed the gate."""

    request: GenerateRequest
    """Request to send."""
    num_sampled: int = 0
    instance: str | None = None
    """Start of the engine that sampled it, once that is known."""


class GatedSampler:
    """A sampler whose turns pass the gate."""

    def __init__(self, sampler: Sampler, gate: Gate) -> None:
        self._sampler = sampler
        self._gate = gate

    async def stream(
        self, request: GenerateRequest
    ) -> AsyncGenerator[GenerateChunk | GenerateEnd, None]:
        async with (
            self._gate.turn(request) as turn,
            contextlib.aclosing(self._sampler.stream(turn.request)) as parts,
        ):
            async for part in parts:
                if isinstance(part, GenerateChunk):
                    turn.num_sampled += len(part.ids_T)
                else:
                    turn.instance = part.engine
                yield part


def _group_openings(records: Sequence[SessionRecord]) -> Mapping[str, float]:
    """Return when the first open session of each group was opened."""
    opened_at: dict[str, float] = {}
    for record in records:
        group_id = record.session.group_id
        earliest = opened_at.get(group_id, record.opened_at)
        opened_at[group_id] = min(earliest, record.opened_at)
    return opened_at


def _fault_of(plans: object, fleet: FleetSnapshot) -> str:
    """Describe what is wrong with a policy's answer; "" if nothing is."""
    if not isinstance(plans, Mapping):
        return f"it returned {plans!r}, not a mapping of session ids to TurnPlan"
    for session_id, plan in plans.items():
        if not isinstance(plan, TurnPlan):
            return f"it returned {plan!r} for session {session_id}, not a TurnPlan"
        if plan.engine is not None and plan.engine not in fleet.engines:
            engines = ", ".join(fleet.engines) or "none"
            return (
                f"it moved session {session_id} to {plan.engine!r}; engines: {engines}"
            )
    return ""


def _resolve(waiting: asyncio.Future[TurnPlan], plan: TurnPlan) -> None:
    if not waiting.done():
        waiting.set_result(plan)
