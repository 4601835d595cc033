"""The plan of GPUs: which trainer rank and which engine is on which GPU. Made before
anything starts, from the number of GPUs; Ray and SGLang place nothing themselves.

    trainer ranks | engine-0 | engine-1 | ...    GPUs in CUDA's order, with their own
    trainer ranks
    engine-0 | engine-1 | ...                    with --colocate, by turns
    trainer rank + engine-0                      one GPU: both are resident on it

GPU numbers are those of this process (`host/gpus.py`). Imports no torch.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from invrl.errors import ConfigError
from invrl.host.gpus import VISIBLE_VARIABLE
from invrl.run.settings.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """GPUs of a run."""

    ranks: tuple[int, ...]
    """GPU of each trainer rank: the policy's, then those of a critic with own ranks."""
    engines: tuple[tuple[int, ...], ...]
    """GPUs of each engine that the run starts."""
    takes_turns: bool = False
    """Whether ranks and engines on the same GPU use it by turns."""

    @property
    def numbers(self) -> list[int]:
        """Numbers of all GPUs of the run."""
        return sorted({*self.ranks, *(gpu for gpus in self.engines for gpu in gpus)})

    @property
    def shares(self) -> bool:
        """Whether a trainer rank and an engine are on the same GPU."""
        return any(gpu in self.ranks for gpus in self.engines for gpu in gpus)

    def cores_per_rank(self, cores: int) -> int:
        """Return the cores that a trainer rank computes with: its share of those that
        the engines leave, whose process on each GPU always runs. At least 1."""
        of_engines = sum(len(gpus) for gpus in self.engines)
        return max(1, (cores - of_engines) // len(self.ranks))

    def __str__(self) -> str:
        parts = [f"engine-{i} on {_named(gpus)}" for i, gpus in enumerate(self.engines)]
        if self.ranks:
            noun = "trainer rank" if len(self.ranks) == 1 else "trainer ranks"
            parts.insert(0, f"{len(self.ranks)} {noun} on {_named(self.ranks)}")
        if self.takes_turns and self.shares:
            parts.append("by turns")
        return ", ".join(parts)


def plan_run(config: Config, num_gpus: int) -> GpuPlan | None:
    """Plan a run that trains with the first of `num_gpus` GPUs. None: there is no GPU,
    and everything is on the CPU. Raises ConfigError if there are too few GPUs, with the
    settings that would fit."""
    return _plan(
        config,
        num_gpus,
        num_ranks=0 if config.run.debug_rollout_only else _ranks_here(config),
        num_engines=config.engines_here,
    )


def plan_engines(config: Config, num_gpus: int) -> GpuPlan | None:
    """Plan engines without a trainer, as `plan_run` does."""
    return _plan(config, num_gpus, num_ranks=0, num_engines=config.engines_here)


def plan_trainer(config: Config, num_gpus: int) -> GpuPlan | None:
    """Plan a trainer without engines, as `plan_run` does."""
    return _plan(config, num_gpus, num_ranks=_ranks_here(config), num_engines=0)


def _ranks_here(config: Config) -> int:
    """Return the number of trainer ranks on the driver's node."""
    return 0 if config.rank_nodes else config.num_ranks


def _plan(
    config: Config, num_gpus: int, *, num_ranks: int, num_engines: int
) -> GpuPlan | None:
    if not num_gpus:
        return None
    of_engine = config.engine.tp_size
    first = num_ranks
    shares_the_only_gpu = num_gpus == num_ranks == num_engines == of_engine == 1
    if config.run.colocate or shares_the_only_gpu:
        first = 0
    needed = max(num_ranks, first + num_engines * of_engine)
    if needed > num_gpus:
        raise _too_few(
            config, num_gpus, num_ranks=num_ranks, num_engines=num_engines, first=first
        )
    starts = [first + index * of_engine for index in range(num_engines)]
    return GpuPlan(
        ranks=tuple(range(num_ranks)),
        engines=tuple(tuple(range(start, start + of_engine)) for start in starts),
        takes_turns=bool(config.run.colocate),
    )


def _too_few(
    config: Config, num_gpus: int, *, num_ranks: int, num_engines: int, first: int
) -> ConfigError:
    """Return the error for too few GPUs. `first`: the engines' first GPU."""
    of_engine = config.engine.tp_size
    of_engines = num_engines * of_engine
    reason = f"the run needs {max(num_ranks, first + of_engines)}"
    parts: list[str] = []
    if num_ranks:
        parts.append(f"{num_ranks} for the trainer's ranks")
    if num_engines:
        parts.append(f"{of_engines} for {num_engines} engine(s) of {of_engine} each")
    reason += f": {' and '.join(parts)}"
    if first == 0 and len(parts) == 2:
        reason += ", the same ones by turns"
    setting = os.environ.get(VISIBLE_VARIABLE)
    if setting is not None:
        reason += f"; {VISIBLE_VARIABLE}={setting} shows no more"
    fixes: list[str] = []
    fitting = (num_gpus - first) // of_engine
    if 0 < fitting < num_engines:
        fixes.append(f"lower --num-engines to {fitting}")
    elif of_engine > 1:
        fixes.append("lower --engine.tp-size")
    ranks_too_many = num_ranks + (of_engine if first else 0) > num_gpus
    if ranks_too_many and config.train.data_parallel_size > 1:
        fixes.append("lower --data-parallel-size")
    if first and max(num_ranks, of_engines) <= num_gpus:
        fixes.append(fix_by_turns(config))
    fix = "; or ".join(fixes) or "use a machine with more"
    return ConfigError("gpus", num_gpus, reason, fix)


def fix_by_turns(config: Config) -> str:
    """Return the fix of a run that would fit by turns."""
    decided = config.run.colocate is not None
    fix = "write --colocate for --no-colocate" if decided else "add --colocate"
    return f"{fix}: trainer and engines then use the same GPUs by turns"


def _named(numbers: Sequence[int]) -> str:
    """Name GPUs that follow each other: "GPU 2", "GPUs 2 to 5"."""
    if len(numbers) == 1:
        return f"GPU {numbers[0]}"
    return f"GPUs {numbers[0]} to {numbers[-1]}"
