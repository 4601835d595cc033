"""Silence is death, work is not; a stopped process is found, and so is what it left
behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from invrl.errors import ServerError
from invrl.host.processes.process import still_running
from invrl.host.ray import actor_heartbeat, ray_memory
from invrl.host.ray.actor_heartbeat import ActorHeartbeat, Pulse, pulse
from invrl.host.ray.ray_memory import killed_for_memory
from invrl.host.ray.ray_watch import RayWatch, Watched

HERE = os.uname().nodename
ROOT = Path(__file__).parents[2]


@pytest.fixture
def start() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Each in a session of its own: the kernel ends a stopped process whose session
    loses its leader."""
    processes: list[subprocess.Popen[str]] = []

    def start(code: str) -> subprocess.Popen[str]:
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", code],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        )
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


class Asked:
    """Answers `times` times with the pulse of a process, and then never again."""

    def __init__(self, answer: Pulse, times: int) -> None:
        self.answer = answer
        self.times = times

    async def __call__(self) -> Pulse:
        if self.times == 0:
            await asyncio.Event().wait()
        self.times -= 1
        return self.answer


async def test_silent_process_is_named_and_killed(
    start: Callable[[str], subprocess.Popen[str]],
) -> None:
    process = start("import sys; print('up', flush=True); sys.stdin.read()")
    assert line(process) == "up"
    process.send_signal(signal.SIGSTOP)
    heart = ActorHeartbeat(
        "trainer rank 1", Asked(Pulse(pid=process.pid, host=HERE), 2), timeout_s=0.5
    )
    with pytest.raises(ServerError) as error:
        await asyncio.wait_for(heart.watch(), 300)
    words = str(error.value)
    assert words.startswith(
        f"trainer rank 1 (process {process.pid} on {HERE}) has not answered for "
    )
    assert "run.heartbeat_timeout_s" in words
    assert process.wait(60) == -signal.SIGKILL


async def test_silent_process_of_another_host_is_named_and_not_killed() -> None:
    heart = ActorHeartbeat(
        "the buffer", Asked(Pulse(pid=os.getpid(), host="elsewhere"), 1), timeout_s=0.2
    )
    with pytest.raises(ServerError, match=f"process {os.getpid()} on elsewhere"):
        await asyncio.wait_for(heart.watch(), 300)


async def test_silence_before_the_first_heartbeat_counts() -> None:
    with pytest.raises(ServerError, match="the buffer has not answered"):
        await asyncio.wait_for(
            ActorHeartbeat("the buffer", Asked(pulse(), 0), timeout_s=0.2).watch(), 300
        )


