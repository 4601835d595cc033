"""Training steps with the optimizer in main memory: the weights are its master weights,
rounded; the memory of the card next to our own estimate; the seconds of a step."""

from typing import Any

from benchmarks.training.step_program import start_rank
from benchmarks.training.workloads import make_batch
from gpu_check.random_model import random_model
from gpu_check.result import emit
from gpu_check.settings import CheckSettings
from invrl.algorithms.config import AlgorithmConfig
from invrl.families.hf_config import read_hf_config
from invrl.train.batches.sharding import shard_batch
from invrl.train.config import TrainConfig
from invrl.train.trainer.train_rank import TrainRank
from invrl.types.metrics import resolve

_MICRO_BATCH = 4096
_SMOKE_MICRO_BATCH = 128
_STEPS = 3
_LARGEST_PEAK = 1.1
"""Times the estimate."""


def run(settings: CheckSettings) -> None:
    num_tokens = _SMOKE_MICRO_BATCH if settings.smoke else _MICRO_BATCH
    model = random_model(settings, settings.model)
    train = TrainConfig.model_validate(
        {
            "optimizer_cpu_offload": True,
            "max_tokens_per_micro_batch": num_tokens,
            "lr": 1e-3,
        }
    )
    rank = start_rank(str(model), train, AlgorithmConfig.model_validate({}))
    batch = make_batch(
        "equal_lengths",
        num_tokens=2 * num_tokens,
        longest=num_tokens,
        vocab_size=read_hf_config(model).vocab_size,
    )
    [shard] = shard_batch(batch, ranks=1, steps=1)
    values: dict[str, float] = {}
    for _ in range(_STEPS):
        result = rank.train(shard)
        num_unequal = _unequal_shares(rank)
        values = resolve(result.metrics)
        emit(
            peak_memory_gb=values["peak_memory_gb"],
            estimated_memory_gb=values["estimated_memory_gb"],
            step_phases_s=dict(result.seconds),
            unequal_shares=num_unequal,
        )
        assert num_unequal == 0, "weights are not the master weights, rounded"
    if not settings.smoke:
        most = _LARGEST_PEAK * values["estimated_memory_gb"]
        assert values["peak_memory_gb"] <= most, "the step needs more than estimated"


def _unequal_shares(rank: TrainRank) -> int:
    """Count the parameters whose weights are not their master weights in the dtype of
    the model."""
    parts: list[Any] = list(rank._step.optimizer.chained_optimizers)
    num_unequal = 0
    for part in parts:
        for group in part._groups:
            for share in group:
                weights = part._model_share(share.parameter).cpu()
                expected = share.master.detach().to(weights.dtype)
                num_unequal += not weights.equal(expected)
    return num_unequal
