"""The process above the drivers of a run: `invrl train` itself. It runs one incarnation
after another, each in a new driver process, and reports why a driver ended that could
not report it. `invrl eval` and `invrl replay`, which start a Ray too, are supervised in
the same way, with one incarnation.

A driver cannot outlive its Ray: Ray's C++ code ends it within a second of its raylet's
death. It may also be killed, or stopped. So another process starts the next
incarnation. The supervisor imports neither Ray nor torch, and starts no thread.

Invariants. When the supervisor dies, the kernel kills the driver (PR_SET_PDEATHSIG).
When an incarnation is over, every process below the supervisor has ended before the
next one starts: the supervisor adopts orphans (PR_SET_CHILD_SUBREAPER), in whatever
session they are. An interrupted run starts no further incarnation. A signal never ends
the supervisor itself, so that nothing is left half ended.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from invrl.engines.launch.engine_server import ENGINE_MODULE, count_gpus
from invrl.host.files.disk import full_disk
from invrl.host.files.temporary_folder import remove_abandoned, temporary_parents
from invrl.host.output.traces import traces_endpoint
from invrl.host.processes.awake_time import Stopwatch
from invrl.host.processes.descendants import (
    adopt_orphans,
    collect_ended_children,
    die_with_parent,
    end_descendants,
)
from invrl.host.processes.environment_keys import held_keys
from invrl.host.processes.fork_parent import EarlyParent
from invrl.host.processes.lifeline import Listener, Note, NoteKind, environment
from invrl.host.ray.ray_setup import remove_ray_folder
from invrl.run.checkpoints.checkpoints import Checkpoints
from invrl.run.processes.driver_commands import (
    FAILURE_EXIT,
    INCARNATION_COMMAND,
    INTERRUPT_EXIT,
    REPLAY_COMMAND,
    USAGE_EXIT,
)
from invrl.run.settings.config import Config
from invrl.store.run_folder import RunFolder

_INTERRUPTS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""Signals that are forwarded to the driver."""
_AWAITED_SIGNALS = _INTERRUPTS | {signal.SIGCHLD}
_POLL_INTERVAL_S = 0.2
_FIRST_HEARTBEAT_TIMEOUT_S = 120.0
"""Seconds to the first heartbeat. A driver sends heartbeats as soon as Python has
started."""
_GRACE_S = 3.0
"""Grace period for processes left by an ended driver: most of them end by
themselves."""
_KILL_TIMEOUT_S = 30.0
BLOCKED_GRACE_S = 2.0
"""Grace period after an interrupt, for a driver in a call that does not react to
signals (`NoteKind.BLOCKED`)."""
_LONGEST_PAUSE_S = 60.0
"""Longest pause before a restart: the first restart is immediate, each further one
waits twice as long."""
_SPACE_POLL_S = 1.0
_SHOW_CURSOR = "\x1b[?25h"


@dataclass(frozen=True, slots=True, kw_only=True)
class IncarnationEnd:
    """End of a driver. `code`: as in Popen, negative for a signal."""

    code: int
    notes: tuple[Note, ...]
    silent_s: float = 0.0
    """Seconds of silence for which the supervisor killed the driver, or 0."""
    blocking_call: str = ""
    """Call that kept an interrupt from the driver, for which the supervisor killed it,
    or ""."""

    def has_note(self, kind: NoteKind) -> bool:
        return any(note.kind is kind for note in self.notes)

    def cause(self) -> str:
        """One sentence; empty if the driver has informed the user itself."""
        if self.silent_s:
            return (
                f"the driver has not answered for {self.silent_s:.0f} s (run.heartbeat_timeout_s), "
                "so it counts as dead and was killed"
            )
        causes = [note.text for note in self.notes if note.kind is NoteKind.CAUSE]
        if causes:
            return "; ".join(dict.fromkeys(causes))
        if self.has_note(NoteKind.REPORTED):
            return ""
        if self.code >= 0:
            return f"the driver ended with exit code {self.code}"
        signal_name = signal.Signals(-self.code).name
        if signal_name == "SIGKILL":
            signal_name += "; the kernel does that when memory runs out (see dmesg)"
        return f"the driver was ended by {signal_name}"


