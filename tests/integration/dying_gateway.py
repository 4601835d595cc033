"""The gateway's process, but its worker dies (-9) or hangs once: after the first commit
that holds a turn, before anyone is told. Started in the place of
`invrl.gateway.server.processes.gateway_server`."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

from invrl.gateway.server.processes import gateway_server
from invrl.store.run_store_writer import RunStoreWriter


def die_after_the_first_turn() -> None:
    commit = RunStoreWriter._commit

    def commit_and_die(
        self: RunStoreWriter, db: sqlite3.Connection, batch: Sequence
    ) -> bool:
        turns = any(
            sql.startswith("INSERT INTO turns")
            for work in batch
            for sql, _ in work.statements
        )
        committed = commit(self, db, batch)
        done = Path(os.environ["DIED_ONCE"])
        if turns and committed and not done.exists():
            done.touch()
            if os.environ.get("INSTEAD_OF_DYING") == "hang":
                time.sleep(3600)
            # whoever waits for the future has not run since
            os.kill(os.getpid(), signal.SIGKILL)
        return committed

    RunStoreWriter._commit = commit_and_die  # type: ignore[method-assign]


prepare = gateway_server.prepare


def main(arguments: Sequence[str]) -> None:
    die_after_the_first_turn()
    gateway_server.main(arguments)
