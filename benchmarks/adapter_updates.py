"""usage: python -m benchmarks.adapter_updates --model-path MODEL [flags]

Measures updates that send an adapter alone. First, updates of one engine while 8 and
then 64 requests decode: all of them begin before an update and end after it. Then the
weight update of a training step, as `time/sync_s` of two short runs of the presets
quickstart_lora and quickstart, which sends the whole model.

Prints each ratio, and writes it with its details to RESULTS/adapter_updates.json, as
soon as it is measured. Adds all of them to RESULTS/history.jsonl. A part that fails
costs none of the others. Exit code 1 if a part failed, or if a ratio is worse than the
median of the history by 25 %: ratios are of wall time.

--engine.dtype D     bfloat16 (default) or float32
--lora.rank N        rank of the adapter, which has all projections (default: 16)
--updates N          with 8 requests (default: 100)
--repetitions N      updates with 64 requests (default: 10)
--steps N            of each training run (default: 6); 0: without these
--deadline-s S       of each phase of an update, each volley of requests (default: 300)
--results FOLDER     default: bench
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal
from uuid import uuid4

import numpy as np
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from benchmarks import ROOT
from benchmarks.command_line import model_folder, run_benchmark, validated
from benchmarks.ratio_record import RatioRecord
from benchmarks.ratios import Part, exceeded, rises
from benchmarks.weight_updates.measurement import failed_part, report_part
from benchmarks.weight_updates.token_times import Window, decode_step, longest_gap
from invrl.cli.arguments import split_options, unknown_flag
from invrl.engines.client.generation import GenerateChunk, GenerateRequest
from invrl.engines.client.sglang_client import SglangClient
from invrl.engines.config import EngineConfig
from invrl.engines.fleet.fleet import Fleet
from invrl.engines.launch.served_adapter import ServedAdapter
from invrl.errors import DeadlineError, InvrlError, ServerError
from invrl.run.loop.weight_updater import canary_prompts
from invrl.types.sessions import Sampling
from invrl.types.weights import WeightVersion
from invrl.weights.config import AdapterWeights
from invrl.weights.update.canary import CanaryBound
from invrl.weights.update.transaction import WeightTransaction

if TYPE_CHECKING:
    from benchmarks.weight_updates.changing_adapter import ChangingAdapter

_DEFAULTS = {
    "--model-path": "",
    "--engine.dtype": "bfloat16",
    "--lora.rank": "16",
    "--updates": "100",
    "--repetitions": "10",
    "--steps": "6",
    "--deadline-s": "300",
    "--results": "bench",
}
_FEW_REQUESTS = 8
_MANY_REQUESTS = 64
_TARGETS = {
    f"gap_{_FEW_REQUESTS}": 1.1,
    f"gap_{_MANY_REQUESTS}": 1.1,
    f"failed_requests_{_FEW_REQUESTS}": 0.0,
    f"failed_requests_{_MANY_REQUESTS}": 0.0,
    f"unequal_tensors_{_FEW_REQUESTS}": 0.0,
    f"unequal_tensors_{_MANY_REQUESTS}": 0.0,
    "bytes_moved": 1.01,
    "sync_phase": 0.2,
}
"""Ratio -> the most it should be."""
_PROMPT_TOKENS = 32
_TOKENS = 96
"""Tokens of each request: an update begins and ends while all of them decode."""
_TOKENS_BEFORE = 24
"""Tokens of each request before an update: the time of an ordinary decode step."""
_KV_TOKENS = 24_576
_NUM_VERSIONS = 3
_POLL_S = 0.002
_RUN_DEADLINE_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterBenchSettings:
    """Settings of the measurements."""

    model_path: str
    engine_dtype: Literal["bfloat16", "float32"]
    rank: PositiveInt
    updates: PositiveInt
    repetitions: PositiveInt
    steps: NonNegativeInt
    deadline_s: PositiveFloat


def benchmark_adapter_updates(arguments: Sequence[str]) -> None:
    """Raises ConfigError; CommandFailed if a part failed or a ratio rose."""
    given, switches = split_options(arguments, list(_DEFAULTS))
    if switches:
        raise unknown_flag(switches[0], list(_DEFAULTS))
    options = _DEFAULTS | given
    folder = model_folder(options)
    fields = {
        "model_path": str(folder),
        "engine_dtype": options["--engine.dtype"],
        "rank": options["--lora.rank"],
        "updates": options["--updates"],
        "repetitions": options["--repetitions"],
        "steps": options["--steps"],
        "deadline_s": options["--deadline-s"],
    }
    settings = validated(AdapterBenchSettings, fields, name="adapter_updates")
    record = RatioRecord(
        Path(options["--results"]).expanduser(),
        "adapter_updates",
        model=f"{folder.name} {settings.engine_dtype} rank {settings.rank}",
        settings=asdict(settings),
        targets=_TARGETS,
        missed=exceeded,
    )
    asyncio.run(_measure(settings, record.add))
    if settings.steps:
        record.add(_measure_runs(settings))
    record.close("rose", rises)


async def _measure(
    settings: AdapterBenchSettings, report: Callable[[Part], None]
) -> None:
    with TemporaryDirectory(prefix="invrl-bench-") as folder:
        async with AsyncExitStack() as stack:
            try:
                engine = await _start(settings, Path(folder), stack)
            except InvrlError as error:
                report(failed_part("engine", error))
                return
            few = engine.measure(_FEW_REQUESTS, settings.updates)
            await report_part(f"in_flight_{_FEW_REQUESTS}", few, report)
            many = engine.measure(_MANY_REQUESTS, settings.repetitions)
            await report_part(f"in_flight_{_MANY_REQUESTS}", many, report)


async def _start(
    settings: AdapterBenchSettings, folder: Path, stack: AsyncExitStack
) -> UpdatedAdapter:
    """Start one engine behind a router, which `stack` ends, and give it version 0."""
    from benchmarks.weight_updates.changing_adapter import ChangingAdapter

    model = Path(settings.model_path)
    adapter = ChangingAdapter(
        model, folder / "weights", rank=settings.rank, dtype=settings.engine_dtype
    )
    weights = AdapterWeights.model_validate({"timeout_s": settings.deadline_s})
    fleet = Fleet(
        EngineConfig.model_validate(
            {"dtype": settings.engine_dtype, "max_total_tokens": _KV_TOKENS}
        ),
        model,
        folder,
        sglang={"max-running-requests": str(_MANY_REQUESTS + _FEW_REQUESTS)},
        weights=weights,
        adapter=ServedAdapter(
            rank=settings.rank, targets=adapter.kinds, num_versions=_NUM_VERSIONS
        ),
    )
    stack.push_async_callback(fleet.stop)
    await fleet.start()
    await fleet.admit()
    client = SglangClient(
        fleet.router.url,
        limits=fleet.limits,
        api_key=fleet.router.api_key,
        name="the router",
    )
    await stack.enter_async_context(client)
    [own] = fleet.engines.values()
    prompts = canary_prompts(model)
    adapter.expect(prompts, await own.client.prompt_logprobs(prompts))
    engine = UpdatedAdapter(fleet, client, adapter, settings, prompts)
    adapter.change()
    await engine.update()
    return engine


class UpdatedAdapter:
    """An engine that gets one version of an adapter after the other."""

    def __init__(
        self,
        fleet: Fleet,
        client: SglangClient,
        adapter: ChangingAdapter,
        settings: AdapterBenchSettings,
        prompts: Sequence[Sequence[int]],
    ) -> None:
        self._adapter = adapter
        self._client = client
        self._deadline_s = settings.deadline_s
        self._version = -1
        [self._engine] = fleet.engines.values()
        self._transaction = WeightTransaction(
            adapter,
            fleet.receivers,
            canary_prompts=prompts,
            bound=CanaryBound.for_dtypes(settings.engine_dtype),
            deadline_s=settings.deadline_s,
            pauses=False,
        )

    async def update(self) -> None:
        self._version += 1
        await self._transaction.run(WeightVersion(self._version))

    async def unequal_tensors(self) -> int:
        """Return how many tensors of the engine are not what the trainer has."""
        held = await self._engine.receiver.read_back(())
        expected = self._adapter.checksums()
        different = [
            name
            for name in held.checksums
            if expected.get(name) != held.checksums[name]
        ]
        return len(different) + len(expected.keys() - held.checksums.keys())

    async def measure(self, number: int, updates: int) -> Part:
        """Update the engine while `number` requests decode, `updates` times."""
        times: list[list[float]] = []
        quiet: list[Window] = []
        gaps: list[float] = []
        quiet_gaps: list[float] = []
        update_s: list[float] = []
        failures: list[str] = []
        unequal = 0
        for _ in range(updates):
            self._adapter.change()
            volley = Volley(self._client, number, version=self._version)
            before, window = await self._update_during(volley)
            unequal += await self.unequal_tensors()
            quiet.append(before)
            gaps.append(longest_gap(volley.times, window))
            update_s.append(window.end - window.start)
            as_long = Window(start=before.end - update_s[-1], end=before.end)
            quiet_gaps.append(longest_gap(volley.times, as_long))
            times += volley.times
            failures += volley.failures
        step_s = decode_step(times, quiet)
        name = f"in_flight_{number}"
        reasons = (
            [f"{len(failures)} requests failed, {failures[0]}"] if failures else []
        )
        if unequal:
            reasons.append(f"{unequal} tensors are not what the trainer has")
        return Part(
            ratios={
                f"gap_{number}": median(gaps) / step_s,
                f"gap_over_quiet_gap_{number}": median(gaps) / median(quiet_gaps),
                f"failed_requests_{number}": len(failures),
                f"unequal_tensors_{number}": unequal,
                "bytes_moved": self._adapter.bytes_moved / self._adapter.num_bytes,
            },
            details={
                name: {
                    "updates": updates,
                    "decode_step_s": step_s,
                    "gap_s": {"median": median(gaps), "longest": max(gaps)},
                    "quiet_gap_s": {
                        "median": median(quiet_gaps),
                        "longest": max(quiet_gaps),
                    },
                    "update_s": median(update_s),
                    "adapter_bytes": self._adapter.num_bytes,
                    "failures": failures[:10],
                }
            },
            failure=f"{name}: {', '.join(reasons)}" if reasons else "",
        )

    async def _update_during(self, volley: Volley) -> tuple[Window, Window]:
        """Update the engine while the requests decode. Returns the time before the
        update in which nothing else happened, and that of the update. Raises
        DeadlineError."""
        try:
            async with (
                asyncio.timeout(self._deadline_s),
                asyncio.TaskGroup() as group,
            ):
                volley.begin(group)
                await volley.until(1)
                quiet_from = time.monotonic()
                await volley.until(_TOKENS_BEFORE)
                start = time.monotonic()
                await self.update()
                end = time.monotonic()
        except TimeoutError:
            raise DeadlineError("a volley of requests", self._deadline_s) from None
        return Window(start=quiet_from, end=start), Window(start=start, end=end)


class Volley:
    """Requests that begin together, under one version, and have equally many
    tokens."""

    def __init__(self, client: SglangClient, number: int, *, version: int) -> None:
        self.times: list[list[float]] = [[] for _ in range(number)]
        """When the tokens of each request came, in seconds of the monotonic clock."""
        self.failures: list[str] = []
        self._client = client
        self._version = str(version)

    def begin(self, group: asyncio.TaskGroup) -> None:
        for place in range(len(self.times)):
            group.create_task(self._run(place))

    async def until(self, count: int) -> None:
        """Wait until each request has so many tokens, or one has failed."""
        while not self.failures and min(map(len, self.times)) < count:
            await asyncio.sleep(_POLL_S)

    async def _run(self, place: int) -> None:
        random = np.random.default_rng(place)
        limit = self._client.limits.vocab_size
        request = GenerateRequest(
            rid=f"bench-{uuid4().hex}",
            input_ids_T=random.integers(0, limit, _PROMPT_TOKENS).astype(np.int32),
            sampling=Sampling(max_new_tokens=_TOKENS),
            ignore_eos=True,
            routing_key=f"bench-{place}",
        )
        versions: set[str] = set()
        num_tokens = 0
        try:
            async for event in self._client.stream(request):
                versions |= {str(span.version) for span in event.spans}
                if isinstance(event, GenerateChunk):
                    self.times[place].append(time.monotonic())
                    num_tokens += len(event.ids_T)
        except InvrlError as error:
            self.failures.append(str(error))
            return
        if num_tokens != _TOKENS or versions != {self._version}:
            self.failures.append(
                f"{num_tokens} of {_TOKENS} tokens, of the versions {sorted(versions)} "
                f"instead of {self._version}"
            )


def _measure_runs(settings: AdapterBenchSettings) -> Part:
    """Compare the weight updates of two training runs, of which only one sends the
    adapter alone."""
    seconds: dict[str, list[float]] = {}
    try:
        for preset in ("quickstart_lora", "quickstart"):
            seconds[preset] = _sync_seconds(settings, preset)
    except (ServerError, DeadlineError) as error:
        return failed_part("sync_phase", error)
    of_adapter, of_model = map(median, seconds.values())
    return Part(
        ratios={"sync_phase": of_adapter / of_model},
        details={"sync_s": seconds},
    )


def _sync_seconds(settings: AdapterBenchSettings, preset: str) -> list[float]:
    """Return `time/sync_s` of each step of a run but the first. Raises ServerError,
    DeadlineError."""
    with TemporaryDirectory(prefix="invrl-bench-") as folder:
        command = [sys.executable, "-m", "invrl.cli", "train", "--config", preset]
        command += ["--model-path", settings.model_path, "--no-eval.tasks"]
        command += ["--num-steps", str(settings.steps), "--log.progress", "plain"]
        command += ["--run-root", folder, "--run-name", preset]
        try:
            run = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_RUN_DEADLINE_S,
            )
        except subprocess.TimeoutExpired:
            raise DeadlineError(f"a run of {preset}", _RUN_DEADLINE_S) from None
        if run.returncode:
            raise ServerError(
                f"the run failed: {run.stdout[-2000:]}{run.stderr[-1000:]}"
            )
        lines = Path(folder, preset, "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [row["time/sync_s"] for row in rows if "time/sync_s" in row][1:]


if __name__ == "__main__":
    sys.exit(run_benchmark(benchmark_adapter_updates, usage=__doc__))
