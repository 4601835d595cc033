"""The process above a run's driver: `invrl train` itself. It runs one incarnation after another, each in a
driver process of its own, and says what ended a driver that could not say so itself. `invrl eval` and `invrl
replay`, which start a Ray too, are supervised in the same way, with one incarnation.

The driver cannot outlive its Ray: it is ended from C++ within a second of its raylet's death. And it may be
killed, or stopped. So what begins the next incarnation stands outside of it. The supervisor itself imports
neither Ray nor torch, and starts no thread.

Invariants. Where the supervisor dies, the kernel kills the driver (PR_SET_PDEATHSIG). When an incarnation is
over, every process below is gone before the next one begins: the supervisor adopts orphans
(PR_SET_CHILD_SUBREAPER), whatever session they put themselves into. An interrupted run begins no
incarnation. A signal never ends the supervisor itself, so that nothing is left half ended."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from invrl.host.descendants import adopt_orphans, collect_ended_children, die_with_parent, end_descendants
from invrl.host.environment_keys import held_keys
from invrl.host.lifeline import Listener, Note, NoteKind, environment
from invrl.host.ray_setup import remove_ray_folder
from invrl.run.checkpoints import Checkpoints
from invrl.run.config import Config
from invrl.run.driver_commands import FAILURE_EXIT, INCARNATION_COMMAND, INTERRUPT_EXIT, USAGE_EXIT
from invrl.store.run_folder import RunFolder

_PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_WATCHED = _PASSED_ON | {signal.SIGCHLD}
_LOOK_EVERY_S = 0.2
_FIRST_BEAT_S = 120.0
"""A driver beats as soon as Python has started."""
_GRACE_S = 3.0
"""For what is left below when a driver has ended: most of it ends by itself."""
_KILL_WITHIN_S = 30.0
BLOCKED_GRACE_S = 2.0
"""From an interrupt on, for a driver in a call that hears no signal (`NoteKind.BLOCKED`)."""
_SHOW_CURSOR = "\x1b[?25h"


@dataclass(frozen=True, slots=True, kw_only=True)
class IncarnationEnd:
    """How a driver ended. `code`: as Popen gives it, negative for a signal."""

    code: int
    notes: tuple[Note, ...]
    hung_s: float = 0.0
    """The supervisor ended it, because it had not been heard of for so long."""
    blocked_in: str = ""
    """The supervisor ended it, because this call would not have let an interrupt through."""

    def said(self, kind: NoteKind) -> bool:
        return any(note.kind is kind for note in self.notes)

    def cause(self) -> str:
        """One sentence; empty where the driver has told the user itself."""
        if self.hung_s:
            return (
                f"the driver has not answered for {self.hung_s:.0f} s (run.heartbeat_timeout_s), "
                "so it counts as dead and was killed"
            )
        causes = [note.text for note in self.notes if note.kind is NoteKind.CAUSE]
        if causes:
            return "; ".join(dict.fromkeys(causes))
        if self.said(NoteKind.REPORTED):
            return ""
        if self.code < 0:
            name = signal.Signals(-self.code).name
            hint = "; the kernel does that when memory runs out (see dmesg)" if name == "SIGKILL" else ""
            return f"the driver was ended by {name}{hint}"
        return f"the driver ended with exit code {self.code}"


class Supervisor:
    """Of one run. `command` is the driver's."""

    def __init__(
        self, config: Config, folder: RunFolder, command: Sequence[str], *, max_restarts: int
    ) -> None:
        self._folder = folder
        self._max_restarts = max_restarts
        self._heartbeat_s = config.run.heartbeat_timeout_s
        self._checkpoints = Checkpoints(folder.checkpoints_path)
        self._command = list(command)
        self._interrupted = False
        self._stray: list[int] = []
        """Signals that another thread of this process was given, and that are to be passed on."""

    def run(self) -> int:
        """Lives until the run is done, fails for good or is interrupted; the exit code. A failed life is
        followed by another `max_restarts` times without a new checkpoint between."""
        with self._signals_wait():
            adopt_orphans()
            restarts = 0
            while True:
                if self._interrupted_between_incarnations():
                    return INTERRUPT_EXIT
                before = self._newest_step()
                end = self._one_incarnation()
                after = self._newest_step()
                if end.code in (0, USAGE_EXIT, INTERRUPT_EXIT):
                    return end.code
                if end.blocked_in:
                    what = f"interrupted during {end.blocked_in}, which hears no signal"
                    _say(f"{what}: the driver was killed")
                    return INTERRUPT_EXIT
                if self._interrupted and -end.code in _PASSED_ON:  # before the driver had its handlers
                    return INTERRUPT_EXIT
                if cause := end.cause():
                    _say(f"the run failed: {cause}\n  log: {self._folder.log_path('driver')}")
                restarts = restarts + 1 if after == before else 1
                if self._interrupted or end.said(NoteKind.FINAL) or restarts > self._max_restarts:
                    return FAILURE_EXIT
                _say(f"resuming from step {after} (restart {restarts} of {self._max_restarts})")

    @contextlib.contextmanager
    def _signals_wait(self) -> Iterator[None]:
        """Signals are taken when this program asks for them. Those that are ignored (nohup) stay so.

        A mask is a thread's own. NumPy, or a module of the user's that was checked, may have started threads
        before, and the kernel gives a signal to one of those while this thread does not wait for any. The
        handlers are for such signals, which would end this process, or raise KeyboardInterrupt anywhere."""
        watched = {one for one in _WATCHED if signal.getsignal(one) != signal.SIG_IGN}
        handlers = {one: signal.signal(one, self._note_stray) for one in watched & _PASSED_ON}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for one, handler in handlers.items():
                signal.signal(one, handler)

    def _note_stray(self, number: int, _frame: object) -> None:
        self._interrupted = True
        self._stray.append(number)

    def _interrupted_between_incarnations(self) -> bool:
        while signal.sigtimedwait(_PASSED_ON, 0) is not None:
            self._interrupted = True
        return self._interrupted

    def _newest_step(self) -> int:
        newest = self._checkpoints.latest()
        return newest.step if newest else 0

    def _one_incarnation(self) -> IncarnationEnd:
        """Starts a driver, waits for its end, and ends whatever it left behind."""
        listener = Listener()
        me = os.getpid()

        def in_child() -> None:
            die_with_parent()
            if os.getppid() != me:  # it died before the line above
                os._exit(FAILURE_EXIT)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)

        driver = subprocess.Popen(
            self._command,
            env={**os.environ, **held_keys(), **environment(listener.writer)},
            pass_fds=[listener.writer],
            preexec_fn=in_child,
        )
        listener.opened_in_child()
        try:
            end = self._follow(driver, listener)
        finally:
            _end_descendants()
            listener.close()
        for note in end.notes:
            if note.kind is NoteKind.FOLDER:
                remove_ray_folder(note.text, self._folder.ray_logs_path)
        if end.code < 0 and sys.stdout.isatty():
            print(_SHOW_CURSOR, end="", flush=True)
        return end

    def _follow(self, driver: subprocess.Popen[bytes], listener: Listener) -> IncarnationEnd:
        notes: list[Note] = []
        heard = False
        silent_s = hung_s = 0.0
        call = blocked_in = ""
        blocked_s = 0.0
        last = time.monotonic()
        while driver.returncode is None:
            info = signal.sigtimedwait(_WATCHED, _LOOK_EVERY_S)
            if info is not None and info.si_signo in _PASSED_ON:
                self._interrupted = True
                # A terminal's Ctrl-C (si_code > 0) has reached the driver already, which is in the same
                # process group, unless it has only just been started.
                if info.si_code <= 0 or not heard:
                    driver.send_signal(info.si_signo)
            while self._stray:  # from wherever: the driver minds no signal that it has had already
                driver.send_signal(self._stray.pop())
            now = time.monotonic()
            # A long gap means that this process was stopped (Ctrl-Z), and the driver perhaps with it.
            passed_s = min(now - last, 2 * _LOOK_EVERY_S)
            last = now
            silent_s += passed_s
            for note in listener.notes():
                heard = True
                silent_s = 0.0
                if note.kind is NoteKind.BLOCKED:
                    call = note.text
                elif note.kind is NoteKind.FREE:
                    call = ""
                elif note.kind is not NoteKind.BEAT:
                    notes.append(note)
            blocked_s = blocked_s + passed_s if self._interrupted and call else 0.0
            if blocked_s > BLOCKED_GRACE_S and not blocked_in:
                blocked_in = call
                driver.kill()
            allowed_s = self._heartbeat_s if heard else max(_FIRST_BEAT_S, self._heartbeat_s)
            if silent_s > allowed_s and not hung_s:
                hung_s = silent_s
                driver.kill()
            collect_ended_children(except_pid=driver.pid)
            driver.poll()
        notes += [note for note in listener.notes() if note.kind is not NoteKind.BEAT]
        code = driver.returncode
        codes = [int(note.text) for note in notes if note.kind is NoteKind.ENDING]
        if hung_s and codes:  # only its interpreter was still there
            code = codes[-1]
            hung_s = 0.0
        return IncarnationEnd(
            code=code,
            notes=tuple(notes),
            hung_s=hung_s,
            blocked_in=blocked_in,
        )


def _end_descendants() -> None:
    """Wait for the processes that end by themselves, then kill the others."""
    remaining = end_descendants(terminate=False, grace_s=_GRACE_S, kill_within_s=_KILL_WITHIN_S)
    if remaining:
        names = ", ".join(f"{process.pid} ({process.name()})" for process in remaining)
        _say(f"these processes of the run could not be killed: {names}")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"invrl: {text}", file=sys.stderr, flush=True)


def supervise(config: Config, folder: RunFolder) -> int:
    """`invrl train` on a folder that is made, checked and held by this process; its exit code."""
    command = _driver(INCARNATION_COMMAND, folder)
    return Supervisor(config, folder, command, max_restarts=config.run.max_restarts).run()


def supervise_once(config: Config, folder: RunFolder, inner: str, *arguments: str) -> int:
    """The same for what is not begun again: `inner` is the driver's command, which takes the folder and the
    `arguments`."""
    return Supervisor(config, folder, _driver(inner, folder, *arguments), max_restarts=0).run()


def _driver(inner: str, folder: RunFolder, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "invrl.cli", inner, str(folder.path), *arguments]
