"""The trainer's own state on disk: a Megatron distributed checkpoint of model, optimizer and schedule, and
each rank's random state.

A checkpoint that one layout of ranks wrote can be loaded by any other. What a run's
whole checkpoint consists of is in `run/checkpoints.py`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint.api import CheckpointException

from invrl.errors import TrainError
from invrl.store.checksummed_file import ChecksummedFile
from invrl.train import device
from invrl.train.checkpoint_writer import LateTensors, TensorByTensor, gather_late
from invrl.train.model import PolicyModel
from invrl.types import FileEntries


class TrainerState:
    """Saves and loads one rank's share of the model and its optimizer, and its random state."""

    def __init__(
        self, chunks: Sequence[PolicyModel], optimizer: ChainedOptimizer, schedule: OptimizerParamScheduler
    ) -> None:
        self._chunks = {f"model{number}": chunk for number, chunk in enumerate(chunks)}
        self._optimizer = optimizer
        self._schedule = schedule
        self._late = LateTensors()
        for part in optimizer.chained_optimizers:
            if isinstance(part, DistributedOptimizer):
                gather_late(part, self._late)

    def save(self, path: str) -> FileEntries:
        """Called on all ranks together. Returns the entries of the files that this rank has written. Raises
        TrainError if the folder is not empty or cannot be written."""
        folder = Path(path)
        if torch.distributed.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        if any(folder.iterdir()):
            raise TrainError(f"{folder} is not empty: a checkpoint is not written over another")
        torch.distributed.barrier()
        self._late.clear()
        state = self._sharded_state(is_loading=False)
        tensors = TensorByTensor(self._late)
        try:
            dist_checkpointing.save(state, str(folder), tensors)
        except CheckpointException as error:  # a BaseException, and only rank 0's names the cause
            causes = [str(cause) for cause, _ in error.failures.values()] or ["another rank failed"]
            raise TrainError(f"the checkpoint {folder} could not be written: {causes[0]}") from error
        rng_file = _rng_file(folder)
        rng_file.parent.mkdir(exist_ok=True)
        with ChecksummedFile(rng_file) as file:
            torch.save(device.random_state(), cast(Any, file))
        torch.distributed.barrier()
        return {**tensors.written, rng_file.relative_to(folder).as_posix(): file.entry()}

    def load(self, path: str) -> None:
        """Called on all ranks together. Raises TrainError if there is no checkpoint."""
        if not dist_checkpointing.check_is_distributed_checkpoint(path):
            raise TrainError(f"{path} holds no checkpoint")
        state: Any = dist_checkpointing.load(self._sharded_state(is_loading=True), path)
        for name, chunk in self._chunks.items():
            chunk.load_state_dict(state[name])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        rng_file = _rng_file(Path(path))
        if rng_file.exists():  # absent for a rank that the saving run did not have
            device.set_random_state(torch.load(rng_file, weights_only=True))

    def _sharded_state(self, *, is_loading: bool) -> dict[str, Any]:
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        model: dict[str, Any] = {
            name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in self._chunks.items()
        }
        optimizer = self._optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        return {**model, "optimizer": optimizer, "schedule": self._schedule.state_dict()}


def _rng_file(folder: Path) -> Path:
    return folder / "rng" / f"rank-{torch.distributed.get_rank()}.pt"
