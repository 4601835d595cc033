"""The supervisor above programs that behave as drivers do. Nothing waits for time to
pass, but where silence is what is noticed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from run_config import config
from slow_cases import first_quick

from invrl.host.processes.process import still_running
from invrl.run.processes.supervisor import BLOCKED_GRACE_S
from invrl.run.settings.folder import make_run_folder

ROOT = Path(__file__).parents[2]
SUPERVISOR = """
import sys
from pathlib import Path
from invrl.run.settings.resolved_config import load_resolved
from invrl.store.run_folder import RunFolder
from invrl.run.processes.supervisor import Supervisor

folder = RunFolder(path=Path(sys.argv[1]))
config = load_resolved(folder.config_path)
run = config.run.model_copy(update={"heartbeat_timeout_s": float(sys.argv[4])})
config = config.model_copy(update={"run": run})
driver = [sys.executable, "-c", sys.argv[3], str(folder.path)]
with folder.held("train"):
    sys.exit(Supervisor(config, folder, driver, max_restarts=int(sys.argv[2])).run())
"""
DRIVER = """
import os, signal, subprocess, sys, time
from pathlib import Path
from invrl.host.processes import lifeline
from invrl.run.checkpoints.checkpoints import Checkpoints
from invrl.host.processes.lifeline import NoteKind

place = Path(sys.argv[1])
incarnations = place / "incarnations"
number = len(incarnations.read_text()) + 1 if incarnations.exists() else 1
incarnations.write_text("x" * number)
lifeline.hold()

def say(what):
    os.write(1, f"{what}\\n".encode())  # at once: a daemon speaks, too

def wait():
    sys.stdin.readline()

"""
SILENT_S = 6.0
"""Where silence is meant to be noticed: longer than a starved machine leaves a driver
without a turn."""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    processes: list[subprocess.Popen[str]] = []

    def start(
        body: str, *, restarts: int = 0, heartbeat_s: float = 10_000.0, before: str = ""
    ) -> subprocess.Popen[str]:
        """`body`: of the driver. `before`: what the supervisor's process does first."""
        folder = make_run_folder(config(tmp_path, "run"))
        arguments = [str(folder.path), str(restarts), DRIVER + body, str(heartbeat_s)]
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", before + SUPERVISOR, *arguments],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                process_group=0,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=1200)
    return process.returncode, out, err


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("code", [0, 2, 130])
def test_finished_refused_or_interrupted_run_is_not_restarted(
    start: Start, code: int
) -> None:
    assert end(start(f"say(number); sys.exit({code})", restarts=3)) == (code, "1\n", "")


def test_failure_reported_by_the_driver_is_not_reported_twice(start: Start) -> None:
    body = "lifeline.tell(NoteKind.REPORTED); say(number); sys.exit(1)"
    code, out, err = end(start(body, restarts=2))
    assert code == 1
    assert out == "1\n2\n3\n"
    lines = err.splitlines()
    assert lines == [
        "invrl: resuming from step 0 (restart 1 of 2)",
        "invrl: resuming from step 0 (restart 2 of 2)",
    ]


def test_restarts_are_counted_since_the_last_new_checkpoint(start: Start) -> None:
    body = """
if number == 2:
    checkpoints = Checkpoints(place / "checkpoints")
    filling = checkpoints.begin(number)
    filling.megatron.mkdir()
    checkpoints.commit(filling, {})
say(number)
lifeline.tell(NoteKind.REPORTED)
sys.exit(1)"""
    code, out, err = end(start(body, restarts=1))
    # Incarnations 1 and 2 are followed by a first restart each, because incarnation 2
    # made a checkpoint; incarnation 3 made none.
    assert code == 1
    assert out == "1\n2\n3\n"
    assert [line.split("resuming ")[1] for line in err.splitlines()] == [
        "from step 0 (restart 1 of 1)",
        "from step 2 (restart 1 of 1)",
    ]


FULL_DISK = """
import shutil
from pathlib import Path
from types import SimpleNamespace
def disk_usage(folder):
    return SimpleNamespace(free=10**9 if (Path(folder) / "space").exists() else 1_300_000)
shutil.disk_usage = disk_usage
"""


@pytest.mark.parametrize("interrupted", [False, True])
def test_on_a_full_disk_the_next_incarnation_waits_for_space(
    start: Start, tmp_path: Path, interrupted: bool
) -> None:
    body = """
if number <= 2:
    lifeline.tell(NoteKind.REPORTED)
    sys.exit(1)
say(number)"""
    process = start(body, restarts=1, before=FULL_DISK)
    assert process.stderr is not None
    assert " is full: 1.3 MB are free, of the run folder" in process.stderr.readline()
    assert "waiting for space" in process.stderr.readline()
    if interrupted:
        process.send_signal(signal.SIGTERM)
        assert end(process) == (130, "", "")
        return
    (tmp_path / "run" / "space").touch()
    code, out, err = end(process)
    assert code == 0
    assert out == "3\n"
    assert err.splitlines() == ["invrl: resuming from step 0 (restart 1 of 1)"], (
        "the wait was no restart"
    )