def supervise(config: Config, folder: RunFolder) -> int:
    """Run `invrl train` on a folder that this process has made, checked and holds.
    Returns its exit code."""
    max_restarts = config.run.max_restarts
    return _supervise(config, folder, INCARNATION_COMMAND, max_restarts=max_restarts)


def supervise_once(
    config: Config, folder: RunFolder, inner: str, *arguments: str
) -> int:
    """Supervise a command that is never restarted, as `supervise` does. `inner`: the
    driver's command, which takes the folder and the `arguments`."""
    return _supervise(config, folder, inner, *arguments, max_restarts=0)


def _supervise(
    config: Config, folder: RunFolder, inner: str, *arguments: str, max_restarts: int
) -> int:
    command = [sys.executable, "-m", "invrl.cli", inner, str(folder.path), *arguments]
    # whether the driver will fork engines (`engines/fleet/fleet.py`)
    forks_engines = config.engines_here > 0 and not (
        inner == REPLAY_COMMAND
        or count_gpus()
        or traces_endpoint(config.run.log.otel_endpoint)
    )
    return Supervisor(
        config,
        folder,
        command,
        max_restarts=max_restarts,
        forks_engines=forks_engines,
    ).run()


class Supervisor:
    """Supervisor of one run. `command` is the driver's. `forks_engines`: a process
    imports SGLang while the first driver starts, and forks the engines of all
    drivers."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        command: Sequence[str],
        *,
        max_restarts: int,
        forks_engines: bool = False,
    ) -> None:
        self._folder = folder
        self._max_restarts = max_restarts
        self._heartbeat_timeout_s = config.run.heartbeat_timeout_s
        self._checkpoints = Checkpoints(folder.checkpoints_path)
        self._command = list(command)
        self._forks_engines = forks_engines
        self._parent: EarlyParent | None = None
        """The process that forks the engines; None before the first driver, or if they
        are not forked."""
        self._interrupted = False
        self._stray_signals: list[int] = []
        """Signals that the kernel gave to another thread of this process, for
        forwarding."""

    def run(self) -> int:
        """Run incarnations until the run is done, fails for good or is interrupted.
        Returns the exit code. A failed incarnation is followed by another one,
        `max_restarts` times without a new checkpoint between them."""
        remove_abandoned()
        with self._signals_blocked():
            adopt_orphans()
            try:
                return self._run_incarnations()
            finally:
                self._stop_parent()

    def _run_incarnations(self) -> int:
        """Do the work of `run`, while signals are blocked."""
        restarts = 0
        while True:
            if self._is_interrupted():
                return INTERRUPT_EXIT
            step_before = self._newest_step()
            end = self._run_incarnation()
            step_after = self._newest_step()

            if end.code in (0, USAGE_EXIT, INTERRUPT_EXIT):
                return end.code
            if end.blocking_call:
                _print_error(
                    f"interrupted during {end.blocking_call}, which does not react to signals: "
                    "the driver was killed"
                )
                return INTERRUPT_EXIT
            if (
                self._interrupted and -end.code in _INTERRUPTS
            ):  # before the driver had its handlers
                return INTERRUPT_EXIT

            cause = end.cause()
            if cause:
                log = self._folder.log_path("driver")
                _print_error(f"the run failed: {cause}\n  log: {log}")
            full = self._full_disk()
            if full:
                _print_error(full)
            if step_after != step_before:
                restarts = 0
            if not full or not self._max_restarts:
                restarts += 1
            if (
                self._interrupted
                or end.has_note(NoteKind.FINAL)
                or restarts > self._max_restarts
            ):
                return FAILURE_EXIT
            if full:
                self._wait_for_space()
                continue
            self._wait_for_interrupt(min(2.0 ** (restarts - 1) - 1, _LONGEST_PAUSE_S))
            _print_error(
                f"resuming from step {step_after} (restart {restarts} of {self._max_restarts})"
            )

    @contextlib.contextmanager
    def _signals_blocked(self) -> Iterator[None]:
        """Block signals until this program asks for them. Signals that are ignored
        (nohup) stay ignored.

        A signal mask belongs to one thread. NumPy, or a checked module of the user, may
        have started threads before, and the kernel gives a signal to one of those while
        this thread waits for none. Without the handlers such a signal would end this
        process, or raise KeyboardInterrupt anywhere.
        """
        blocked = {
            number
            for number in _AWAITED_SIGNALS
            if signal.getsignal(number) != signal.SIG_IGN
        }
        old_handlers = {
            number: signal.signal(number, self._note_stray)
            for number in blocked & _INTERRUPTS
        }
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
            for number, handler in old_handlers.items():
                signal.signal(number, handler)

    def _note_stray(self, number: int, _frame: object) -> None:
        self._interrupted = True
        self._stray_signals.append(number)

    def _is_interrupted(self) -> bool:
        """Whether the run was interrupted, including by signals between two
        incarnations."""
        while signal.sigtimedwait(_INTERRUPTS, 0) is not None:
            self._interrupted = True
        return self._interrupted

    def _wait_for_space(self) -> None:
        """Wait until the disks of the run have space again, or for an interrupt."""
        _print_error("waiting for space, then the run goes on (this is no restart)")
        while self._full_disk() and not self._interrupted:
            self._wait_for_interrupt(_SPACE_POLL_S)

    def _full_disk(self) -> str:
        """Describe a full disk of the run; "" if none is full."""
        folder = self._folder.path
        full = full_disk(folder)
        if full:
            return f"{full}, of the run folder {folder}"
        for folder in temporary_parents():
            full = full_disk(folder)
            if full:
                return f"{full}, of temporary files ({folder})"
        return ""

    def _wait_for_interrupt(self, seconds: float) -> None:
        """Wait for an interrupt, at most for `seconds`."""
        if signal.sigtimedwait(_INTERRUPTS, seconds) is not None:
            self._interrupted = True

    def _newest_step(self) -> int:
        checkpoint = self._checkpoints.latest()
        if checkpoint is None:
            return 0
        return checkpoint.step

    def _run_incarnation(self) -> IncarnationEnd:
        """Start a driver, wait for its end, and end every process that it left
        behind."""
        listener = Listener()
        parent = self._living_parent()
        driver = _start_driver(self._command, listener, parent)
        try:
            end = self._watch_driver(driver, listener)
        finally:
            _end_descendants(except_pid=parent.pid if parent is not None else None)
            listener.close()
        for note in end.notes:
            if note.kind is NoteKind.FOLDER:
                remove_ray_folder(note.text, self._folder.ray_logs_path)
        remove_abandoned()  # of engines and rollout workers that were killed
        if end.code != 0:
            _restore_terminal(was_killed=not end.has_note(NoteKind.ENDING))
        return end

    def _living_parent(self) -> EarlyParent | None:
        """Return the process that forks the engines, which imports SGLang while the
        first driver starts. It is started again if it has died."""
        if self._forks_engines and (self._parent is None or not self._parent.alive()):
            self._stop_parent()
            log_file = self._folder.path / "logs" / "engine-parent.log"
            self._parent = EarlyParent(ENGINE_MODULE, log=log_file)
        return self._parent

    def _stop_parent(self) -> None:
        if self._parent is not None:
            self._parent.stop()

    def _watch_driver(
        self, driver: subprocess.Popen[bytes], listener: Listener
    ) -> IncarnationEnd:
        """Forward signals until the driver has ended. Kill it when it is silent for too
        long, or when an interrupt does not reach it."""
        health = _DriverHealth(heartbeat_timeout_s=self._heartbeat_timeout_s)
        killed_after_s = 0.0
        blocking_call = ""
        # Ctrl-Z stops this process, and perhaps the driver with it.
        stopwatch = Stopwatch(longest_gap_s=2 * _POLL_INTERVAL_S)
        while driver.returncode is None:
            self._pass_signals_on(driver, heard=health.heard)
            health.update(
                listener.notes(),
                elapsed_s=stopwatch.lap_s(),
                interrupted=self._interrupted,
            )
            if health.blocked_s > BLOCKED_GRACE_S and not blocking_call:
                blocking_call = health.blocking_call
                driver.kill()
            if health.is_silent() and not killed_after_s:
                killed_after_s = health.silent_s
                driver.kill()
            collect_ended_children(except_pid=driver.pid)
            driver.poll()
        health.read(listener.notes())
        code = driver.returncode
        announced_codes = [
            int(note.text) for note in health.notes if note.kind is NoteKind.ENDING
        ]
        if (
            killed_after_s and announced_codes
        ):  # its work was over; only its interpreter hung
            code = announced_codes[-1]
            killed_after_s = 0.0
        return IncarnationEnd(
            code=code,
            notes=tuple(health.notes),
            silent_s=killed_after_s,
            blocking_call=blocking_call,
        )

    def _pass_signals_on(self, driver: subprocess.Popen[bytes], *, heard: bool) -> None:
        """Wait for a signal for a poll interval, and forward it. `heard`: the driver
        has sent a note."""
        info = signal.sigtimedwait(_AWAITED_SIGNALS, _POLL_INTERVAL_S)
        if info is not None and info.si_signo in _INTERRUPTS:
            self._interrupted = True
            # A terminal's Ctrl-C (si_code > 0) has reached the driver already, which is
            # in the same process group, unless the driver has only just been started.
            if info.si_code <= 0 or not heard:
                driver.send_signal(info.si_signo)
        while (
            self._stray_signals
        ):  # their source is not known; a driver ignores a signal that it has had
            driver.send_signal(self._stray_signals.pop())


@dataclass(slots=True, kw_only=True)
class _DriverHealth:
    """State of a running driver, from its notes."""

    heartbeat_timeout_s: float
    notes: list[Note] = field(default_factory=list)
    """All notes but heartbeats and the bounds of blocking calls."""
    heard: bool = False
    """Whether the driver has sent a note."""
    silent_s: float = 0.0
    """Seconds since its last note."""
    blocking_call: str = ""
    """The driver's current call, if that does not react to signals."""
    blocked_s: float = 0.0
    """Seconds that the driver has been in such calls since an interrupt."""

    def read(self, notes: Sequence[Note]) -> None:
        for note in notes:
            self.heard = True
            self.silent_s = 0.0
            if note.kind is NoteKind.BLOCKED:
                self.blocking_call = note.text
            elif note.kind is NoteKind.FREE:
                self.blocking_call = ""
            elif note.kind is not NoteKind.BEAT:
                self.notes.append(note)

    def update(
        self, notes: Sequence[Note], *, elapsed_s: float, interrupted: bool
    ) -> None:
        self.silent_s += elapsed_s
        self.read(notes)
        if interrupted and self.blocking_call:
            self.blocked_s += elapsed_s
        else:
            self.blocked_s = 0.0

    def is_silent(self) -> bool:
        """Whether the driver counts as dead."""
        timeout_s = self.heartbeat_timeout_s
        if not self.heard:
            timeout_s = max(_FIRST_HEARTBEAT_TIMEOUT_S, timeout_s)
        return self.silent_s > timeout_s


