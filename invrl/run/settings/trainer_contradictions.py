"""Contradictions between settings of the trainer.

`contradictions.py` runs them. Pure, but for a look at which packages are installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from invrl.run.settings.algorithm_contradictions import Contradictions
from invrl.train.cost.activation_memory import recomputed_modules
from invrl.train.runtime.kernels import fused_adam

if TYPE_CHECKING:
    from invrl.run.settings.config import Config


def _routing_replay(config: Config) -> Contradictions:
    replay = config.train.routing_replay
    algorithm = config.algorithm
    if replay == "trainer" and algorithm.old_logprobs != "recompute":
        reason = (
            f"with --old-logprobs {algorithm.old_logprobs} the trainer makes no pass for them whose routing "
            "it could replay"
        )
        yield "train.routing_replay", reason, "use --old-logprobs recompute"
    if replay == "trainer" and algorithm.num_mini_batches == 1:
        reason = (
            "a batch has one optimizer step, in which the current policy is the old one: there is no earlier "
            "pass to repeat"
        )
        yield "train.routing_replay", reason, "set --num-mini-batches to 2 or more"
    if replay != "none" and "moe" in recomputed_modules(config.megatron):
        reason = "Megatron recomputes the experts' part of a layer without the routing of its micro-batch"
        fix = "recompute whole layers (--megatron-recompute-granularity full), or leave moe out"
        yield "megatron.recompute_modules", reason, fix


def _offloaded_optimizer(config: Config) -> Contradictions:
    train = config.train
    if not train.optimizer_cpu_offload:
        return
    if not train.use_distributed_optimizer:
        reason = "only the distributed optimizer can have its state in main memory"
        fix = "leave --no-use-distributed-optimizer out"
        yield "train.optimizer_cpu_offload", reason, fix
    fused = fused_adam()
    if fused is not None:
        reason = (
            f"{fused} is installed, which Megatron uses and which has no step on a CPU"
        )
        fix = "leave it out, or uninstall that package"
        yield "train.optimizer_cpu_offload", reason, fix


TRAINER = (_routing_replay, _offloaded_optimizer)
