"""M engines behind one router, as one object that starts, updates and ends them, or
uses external ones.

Invariant: an engine that comes back joins `engines` with the fleet's version whole, and
from then on every update includes it; only then is it registered with the router.
Weight updates ignore an engine as soon as it leaves (`evict`); in the background it is
unregistered from the router and then ended. Each engine and the router have their own
watch (`engine_health.py`), so a failure concerns only that one; `check` raises when a
watch itself has failed. A router that dies is started again at the same address. A
fleet whose last engine has left waits for one that is started again
(`engine_restarts.py`); `check` raises only if none may come back.

An external engine (`external_engine.py`) differs only in that the fleet does not start
or end its process: after it leaves, the fleet waits for it, and it joins like a
restarted engine.

A plain class, for `invrl serve` and for training. Start it from a thread that lives as
long as the servers should.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from invrl.engines.config import EngineConfig
from invrl.engines.engine_health import (
    TOKEN_TIMEOUTS,
    engine_death,
    router_death,
    wrong_answer,
)
from invrl.engines.engine_restarts import EngineRestarts
from invrl.engines.engine_server import (
    ENGINE_MODULE,
    EngineServer,
    count_gpus,
    max_total_tokens,
)
from invrl.engines.engine_spans import FLAG
from invrl.engines.external_engine import ExternalEngine, wanted_traits
from invrl.engines.fleet_state import FleetState
from invrl.engines.router_server import RouterServer
from invrl.engines.sglang_args import flags_of_run, router_flags
from invrl.engines.sglang_client import EngineLimits, SglangClient
from invrl.engines.smg import find_smg
from invrl.engines.weight_receiver import RECEIVERS, EngineReceiver
from invrl.errors import DeadlineError, InvrlError, ServerError
from invrl.host.fork_parent import ForkParent
from invrl.host.incidents import incidents
from invrl.host.log_lines import LogSettings
from invrl.host.process import RestartLimit, family_of
from invrl.interfaces import WeightReceiver
from invrl.types import WeightVersion
from invrl.weights.config import WeightSyncConfig

_LOG = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
BringUp = Callable[[WeightReceiver, Callable[[], None]], Awaitable[None]]
"""Gives a new engine the fleet's version, and then calls the function, which makes it a
member of the fleet; no update comes in between."""

_PORT_TRIES = 3
_ROUTER_RESTARTS_PER_MINUTE = 3
_ROUTER_RETURN_S = 180.0
"""Seconds that an engine waits for a restarting router, in addition to those until its
silence is noticed."""
_ROUTER_ANSWER_S = 5.0
_END_DEADLINE_S = 60.0
_END_POLL_S = 0.05


@dataclass(slots=True, kw_only=True)
class Engine:
    """One engine of the fleet: its process or address, its client with the keys, and
    its receiver."""

    server: EngineServer | ExternalEngine
    client: SglangClient
    receiver: EngineReceiver


class Fleet:
    """Engines and router. Call `start`; then `router` is for the gateway, and
    `receivers` are for weight updates."""

    def __init__(
        self,
        engine: EngineConfig,
        model_path: Path,
        run_folder: Path,
        sglang: Mapping[str, object] | None = None,
        router: Mapping[str, object] | None = None,
        weight_sync: WeightSyncConfig | None = None,
        heartbeat_timeout_s: float = 30.0,
        record_experts: bool = False,
        external_key: str = "",
        traces_endpoint: str = "",
        log: LogSettings | None = None,
        shares_gpus: bool = False,
        parent: ForkParent | None = None,
    ) -> None:
        """Start the router's process, and one that forks engines. Raises ConfigError.

        `sglang` and `router` are passed through, by upstream's field names.
        `weight_sync`: None for the defaults. An engine or router that is silent for
        longer than `heartbeat_timeout_s` is dead, except that a call of an update in
        which an engine copies or hashes its weights may take `weight_sync_timeout_s`.
        `record_experts`: engines keep the experts that computed each token.
        `external_key`: of the external engines. `traces_endpoint`: target of the spans
        of the engines that start here; "": none. `log`: log settings of these engines;
        None for the defaults. `shares_gpus`: engines use the trainer's GPUs in turns,
        and start one after the other. `parent`: forks the engines, and belongs to the
        caller; None: the fleet makes one if engines can be forked.
        """
        self._config = engine
        self._model_path = model_path
        self._run_folder = run_folder
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._weight_sync = weight_sync or WeightSyncConfig.model_validate({})
        in_place = self._weight_sync.weight_update_inflight == "in_place"
        self._sglang_flags = flags_of_run(
            sglang or {},
            in_place=in_place,
            record_experts=record_experts,
            traces_endpoint=traces_endpoint,
            shares_gpu=shares_gpus and count_gpus() > 0,
        )
        self._shares_gpus = shares_gpus
        self._start_turn = asyncio.Lock()
        """Held from an engine's restart until it has joined, if GPUs are shared: it
        takes the memory that is free at that time."""
        self._traits = wanted_traits(
            engine, model_path, in_place=in_place, record_experts=record_experts
        )
        self._external_key = external_key
        self._log = log
        self._external_urls = {
            f"external-{index}": url.rstrip("/")
            for index, url in enumerate(engine.external_engines)
        }
        """URLs of the external engines, by name."""
        self._smg = find_smg(engine.smg_environment) if engine.router == "smg" else None
        self._router_flags = router_flags(router or {}, self._smg)
        self.limits = EngineLimits.of(
            model_path, max_total_tokens=max_total_tokens(engine)
        )
        self.engines: dict[str, Engine] = {}
        self._restarts = EngineRestarts(
            engine.engine_max_restarts, external=self._external_urls
        )
        self._leaving: list[Engine] = []
        """Engines that left and are not being ended yet: `stop` may come first."""
        self._num_ending = 0
        self._restarts_engines = False
        self._bring_up: BringUp | None = None
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._replacements: dict[str, asyncio.Task[None]] = {}
        self._unrouted: set[str] = set()
        """URLs of engines whose registration the router's death interrupted."""
        self._examination: asyncio.Task[None] | None = None
        self._router_restarts = RestartLimit(_ROUTER_RESTARTS_PER_MINUTE)
        # Our own pool, large enough: threads that wait for a starting engine must not
        # delay those that end one.
        num_engines = engine.num_engines + len(self._external_urls)
        self._threads = ThreadPoolExecutor(
            max_workers=3 * num_engines + 3, thread_name_prefix="fleet"
        )
        self._calls: set[asyncio.Future[Any]] = set()
        """Calls in those threads, including those that nobody awaits any more."""
        self._own_parent: ForkParent | None = None
        self._parent = self._find_parent(parent)
        self.router = self._launch_router()

    def _find_parent(self, given: ForkParent | None) -> ForkParent | None:
        """Return the process that forks the engines; None if they cannot be forked
        (`host/fork_parent.py`), or if spans are sent, whose exporter is chosen before
        SGLang is imported."""
        if not self._config.num_engines or count_gpus() or FLAG in self._sglang_flags:
            return None
        if given is not None:
            return given
        log_file = self._run_folder / "logs" / "engine-parent.log"
        self._own_parent = ForkParent(ENGINE_MODULE, log=log_file)
        return self._own_parent

    async def start(self) -> None:
        """Start all engines together, and wait for the external ones; none gets
        requests before `admit`. After an error nothing is left. Raises ConfigError for
        an external engine that does not fit the run."""
        try:
            names = [f"engine-{index}" for index in range(self._config.num_engines)]
            names += self._external_urls
            self.engines = {name: self._launch(name) for name in names}
            async with asyncio.TaskGroup() as starts:
                for name, engine in self.engines.items():
                    starts.create_task(self._wait_ready(name, engine))
            await self._in_thread(self.router.wait_ready)
        except ExceptionGroup as errors:
            await self.stop()
            first = errors.exceptions[0]
            raise first from first.__cause__
        except BaseException:
            await self.stop()
            raise
        for name, engine in self.engines.items():
            self._watch_engine(name, engine)
        self._watches["router"] = asyncio.create_task(self._watch_router())

    async def admit(self) -> None:
        """Register the engines, which hold the fleet's version, with the router.

        An engine that the router cannot reach leaves. Raises ServerError or
        DeadlineError if it reaches none.
        """
        engines = dict(self.engines)
        registrations = [self._register(engine) for engine in engines.values()]
        results = await asyncio.gather(*registrations, return_exceptions=True)
        failures: dict[str, BaseException] = {}
        for name, result in zip(engines, results, strict=True):
            if isinstance(result, BaseException):
                failures[name] = result
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
    def evicted(self) -> Mapping[str, str]:
        """Name -> reason, of the engines that left and have not come back."""
        return self._restarts.away

    @property
    def shares_gpus(self) -> bool:
        """Whether engines and trainer use the GPUs in turns."""
        return self._shares_gpus

    def check(self) -> None:
        """Raise InvrlError if the router is gone for good, no engine is left and none
        may come back, or a watch has failed."""
        for name, watch in self._watches.items():
            if not watch.done() or watch.cancelled():
                continue
            error = watch.exception()
            if isinstance(error, InvrlError):
                raise error
            if error is not None:
                raise ServerError(
                    f"nobody watches {name} any more: {error!r}"
                ) from error
        if not self.engines and self.evicted and not self._may_return():
            raise ServerError(f"no engine is left: {self._restarts.reasons()}")

    def _may_return(self) -> bool:
        """Whether an engine that left is being started again and is not overdue."""
        if not self._restarts_engines:
            return False
        return any(
            not self._replacements[name].done() and not self._restarts.is_overdue(name)
            for name in self.evicted
        )

    async def until_engine(self) -> None:
        """Wait until the fleet has an engine. Raises as `check` does: each start of an
        engine has a deadline, so this wait needs none."""
        while not self.engines:
            self.check()
            await asyncio.sleep(_END_POLL_S)

    def state(self) -> FleetState:
        """Return the fleet's state. Any thread may call this."""
        return FleetState(
            alive={
                name: engine.server.url for name, engine in dict(self.engines).items()
            },
            lost=tuple(self.evicted),
            restarts=dict(self._restarts.counts),
            router_metrics_url=self.router.metrics_url,
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
        watch = self._watches.pop(name, None)
        if watch is not None and watch is not asyncio.current_task():
            watch.cancel()
        self._leaving.append(engine)
        previous = self._replacements.get(name)
        self._replacements[name] = asyncio.create_task(
            self._replace(name, engine, after=previous)
        )

    async def evict_silent(self) -> None:
        """Evict the engines that do not answer, before their watches notice."""
        engines = dict(self.engines)
        questions = [
            engine.client.answers(deadline_s=self._heartbeat_timeout_s)
            for engine in engines.values()
        ]
        answers = await asyncio.gather(*questions)
        for (name, engine), answered in zip(engines.items(), answers, strict=True):
            if not answered and self.engines.get(name) is engine:
                self.evict(name, "it does not answer")

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
        engines = dict(self.engines)
        questions = [
            wrong_answer(
                engine.client,
                vocab_size=self.limits.vocab_size,
                newest_version=newest_version,
                deadline_s=TOKEN_TIMEOUTS * self._heartbeat_timeout_s,
            )
            for engine in engines.values()
        ]
        reasons = await asyncio.gather(*questions)
        for (name, engine), reason in zip(engines.items(), reasons, strict=True):
            if reason and self.engines.get(name) is engine:
                self.evict(name, reason)

    def restart_evicted(self, bring_up: BringUp | None = None) -> None:
        """Start engines that leave again from now on, and those that have already left.

        Each is started at most `engine_max_restarts` times an hour, in the background;
        an external one is awaited as long as the fleet lives. `bring_up` gives it the
        fleet's version; None without weight updates: it serves the weights of its model
        folder.
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
            await self._start_turn.acquire()
            if self.engines:
                return
            self._start_turn.release()

    def allow_starts(self) -> None:
        self._start_turn.release()

    async def until_lost_have_ended(self) -> None:
        """Wait until the processes of all engines that left have ended. Raises
        DeadlineError."""
        try:
            async with asyncio.timeout(_END_DEADLINE_S):
                while self._leaving or self._num_ending:
                    await asyncio.sleep(_END_POLL_S)
        except TimeoutError:
            raise DeadlineError("lost engines to end", _END_DEADLINE_S) from None

    async def stop(self) -> None:
        """End everything, even if a part of it fails. Idempotent."""
        tasks = [*self._watches.values(), *self._replacements.values()]
        if self._examination is not None:
            tasks.append(self._examination)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._watches.clear()
        self._replacements.clear()
        engines = [*self.engines.values(), *self._leaving]
        self.engines = {}
        await asyncio.gather(
            *(self._end(engine) for engine in engines), self._end_router(self.router)
        )
        self.router.address.close()
        if self._own_parent is not None:
            await self._in_thread(self._own_parent.stop)
        # A cancelled task may have left a thread that ends a process.
        await asyncio.gather(*self._calls, return_exceptions=True)

    # ----------------------------------------------------------------- watches

    def _watch_engine(self, name: str, engine: Engine) -> None:
        self._watches[name] = asyncio.create_task(self._watch(name, engine))

    async def _watch(self, name: str, engine: Engine) -> None:
        try:
            reason = await self._death(engine)
        except Exception as error:  # of this engine, not of the fleet
            _LOG.exception("the health of %s cannot be checked", name)
            reason = f"its health cannot be checked: {error!r}"
        if self.engines.get(name) is engine:
            self.evict(name, reason)

    def _death(self, engine: Engine) -> Awaitable[str]:
        return engine_death(
            engine.server.processes(),
            engine.client,
            engine.receiver,
            timeout_s=self._heartbeat_timeout_s,
            interval_s=self._config.engine_health_interval_s,
        )

    async def _watch_router(self) -> None:
        """Restart the router whenever it dies. Raises ServerError or DeadlineError once
        it dies too often, or does not come back."""
        while True:
            router = self.router

            async def answers(deadline_s: float, router: RouterServer = router) -> bool:
                return await self._in_thread(router.answers, deadline_s)

            reason = await router_death(
                family_of(router.pid)[:1],
                answers,
                timeout_s=self._heartbeat_timeout_s,
                interval_s=self._config.engine_health_interval_s,
            )
            if not self._router_restarts.allows():
                raise ServerError(
                    f"the router died {_ROUTER_RESTARTS_PER_MINUTE + 1} times in a minute: {reason}. "
                    f"Last lines of {router.log}:\n{router.log_tail()}"
                )
            incidents.error("the router is started again: %s", reason)
            await self._restart_router(router)
            incidents.warning("the router is back")

    async def _restart_router(self, dead: RouterServer) -> None:
        """Start a router at the same address with the same keys, so that the gateway
        does not notice.

        It gets the dead router's engines that are still there.
        """
        await self._end_router(dead)
        self.router = self._launch_router(dead)
        await self._in_thread(self.router.wait_ready)
        for name, engine in list(self.engines.items()):
            if not (
                dead.registered(engine.server.url)
                or engine.server.url in self._unrouted
            ):
                continue
            try:
                await self._register_now(engine)
                self._unrouted.discard(engine.server.url)
            except (ServerError, DeadlineError) as error:
                if (
                    not await self._router_answers()
                ):  # the router has died again and is restarted again
                    self._unrouted.add(engine.server.url)
                    continue
                self.evict(name, f"the restarted router does not reach it: {error}")
            if self.engines.get(name) is not engine:  # it left meanwhile
                await self._unregister(engine)

    # ------------------------------------------------------------- engines come and go

    async def _replace(
        self, name: str, engine: Engine | None, *, after: asyncio.Task[None] | None
    ) -> None:
        """End an engine that left, and start it again while that is wanted and allowed.
        `after`: task that started this engine and may not have registered it yet."""
        if after is not None:
            await after
        if engine is not None:
            await self._retire(engine)
        while self._restarts_engines and self._restarts.are_allowed(name):
            async with self._start_turn if self._shares_gpus else nullcontext():
                count = self._restarts.begin(name)
                if not self.engines:
                    incidents.warning(
                        "no engine is left: requests and weight updates wait for %s (restart %s)",
                        name,
                        count,
                    )
                try:
                    return await self._restart(name)
                except Exception as error:
                    # this engine's failure: the others continue without it
                    _LOG.exception("%s did not come back (%s)", name, count)
                    self._restarts.failed(name, error)
            if name in self._external_urls:
                await asyncio.sleep(self._config.engine_health_interval_s)
        if self._restarts_engines:
            most = self._config.engine_max_restarts
            incidents.error(
                "%s stays away: it left more than %d times in an hour", name, most
            )

    async def _restart(self, name: str) -> None:
        """Start a new process under the name. It joins the fleet once it holds the
        fleet's version.

        Raises InvrlError before that. An engine that has joined and cannot be reached
        by the router is evicted.
        """
        engine = await self._started(name, self._launch(name))

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
            await self._while_alive(engine, bring_up)
        except BaseException:
            self.engines.pop(name, None)
            await self._retire(engine)
            raise
        if self.engines.get(name) is engine:
            self._watch_engine(name, engine)
            await self._register_joined(name, engine)

    async def _register_joined(self, name: str, engine: Engine) -> None:
        """Register an engine of the fleet; it may leave meanwhile."""
        try:
            await self._register(engine)
        except InvrlError as error:
            if self.engines.get(name) is engine:
                self.evict(name, f"the router does not reach it: {error}")
            return
        if self.engines.get(name) is engine:
            incidents.warning("%s is back", name)
        else:
            await self._unregister(engine)

    async def _while_alive(self, engine: Engine, work: Awaitable[None]) -> None:
        """Await `work` on an engine that has no watch yet. Raises ServerError if the
        engine dies first."""
        working = asyncio.ensure_future(work)
        death = asyncio.ensure_future(self._death(engine))
        try:
            await asyncio.wait((working, death), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ServerError(f"{engine.server.name} died: {death.result()}")
        finally:
            working.cancel()
            death.cancel()
            await asyncio.gather(working, death, return_exceptions=True)
        working.result()

    def _launch(self, name: str) -> Engine:
        """Start an engine's process, in this thread: the kernel ends it with the
        thread. For an external engine's name nothing is started."""
        server: EngineServer | ExternalEngine
        if name in self._external_urls:
            server = ExternalEngine(
                name,
                self._external_urls[name],
                key=self._external_key,
                traits=self._traits,
                total_tokens=max_total_tokens(self._config),
                start_timeout_s=self._config.engine_start_timeout_s,
            )
        else:
            server = EngineServer(
                name,
                self._config,
                model_path=self._model_path,
                run_folder=self._run_folder,
                passthrough=self._sglang_flags,
                api_key=self.router.engine_api_key,
                log=self._log,
                parent=self._parent,
            )
        client = SglangClient(
            server.url,
            limits=self.limits,
            api_key=server.api_key,
            admin_key=server.admin_key,
            name=name,
        )
        receiver = RECEIVERS[self._weight_sync.weight_transport](
            name, client, self._weight_sync, num_ranks=self._config.engine_tp_size
        )
        receiver.replies_over_http = name in self._external_urls
        return Engine(server=server, client=client, receiver=receiver)

    def _launch_router(self, predecessor: RouterServer | None = None) -> RouterServer:
        return RouterServer(
            run_folder=self._run_folder,
            start_timeout_s=self._config.router_start_timeout_s,
            passthrough=self._router_flags,
            address=None if predecessor is None else predecessor.address,
            installed_smg=self._smg,
        )

    async def _wait_ready(self, name: str, engine: Engine) -> None:
        self.engines[name] = await self._started(name, engine)

    async def _started(self, name: str, engine: Engine) -> Engine:
        """Return `engine` once it is up, or another one under the name if a stranger
        took its port.

        Raises ServerError or DeadlineError; the engine has ended then.
        """
        for tries_left in reversed(range(_PORT_TRIES)):
            try:
                await self._in_thread(engine.server.wait_ready)
                break
            except ServerError:
                lost_its_port = engine.server.lost_its_port()
                await self._end(engine)
                if not lost_its_port or tries_left == 0:
                    raise
                _LOG.warning("%s is started again: somebody took its port", name)
                engine = self._launch(name)
            except BaseException:
                await self._end(engine)
                raise
        # an external engine's key is known now
        engine.client.api_key = engine.server.api_key
        return engine

    async def _register(self, engine: Engine) -> None:
        """Register an engine with the router; if the router must be restarted, wait for
        that first. Raises ServerError or DeadlineError if a router that answers does
        not reach the engine."""
        while True:
            router = self.router
            try:
                return await self._register_now(engine)
            except (ServerError, DeadlineError):
                if self.router is router and await self._router_answers():
                    raise
                _LOG.warning(
                    "%s waits for the router, which is away", engine.server.name
                )
                await self._until_router_answers()

    async def _until_router_answers(self) -> None:
        deadline_s = self._heartbeat_timeout_s + _ROUTER_RETURN_S
        try:
            async with asyncio.timeout(deadline_s):
                while not await self._router_answers():
                    await asyncio.sleep(_END_POLL_S)
        except TimeoutError:
            raise DeadlineError("the router to be started again", deadline_s) from None

    async def _router_answers(self) -> bool:
        return await self._in_thread(self.router.answers, _ROUTER_ANSWER_S)

    async def _register_now(self, engine: Engine) -> None:
        await self._in_thread(
            self.router.register, engine.server.url, api_key=engine.server.api_key
        )

    async def _unregister(self, engine: Engine) -> None:
        try:
            await self._in_thread(self.router.unregister, engine.server.url)
        except Exception as error:  # a dead router routes nothing
            _LOG.warning("%s could not be unregistered: %s", engine.server.name, error)

    async def _retire(self, engine: Engine) -> None:
        try:
            await self._unregister(engine)
        finally:
            await self._end(engine)

    async def _end(self, engine: Engine) -> None:
        """End an engine. Only log what does not end: everything else must still be
        ended."""
        self._leaving = [other for other in self._leaving if other is not engine]
        self._num_ending += 1
        try:
            try:
                await engine.client.close()
            finally:
                await self._in_thread(engine.server.stop)
        except Exception:
            _LOG.exception("%s could not be ended", engine.server.name)
        finally:
            self._num_ending -= 1

    async def _end_router(self, router: RouterServer) -> None:
        try:
            await self._in_thread(router.stop)
        except Exception:
            _LOG.exception("the router could not be ended")

    async def _in_thread(
        self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.run_in_executor(
            self._threads, lambda: call(*args, **kwargs)
        )
        self._calls.add(future)
        future.add_done_callback(self._forget)
        return await asyncio.shield(future)

    def _forget(self, future: asyncio.Future[Any]) -> None:
        self._calls.discard(future)
        if not future.cancelled():
            future.exception()  # if its caller was cancelled, asyncio would warn
