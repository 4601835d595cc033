"""A real run in which processes are killed and stopped, at random or by plan, until the
time is over.

    python tests/soak.py --minutes M [--faults N] [--kinds kill,stop] [--out FILE] \
        [--seed S] [flags of `invrl train`]

Writes its result as JSON (default: RUN_FOLDER/soak.json): what was done, when it was
noticed, and what came of it. --seed also draws the faults; the run ends after N of them
or after M minutes.

Each fault strikes one role's process in one phase of the loop: kill -9, or SIGSTOP for
90 s. The run must train on: by itself (a worker, the gateway), after a restart from its
checkpoint, or, when the supervisor was killed, when its command is repeated. At the end
the run is brought to its last step and its ledger and turns are checked.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import psutil
from exactly_once import NotExactlyOnce, check_exactly_once

from invrl.buffer.ledger.ledger_store import (
    check_lineage,
    read_incarnations,
    read_ledger,
)
from invrl.buffer.ledger.open_group import RolloutState
from invrl.cli.arguments import split_options
from invrl.cli.main import run_with_exit_code
from invrl.cli.run_process import checked_configuration, log_to_folder
from invrl.errors import (
    BufferStateError,
    ConfigError,
    DeadlineError,
    InvrlError,
    ServerError,
)
from invrl.host.processes.environment_keys import held_keys, hold_keys
from invrl.run.settings.folder import make_run_folder
from invrl.store.run_folder import RunFolder
from invrl.store.run_store import RunStore
from invrl.types.rollouts import RolloutSummary

ROLES = {
    "supervisor": "",
    "driver": "invrl.cli _incarnation",
    "trainer": "ray::TrainActor",
    "buffer": "ray::BufferActor",
    "worker": "ray::RolloutWorker",
    "gateway": "-m invrl.gateway.server.processes.gateway_server",
    "router": "invrl.engines.router.launch_router",
    "engine": "-m invrl.engines.inside_sglang.launch_sglang",
    "fork parent": "invrl.host.processes.fork_parent",
    "raylet": "src/ray/raylet/raylet",
    "gcs": "src/ray/gcs/gcs_server",
}
"""Role -> what its command line holds, among the supervisor's descendants."""
KINDS = ("kill", "stop")
STOPPED_S = 90.0
PHASES = ("rollout", "train", "sync", "checkpoint")
_PROGRESS_S = 1200.0
_CATCH_S = 120.0
_LOOK_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What was done to whom and when, and what came of it."""

    role: str
    kind: str
    phase: str
    step: int
    at: str
    """UTC."""
    outcome: str
    """recovered (the same incarnation went on), restarted (a new incarnation), resumed
    (the command was repeated)."""
    noticed_s: float | None
    """From the fault to the first line about it, in the driver's log or on its console;
    None: no line."""
    message: str
    """That line."""
    stopped_s: float
    """How long a stopped process stayed so: STOPPED_S, or until a step was trained
    without it, which counted as dead and had been killed. 0 for a kill."""
    seconds: float
    """From the fault to the end of a later step; of one that was stopped, a step after
    it went on."""


class Soak:
    """One run under faults. `flags`: those of `invrl train`, run root and name among
    them."""

    def __init__(self, folder: RunFolder, flags: Sequence[str]) -> None:
        self._folder = folder
        self._flags = list(flags)
        self._console = folder.path.with_name(folder.path.name + ".soak.log")
        self._supervisor: subprocess.Popen[bytes] | None = None
        self.faults: list[Fault] = []
        """Those inflicted so far."""

    def start(self, *more: str) -> None:
        """The run's command, also to repeat it."""
        command = [sys.executable, "-m", "invrl.cli", "train", *self._flags, *more]
        with self._console.open("ab") as log:
            self._supervisor = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **held_keys()},
            )

    @property
    def pid(self) -> int:
        """Of the supervisor; all other processes of the run are below it."""
        return self._running().pid

    def train_on(self) -> None:
        """Wait until a step has ended that had not ended before."""
        self._wait_beyond(self.last_step(), _Logs([]))

    def inflict(
        self,
        role: str,
        phase: str,
        kind: str = "kill",
        repeated_with: Sequence[str] = (),
    ) -> Fault:
        """Kill or stop `role` in `phase` and wait until the run has trained a later
        step. `repeated_with`: flags with which the command is repeated once its
        supervisor was killed. Raises ServerError if the run ends for good,
        DeadlineError if it stands still."""
        supervisor = self._running()
        step, victim = self._catch(role, phase, kind)
        began = time.monotonic()
        at = time.strftime("%H:%M:%S", time.gmtime())
        stopped_s = 0.0
        logs = _Logs([self._console, self._folder.log_path("driver")])
        # the next one takes seconds to begin
        incarnations = len(read_incarnations(self._folder.store_path))
        if role == "supervisor" and kind == "kill":
            supervisor.wait(60)
            self.start(*repeated_with)
        self._wait_beyond(step, logs)
        if kind == "stop":
            # One that counts as dead has been killed meanwhile: there is nothing left
            # to wait for.
            while time.monotonic() < began + STOPPED_S and _is_there(victim):
                self._running()
                logs.look()
                time.sleep(0.1)
            stopped_s = round(time.monotonic() - began, 1)
            with contextlib.suppress(psutil.Error):
                victim.resume()
            self._wait_beyond(self.last_step(), logs)
        seconds = round(time.monotonic() - began, 1)
        same_incarnation = (
            len(read_incarnations(self._folder.store_path)) == incarnations
        )
        resumed = role == "supervisor" and kind == "kill"
        outcome = (
            "resumed" if resumed else "recovered" if same_incarnation else "restarted"
        )
        noticed_s = None if logs.found_at is None else round(logs.found_at - began, 1)
        fault = Fault(
            role=role,
            kind=kind,
            phase=phase,
            step=step,
            at=at,
            outcome=outcome,
            noticed_s=noticed_s,
            message=logs.found,
            stopped_s=stopped_s,
            seconds=seconds,
        )
        self.faults.append(fault)
        return fault

    def finish(self) -> int:
        """Stop the run, then bring it to an end two steps later; how many steps that
        makes."""
        supervisor = self._running()
        supervisor.send_signal(signal.SIGINT)
        supervisor.wait(180)  # it ends itself within 120
        steps = self.last_step() + 2
        self.start("--num-steps", str(steps))
        self.wait_for_end()
        return steps

    def wait_for_end(self) -> None:
        """Until the run has made its last step. Raises ServerError if it fails."""
        if self._supervisor is None or self._supervisor.wait(_PROGRESS_S) != 0:
            raise ServerError(f"the run failed in the end, see {self._folder.path}")

    def stop(self) -> None:
        if self._supervisor is not None and self._supervisor.poll() is None:
            self._supervisor.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._supervisor.wait(180)  # a clean-up may take the driver's own 120 s
            self._supervisor.kill()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._supervisor is None or self._supervisor.poll() is not None:
            raise ServerError(f"the run has ended, see {self._folder.path}")
        return self._supervisor

    def _catch(self, role: str, phase: str, kind: str) -> tuple[int, psutil.Process]:
        """Wait for the phase and strike; the step it was in, and who was struck. A
        process is looked up before the phase begins, because a phase may be shorter
        than looking."""
        deadline = time.monotonic() + _CATCH_S + _PROGRESS_S
        last = self.last_step()
        while time.monotonic() < deadline:
            self._running()
            if (
                self.last_step() <= last
            ):  # the run has come up and trained since the last fault
                time.sleep(0.2)
                continue
            pids = self._pids(role)
            until = time.monotonic() + 5
            while pids and time.monotonic() < until:
                now = self._phase()
                if now.get("phase") == phase:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        victim = psutil.Process(random.choice(pids))
                        victim.send_signal(
                            signal.SIGKILL if kind == "kill" else signal.SIGSTOP
                        )
                        return int(now["step"]), victim
                time.sleep(_LOOK_S)
        raise DeadlineError(
            f"a {role} process in phase {phase}", _CATCH_S + _PROGRESS_S
        )

    def _pids(self, role: str) -> list[int]:
        pid = self.pid
        if role == "supervisor":
            return [pid]
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if ROLES[role] in " ".join(child.cmdline()):
                        found.append(child.pid)
        return found

    def _phase(self) -> dict[str, str | int]:
        try:
            return json.loads(self._folder.phase_path.read_bytes())
        except (OSError, ValueError):
            return {}

    def last_step(self) -> int:
        """Of the steps that ended; a new incarnation forgets those it makes again."""
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
            return int(
                json.loads(self._folder.metrics_path.read_bytes().splitlines()[-1])[
                    "step"
                ]
            )
        return 0

    def _wait_beyond(self, step: int, logs: _Logs) -> None:
        deadline = time.monotonic() + _PROGRESS_S
        while self.last_step() <= step:
            self._running()
            if time.monotonic() > deadline:
                raise DeadlineError(f"a step after {step}", _PROGRESS_S)
            logs.look()
            time.sleep(0.1)


