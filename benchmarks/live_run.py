"""A short `invrl train` as a user runs it: where the time of its steps goes, and how
much memory and CPU each of its processes takes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from soak import ROLES

from invrl.errors import ServerError

_SAMPLE_S = 0.5
_MB = 1e6


def measure_run(flags: Sequence[str], folder: Path) -> dict[str, Any]:
    """Runs it to its end. `time`: see `step_shares`; `processes`: see `Family`. Raises
    ServerError."""
    command = [
        sys.executable,
        "-m",
        "invrl.cli",
        "train",
        *flags,
        "--log.progress",
        "plain",
    ]
    started = time.monotonic()
    with (folder / "live.log").open("wb") as log:
        run = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
        family = Family(run.pid)
        while run.poll() is None:
            family.sample()
            time.sleep(_SAMPLE_S)
    if run.returncode:
        raise ServerError(
            f"the run failed: {(folder / 'live.log').read_text()[-3000:]}"
        )
    [metrics] = folder.glob("live/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {
        "wall_s": round(time.monotonic() - started, 1),
        "time": step_shares(rows),
        "processes": family.report(),
    }


def step_shares(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Shares of the wall time from the end of the first step to the end of the last but
    one: the first waits for what is slow once, the last writes the checkpoint. The
    phases are the driver's: a batch that is generated while another trains costs only
    what the driver still waits for it, so nothing counts twice."""
    steps = [row for row in rows if "time/step_s" in row]
    counted = steps[1:-1]
    wall = counted[-1]["time"] - steps[0]["time"]
    shares = {
        phase: sum(row[f"time/{phase}_s"] for row in counted) / wall
        for phase in ("rollout", "train", "sync")
    }
    return {
        name: round(value, 4)
        for name, value in {**shares, "busy_share": sum(shares.values())}.items()
    }


class Family:
    """A supervisor, its driver and all below, sampled. Memory is per role: PSS shares
    what several processes map (the weight arena, what a fork has not written); RSS
    counts it in each."""

    def __init__(self, pid: int) -> None:
        self._supervisor = psutil.Process(pid)
        self._pss: Counter[str] = Counter()
        self._rss: Counter[str] = Counter()
        self._total = 0.0
        self._cpu: dict[tuple[str, int], float] = {}

    def sample(self) -> None:
        pss = Counter[str]()
        rss = Counter[str]()
        try:
            found = [self._supervisor, *self._supervisor.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in found:
            try:
                role = (
                    process_role(process.cmdline())
                    if process != self._supervisor
                    else "supervisor"
                )
                memory = process.memory_full_info()
                cpu = process.cpu_times()
            except psutil.Error:
                continue
            pss[role] += memory.pss
            rss[role] += memory.rss
            self._cpu[role, process.pid] = cpu.user + cpu.system
        self._pss |= pss  # the larger of each
        self._rss |= rss
        self._total = max(self._total, pss.total())

    def report(self) -> dict[str, object]:
        cpu: defaultdict[str, float] = defaultdict(float)
        for (role, _), seconds in self._cpu.items():
            cpu[role] += seconds
        roles = {
            role: {
                "peak_pss_mb": round(self._pss[role] / _MB),
                "peak_rss_mb": round(self._rss[role] / _MB),
                "cpu_s": round(cpu[role], 1),
            }
            for role in sorted(self._pss)
        }
        return {
            "peak_pss_mb": round(self._total / _MB),
            "cpu_s": round(sum(cpu.values()), 1),
            "roles": roles,
        }


_OF_RAY = {"raylet", "gcs"}


def process_role(command: Sequence[str]) -> str:
    """What a process of a run is, by its command line. "ray" is all of Ray's own,
    raylet and GCS among them, and actors that have not begun."""
    line = " ".join(command)
    for role, part in ROLES.items():
        if part and part in line:
            return "ray" if role in _OF_RAY else role
    if "sglang::" in line:
        return "engine"
    if "invrl.host.processes.guardian" in line:
        return "guardian"
    return "ray" if "ray" in line else "other"