def test_without_restarts_a_full_disk_is_named_and_not_waited_for(start: Start) -> None:
    code, out, err = end(
        start("lifeline.tell(NoteKind.REPORTED); sys.exit(1)", before=FULL_DISK)
    )
    assert code == 1
    assert out == ""
    [line] = err.splitlines()
    assert " is full: 1.3 MB are free, of the run folder" in line


def test_permanent_failure_is_not_restarted(start: Start) -> None:
    body = "lifeline.tell(NoteKind.FINAL); lifeline.tell(NoteKind.REPORTED); say(number); sys.exit(1)"
    assert end(start(body, restarts=3)) == (1, "1\n", "")


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV])
def test_killed_driver_is_reported_and_the_next_incarnation_starts(
    start: Start, kind: signal.Signals
) -> None:
    body = f"""
if number == 1:
    os.kill(os.getpid(), {int(kind)})
say("done")"""
    code, out, err = end(start(body, restarts=1))
    assert code == 0
    assert out == "done\n"
    assert f"the run failed: the driver was ended by {kind.name}" in err
    assert "restart 1 of 1" in err


def test_only_drivers_have_the_keys_of_the_command(start: Start) -> None:
    """The supervisor's own process, where checks have imported user code, shows them
    nowhere."""
    before = """
import os
os.environ["INVRL_ENV_KEY"] = "env-of-the-user-0123456789"
os.environ["RAY_AUTH_TOKEN"] = "token-of-ray-0123456789"
from invrl.host.processes.environment_keys import hold_keys
hold_keys()
print(sorted({"INVRL_ENV_KEY", "RAY_AUTH_TOKEN"} & set(os.environ)), flush=True)
"""
    body = """
say(os.environ["INVRL_ENV_KEY"] + " " + os.environ["RAY_AUTH_TOKEN"])
lifeline.tell(NoteKind.REPORTED)
sys.exit(1)"""
    _, out, _ = end(start(body, restarts=1, before=before))
    assert out.splitlines() == ["[]"] + 2 * [
        "env-of-the-user-0123456789 token-of-ray-0123456789"
    ]


def test_guardians_of_earlier_incarnations_have_ended(start: Start) -> None:
    body = """
import psutil
from invrl.host.processes.guardian import start_guardian
start_guardian()

def watched():
    "The driver that each guardian watches. A program that is just being started has no command line yet."
    found = []
    for process in psutil.Process(os.getppid()).children(recursive=True):
        try:
            command = process.cmdline()
        except psutil.NoSuchProcess:
            continue
        if "invrl.host.processes.guardian" in command:
            found.append(int(command[-2]))
    return found

while os.getpid() not in watched():
    time.sleep(0.01)
say(len(watched()))
lifeline.tell(NoteKind.REPORTED)
os.kill(os.getpid(), signal.SIGKILL)"""
    _, out, _ = end(start(body, restarts=3))
    assert out.split() == 4 * ["1"]


def test_last_words_of_a_driver_are_the_reported_cause(start: Start) -> None:
    """As Ray's C++ ends it: nobody in Python gets to say anything more."""
    body = "lifeline.tell(NoteKind.CAUSE, 'the raylet is gone'); os._exit(1)"
    code, _, err = end(start(body))
    assert code == 1
    assert "invrl: the run failed: the raylet is gone\n" in err


def test_stopped_driver_is_dead_after_its_heartbeat_timeout(start: Start) -> None:
    body = """
if number == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
say("done")"""
    code, out, err = end(start(body, restarts=1, heartbeat_s=SILENT_S))
    assert code == 0
    assert out == "done\n"
    assert (
        "the driver has not answered for 6 s (run.heartbeat_timeout_s), so it counts as dead"
        in err
    )


@pytest.mark.parametrize("code", first_quick([0, 1]))
def test_driver_silent_after_its_final_report_ended_as_reported(
    start: Start, code: int
) -> None:
    """The interpreter's end waits for what it has loaded, and its threads do not beat
    meanwhile."""
    body = f"""
say(number)
lifeline.tell(NoteKind.REPORTED)
lifeline.tell(NoteKind.ENDING, "{code}")
os.kill(os.getpid(), signal.SIGSTOP)"""
    assert end(start(body, heartbeat_s=SILENT_S)) == (code, "1\n", "")


@pytest.mark.slow
def test_driver_with_a_blocked_event_loop_is_alive(start: Start) -> None:
    assert end(start("time.sleep(10); say('done')", heartbeat_s=SILENT_S)) == (
        0,
        "done\n",
        "",
    )


LEAVES = """
code = "import os, time; os.setsid(); os.write(1, b'%d\\\\n' % os.getpid()); time.sleep(10**6)"
daemon = f"import os, sys; os.fork() and os._exit(0); {code}"
subprocess.Popen([sys.executable, "-c", daemon], stderr=subprocess.DEVNULL).wait()
"""


