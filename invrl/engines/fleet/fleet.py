"""M engines behind a router, as one object that starts, updates and ends them, or
uses those of others. Engines that are set aside for evaluation have a second router
(`engine_group.py`), and are like the others in everything else.

Invariant: an engine that comes back joins `engines` with the fleet's version whole, and
from then on every update includes it; only then is it registered with the router. An
engine that leaves (`evict`) is unknown to weight updates at once; in the background it
is unregistered from its router and then ended. Each engine and each router has its
own watch (`engine_health.py`), so a failure there concerns that one alone; `check`
raises when a watch itself has failed. A router that dies is started again
(`fleet_router.py`). A group whose last engine has left waits for one that is started
again (`engine_restarts.py`); only if none may come back any more, `check` raises.

An external engine (`external_engine.py`) is one of them like the others, but that
nobody here starts or ends its process: one that left is waited for, and joins like an
engine that was started again.

A plain class, for `invrl serve` and for training. Start it from a thread that lives as
long as the servers should.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Unpack

from invrl.engines.config import EngineConfig
from invrl.engines.fleet.blocking_calls import BlockingCalls
from invrl.engines.fleet.engine_group import EngineGroup, engine_groups
from invrl.engines.fleet.engine_health import TOKEN_TIMEOUTS, wrong_reply
from invrl.engines.fleet.engine_processes import EngineProcesses
from invrl.engines.fleet.engine_restarts import EngineRestarts
from invrl.engines.fleet.fleet_router import FleetRouter, router_maker
from invrl.engines.fleet.fleet_state import FleetState
from invrl.engines.fleet.load_watch import LoadWatch
from invrl.engines.fleet.start_turns import StartTurns
from invrl.engines.fleet.watches import Watches
from invrl.engines.launch.engine_launcher import Engine, EngineLauncher, EngineOptions
from invrl.engines.router.router_server import RouterServer
from invrl.errors import DeadlineError, InvrlError, ServerError
from invrl.host.output.incidents import incidents
from invrl.interfaces import WeightReceiver
from invrl.types.fleet import FleetSnapshot
from invrl.types.weights import WeightVersion

_LOG = logging.getLogger(__name__)

BringUp = Callable[[WeightReceiver, Callable[[], None]], Awaitable[None]]
"""Gives a new engine the fleet's version, and then calls the function, which makes it a
member of the fleet; no update comes in between."""

_ENGINE_POLL_S = 0.05


class Fleet:
    """Engines and routers. Call `start`; then the routers are for the gateway, and
    `receivers` are for weight updates."""

    def __init__(
        self,
        engine: EngineConfig,
        model_path: Path,
        run_folder: Path,
        *,
        router: Mapping[str, object] | None = None,
        heartbeat_timeout_s: float = 30.0,
        eval_engines: int = 0,
        **options: Unpack[EngineOptions],
    ) -> None:
        """Starts the processes of the routers, and one that forks engines. Raises
        ConfigError.

        `router` is passed through, by upstream's field names. An engine or a router
        that is silent for longer than `heartbeat_timeout_s` is dead. The exception is
        one call of an update in which an engine copies or hashes its weights: that may
        take `weights.timeout_s`. `eval_engines`: number of the last engines, which
        serve evaluation only.
        """
        self._config = engine
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._start_turns = StartTurns(shares_gpus=options.get("shares_gpus", False))
        make_router = router_maker(
            engine, run_folder, router or {}, heartbeat_timeout_s=heartbeat_timeout_s
        )
        self._launcher = EngineLauncher(engine, model_path, run_folder, **options)
        self.limits = self._launcher.limits
        self.fork_parent = self._launcher.parent
        """The process that has imported SGLang and forks the engines; None if they are
        not forked."""
        self.engines: dict[str, Engine] = {}
        self._restarts = EngineRestarts(
            engine.max_restarts, external=self._launcher.external_urls
        )
        self._restarts_engines = False
        self._bring_up: BringUp | None = None
        self._watches = Watches(
            timeout_s=heartbeat_timeout_s, interval_s=engine.health_interval_s
        )
        self._replacements: dict[str, asyncio.Task[None]] = {}
        self._examination: asyncio.Task[None] | None = None
        # Threads of our own, enough of them: those that wait for an engine to start
        # must not delay those that end one.
        self._calls = BlockingCalls(3 * (len(self._launcher.names) + 2), name="fleet")
        self._groups = engine_groups(
            self._launcher.names, eval_engines, partial(make_router, calls=self._calls)
        )
        self._load_watch = LoadWatch(
            lambda: {name: engine.client for name, engine in self.engines.items()},
            eval_engines=self._groups[1].names if eval_engines else (),
        )
        self._processes = EngineProcesses(self._launcher, self._router_of, self._calls)

    async def start(self) -> None:
        """Start all engines together, and wait for the external ones; none gets
        requests before `admit`. After an error nothing is left. Raises ConfigError for
        an external engine that does not fit the run."""
        try:
            self.engines = {
                name: self._processes.launch(name) for name in self._launcher.names
            }
            async with asyncio.TaskGroup() as starts:
                for name, engine in self.engines.items():
                    starts.create_task(self._wait_ready(name, engine))
            for group in self._groups:
                await group.router.wait_ready()
        except ExceptionGroup as errors:
            await self.stop()
            first = errors.exceptions[0]
            raise first from first.__cause__
        except BaseException:
            await self.stop()
            raise
        for name, engine in self.engines.items():
            self._watches.begin(name, self._watch(name, engine))
        for group in self._groups:
            watch = group.router.watch(partial(self._route_again, group))
            self._watches.begin(group.router.name, watch)
        self._watches.begin("load", self._load_watch.follow())

    async def admit(self) -> None:
        """Register the engines, which hold the fleet's version, with their routers.

        An engine that its router cannot reach leaves. Raises ServerError or
        DeadlineError if none is reached.
        """
        engines = dict(self.engines)
        registrations = [
            self._router_of(name).register(engine) for name, engine in engines.items()
        ]
        results = await asyncio.gather(*registrations, return_exceptions=True)
        failures = {
            name: result
            for name, result in zip(engines, results, strict=True)
            if isinstance(result, BaseException)
        }
        for name, error in failures.items():
            if len(failures) == len(engines) or not isinstance(error, InvrlError):
                raise error
            self.evict(name, f"the router does not reach it: {error}")

    async def check_unchanged(self) -> None:
        """Raise ServerError unless every engine holds the weights of its model folder:
        an external one may have been trained before. For a fleet that gets no weight
        updates."""
        for name, engine in self.engines.items():
            await self._check_unchanged(name, engine)

    async def _check_unchanged(self, name: str, engine: Engine) -> None:
        version = await engine.client.weight_version()
        if version != "0":
            raise ServerError(
                f"{name} ({engine.server.url}) holds version {version} of an earlier training run, not "
                "the weights of its model folder: start it again"
            )

    async def receivers(self) -> Sequence[WeightReceiver]:
        return [engine.receiver for engine in self.engines.values()]

    @property
    def routers(self) -> Mapping[str, RouterServer]:
        """Processes of this moment, by the name of the router."""
        return {group.router.name: group.router.server for group in self._groups}

    @property
    def router(self) -> RouterServer:
        """Router of training sessions, and of all others unless there is
        `eval_router`."""
        return self._groups[0].router.server

    @property
    def eval_router(self) -> RouterServer | None:
        """Router of evaluation sessions, if engines are set aside for them."""
        return self._groups[1].router.server if len(self._groups) > 1 else None

    @property
    def evicted(self) -> Mapping[str, str]:
        """Name -> reason, of the engines that left and have not come back."""
        return self._restarts.away

    @property
    def shares_gpus(self) -> bool:
        """Whether engines and trainer use the GPUs in turns."""
        return self._start_turns.shares_gpus

    def check(self) -> None:
        """Raise InvrlError if a router is gone for good, no engine of a group is left
        and none may come back, or a watch has failed."""
        self._watches.check()
        for group in self._groups:
            away = [name for name in self.evicted if name in group.names]
            is_empty = group.is_without(self.engines)
            if is_empty and away and not self._may_return(away):
                reasons = self._restarts.reasons(away)
                raise ServerError(f"no engine is left{group.described}: {reasons}")

    def _may_return(self, names: Sequence[str]) -> bool:
        """Whether one of these engines, which left, is being started again and is not
        overdue."""
        if not self._restarts_engines:
            return False
        return any(
            not self._replacements[name].done() and not self._restarts.is_overdue(name)
            for name in names
        )

    async def until_engine(self) -> None:
        """Wait until the fleet has an engine. Raises as `check` does: each start of an
        engine has a deadline, so this wait needs none. Starts that are held off are
        allowed meanwhile: where GPUs are shared, the trainer sleeps then."""
        if self._start_turns.are_held and not self.engines:
            self.allow_starts()
            return await self.hold_starts()
        while not self.engines:
            self.check()
            await asyncio.sleep(_ENGINE_POLL_S)

    @property
    def load(self) -> FleetSnapshot:
        """Load of the engines, about a second old."""
        return self._load_watch.snapshot

    def state(self) -> FleetState:
        """Return the fleet's state. Any thread may call this."""
        return FleetState(
            alive={
                name: engine.server.url for name, engine in dict(self.engines).items()
            },
            lost=tuple(self.evicted),
            restarts=dict(self._restarts.counts),
            router_metrics={
                name: router.metrics_url for name, router in self.routers.items()
            },
        )

    def evict(self, name: str, reason: str) -> None:
        """Take an engine out of the fleet; do nothing if it has left already.

        Updates ignore it from now on. In the background it is unregistered, ended, and,
        once `restart_evicted` has been called, started again. An external engine is
        only awaited.
        """
        engine = self.engines.pop(name, None)
        if engine is None:
            return
        incidents.error("%s leaves the fleet: %s", name, reason)
        self._restarts.left(name, reason)
        self._watches.end(name)
        self._processes.leaving.append(engine)
        previous = self._replacements.get(name)
        self._replacements[name] = asyncio.create_task(
            self._replace(name, engine, after=previous)
        )

    async def evict_silent(self) -> None:
        """Evict the engines that do not answer, before their watches notice."""

        async def find_silence(engine: Engine) -> str:
            deadline_s = self._heartbeat_timeout_s
            answers = await engine.client.answers(deadline_s=deadline_s)
            return "" if answers else "it does not answer"

        await self._evict_faulty(find_silence)

    def examine(self, newest_version: WeightVersion) -> None:
        """Examine every engine with a short request in the background, after one of
        them gave a wrong answer. One that answers wrongly again leaves the fleet.
        `newest_version`: of the weights."""
        if self._examination is None or self._examination.done():
            _LOG.warning(
                "an engine has answered wrongly, see gateway.log: all engines are examined"
            )
            self._examination = asyncio.create_task(self._examine(newest_version))

    async def _examine(self, newest_version: WeightVersion) -> None:
        await self._evict_faulty(
            lambda engine: wrong_reply(
                engine.client,
                vocab_size=self.limits.vocab_size,
                newest_version=newest_version,
                deadline_s=TOKEN_TIMEOUTS * self._heartbeat_timeout_s,
            )
        )

    async def _evict_faulty(
        self, find_fault: Callable[[Engine], Awaitable[str]]
    ) -> None:
        """Look for faults of all engines at the same time, and evict those that have
        one. `find_fault` returns "" for the others."""
        engines = dict(self.engines)
        faults = await asyncio.gather(*map(find_fault, engines.values()))
        for (name, engine), fault in zip(engines.items(), faults, strict=True):
            if fault:
                self._evict_this(name, engine, fault)

    def _evict_this(self, name: str, engine: Engine, reason: str) -> None:
        """Evict the engine unless it has left: another one may have its name by
        now."""
        if self.engines.get(name) is engine:
            self.evict(name, reason)

    def restart_evicted(self, bring_up: BringUp | None = None) -> None:
        """Start engines that left again from now on, including those that already left.

        Each is started at most `engine.max_restarts` times an hour, in the background;
        an external one is waited for as long as the fleet lives. `bring_up` gives it
        the fleet's version; None where nobody sends weights, and it serves those of its
        model folder.
        """
        self._restarts_engines = True
        self._bring_up = bring_up
        for name in self.evicted:
            if self._restarts.are_allowed(name) and self._replacements[name].done():
                self._replacements[name] = asyncio.create_task(
                    self._replace(name, None, after=None)
                )

    async def hold_starts(self) -> None:
        """Wait until the fleet has an engine and none is starting, and block starts
        until `allow_starts`. Starts have deadlines, so this wait needs none. Raises as
        `check` does."""
        while True:
            await self.until_engine()
            await self._start_turns.hold()
            if self.engines:
                return
            self._start_turns.allow()

    def allow_starts(self) -> None:
        """Do nothing if they are allowed."""
        self._start_turns.allow()

    async def until_lost_have_ended(self) -> None:
        """Wait until the processes of all engines that left have ended. Raises
        DeadlineError."""
        await self._processes.until_lost_have_ended()

    async def stop(self) -> None:
        """End everything, even if a part of it fails. Idempotent."""
        tasks = [*self._watches.tasks.values(), *self._replacements.values()]
        if self._examination is not None:
            tasks.append(self._examination)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._watches.tasks.clear()
        self._replacements.clear()
        engines = [*self.engines.values(), *self._processes.leaving]
        self.engines = {}
        await asyncio.gather(
            *(self._processes.end(engine) for engine in engines),
            *(group.router.stop() for group in self._groups),
        )
        if self._launcher.own_parent is not None:
            await self._calls.run(self._launcher.own_parent.stop)
        # A cancelled task may have left a thread behind that ends a process.
        await self._calls.until_ended()

    async def _watch(self, name: str, engine: Engine) -> None:
        try:
            reason = await self._watches.death(engine)
        except Exception as error:  # of this engine, not of the fleet
            _LOG.exception("the health of %s cannot be checked", name)
            reason = f"its health cannot be checked: {error!r}"
        self._evict_this(name, engine, reason)

    async def _route_again(self, group: EngineGroup, dead: RouterServer) -> None:
        """Register with a router that was started again the engines that the dead one
        routed to and that are still there."""
        for name, engine in list(self.engines.items()):
            try:
                if not await group.router.register_again(engine, dead):
                    continue
            except (ServerError, DeadlineError) as error:
                self.evict(name, f"the restarted router does not reach it: {error}")
            if self.engines.get(name) is not engine:  # it left meanwhile
                await group.router.unregister(engine)

    # ------------------------------------------------------------- engines come and go

    async def _replace(
        self, name: str, engine: Engine | None, *, after: asyncio.Task[None] | None
    ) -> None:
        """End an engine that left, and start it again while that is wanted and allowed.
        `after`: task that started this engine and may not have registered it yet."""
        if after is not None:
            await after
        if engine is not None:
            await self._retire(name, engine)
        while self._restarts_engines and self._restarts.are_allowed(name):
            async with self._start_turns.turn():
                count = self._restarts.begin(name)
                self._report_wait(name, count)
                try:
                    return await self._restart(name)
                except Exception as error:
                    # of this engine: the others go on without it
                    _LOG.exception("%s did not come back (%s)", name, count)
                    self._restarts.failed(name, error)
            if name in self._launcher.external_urls:
                await asyncio.sleep(self._config.health_interval_s)
        if self._restarts_engines:
            most = self._config.max_restarts
            incidents.error(
                "%s stays away: it left more than %d times in an hour", name, most
            )

    def _report_wait(self, name: str, count: str) -> None:
        """Report that requests wait for this engine, if no other serves them. `count`:
        the number of its restart, as text."""
        group = self._group_of(name)
        if not self.engines:
            waiting = ": requests and weight updates wait"
        elif group.is_without(self.engines):
            waiting = f"{group.described}: requests wait"
        else:
            return
        incidents.warning(
            "no engine is left%s for %s (restart %s)", waiting, name, count
        )

    async def _restart(self, name: str) -> None:
        """Start a new process under the name. It joins the fleet once it holds the
        fleet's version.

        Raises InvrlError before that. An engine that has joined and cannot be reached
        by the router is evicted.
        """
        engine = await self._processes.started(name, self._processes.launch(name))

        def join() -> None:
            self.engines[name] = engine
            self._restarts.returned(name)

        async def join_unchanged() -> None:
            await self._check_unchanged(name, engine)
            join()

        if self._bring_up is None:
            bring_up = join_unchanged()
        else:
            bring_up = self._bring_up(engine.receiver, join)
        try:
            await self._watches.while_alive(engine, bring_up)
        except BaseException:
            self.engines.pop(name, None)
            await self._retire(name, engine)
            raise
        if self.engines.get(name) is engine:
            self._watches.begin(name, self._watch(name, engine))
            await self._register_joined(name, engine)

    async def _register_joined(self, name: str, engine: Engine) -> None:
        """Register an engine of the fleet; it may leave meanwhile."""
        router = self._router_of(name)
        try:
            await router.register(engine)
        except InvrlError as error:
            self._evict_this(name, engine, f"the router does not reach it: {error}")
            return
        if self.engines.get(name) is engine:
            incidents.warning("%s is back", name)
        else:
            await router.unregister(engine)

    async def _wait_ready(self, name: str, engine: Engine) -> None:
        self.engines[name] = await self._processes.started(name, engine)

    async def _retire(self, name: str, engine: Engine) -> None:
        try:
            await self._router_of(name).unregister(engine)
        finally:
            await self._processes.end(engine)

    def _group_of(self, name: str) -> EngineGroup:
        return next(group for group in self._groups if name in group.names)

    def _router_of(self, name: str) -> FleetRouter:
        return self._group_of(name).router
