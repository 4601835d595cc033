"""Interrupts as a process gets them: a program per case, in a process group of its own,
told by lines when it may go on. Nothing waits for time to pass."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from invrl.host.processes import interrupts

KINDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PROGRAM = """
import asyncio, signal, sys
from pathlib import Path
from invrl.host.processes import interrupts
from invrl.host.processes.process import ServerProcess

def say(what):
    print(what, flush=True)

async def told():
    await asyncio.to_thread(sys.stdin.readline)

async def clean_up():
    for step in range(4):
        say(step)
        await told()
    say("clean")

async def work():
    say("up")
    await asyncio.Event().wait()

async def main():
    {body}

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under `nohup`
interrupts.catch()
interrupts.DEADLINE_S = {deadline}
try:
    {before}
    interrupts.run(main())
    {after}
except KeyboardInterrupt:
    sys.exit(130)
"""


class Program(subprocess.Popen[str]):
    def __init__(
        self, body: str, *, before: str = "", after: str = "", deadline: float = 600
    ) -> None:
        code = PROGRAM.format(body=body, before=before, after=after, deadline=deadline)
        pipe = subprocess.PIPE
        root = Path(__file__).parents[2]
        super().__init__(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": str(root)},
            process_group=0,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )

    def says(self, line: str) -> None:
        assert self.stdout is not None
        said = self.stdout.readline()
        assert said == f"{line}\n", said or (self.stderr and self.stderr.read())

    def interrupt(self, *kinds: signal.Signals) -> None:
        for kind in kinds:
            os.killpg(self.pid, kind)

    def end(self) -> tuple[int, str, str]:
        out, err = self.communicate(timeout=60)
        return self.returncode, out, err


Start = Callable[..., Program]


@pytest.fixture
def start() -> Iterator[Start]:
    programs: list[Program] = []

    def start(*arguments: str, **more: object) -> Program:
        programs.append(Program(*arguments, **more))  # type: ignore[arg-type]
        return programs[-1]

    yield start
    for program in programs:
        program.kill()
        program.communicate()


def goes_on_through(program: Program) -> None:
    """Every step of its clean-up, told to go on after a burst each time."""
    assert program.stdin is not None
    for step in range(4):
        program.says(str(step))
        program.interrupt(*KINDS, *KINDS)
        program.stdin.write("\n")
        program.stdin.flush()
    program.says("clean")


IN_ORDER = """
    try:
        await work()
    finally:
        await clean_up()
        raise ValueError("of the clean-up")"""


@pytest.mark.parametrize("first", KINDS)
def test_first_interrupt_starts_the_clean_up_and_later_interrupts_do_not_cut_it_short(
    first: signal.Signals, start: Start
) -> None:
    program = start(IN_ORDER)
    program.says("up")
    program.interrupt(first)
    goes_on_through(program)
    code, out, err = program.end()
    assert code == 130
    assert out == ""
    assert err.count("ending; what is left") == 1, err
    assert "ValueError: of the clean-up" in err, "what an interrupt hides is logged"
    assert f"kill -9 {program.pid}" in err


def test_first_interrupt_during_a_clean_up_does_not_cut_it_short(start: Start) -> None:
    program = start("""
    async with interrupts.CleanUp() as stack:
        stack.push_async_callback(clean_up)
        raise ValueError("of the work")""")
    goes_on_through(program)
    assert program.end()[0] == 130


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["before", "after"])
def test_interrupt_without_an_event_loop_ends_at_once(
    where: str, kind: signal.Signals, start: Start
) -> None:
    program = start("pass", **{where: "say('there'); sys.stdin.readline(); say('no')"})
    program.says("there")
    program.interrupt(kind)
    assert program.end() == (130, "", "")


def test_endless_clean_up_is_killed_and_its_wait_is_named(start: Start) -> None:
    """The deadline passes when the clean-up waits."""
    program = start(
        IN_ORDER.replace("clean_up()", "(asyncio.gather(told()), begun.set())[0]"),
        before="import threading, types; begun = threading.Event(); "
        "interrupts.time = types.SimpleNamespace(sleep=lambda _: begun.wait())",
        deadline=0.01,
    )
    program.says("up")
    program.interrupt(signal.SIGINT)
    assert program.stderr is not None
    err = program.stderr.read()  # to its end; it still waits for a line
    assert program.wait(60) == 1
    assert "killed, 0.01 s after the interrupt; it waited for " in err
    assert "told" in err.splitlines()[0]
    assert "in run_until_complete" in err, "where each thread was"


def test_interrupt_of_the_process_group_does_not_reach_a_server(
    start: Start, tmp_path: Path
) -> None:
    program = start(f"""
    async with interrupts.CleanUp() as stack:
        server = ServerProcess("one", ["sleep", "1000"], log=Path({str(tmp_path / "log")!r}))
        stack.callback(server.stop)
        stack.callback(lambda: say(server.alive()))
        stack.push_async_callback(clean_up)
        await work()""")
    program.says("up")
    program.interrupt(*KINDS)
    goes_on_through(program)
    program.says("True")
    assert program.end()[0] == 130


def test_signal_just_before_the_event_loop_waits_wakes_the_loop() -> None:
    """Without the waking, 7 of 1,000 signals at such a moment were not seen until
    something else happened."""
    loop = asyncio.new_event_loop()
    main = threading.main_thread().ident
    seen = asyncio.Event()
    handled = threading.Event()
    source = random.Random(0)
    before = signal.signal(signal.SIGUSR1, lambda *_: handled.set())
    assert main is not None

    def send(found: list[bool]) -> None:
        time.sleep(source.random() * 3e-4)
        signal.pthread_kill(main, signal.SIGUSR1)
        found.append(handled.wait(30))
        loop.call_soon_threadsafe(seen.set)

    async def work() -> None:
        for _ in range(1000):
            seen.clear()
            handled.clear()
            found: list[bool] = []
            threading.Thread(target=send, args=(found,)).start()
            await seen.wait()
            assert found == [True]

    try:
        with interrupts._woken(loop):
            loop.run_until_complete(work())
    finally:
        signal.signal(signal.SIGUSR1, before)
        loop.close()


TWO_SLEEPS = """
import threading, types
passed = threading.Event()
again = threading.Event()
def sleep(seconds, slept=[]):
    slept.append(seconds)
    if len(slept) == 1:
        passed.wait()
    else:
        again.set()
        threading.Event().wait()
interrupts.time = types.SimpleNamespace(sleep=sleep)
"""


def test_final_work_may_extend_the_clean_up_deadline(start: Start) -> None:
    """The deadline passes while the work that asked for more time goes on: it is waited
    for once more."""
    program = start(
        """
    try:
        await work()
    except asyncio.CancelledError:
        interrupts.allow_more(600)
        passed.set()
        again.wait()
        say("saved")
        raise""",
        before=f"exec({TWO_SLEEPS!r})",
        deadline=0.01,
    )
    program.says("up")
    program.interrupt(signal.SIGINT)
    program.says("saved")
    assert program.end()[0] == 130
