"""One rank's share of a Megatron distributed checkpoint: the common parts of all states
on disk.

A checkpoint that one layout of ranks wrote can be loaded by any other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from invrl.errors import TrainError
from invrl.store.checksummed_file import ChecksummedFile
from invrl.train.model.policy_model import PolicyModel
from invrl.train.parallel.process_group import max_over_ranks
from invrl.train.ranks.checkpoint_reader import read_checkpoint
from invrl.train.ranks.checkpoint_writer import StatePlaceholders, TensorByTensor
from invrl.train.ranks.joint_write import write_jointly
from invrl.train.runtime import device
from invrl.train.runtime.adamw_repairs import complete_states, steps_made, write_steps
from invrl.types.file_entry import FileEntries


class SavedState:
    """Saves one rank's share of models and their optimizers, and its random state."""

    def __init__(
        self, optimizers: Sequence[ChainedOptimizer], placeholders: StatePlaceholders
    ) -> None:
        """`placeholders` may be used by several objects that save the same
        optimizer."""
        self._placeholders = placeholders
        for optimizer in optimizers:
            for part in optimizer.chained_optimizers:
                if isinstance(part, DistributedOptimizer):
                    placeholders.use_for(part)

    def save(self, path: str) -> FileEntries:
        """Save the share. Called on all ranks together. Returns the entries of the
        files that this rank has written. Raises TrainError if the folder is not empty
        or cannot be written, DiskFullError if there is no space."""
        saving = self._begin(path, copies=False)
        saving.write()
        return saving.finish()

    def copy(self, path: str) -> "Saving":
        """Begin to save in three parts, of which the second, `Saving.write`, may run in
        another thread during training. A copy of everything that this rank writes is in
        memory until then. Called on all ranks together. Raises like `save`."""
        return self._begin(path, copies=True)

    def _begin(self, path: str, *, copies: bool) -> "Saving":
        folder = Path(path)
        write_jointly(folder, partial(_make_empty, folder))
        self._placeholders.late.clear()
        state = self.sharded(is_loading=False)
        tensors = TensorByTensor(self._placeholders.late, copies=copies)
        sharded_state, common_state = save_preprocess(state)
        write_common = partial(_write_common, folder, common_state)
        written = write_jointly(folder, write_common)
        request = tensors.async_save(sharded_state, folder)
        return Saving(folder, request, tensors, device.random_state(), written)

    def _read(self, sharded: dict[str, Any], path: str) -> Any:
        """Fill a state dict, made for loading, from the checkpoint at `path`. The state
        of distributed optimizers is then already where they hold it."""
        try:
            return read_checkpoint(sharded, path, self._placeholders.shares)
        finally:
            self._placeholders.shares.clear()

    def sharded(self, *, is_loading: bool) -> dict[str, Any]:
        """Return this rank's share, to be saved or filled."""
        raise NotImplementedError


