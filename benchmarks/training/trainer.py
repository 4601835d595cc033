"""`python -m benchmarks.train`: the trainer's ratios, measured in processes that are
started one after the other.

Imports neither torch nor Megatron, so that the processes set both up themselves.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import BaseModel, ConfigDict

from benchmarks.ratios import Part, Speeds
from invrl.errors import ConfigError, DeadlineError, TrainError
from invrl.families.hf_config import read_hf_config
from invrl.host.processes.descendants import die_with_parent
from invrl.host.processes.process import random_key
from invrl.train.config import TrainConfig
from invrl.train.cost.memory_budget import MemoryBudget

TARGETS = {
    "equal_lengths": 0.95,
    "long_tailed": 1.5,
    "compute_share": 0.97,
}
"""Ratio -> the least it should be. The other ratios are on record only."""
GPU_TARGETS = {"model_flops_utilization": 0.40}
"""For a model of 4B parameters and more at 16,384 packed tokens."""
_LAYOUTS = {
    "data_parallel_2": {"data_parallel_size": 2},
    "tensor_parallel_2": {"tensor_model_parallel_size": 2},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    model_path: str
    train: TrainConfig
    num_tokens: int
    """Row tokens of a step."""
    repetitions: int
    cores: int
    """For the ratios of layouts: one process with all of them, or ranks that share
    them; 1: no layouts."""
    deadline_s: float
    """Of each process."""


class _StepResult(BaseModel):
    """What `step_program.py` writes."""

    model_config = ConfigDict(extra="forbid")

    speeds: dict[str, dict[str, list[float]]]
    phases: list[dict[str, float]]
    operations_per_s: list[float]
    matmul_operations_per_s: float


class _LayoutResult(BaseModel):
    """What `rank_program.py` writes."""

    model_config = ConfigDict(extra="forbid")

    seconds: list[float]
    peak_memory_gb: float
    largest_micro_batch: int
    row_tokens: int

    @property
    def tokens_per_s(self) -> float:
        return self.row_tokens / median(self.seconds)


def measure_trainer(settings: BenchSettings) -> Iterator[Part]:
    """Part by part, so that a later one that fails or hangs costs none of those before
    it."""
    with tempfile.TemporaryDirectory(prefix="invrl-bench-") as folder:
        ranks = _Ranks(settings, Path(folder))
        parts: dict[str, Callable[[], Part]] = {
            "steps": lambda: _step_ratios(_measure_steps(settings, Path(folder))),
            "memory": ranks.memory,
        }
        if settings.cores > 1:
            parts["data_parallel_2"] = ranks.data_parallel
            parts["tensor_parallel_2"] = ranks.tensor_parallel
        for name, measure in parts.items():
            try:
                yield measure()
            except (TrainError, DeadlineError) as error:
                yield Part(
                    ratios={},
                    details={f"{name}_failed": str(error)},
                    failure=f"{name}: {error}",
                )


class _Ranks:
    """The parts that are measured in other processes: one that has all cores, or two
    that share them."""

    def __init__(self, settings: BenchSettings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder
        self._one: _LayoutResult | None = None
        """One process, once it has been measured."""

    def memory(self) -> Part:
        """The analytic minimum over the peak of one process."""
        one = _measure_layout(
            self._settings,
            self._folder,
            "one_process",
            {},
            threads=self._settings.cores,
        )
        self._one = one
        minimum = _analytic_minimum(self._settings, one.largest_micro_batch)
        return Part(
            ratios={"minimum_memory": minimum / one.peak_memory_gb},
            details={"memory_gb": {"minimum": minimum, "peak": one.peak_memory_gb}},
        )

    def data_parallel(self) -> Part:
        return self._two_over_one(self._settings, "data_parallel_2", self._one)

    def tensor_parallel(self) -> Part:
        """Of a model like this with other heads where two ranks cannot divide its
        own."""
        settings = self._settings
        one = self._one
        if _refusal(settings, _LAYOUTS["tensor_parallel_2"]):
            settings = _with_even_heads(settings, self._folder)
            refusal = _refusal(settings, _LAYOUTS["tensor_parallel_2"])
            if refusal:
                return Part(
                    ratios={}, details={"tensor_parallel_2": {"refused": refusal}}
                )
            one = _measure_layout(
                settings, self._folder, "one_even", {}, threads=settings.cores
            )
        return self._two_over_one(settings, "tensor_parallel_2", one)

    def _two_over_one(
        self, settings: BenchSettings, name: str, one: "_LayoutResult | None"
    ) -> Part:
        if one is None:
            raise TrainError(
                "there is nothing to compare with: one process could not be measured"
            )
        threads = settings.cores // 2
        two = _measure_layout(
            settings, self._folder, name, _LAYOUTS[name], threads=threads
        )
        config = read_hf_config(settings.model_path)
        details = {
            "tokens_per_s": two.tokens_per_s,
            "one_process_tokens_per_s": one.tokens_per_s,
            "heads": [config.num_attention_heads, config.num_key_value_heads],
            "weights": "the model's" if settings is self._settings else "random",
        }
        return Part(
            ratios={name: two.tokens_per_s / one.tokens_per_s}, details={name: details}
        )


def _with_even_heads(settings: BenchSettings, folder: Path) -> BenchSettings:
    target = folder / "even_model"
    program = _Program("benchmarks.training.even_model", folder / "even_model.log")
    program.start({}, settings.model_path, str(target))
    _wait([program], settings.deadline_s)
    return replace(settings, model_path=str(target))


def _step_ratios(steps: _StepResult) -> Part:
    ratios: dict[str, float] = {}
    details: dict[str, Any] = {"speeds": {}, "phases": steps.phases}
    for workload, speeds in steps.speeds.items():
        summary = Speeds(**speeds).summary()
        details["speeds"][workload] = summary
        ratios[workload] = summary["ratio"]
    # Of the time of a step: forward, backward and optimizer. The rest is the
    # objective's.
    ratios["compute_share"] = median(
        (phases["forward_backward"] + phases["optimizer"]) / phases["total"]
        for phases in steps.phases
    )
    ratios["model_flops_utilization"] = (
        median(steps.operations_per_s) / steps.matmul_operations_per_s
    )
    details["operations_per_s"] = {
        "trainer": median(steps.operations_per_s),
        "matmul": steps.matmul_operations_per_s,
    }
    return Part(ratios=ratios, details=details)


def _analytic_minimum(settings: BenchSettings, num_tokens: int) -> float:
    """GB of one rank: weights, gradients, optimizer, and what a step must keep."""
    budget = MemoryBudget.of(
        settings.train,
        Path(settings.model_path),
        frozen_models=0,
        served_dtype=settings.train.train_dtype,
        megatron={},
        copies_checkpoints=False,
        on_cuda=_on_cuda(),
    )
    estimate = budget.largest(num_tokens)
    return (
        estimate.weights + estimate.gradients + estimate.optimizer + estimate.step
    ) / 1e9


def _on_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _measure_steps(settings: BenchSettings, folder: Path) -> _StepResult:
    """Raises TrainError unless both steps are the same, before it compares their
    speeds."""
    same_step = _Program("benchmarks.training.same_step", folder / "same_step.log")
    same_step.start(
        {"model_path": settings.model_path, "train": settings.train.model_dump()}
    )
    _wait([same_step], settings.deadline_s)
    out = folder / "steps.json"
    program = _Program("benchmarks.training.step_program", folder / "steps.log")
    program.start(
        {
            "model_path": settings.model_path,
            "train": settings.train.model_dump(),
            "num_tokens": settings.num_tokens,
            "repetitions": settings.repetitions,
            "out": str(out),
        }
    )
    _wait([program], settings.deadline_s)
    return _StepResult.model_validate_json(out.read_text(encoding="utf-8"))


def _refusal(settings: BenchSettings, sizes: Mapping[str, int]) -> str:
    """Why the model cannot be divided so; "" where it can."""
    try:
        settings.train.model_copy(update=dict(sizes)).check_model(
            read_hf_config(settings.model_path)
        )
    except ConfigError as error:
        return str(error)
    return ""


def _measure_layout(
    settings: BenchSettings,
    folder: Path,
    name: str,
    sizes: Mapping[str, int],
    *,
    threads: int,
) -> _LayoutResult:
    train = settings.train.model_copy(update=dict(sizes))
    store_key = random_key()
    programs: list[_Program] = []
    outs: list[Path] = []
    for rank in range(train.layout.world_size):
        outs.append(folder / f"{name}-{rank}.json")
        program = _Program(
            "benchmarks.training.rank_program",
            folder / f"{name}-{rank}.log",
            threads=threads,
        )
        program.start(
            {
                "rank": rank,
                "train": train.model_dump(),
                "threads": threads,
                "model_path": settings.model_path,
                "workload": "equal_lengths",
                "num_tokens": settings.num_tokens,
                "repetitions": settings.repetitions,
                "port_file": str(folder / f"{name}.port"),
                "store_key": store_key,
                "deadline_s": settings.deadline_s,
                "out": str(outs[-1]),
            }
        )
        programs.append(program)
    _wait(programs, settings.deadline_s)
    return _LayoutResult.model_validate_json(outs[0].read_text(encoding="utf-8"))


class _Program:
    """A process of the measurement, which ends with this one. `log` takes what it
    prints."""

    def __init__(self, module: str, log: Path, *, threads: int = 1) -> None:
        self._module = module
        self._log = log
        self._environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._process: subprocess.Popen[str]

    def start(self, settings: Mapping[str, object], *arguments: str) -> None:
        """`settings` are its standard input."""
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                encoding="utf-8",
                errors="replace",
                preexec_fn=die_with_parent,
            )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(settings))
        self._process.stdin.close()

    def wait(self, seconds: float) -> None:
        """Raises TrainError if it failed."""
        try:
            exit_code = self._process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise DeadlineError(f"{self._module} to end", seconds) from error
        if exit_code:
            last_lines = "\n".join(
                self._log.read_text(errors="replace", encoding="utf-8").splitlines()[
                    -12:
                ]
            )
            raise TrainError(
                f"{self._module} ended with exit code {exit_code}:\n{last_lines}"
            )

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def _wait(programs: Sequence[_Program], seconds: float) -> None:
    try:
        for program in programs:
            program.wait(seconds)
    finally:
        for program in programs:
            program.stop()