def left(pid: str) -> list[psutil.Process]:
    try:
        return still_running([psutil.Process(int(pid))], within_s=60)
    except psutil.NoSuchProcess:
        return []


@pytest.mark.parametrize(
    "how", first_quick(["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(0)"])
)
def test_daemon_left_by_an_incarnation_is_ended(start: Start, how: str) -> None:
    """In a session of its own, and a child of nobody any more."""
    process = start(LEAVES + how)
    pid = says(process)
    end(process)
    assert not left(pid)


def test_driver_ends_with_a_killed_supervisor(start: Start) -> None:
    process = start("say(os.getpid()); wait()")
    pid = says(process)
    process.send_signal(signal.SIGKILL)
    assert not left(pid)


INTERRUPTED = """
def stop(number, frame):
    say("clean")
    sys.exit(130)
for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(kind, stop)
say("up")
while True:
    time.sleep(60)
"""


@pytest.mark.parametrize(
    "kind", first_quick([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
)
def test_signal_is_forwarded_and_no_incarnation_follows(
    start: Start, kind: signal.Signals
) -> None:
    process = start(INTERRUPTED, restarts=3)
    assert says(process) == "up"
    process.send_signal(kind)
    assert end(process) == (130, "clean\n", "")


SIGNALLED_THREAD = """
import os, signal, sys, threading, time

def take_it():
    while not os.path.exists(os.path.join(sys.argv[1], "up")):
        time.sleep(0.02)
    signal.pthread_kill(threading.get_ident(), {kind})

threading.Thread(target=take_it, daemon=True).start()
"""


@pytest.mark.parametrize(
    "kind", first_quick([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
)
def test_signal_delivered_to_another_thread_is_forwarded_too(
    start: Start, kind: signal.Signals
) -> None:
    """NumPy starts threads before the supervisor masks its own, and the kernel may
    choose any of them."""
    body = INTERRUPTED.replace('say("up")', 'say("up"); (place / "up").touch()')
    process = start(body, restarts=3, before=SIGNALLED_THREAD.format(kind=int(kind)))
    assert end(process) == (130, "up\nclean\n", "")


def test_interrupted_incarnation_that_fails_is_not_restarted(start: Start) -> None:
    process = start(INTERRUPTED.replace("sys.exit(130)", "os._exit(1)"), restarts=3)
    assert says(process) == "up"
    process.send_signal(signal.SIGINT)
    code, out, err = end(process)
    assert code == 1
    assert out == "clean\n"
    assert "going on" not in err


BLOCKED = """
for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(kind, lambda *_: say("heard"))
with lifeline.blocked("the start of Ray"):
    say("up")
    while number == 1:
        time.sleep(60)
"""


@pytest.mark.parametrize(
    "kind", first_quick([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
)
def test_interrupt_does_not_wait_for_a_call_that_ignores_signals(
    start: Start, kind: signal.Signals
) -> None:
    process = start(LEAVES + BLOCKED, restarts=3)
    # a daemon speaks when it gets to it
    [pid, up] = sorted(says(process) for _ in range(2))
    assert up == "up"
    process.send_signal(kind)
    code, out, err = end(process)
    assert code == 130
    assert out == "heard\n"
    call = "the start of Ray, which does not react to signals"
    assert err == f"invrl: interrupted during {call}: the driver was killed\n"
    assert not left(pid)


def test_interrupt_after_a_blocking_call_is_left_to_the_driver(start: Start) -> None:
    body = "with lifeline.blocked('the start of Ray'): pass\n" + INTERRUPTED.replace(
        'say("clean")', 'say("cleans up"); wait(); say("clean")'
    )
    process = start(body, restarts=3)
    assert says(process) == "up"
    process.send_signal(signal.SIGINT)
    assert says(process) == "cleans up"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2 * BLOCKED_GRACE_S)
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert end(process) == (130, "clean\n", "")


def test_second_run_of_a_folder_is_refused_while_the_first_lives(
    start: Start, tmp_path: Path
) -> None:
    first = start("say('up'); wait()")
    assert says(first) == "up"
    code, _, err = end(start("say('up')"))
    assert code == 1
    assert f"process {first.pid} (invrl train) works in {tmp_path}" in err
    assert first.stdin is not None
    first.stdin.write("\n")
    first.stdin.flush()
    assert end(first) == (0, "", "")


def test_temporary_folder_of_a_killed_driver_is_removed_and_its_logs_stay(
    start: Start, tmp_path: Path
) -> None:
    logs = tmp_path / "ray" / "r" / "session_2026" / "logs"
    logs.mkdir(parents=True)
    (logs / "worker-1.out").write_text("printed by user code")
    (logs / "worker-2.out").touch()
    folder = str(tmp_path / "ray")
    body = f"lifeline.tell(NoteKind.FOLDER, {folder!r}); os.kill(os.getpid(), signal.SIGKILL)"
    end(start(body))
    assert not Path(folder).exists()
    kept = [path.name for path in (tmp_path / "run" / "logs" / "ray" / "ray").iterdir()]
    assert kept == ["worker-1.out"]
