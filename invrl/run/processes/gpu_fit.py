"""What the memory of a machine's GPUs decides where the settings do not: whether
engines and trainer use them by turns, and the tokens of a micro-batch.

Imports no torch.
"""

from dataclasses import replace

from invrl.errors import ConfigError
from invrl.run.processes.gpu_plan import GpuPlan, plan_run
from invrl.run.processes.trainer_memory import (
    DividedGpu,
    trainer_memory,
    with_divided_memory,
)
from invrl.run.settings import contradictions
from invrl.run.settings.config import Config
from invrl.train.config import MICRO_BATCH_TOKENS

_LARGER_MICRO_BATCHES = (8192, 16384)
"""Tokens to choose from besides the default. More gain little."""
_USED_SHARE = 0.8
"""Share of a GPU that a chosen size may use by the estimate."""


def fitted_to_gpus(config: Config, *, gpus: int, gpu_bytes: int) -> Config:
    """Return the configuration of a run that trains on `gpus` GPUs, the smallest with
    `gpu_bytes` of memory: with `--colocate` if the run does not fit otherwise, and with
    larger micro-batches if they fit and the user has set none.

    What does not fit at all is returned unchanged; the plan refuses it.
    """
    if not gpus:
        return config
    try:
        config = _with_turns(config, gpus=gpus, gpu_bytes=gpu_bytes)
        plan = plan_run(config, gpus)
    except ConfigError:
        return config
    if plan is None or not plan.ranks:
        return config
    return _with_large_micro_batches(config, plan, gpus=gpus, gpu_bytes=gpu_bytes)


def _with_turns(config: Config, *, gpus: int, gpu_bytes: int) -> Config:
    """Return the configuration with `--colocate` if it is refused without, and the user
    has not decided. Raises ConfigError if it is refused with it, too."""
    if config.run.colocate is not None:
        return config
    try:
        plan = plan_run(config, gpus)
        with_divided_memory(config, plan, gpu_bytes=gpu_bytes)
    except ConfigError:
        run = config.run.model_copy(update={"colocate": True})
        turns = config.model_copy(update={"run": run})
        contradictions.check(turns)
        plan_run(turns, gpus)
        parts = DividedGpu.of(turns, gpus=gpus, gpu_bytes=gpu_bytes)
        if parts is not None and not parts.fits_by_turns:
            raise
        return turns
    return config


def _with_large_micro_batches(
    config: Config, plan: GpuPlan, *, gpus: int, gpu_bytes: int
) -> Config:
    """Return the configuration with the largest micro-batches that fit. If trainer and
    engine are resident on one GPU, what the trainer leaves is the engine's cache, so
    they stay small."""
    is_divided = plan.shares and not config.run.colocate
    if config.train.max_tokens_per_micro_batch is not None or is_divided:
        return config
    budget = trainer_memory(config, gpus=gpus, gpu_bytes=gpu_bytes)
    if budget is None:
        return config
    available = _USED_SHARE * gpu_bytes
    if plan.shares:
        parts = DividedGpu.of(config, gpus=gpus, gpu_bytes=gpu_bytes)
        assert parts is not None, "its model was read"
        available -= parts.engine_by_turns
    budgets = [budget]
    if config.critic_layout is not None:  # it is trained whole, with the same rows
        budgets.append(replace(budget, adapter=None, frozen_models=0))
    chosen = MICRO_BATCH_TOKENS
    for tokens in _LARGER_MICRO_BATCHES:
        of_all_ranks = tokens * config.train.context_parallel_size
        needed = max(part.largest(of_all_ranks).total for part in budgets)
        if needed <= available:
            chosen = tokens
    train = config.train.model_copy(update={"max_tokens_per_micro_batch": chosen})
    return config.model_copy(update={"train": train})