def _start_driver(
    command: Sequence[str], listener: Listener, parent: EarlyParent | None
) -> subprocess.Popen[bytes]:
    """Start a driver that dies with this process and sends its notes to `listener`.
    `parent`: for its engines."""
    descriptors = [listener.writer]
    variables = {**os.environ, **held_keys(), **environment(listener.writer)}
    if parent is not None:
        descriptors.append(parent.descriptor)
        variables.update(parent.environment)
    supervisor_pid = os.getpid()

    def prepare_child() -> None:
        die_with_parent()
        if os.getppid() != supervisor_pid:  # the supervisor died before the line above
            os._exit(FAILURE_EXIT)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED_SIGNALS)

    driver = subprocess.Popen(
        command,
        env=variables,
        pass_fds=descriptors,
        preexec_fn=prepare_child,
    )
    listener.opened_in_child()
    return driver


def _end_descendants(*, except_pid: int | None = None) -> None:
    """Wait for the processes that end by themselves, then kill the others."""
    remaining = end_descendants(
        terminate=False,
        grace_s=_GRACE_S,
        kill_within_s=_KILL_TIMEOUT_S,
        except_pid=except_pid,
    )
    if remaining:
        names = ", ".join(f"{process.pid} ({process.name()})" for process in remaining)
        _print_error(f"these processes of the run could not be killed: {names}")


def _restore_terminal(*, was_killed: bool) -> None:
    """Show the cursor again that a driver has hidden. A killed driver has left it in
    the last line of its display."""
    with contextlib.suppress(OSError):  # the terminal may be gone
        if sys.stdout.isatty():
            line_end = "\n" if was_killed else ""
            print(f"{line_end}{_SHOW_CURSOR}", end="", flush=True)


def _print_error(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"invrl: {text}", file=sys.stderr, flush=True)
