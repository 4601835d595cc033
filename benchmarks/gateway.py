"""`python -m benchmarks.gateway`: what the gateway costs, beside the same turns
straight at a paced stand-in engine.

Engine, router, gateway and this load generator share the machine's cores. Pairs are
measured in turns, several times in one run; a ratio or a difference is taken within a
repetition, and the median of the repetitions counts. Four parts:
- `streams`: tokens/s of streamed conversations, through gateway and router, through
  them with capture off, and straight at the engine, at the same concurrency and pace.
- `latency`: requests that arrive on a Poisson schedule, whether or not those before
  have been answered; the difference of the percentiles of both ways, from when a
  request was due to its last byte.
- `saturated`: requests/s when a token takes no time and every agent asks again at once.
- `hold`: streams that all stay open at once, and the gateway's memory meanwhile.

The same ratio against the real engine is `gateway_router` of `benchmarks.loop`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import uvloop
from tiny_model import make_tiny_model
from tokenizers import Tokenizer

from benchmarks.gateway_load.load import (
    Ask,
    Load,
    Measured,
    Script,
    arrivals,
    closed_loop,
    open_loop,
)
from benchmarks.gateway_load.rig import Rig
from benchmarks.ratios import Speeds
from benchmarks.record import RESULTS, add_options, keep
from invrl.engines.client.sglang_client import EngineLimits
from invrl.errors import ServerError
from invrl.host.processes.environment_keys import hold_keys

PARTS = ("streams", "latency", "saturated", "hold")
TARGETS = {
    "paced": 0.98,
    "capture": 0.97,
    "latency_p50": 1.0,
    "latency_p99": 1.0,
    "streamed_p50": 1.0,
    "streamed_p99": 1.0,
    "held": 1.0,
}
"""Ratio -> the least it should be. Latencies: what may be added (`ADDED_MS`) over what
is; 1 if less is."""
ADDED_MS = {"p50": 3.0, "p99": 10.0}
_REPLY = (
    "Let me work it out. Each box holds 12 apples, so I multiply the number of boxes by 12: ten times "
    "the number and then twice the number on top. The shop therefore sells that many apples, no matter in "
    "which order the boxes leave. "
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    repetitions: int
    agents: int
    """Streams and saturated requests at a time."""
    tokens: int
    """Of a streamed answer."""
    pace_s: float
    rate: float
    """Arrivals per second."""
    arrive_s: float
    """Of one repetition, either way."""
    held: int
    hold_s: float
    rounds: int
    """Conversations of an agent when saturated."""


FULL = Size(
    repetitions=5,
    agents=32,
    tokens=64,
    pace_s=0.02,
    rate=200.0,
    arrive_s=5.0,
    held=1000,
    hold_s=120.0,
    rounds=8,
)
SMOKE = Size(
    repetitions=1,
    agents=4,
    tokens=8,
    pace_s=0.01,
    rate=50.0,
    arrive_s=1.0,
    held=40,
    hold_s=4.0,
    rounds=1,
)
_TURNS = 4
_SHORT = 8
"""Tokens of an answer whose latency is measured."""


def main(arguments: Sequence[str]) -> int:
    """0; 1 if a ratio fell."""
    options = _options(arguments)
    load_before = round(os.getloadavg()[0], 2)
    work = Path(tempfile.mkdtemp(prefix="invrl-bench-"))
    os.environ["OMP_NUM_THREADS"] = "1"
    model = Path(options.model_path).name if options.model_path else "tiny"
    folder = (
        Path(options.model_path)
        if options.model_path
        else make_tiny_model(work / "tiny")
    )
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            ratios, details = runner.run(_measure(options, folder, work))
    finally:
        shutil.rmtree(work)
    kept = {
        "options": options,
        "model": f"{model}, paced",
        "baseline": "gateway_baseline.json",
    }
    return keep(ratios, TARGETS, details, load_before=load_before, **kept)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway")
    parser.add_argument(
        "--model-path",
        default="",
        help="model folder, for its tokenizer (default: a tiny one)",
    )
    parser.add_argument(
        "--smoke", action="store_true", help="seconds: does the bench work?"
    )
    parser.add_argument(
        "--repetitions", type=int, default=0, help="of each pair (5; smoke: 1)"
    )
    parser.add_argument(
        "--only",
        choices=PARTS,
        default="",
        help="one part; nothing is compared or kept",
    )
    add_options(parser)
    options = parser.parse_args(arguments)
    options.repetitions = (
        options.repetitions or (SMOKE if options.smoke else FULL).repetitions
    )
    if options.only:
        options.results = None
    elif options.results is None and not options.smoke:
        options.results = RESULTS
    return options


async def _measure(
    options: argparse.Namespace, model: Path, work: Path
) -> tuple[dict[str, float], dict[str, Any]]:
    vocab_size = EngineLimits.of(model, max_total_tokens=8192).vocab_size
    reply_ids = (
        Tokenizer.from_file(str(model / "tokenizer.json"))
        .encode(_REPLY, add_special_tokens=False)
        .ids
    )
    rig = Rig(work, model_path=model, vocab_size=vocab_size, reply_ids=reply_ids)
    load = Load(env_key=rig.env_key, engine_url=rig.engine_url)
    bench = _Bench(rig, load, SMOKE if options.smoke else FULL, options.repetitions)
    try:
        await rig.start()
        await bench.warm_up()
        for part in [options.only] if options.only else PARTS:
            await getattr(bench, part)()
            rig.check()
    finally:
        await load.close()
        rig.stop()
    return bench.ratios, bench.details


class _Bench:
    """Each part notes its ratios and details."""

    def __init__(self, rig: Rig, load: Load, size: Size, repetitions: int) -> None:
        self._rig, self._load, self._size, self._repetitions = (
            rig,
            load,
            size,
            repetitions,
        )
        self.ratios: dict[str, float] = {}
        self.details: dict[str, Any] = {}

    async def warm_up(self) -> None:
        script = await self._script(turns=2, tokens=_SHORT)
        for way in ("on", "off", "direct"):
            for stream in (False, True):
                await self._closed(way, script, agents=8, stream=stream)

    async def streams(self) -> None:
        size = self._size
        found = defaultdict[str, list[Measured]](list)
        script = await self._script(turns=_TURNS, tokens=size.tokens)
        self._rig.pace(size.pace_s)
        for _ in range(self._repetitions):
            for way in ("direct", "on", "off"):
                found[way].append(
                    await self._closed(way, script, agents=size.agents, stream=True)
                )
        speeds = {
            way: [one.tokens / one.seconds for one in all_]
            for way, all_ in found.items()
        }
        paced = Speeds(ours=speeds["on"], reference=speeds["direct"]).summary()
        capture = Speeds(ours=speeds["on"], reference=speeds["off"]).summary()
        self.ratios |= {"paced": paced["ratio"], "capture": capture["ratio"]}
        self.details["streams"] = {
            **{
                "agents": size.agents,
                "pace_ms": 1000 * size.pace_s,
                "tokens_per_answer": size.tokens,
            },
            **{"paced": paced, "capture": capture, "cpu_ms_per_request": _cpu(found)},
        }

    async def latency(self) -> None:
        """Whole answers, then streamed ones."""
        size = self._size
        script = await self._script(turns=_TURNS, tokens=_SHORT)
        self._rig.pace(size.pace_s)
        for name, stream in (("latency", False), ("streamed", True)):
            found = defaultdict[str, list[Measured]](list)
            for nth in range(self._repetitions):
                due_s = arrivals(rate=size.rate, seconds=size.arrive_s, seed=nth)
                for way in ("direct", "on"):
                    found[way].append(
                        await self._open(way, script, due_s, stream=stream)
                    )
            added = dict[str, dict[str, float]]()
            direct = dict[str, float]()
            for what, rank in product(
                ("whole", "first") if stream else ("whole",), ADDED_MS
            ):
                ms = {
                    way: [one.percentile_ms(what, int(rank[1:])) for one in found[way]]
                    for way in found
                }
                pairs = zip(ms["on"], ms["direct"], strict=True)
                added[f"{what}_{rank}"] = _spread(
                    [through - straight for through, straight in pairs]
                )
                direct[f"{what}_{rank}"] = round(median(ms["direct"]), 2)
            for rank, most in ADDED_MS.items():
                self.ratios[f"{name}_{rank}"] = round(
                    most / max(added[f"whole_{rank}"]["median"], most), 3
                )
            self.details[name] = {
                **{
                    "requests_per_s": size.rate,
                    "tokens_per_answer": _SHORT,
                    "pace_ms": 1000 * size.pace_s,
                },
                **{
                    "added_ms": added,
                    "direct_ms": direct,
                    "cpu_ms_per_request": _cpu(found),
                },
            }

    async def saturated(self) -> None:
        """On record, without a target: how much a core can take."""
        size = self._size
        script = await self._script(turns=_TURNS, tokens=_SHORT)
        self._rig.pace(0.0)
        report = {}
        for name, stream in (("whole", False), ("streamed", True)):
            found = defaultdict[str, list[Measured]](list)
            for _ in range(self._repetitions):
                for way in ("direct", "on", "off"):
                    load = {
                        "agents": size.agents,
                        "rounds": size.rounds,
                        "stream": stream,
                    }
                    found[way].append(await self._closed(way, script, **load))
            rates = {
                way: [len(one.whole_s) / one.seconds for one in all_]
                for way, all_ in found.items()
            }
            report[name] = {
                "requests_per_s": {
                    way: round(median(values), 1) for way, values in rates.items()
                },
                "capture": _spread(
                    [
                        on / off
                        for on, off in zip(rates["on"], rates["off"], strict=True)
                    ]
                ),
                "cpu_ms_per_request": _cpu(found),
            }
        self.details["saturated"] = report

    async def hold(self) -> None:
        """One long stream in each session."""
        size = self._size
        tokens = max(int(size.hold_s), 8)
        script = await self._script(turns=1, tokens=tokens)
        self._rig.pace(size.hold_s / tokens)
        watch = Memory(self._rig.processes("on")["gateway"], every_s=size.hold_s / 24)
        watching = asyncio.create_task(watch.watch())
        found = await self._closed("on", script, agents=size.held, stream=True)
        watching.cancel()
        self.ratios["held"] = round(found.tokens / (size.held * tokens), 4)
        self.details["hold"] = {
            **{
                "sessions": size.held,
                "seconds": round(found.seconds, 1),
                "tokens": found.tokens,
            },
            **{
                "errors": len(found.errors),
                "first_errors": found.errors[:3],
                **watch.report(),
            },
        }

    async def _script(self, *, turns: int, tokens: int) -> Script:
        self._rig.pace(0.0)
        return await self._load.script(
            self._rig.gateways["on"].url,
            self._rig.store_path("on"),
            turns=turns,
            tokens=tokens,
        )

    async def _closed(
        self, way: str, script: Script, *, agents: int, stream: bool, rounds: int = 1
    ) -> Measured:
        def run(ask: Ask) -> Awaitable[Measured]:
            return closed_loop(ask, script, agents=agents, rounds=rounds)

        return await self._measured(
            way, script, run, sessions=agents * rounds, stream=stream
        )

    async def _open(
        self, way: str, script: Script, due_s: Sequence[float], *, stream: bool
    ) -> Measured:
        def run(ask: Ask) -> Awaitable[Measured]:
            return open_loop(ask, script, due_s=due_s)

        return await self._measured(
            way, script, run, sessions=-(-len(due_s) // _TURNS), stream=stream
        )

    async def _measured(
        self,
        way: str,
        script: Script,
        run: Callable[[Ask], Awaitable[Measured]],
        *,
        sessions: int,
        stream: bool,
    ) -> Measured:
        """Sessions are opened before and ended after. ServerError if more than one
        request in a hundred failed: what is measured then is something else."""
        direct = way == "direct"
        url = "" if direct else self._rig.gateways[way].url
        opened = [] if direct else await self._load.open(url, sessions)
        through = self._load.through
        straight = self._load.direct
        ask = (
            straight(script, stream=stream)
            if direct
            else through(script, opened, stream=stream)
        )
        processes = self._rig.processes("on" if direct else way)
        before = {name: _cpu_s(process) for name, process in processes.items()}
        gc.collect()
        gc.freeze()  # the load generator's own pauses are nobody's latency
        found = await run(ask)
        found.cpu_s = {
            name: _cpu_s(process) - before[name] for name, process in processes.items()
        }
        await self._load.end(url, opened)
        if len(found.errors) > 0.01 * (len(found.errors) + len(found.whole_s)):
            raise ServerError(
                f"{len(found.errors)} requests failed ({way}): {found.errors[:3]}"
            )
        return found


class Memory:
    """Of a process and those below it, over time."""

    def __init__(self, family: Sequence[psutil.Process], *, every_s: float) -> None:
        self._family, self._every_s = family, every_s
        self._at_s: list[float] = []
        self._mb: list[float] = []

    async def watch(self) -> None:
        """Until it is cancelled."""
        started = time.monotonic()
        while True:
            self._at_s.append(time.monotonic() - started)
            self._mb.append(sum(one.memory_info().rss for one in self._family) / 1e6)
            await asyncio.sleep(self._every_s)

    def report(self) -> dict[str, Any]:
        """The slope is of a straight line through the last three quarters, when all
        streams are open."""
        settled = len(self._mb) // 4
        slope = (
            np.polyfit(self._at_s[settled:], self._mb[settled:], 1)[0]
            if len(self._mb) > settled + 1
            else 0.0
        )
        return {
            "rss_mb": [round(one, 1) for one in self._mb],
            "mb_per_minute": round(60 * float(slope), 2),
        }


def _cpu_s(family: Sequence[psutil.Process]) -> float:
    """User and system, as /proc/<pid>/stat counts them."""
    return sum(
        times.user + times.system for times in (one.cpu_times() for one in family)
    )


def _cpu(found: Mapping[str, Sequence[Measured]]) -> dict[str, dict[str, float]]:
    """CPU-milliseconds per answered request, by way and process."""
    report = {}
    for way, repetitions in found.items():
        requests = sum(len(repetition.whole_s) for repetition in repetitions)
        names = [
            name
            for name in repetitions[0].cpu_s
            if way != "direct" or name in ("engine", "load")
        ]
        report[way] = {
            name: round(
                1000
                * sum(repetition.cpu_s[name] for repetition in repetitions)
                / requests,
                3,
            )
            for name in names
        }
    return report


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(median(values), 3),
        "low": round(min(values), 3),
        "high": round(max(values), 3),
    }


if __name__ == "__main__":
    hold_keys()
    sys.exit(main(sys.argv[1:]))
