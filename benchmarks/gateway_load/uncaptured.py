"""`python -m benchmarks.gateway_load.uncaptured`: the gateway with a store that keeps
nothing.

What capture costs is the difference to the gateway as it is. Sessions' own records and
the token forest stay: without them there is no next turn. Started by `rig.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future

from invrl.gateway.server.processes import gateway_server
from invrl.store import run_store_writer


class DroppingWriter(run_store_writer.RunStoreWriter):
    """Says at once that it has been written. Rows are not even made for turns."""

    def add_turn(self, *_: object, **__: object) -> Future[None]:
        return self._submit(())

    def _submit(
        self, statements: Iterable[object], *, waits: bool = False
    ) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done


def prepare() -> None:
    run_store_writer.RunStoreWriter = DroppingWriter
    gateway_server.prepare()


main = gateway_server.main
