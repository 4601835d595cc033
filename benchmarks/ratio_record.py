"""The result of `benchmarks.train` or `benchmarks.weights`: JSON after every part, and
a line of the history."""

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.ratios import Change, Entry, Part, append_history, read_history
from invrl import __version__
from invrl.cli.command import CommandFailed
from invrl.engines.launch.engine_server import count_gpus
from invrl.host.files.disk import write_atomically
from invrl.run.processes.driver_commands import FAILURE_EXIT


class RatioRecord:
    """The ratios of one run. `add` prints and writes each part as soon as it is
    measured."""

    def __init__(
        self,
        results: Path,
        name: str,
        *,
        model: str,
        settings: Mapping[str, Any],
        targets: Mapping[str, float],
        missed: Callable[[Mapping[str, float], Mapping[str, float]], list[str]],
    ) -> None:
        """Writes `results`/NAME.json. `missed`: the ratios that are on the wrong side
        of their target."""
        results.mkdir(parents=True, exist_ok=True)
        self._file = results / f"{name}.json"
        self._history = results / "history.jsonl"
        self._targets = targets
        self._missed = missed
        self._ratios: dict[str, float] = {}
        self._has_failed = False
        self._entry = Entry(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=__version__,
            machine=_machine(),
            model=model,
            ratios=self._ratios,
        )
        self._result: dict[str, Any] = {
            "date": self._entry.date,
            "version": self._entry.commit,
            "machine": self._entry.machine,
            "load_before": round(os.getloadavg()[0], 2),
            "model": model,
            **settings,
            "ratios": self._ratios,
            "targets": targets,
        }

    def add(self, part: Part) -> None:
        for name, ratio in part.ratios.items():
            self._ratios[name] = round(ratio, 4)
            print(self._line(name), flush=True)
        if part.failure:
            self._has_failed = True
            print(f"FAILED: {part.failure}", flush=True)
        self._result.update(part.details)
        self._result["missed"] = self._missed(self._ratios, self._targets)
        self._write()

    def close(
        self,
        name: str,
        regressions: Callable[[Entry, Sequence[Entry]], Sequence[Change]],
    ) -> None:
        """Write the history, and under `name` the ratios that are worse than it. Raises
        CommandFailed if there are any, or if a part failed."""
        changes = [
            str(change)
            for change in regressions(self._entry, read_history(self._history))
        ]
        append_history(self._history, self._entry)
        self._result[name] = changes
        self._write()
        print(self._file)
        for change in changes:
            print(f"{name.upper()}: {change}")
        if changes or self._has_failed:
            raise CommandFailed(FAILURE_EXIT)

    def _write(self) -> None:
        write_atomically(self._file, json.dumps(self._result, indent=2) + "\n")

    def _line(self, name: str) -> str:
        line = f"{name:<26}{self._ratios[name]:7.3f}"
        if name not in self._targets:
            return line
        verdict = (
            "  MISSED"
            if self._missed({name: self._ratios[name]}, self._targets)
            else ""
        )
        return f"{line}   target {self._targets[name]:.2f}{verdict}"


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line for line in lines if line.startswith("model name")]
    processor = names[0].partition(":")[2].strip() if names else platform.machine()
    gpus = count_gpus()
    if gpus:
        return f"{gpus} GPUs, {os.cpu_count()} x {processor}"
    return f"{os.cpu_count()} x {processor}"