async def test_silent_process_that_uses_its_cpu_is_alive(
    start: Callable[[str], subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a library that holds the interpreter's lock. It answers in the end; then it
    stops for good."""
    process = start("print('up', flush=True)\nwhile True: pass")
    assert line(process) == "up"
    psutil_process = psutil.Process(process.pid)
    used = sum(psutil_process.cpu_times()[:2])
    answer = Pulse(pid=process.pid, host=HERE)
    asked = Asked(answer, 1)

    async def ask() -> Pulse:
        if asked.times:
            return await asked()
        # of CPU: four times the limit at least
        while sum(psutil_process.cpu_times()[:2]) < used + 3.0:
            await asyncio.sleep(0.01)
        heard.set()
        process.send_signal(signal.SIGSTOP)
        return await asked()

    heard = asyncio.Event()
    # Beside other work a CPU may be shared by many: a hundredth of one counts as work
    # here.
    monkeypatch.setattr(actor_heartbeat, "_BUSY", 0.01)
    heart = ActorHeartbeat("the worker", ask, timeout_s=1.0)
    with pytest.raises(ServerError, match="the worker"):
        await asyncio.wait_for(heart.watch(), 300)
    assert heard.is_set(), "it was killed while it worked"


async def test_actor_whose_heartbeat_raises_is_left_to_its_callers() -> None:
    calls = 0
    enough = asyncio.Event()

    async def ask() -> Pulse:
        nonlocal calls
        calls += 1
        if calls == 3:
            enough.set()
        raise RayActorError

    watch = asyncio.create_task(
        ActorHeartbeat("the worker", ask, timeout_s=0.3).watch()
    )
    await enough.wait()
    assert not watch.done()
    watch.cancel()


# ---------------------------------------------------------------- Ray's own processes


def watch(
    process: subprocess.Popen[str], ask: Callable[[], object], timeout_s: float
) -> tuple[RayWatch, list]:
    problems: list[str] = []
    known = threading.Event()

    def end(cause: str) -> None:
        problems.append(cause)
        known.set()

    watched = Watched(name="Ray's raylet", pid=process.pid, ask=ask)
    ray_watch = RayWatch([watched], heartbeat_timeout_s=timeout_s, end=end)
    ray_watch.start()
    return ray_watch, [problems, known]


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
def test_death_of_a_ray_process_is_reported_at_once(
    start: Callable[[str], subprocess.Popen[str]], kind: signal.Signals
) -> None:
    process = start("import sys; sys.stdin.read()")
    ray_watch, (problems, known) = watch(process, lambda: None, 10_000)
    process.send_signal(kind)
    assert known.wait(120)
    assert problems == [
        f"Ray's raylet (process {process.pid}) was killed by {kind.name}; a run cannot go on without it"
    ]
    ray_watch.stop()
    assert process.wait(60) == -kind, "it is collected by who started it"


@pytest.mark.parametrize("how", ["hangs", "refuses"])
def test_silence_of_a_ray_process_is_reported(
    start: Callable[[str], subprocess.Popen[str]], how: str
) -> None:
    process = start("import sys; sys.stdin.read()")
    ever = threading.Event()

    def ask() -> None:
        if how == "refuses":
            raise TimeoutError
        ever.wait()

    _, (problems, known) = watch(process, ask, 1.0)
    assert known.wait(120)
    assert "has not answered for" in problems[0]
    ever.set()


def test_ray_process_stopped_on_purpose_is_not_reported(
    start: Callable[[str], subprocess.Popen[str]],
) -> None:
    process = start("import sys; sys.stdin.read()")
    ray_watch, (problems, _) = watch(process, lambda: None, 10_000)
    ray_watch.stop()
    process.kill()
    process.wait(60)
    for thread in threading.enumerate():
        if thread.name == "watch Ray's raylet":
            thread.join(60)
    assert problems == []


# ------------------------------------------------------- what user code leaves behind

# Everything below the worker reads the pipe whose other end only the test holds. So
# whatever the guardian leaves behind ends with the test at the latest, also with one
# that fails or is killed. Each writes its line with one system call: with
# PYTHONUNBUFFERED, print() takes two, and another's line may come between them.
WORKER = """
import os, subprocess, sys
from invrl.host.processes.guardian import start_guardian
start_guardian()
code = "import os, sys; os.setsid(); os.write(1, f'{os.getpid()}{os.linesep}'.encode()); os.close(1); "
code += "sys.stdin.read()"
daemon = "import os; os.fork() and os._exit(0); " + code
subprocess.Popen([sys.executable, "-c", daemon]).wait()
subprocess.Popen([sys.executable, "-c", code])
if os.fork() == 0:
    if os.fork():
        os._exit(0)
    exec(code)
os.wait()
sys.stdin.readline()
"""


def test_daemons_that_left_the_session_of_a_worker_end_with_it(
    start: Callable[[str], subprocess.Popen[str]],
) -> None:
    """A daemon that is nobody's child, a child in a session of its own, and a daemon
    that was forked and has started no program; the worker is killed before its guardian
    need have seen any of them."""
    worker = start(WORKER)
    left = [psutil.Process(int(line(worker))) for _ in range(3)]
    assert all(os.getsid(process.pid) == process.pid for process in left)
    guardians = [
        child
        for child in psutil.Process(worker.pid).children()
        if "invrl.host.processes.guardian" in child.cmdline()
    ]
    assert len(guardians) == 1
    worker.kill()
    worker.wait(60)
    assert not still_running(left, within_s=120)
    assert not still_running(guardians, within_s=120), (
        "a guardian ends with whom it watched"
    )


# --------------------------------------------------------------------- memory

TOLD = (
    "Task was killed due to the node running low on memory.\nMemory on the node (IP: 10.0.0.1) where the "
    "task was running was 22.50GB / 23.50GB (0.957447), which exceeds the memory usage threshold of 0.95."
)


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError(TOLD),
        RayActorError("", TOLD),
    ],
)
def test_death_by_rays_memory_monitor_is_explained_in_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.9")
    monkeypatch.setattr(ray_memory, "_used_by_this_run", lambda: 3_200_000_000)
    words = killed_for_memory(error, "trainer rank 0")
    assert words.startswith(
        "Ray's memory monitor killed trainer rank 0, because the machine's memory was more"
    )
    assert "90%" in words
    assert "the run's other processes use 3.2 GB" in words
    assert "RAY_memory_usage_threshold" in words
    assert "--data-parallel-size" in words
    assert "\n" not in words


FULL_GPU = RayTaskError(
    "call",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    RuntimeError(),
)


@pytest.mark.parametrize(
    "error",
    [None, RayActorError("", "the worker died"), ValueError("memory"), FULL_GPU],
)
def test_other_deaths_are_not_blamed_on_memory(error: Exception | None) -> None:
    assert killed_for_memory(error, "the buffer") == ""