def _is_there(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


class _Logs:
    """What is written into these files from now on: the first line that tells of a
    fault, and when."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._read = {
            path: path.stat().st_size if path.exists() else 0 for path in paths
        }
        self.found = ""
        self.found_at: float | None = None

    def look(self) -> None:
        for path, begin in self._read.items() if self.found_at is None else ():
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(begin)
                text = file.read().decode(errors="replace")
            line = next(
                (line for line in text.splitlines() if _TELLING.search(line)), ""
            )
            if line:
                self.found, self.found_at = line[:400], time.monotonic()
                return


_TELLING = re.compile(
    r"^invrl: the run failed|^\S+ [WE] .*(fail|dead|died|kill|ended|replac|again|not answer|leaves)"
)
"""The supervisor's lines on the console, and warnings and errors in the driver's
log."""


def check_run(folder: RunFolder, steps: int) -> dict[str, int]:
    """What must hold of a run that has ended, whatever was killed: exactly once by the
    ledger, every step's batch trained, every outcome's turns in the store. Raises
    BufferStateError; counts to report."""
    kept = read_ledger(folder.store_path)
    check_lineage(kept, ended=True)
    entries = [one.entry for one in kept if not one.lost]
    trained = [entry for entry in entries if entry.state is RolloutState.TRAINED]
    batches = {entry.batch_id for entry in trained}
    if len(batches) != steps:
        raise BufferStateError(
            f"{steps} steps, but {len(batches)} batches of the lineage were trained"
        )
    store = RunStore(folder.store_path)
    sessions = 0
    for _, outcome in store.outbox_after(0, limit=10**9):
        if isinstance(outcome, RolloutSummary):
            turns = store.turns(outcome.session_id)
            tokens = sum(len(turn.sampled_ids_T) for turn in turns)
            stored = store.closed_session(outcome.session_id)
            if (
                stored is None
                or stored.state != "finished"
                or tokens != outcome.sampled_tokens
            ):
                raise BufferStateError(
                    f"session {outcome.session_id} and its outcome disagree"
                )
            sessions += 1
    store.close()
    return {
        "steps": steps,
        "incarnations": len(read_incarnations(folder.store_path)),
        "rollouts_trained": len(trained),
        "sessions_checked": sessions,
        "ledger_entries": len(kept),
        "ledger_entries_lost": sum(one.lost for one in kept),
    }


def _coverage(faults: Sequence[Fault], kinds: Sequence[str]) -> dict[str, object]:
    """Which kinds each role has met, in which phases, and what the time did not
    reach."""
    met = {(fault.role, fault.kind) for fault in faults}
    return {
        "phases": {
            role: {
                kind: sorted(
                    {
                        fault.phase
                        for fault in faults
                        if (fault.role, fault.kind) == (role, kind)
                    }
                )
                for kind in kinds
            }
            for role in ROLES
        },
        "missing": [
            f"{role}, {kind}"
            for role in ROLES
            for kind in kinds
            if (role, kind) not in met
        ],
    }


def random_faults(seed: int, kinds: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Role, phase, kind. Every role meets each kind once, each time in a phase drawn
    for it, in random order, again and again: after four rounds every role has met each
    kind in every phase."""
    draw = random.Random(seed)
    first = {
        (role, kind): draw.randrange(len(PHASES)) for role in ROLES for kind in kinds
    }
    number = 0
    while True:
        for role, kind in draw.sample(sorted(first), len(first)):
            yield role, PHASES[(first[role, kind] + number) % len(PHASES)], kind
        number += 1


def main(arguments: Sequence[str]) -> None:
    """Run the soak and print its summary. Raises ConfigError for bad input."""
    if "-h" in arguments or "--help" in arguments:
        print(__doc__)
        return
    options, flags = split_options(
        arguments, ["--minutes", "--faults", "--kinds", "--out"]
    )
    minutes = _read_positive("--minutes", options.get("--minutes", "30"))
    num_faults = math.inf
    if "--faults" in options:
        num_faults = _read_positive("--faults", options["--faults"])
    kinds = _read_kinds(options.get("--kinds", ",".join(KINDS)))
    config = checked_configuration(flags, command="train")
    folder = make_run_folder(config)  # the drivers that the run starts hold it
    log_to_folder(folder, config)
    flags = [
        *flags,
        "--run-root",
        str(folder.path.parent),
        "--run-name",
        folder.path.name,
    ]
    flags += "--log.progress none --num-steps 1000000 --max-restarts 3 --save-interval 2".split()
    out = (
        Path(options.get("--out") or folder.path / "soak.json").expanduser().absolute()
    )
    result = soak(
        folder,
        flags,
        minutes=minutes,
        num_faults=num_faults,
        kinds=kinds,
        seed=config.run.seed,
        out=out,
    )
    print(result)


def _read_positive(flag: str, text: str) -> float:
    with contextlib.suppress(ValueError):
        number = float(text)
        if 0 < number < math.inf:
            return number
    raise ConfigError(flag, text, "not a number above 0", f"give {flag} 30")


def _read_kinds(text: str) -> list[str]:
    kinds = text.split(",")
    if set(kinds) <= set(KINDS):
        return kinds
    reason = "not kinds of faults"
    raise ConfigError("--kinds", text, reason, f"give some of {', '.join(KINDS)}")


def soak(
    folder: RunFolder,
    flags: Sequence[str],
    *,
    minutes: float,
    num_faults: float,
    kinds: Sequence[str],
    seed: int,
    out: Path,
) -> str:
    """Inflict `num_faults`, or as many as `minutes` hold. Writes the result as JSON to
    `out`, also of a run that broke, with the reason. Raises what a broken run
    raises."""
    run = Soak(folder, flags)
    started = time.monotonic()
    checked: dict[str, int] = {}
    broke = ""
    loads = [os.getloadavg()[0]]
    try:
        run.start()
        for role, phase, kind in random_faults(seed, kinds):
            is_over = time.monotonic() - started > 60 * minutes
            if is_over or len(run.faults) >= num_faults:
                break
            broke = f"{role}, {kind}, {phase}: "
            fault = run.inflict(role, phase, kind)
            loads.append(os.getloadavg()[0])
            print(f"[{time.monotonic() - started:6.0f} s] {fault}", flush=True)
        broke = "at the end: "
        steps = run.finish()
        checked = check_run(folder, steps) | check_exactly_once(folder.store_path)
        broke = ""
    except (InvrlError, NotExactlyOnce) as error:
        broke += str(error)
        raise
    finally:
        run.stop()
        result = {
            "commit": _commit(),
            "flags": list(flags),
            "load_mean": round(fmean(loads), 2),
            "cores": os.cpu_count(),
            "seed": seed,
            "minutes": round((time.monotonic() - started) / 60, 1),
            "faults": len(run.faults),
            "outcomes": Counter(
                f"{fault.role}, {fault.kind}: {fault.outcome}" for fault in run.faults
            ),
            "covered": _coverage(run.faults, kinds),
            "run": checked,
            "broke": broke,
            "each": [asdict(fault) for fault in run.faults],
        }
        out.write_text(json.dumps(result, indent=2) + "\n")
    return f"{len(run.faults)} faults, nothing lost and nothing trained twice: {checked}\n{out}"


def _commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    return subprocess.run(
        git, capture_output=True, text=True, check=False
    ).stdout.strip()


if __name__ == "__main__":
    hold_keys()
    sys.exit(run_with_exit_code(partial(main, sys.argv[1:])))
