"""The parts of one worker of the gateway, put together: sessions, turns, gates, counts,
and the tasks that run next to requests."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from invrl.gateway.gate.gate import Gate, GatedSampler
from invrl.gateway.gate.policies import gate_policy
from invrl.gateway.registry import SessionRegistry, WorkerPlace
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.rendering.replies.parsers import Parsers
from invrl.gateway.server.settings import GatewaySettings
from invrl.gateway.server.workers.loop_lag import LoopLag
from invrl.gateway.server.workers.peers import Peers
from invrl.gateway.server.workers.request_counts import RequestCounts
from invrl.gateway.session_record import SessionRecord
from invrl.gateway.sessions.lifecycle import Lifecycle
from invrl.gateway.turns.reply_sampling import Sampler
from invrl.gateway.turns.turns import Turns
from invrl.gateway.types import MatchLevel
from invrl.store.lease_store import LeaseStore
from invrl.store.run_store import RunStore
from invrl.store.run_store_writer import RunStoreWriter
from invrl.types.fleet import FleetSnapshot
from invrl.types.sessions import Sampling


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerParts:
    settings: GatewaySettings
    peers: Peers
    reader: RunStore
    registry: SessionRegistry
    turns: Turns
    lifecycle: Lifecycle
    gates: Sequence[Gate]
    loop_lag: LoopLag
    requests: RequestCounts

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the tasks that follow time and the fleet, and end them on exit."""
        tasks = [
            asyncio.create_task(self.lifecycle.expire_forever()),
            asyncio.create_task(self.loop_lag.measure()),
        ]
        tasks += [asyncio.create_task(gate.follow()) for gate in self.gates]
        yield
        for task in tasks:
            task.cancel()

    def close(self) -> None:
        """Close what the parts have opened."""
        self.peers.close()
        self.reader.close()


def make_parts(
    settings: GatewaySettings,
    *,
    samplers: Sequence[Sampler],
    renderer: Renderer,
    parsers: Parsers,
    store: RunStoreWriter,
    place: WorkerPlace,
    run_ended: Callable[[], bool],
    read_fleet: Callable[[], FleetSnapshot],
    note_held_turns: Callable[[int], None],
) -> WorkerParts:
    """Make the parts. Sessions of this worker that are open in the store continue.
    `samplers`: that of all sessions; or that of training, and then that of evaluation.
    The functions are those of `make_app`."""
    reader = RunStore(Path(settings.store_path))
    registry = _make_registry(settings, place, reader)
    gates = _make_gates(
        settings,
        registry,
        read_fleet,
        note_held_turns,
        sets_engines_aside=len(samplers) > 1,
    )
    if gates:
        samplers = [
            GatedSampler(sampler, gate)
            for sampler, gate in zip(samplers, gates, strict=True)
        ]
    turns = Turns(
        sampler=samplers[0],
        eval_sampler=samplers[-1],
        renderer=renderer,
        parsers=parsers,
        store=store,
        reader=reader,
        context_length=settings.context_length,
        run_seed=settings.sampling_seed,
        match_level=MatchLevel[settings.match_level.upper()],
        constrained=settings.constrained,
        models=settings.model_names,
        adapters=settings.adapters,
        recorded_top_logprobs=settings.record_top_logprobs,
        engine_return_s=settings.engine_return_s,
        space_wait_s=settings.space_wait_s,
    )
    return WorkerParts(
        settings=settings,
        peers=Peers(place),
        reader=reader,
        registry=registry,
        turns=turns,
        lifecycle=_make_lifecycle(settings, registry, turns, store, run_ended),
        gates=gates,
        loop_lag=LoopLag(),
        requests=RequestCounts(),
    )


def _make_registry(
    settings: GatewaySettings, place: WorkerPlace, reader: RunStore
) -> SessionRegistry:
    """Return a registry with the sessions of this worker that are open in the store."""

    def recall_closed(name: str | bytes) -> SessionRecord | None:
        stored = reader.closed_session(name)
        if stored is None:
            return None
        return SessionRecord.restored(stored)

    registry = SessionRegistry(
        max_open=settings.session.max_open,
        ttl_s=settings.session.ttl_s,
        public_url=settings.url,
        secret=settings.env_key.get_secret_value().encode(),
        incarnation=settings.incarnation,
        place=place,
        recall_closed=recall_closed,
    )
    stored_sessions = reader.live_sessions(f"ses-{place.mark}")
    registry.restore([SessionRecord.restored(stored) for stored in stored_sessions])
    return registry


def _make_gates(
    settings: GatewaySettings,
    registry: SessionRegistry,
    read_fleet: Callable[[], FleetSnapshot],
    note_held_turns: Callable[[int], None],
    *,
    sets_engines_aside: bool,
) -> list[Gate]:
    """Return the gate of all sessions. If engines are set aside for evaluation, return
    the gate of all other sessions, and then that of evaluation. Empty without a
    policy."""
    if settings.gate is None:
        return []
    make_gate = partial(
        Gate,
        gate_policy(settings.gate.policy),
        max_hold_s=settings.gate.max_hold_s,
        share=lambda: registry.share,
        sends_priority=settings.priority_scheduling,
    )
    if not sets_engines_aside:
        return [
            make_gate(
                open_sessions=registry.open_records,
                read_fleet=read_fleet,
                note_held_turns=note_held_turns,
            )
        ]

    def open_sessions(evaluation: bool) -> list[SessionRecord]:
        return [
            record
            for record in registry.open_records()
            if (record.session.purpose == "eval") == evaluation
        ]

    def read_engines(evaluation: bool) -> FleetSnapshot:
        return read_fleet().serving(evaluation=evaluation)

    return [
        make_gate(
            open_sessions=partial(open_sessions, False),
            read_fleet=partial(read_engines, False),
            note_held_turns=note_held_turns,
        ),
        make_gate(
            open_sessions=partial(open_sessions, True),
            read_fleet=partial(read_engines, True),
        ),
    ]


def _make_lifecycle(
    settings: GatewaySettings,
    registry: SessionRegistry,
    turns: Turns,
    store: RunStoreWriter,
    run_ended: Callable[[], bool],
) -> Lifecycle:
    leases = None
    if settings.leases:
        leases = LeaseStore(
            Path(settings.store_path), heartbeat_timeout_s=settings.heartbeat_timeout_s
        )
    return Lifecycle(
        registry=registry,
        turns=turns,
        store=store,
        sampling=Sampling(
            temperature=settings.temperature,
            top_p=settings.top_p,
            max_new_tokens=settings.max_new_tokens,
        ),
        policy=settings.session,
        late=settings.late,
        leases=leases,
        run_ended=run_ended,
    )
