"""Asks the engines of a fleet for their load, once a second.

Invariants: an engine answers with what its scheduler has published last, so none of its
steps waits. The last answer of an engine counts until the next one, or until the engine
leaves: a busy machine may answer late.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from invrl.errors import InvrlError
from invrl.types.fleet import EngineLoad, FleetSnapshot

_LOG = logging.getLogger(__name__)
_INTERVAL_S = 1.0
_ANSWER_S = 2.0


class ReportsLoad(Protocol):
    """Part of `SglangClient` that is asked."""

    async def load(self, *, deadline_s: float) -> EngineLoad: ...


class LoadWatch:
    """`snapshot` has the newest load of the engines. `clients`: returns those of the
    engines, by name. `eval_engines`: names of those that are set aside for
    evaluation."""

    def __init__(
        self,
        clients: Callable[[], Mapping[str, ReportsLoad]],
        *,
        eval_engines: Sequence[str] = (),
    ) -> None:
        self._clients = clients
        self._eval_engines = tuple(eval_engines)
        self.snapshot = FleetSnapshot()

    async def follow(self) -> None:
        """Ask until cancelled."""
        while True:
            try:
                self.snapshot = await self._ask()
            except Exception:
                _LOG.exception("the load of the engines cannot be read")
            await asyncio.sleep(_INTERVAL_S)

    async def _ask(self) -> FleetSnapshot:
        clients = dict(self._clients())
        questions = [client.load(deadline_s=_ANSWER_S) for client in clients.values()]
        answers = await asyncio.gather(*questions, return_exceptions=True)
        loads: dict[str, EngineLoad] = {}
        silent: list[str] = []
        for name, answer in zip(clients, answers, strict=True):
            if isinstance(answer, EngineLoad):
                loads[name] = answer
            elif not isinstance(answer, InvrlError):
                raise answer
            elif name in self.snapshot.engines:
                loads[name] = self.snapshot.engines[name]
            else:
                silent.append(name)
                if name not in self.snapshot.silent:
                    _LOG.info("%s does not report its load: %s", name, answer)
        return FleetSnapshot(
            engines=loads, silent=tuple(silent), eval_engines=self._eval_engines
        )