class Trained:
    """A model with its optimizer and schedule."""

    def __init__(
        self,
        chunks: Sequence[PolicyModel],
        optimizer: ChainedOptimizer,
        schedule: OptimizerParamScheduler,
    ) -> None:
        self._chunks = {f"model{number}": chunk for number, chunk in enumerate(chunks)}
        self._optimizer = optimizer
        self._schedule = schedule

    @property
    def chunk_names(self) -> Sequence[str]:
        """Their keys in `sharded_state`."""
        return list(self._chunks)

    def sharded_state(
        self, metadata: dict[str, Any], *, is_loading: bool
    ) -> dict[str, Any]:
        model: dict[str, Any] = {
            name: chunk.sharded_state_dict(metadata=metadata)
            if chunk.adapter is None
            else chunk.adapter.sharded_state(metadata)
            for name, chunk in self._chunks.items()
        }
        parts = self._optimizer.chained_optimizers
        for part in parts:
            if isinstance(part.optimizer, torch.optim.AdamW) and not isinstance(
                part, DistributedOptimizer
            ):
                complete_states(part.optimizer)
        optimizer: Any = self._optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=metadata
        )
        steps = max_over_ranks(steps_made([part.optimizer for part in parts]))
        for part, state in self._by_part(optimizer):
            write_steps(
                state, steps, is_distributed=isinstance(part, DistributedOptimizer)
            )
        return {
            **model,
            "optimizer": optimizer,
            "schedule": self._schedule.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Load a state in the form of `sharded_state`, filled."""
        for name, chunk in self._chunks.items():
            if chunk.adapter is None:
                chunk.load_state_dict(state[name])
            else:
                chunk.adapter.load_state(state[name])
        for _, of_part in self._by_part(state["optimizer"]):
            of_part.pop("param_state", None)  # read into its place already
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.num_steps = 0  # Megatron adds the saved number to it
        self._schedule.load_state_dict(state["schedule"])

    def _by_part(self, state: Any) -> Iterator[tuple[MegatronOptimizer, Any]]:
        """Yield each of the chained optimizers with its part of their state."""
        parts = self._optimizer.chained_optimizers
        for place, part in enumerate(parts):
            yield part, state if len(parts) == 1 else state[place]


@dataclass(frozen=True, slots=True, eq=False)
class Saving:
    """A checkpoint that this rank is writing."""

    folder: Path
    request: AsyncRequest
    tensors: TensorByTensor
    random_state: object
    written: FileEntries
    """Entries of the files that this rank has already written."""

    def write(self) -> None:
        """Write this rank's tensors. `finish` raises its failure."""
        assert self.request.async_fn is not None
        self.request.async_fn(*self.request.async_fn_args)

    def finish(self) -> FileEntries:
        """Finish the checkpoint. Called on all ranks together, once all have written.
        Returns the entries of the files that this rank has written. Raises TrainError
        if they could not be written, DiskFullError if there was no space."""
        write_jointly(self.folder, self.tensors.check_written)
        for finish in self.request.finalize_fns:
            finish()
        return write_jointly(self.folder, self._write_rest)

    def _write_rest(self) -> FileEntries:
        """Write what Megatron reads first, on rank 0, and this rank's random state."""
        self.tensors.check_written()  # the index of the tensors, on rank 0
        if torch.distributed.get_rank() == 0:
            format_of_tensors = CheckpointingConfig(
                self.tensors.backend, self.tensors.version
            )
            save_config(format_of_tensors, str(self.folder))
        rng_file = _rng_file(self.folder)
        rng_file.parent.mkdir(exist_ok=True)
        with ChecksummedFile(rng_file) as file:
            torch.save(self.random_state, cast(Any, file))
        return {
            **self.written,
            **self.tensors.written,
            rng_file.relative_to(self.folder).as_posix(): file.entry(),
        }


def _make_empty(folder: Path) -> None:
    """Make the folder, on rank 0. Raises TrainError if it is not empty."""
    if torch.distributed.get_rank() > 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise TrainError(
            f"{folder} is not empty: a checkpoint is not written over another"
        )


def _write_common(folder: Path, state: dict[str, Any]) -> FileEntries:
    """Write what is equal on all ranks, on rank 0, as Megatron does."""
    if torch.distributed.get_rank() > 0:
        return {}
    with ChecksummedFile(folder / COMMON_STATE_FNAME) as file:
        torch.save(state, cast(Any, file))
    return {COMMON_STATE_FNAME: file.entry()}


def sharding_metadata() -> dict[str, Any]:
    """Return the request to Megatron's models and optimizers for a state that any
    layout can load."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(
            with_context_parallel=True
        ),
    }


def load_random_state(path: str) -> None:
    """Load this rank's random state; it stays unchanged for a rank that the saving run
    did not have."""
    rng_file = _rng_file(Path(path))
    if rng_file.exists():
        device.set_random_state(torch.load(rng_file, weights_only=True))


def _rng_file(folder: Path) -> Path:
    return folder / "rng" / f"rank-{torch.distributed.get_rank()}.pt"
