"""The process of an environment: started, started again when it dies, its output
masked, its open sessions aborted after its death.

Invariant: a key leaves this process only through the program's standard input, and no
line with a key is passed on.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from invrl.environments.environment_folder import EnvironmentFolder
from invrl.environments.installation import (
    Value,
    program_command,
    program_variables,
)
from invrl.errors import ServerError
from invrl.host.network.direct_connections import direct_client
from invrl.host.output.masked_keys import HIDDEN, without_keys
from invrl.host.processes.descendants import die_with_parent
from invrl.host.processes.process import end_processes, process_tree
from invrl.types.reasons import FailureReason

MOST_DEATHS = 5
"""Deaths in a row, with no finished episode between them, before giving up."""
_FIRST_PAUSE_S = 1.0
_MOST_PAUSE_S = 30.0
_GRACE_S = 5.0
_KILL_DEADLINE_S = 30.0
_DRAIN_S = 2.0
"""Time for the last lines of a program that has ended. A process that it has left
behind may hold the pipe longer."""
_LONGEST_LINE = 65536
_ABORT_DEADLINE_S = 10.0
Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the program is to do, as `episodes.py` reads it."""

    arguments: Mapping[str, Value]
    step_timeout_s: float
    """Longest time between two calls of the model."""
    url: str = ""
    key: str = field(default="", repr=False)
    concurrency: int = 1
    endpoints: Sequence[Mapping[str, object]] = ()
    """Of `try`: base URL, key, model and task of each episode."""

    @property
    def keys(self) -> list[str]:
        keys = [self.key, *(str(endpoint["key"]) for endpoint in self.endpoints)]
        return [key for key in keys if key]


def play(
    environment: EnvironmentFolder,
    mode: str,
    order: Order,
    *,
    on_report: Callable[[Report], None],
    show: Callable[[str], None],
    on_start: Callable[[subprocess.Popen[bytes]], object] = lambda process: None,
) -> int:
    """Run the program once and return its exit code. `on_report` gets its reports,
    `show` the lines that it prints, without keys; both in threads. `on_start` gets the
    process, whose end from elsewhere ends the call."""
    with _started(environment, mode) as (process, reading, report_fd):
        on_start(process)
        readers = [
            threading.Thread(
                target=_read_lines, args=(process.stdout, order.keys, show), daemon=True
            ),
            threading.Thread(
                target=_read_reports, args=(reading, on_report), daemon=True
            ),
        ]
        for reader in readers:
            reader.start()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(json.dumps({**asdict(order), "report_fd": report_fd}).encode())
        code = process.wait()
        for reader in readers:
            reader.join(_DRAIN_S)
        return code


@contextmanager
def _started(
    environment: EnvironmentFolder, mode: str
) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """Yield the process, and the two ends of the pipe of its reports: ours, which the
    caller closes, and its. Ends the process, and everything below it, on exit."""
    reading, writing = os.pipe()
    try:
        process = subprocess.Popen(
            program_command(environment, mode),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=program_variables(environment),
            pass_fds=[writing],
            preexec_fn=die_with_parent,
            process_group=0,
        )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    try:
        yield process, reading, writing
    finally:
        family = process_tree(process.pid)
        if process.poll() is None:
            process.terminate()
        end_processes(family, grace_s=_GRACE_S, kill_within_s=_KILL_DEADLINE_S)
        with contextlib.suppress(ProcessLookupError):  # what it has left behind
            os.killpg(process.pid, signal.SIGKILL)


def _read_lines(pipe: Any, keys: Sequence[str], show: Callable[[str], None]) -> None:
    with contextlib.suppress(OSError, ValueError):  # closed
        while line := pipe.readline(_LONGEST_LINE):
            text = line.decode(errors="replace")
            for key in keys:
                text = text.replace(key, HIDDEN)
            show(without_keys(text))


def _read_reports(reading: int, on_report: Callable[[Report], None]) -> None:
    """Read until no process holds the other end. Only this thread may close ours: a
    close waits for a read that goes on."""
    with os.fdopen(reading, encoding="utf-8", errors="replace") as pipe:
        for line in pipe:
            if line.endswith("\n"):  # whole
                on_report(json.loads(line))


class LeasingEnvironment:
    """An environment that leases the tasks of a run until the run has ended."""

    def __init__(
        self,
        environment: EnvironmentFolder,
        order: Order,
        *,
        pause: Callable[[float], None] = time.sleep,
        end_left_behind: Callable[[], object] = lambda: None,
    ) -> None:
        """`end_left_behind` is called after each life of the program."""
        self._environment = environment
        self._order = order
        self._pause = pause
        self._end_left_behind = end_left_behind
        self._open: set[str] = set()
        """Sessions that the program has opened and not ended."""
        self._finished = 0
        """Episodes that this life has finished."""

    def run(self) -> None:
        """Return when the run has ended. Raises ServerError after `MOST_DEATHS`."""
        deaths = 0
        while True:
            self._finished = 0
            try:
                code = play(
                    self._environment,
                    "run",
                    self._order,
                    on_report=self._note,
                    show=_print,
                )
            except BaseException:  # Ctrl-C
                self._abort_open("was ended")
                raise
            finally:
                self._end_left_behind()
            if code == 0:
                return
            self._abort_open(f"ended with code {code}")
            deaths = 1 if self._finished else deaths + 1
            name = self._environment.called
            if deaths >= MOST_DEATHS:
                text = f"environment {name} has died {deaths} times in a row without a finished episode"
                raise ServerError(f"{text} (the last exit code: {code})")
            pause_s = min(_MOST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (deaths - 1))
            _print(
                f"environment {name} ended with code {code} after {self._finished} finished episodes; "
                f"it is started again in {pause_s:g} s\n"
            )
            self._pause(pause_s)

    def _note(self, report: Report) -> None:
        self._open.update(report.get("opened", ()))
        if "ended" in report:
            self._open.discard(report["ended"])
            self._finished += report["finished"]

    def _abort_open(self, how: str) -> None:
        """Abort what the ended program had open, so that it is leased again now and not
        after the sessions' idle time."""
        headers = {"authorization": f"Bearer {self._order.key}"}
        url = self._order.url
        body = {
            "reason": FailureReason.ENVIRONMENT_GONE.value,
            "detail": f"the process of {self._environment.called} {how}",
        }
        with direct_client(
            url, timeout_s=_ABORT_DEADLINE_S, headers=headers
        ) as gateway:
            for session_id in tuple(self._open):
                # else its idle time ends it
                with contextlib.suppress(httpx.HTTPError):
                    gateway.post(f"/sessions/{session_id}/abort", json=body)
        self._open.clear()


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
