"""What outlives the trainer: Megatron distributed checkpoints, and Hugging Face folders.

Any number of data-parallel ranks can load a checkpoint."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint.api import CheckpointException

from invrl.errors import TrainError
from invrl.host.disk import flush, flush_tree
from invrl.store.manifest import MANIFEST_NAME
from invrl.train import device
from invrl.train.checkpoint_writer import LateTensors, TensorByTensor, gather_late
from invrl.train.hf_config import HuggingFaceConfig
from invrl.train.model import PolicyModel
from invrl.train.safetensors_file import write_safetensors
from invrl.train.weights import export_weights, weight_specs

_NOT_COPIED = (
    *(".safetensors", ".bin", ".gguf", ".pt", ".pth", ".msgpack", ".h5"),
    "model.safetensors.index.json",
    MANIFEST_NAME,
)
"""Ends of names: weights, and the checksums of another folder."""


class Checkpoint:
    """Saves and loads one rank's share of the model and its optimizer, and its random state."""

    def __init__(
        self, model: PolicyModel, optimizer: ChainedOptimizer, schedule: OptimizerParamScheduler
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._schedule = schedule
        self._late = LateTensors()
        for part in optimizer.chained_optimizers:
            if isinstance(part, DistributedOptimizer):
                gather_late(part, self._late)

    def save(self, path: str) -> None:
        """All ranks together. Raises TrainError if the folder holds something or cannot be written."""
        folder = Path(path)
        if torch.distributed.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        if any(folder.iterdir()):
            raise TrainError(f"{folder} is not empty: a checkpoint is not written over another")
        torch.distributed.barrier()
        self._late.clear()
        try:
            dist_checkpointing.save(self._state(is_loading=False), str(folder), TensorByTensor(self._late))
        except CheckpointException as error:  # a BaseException, and only rank 0's names the cause
            causes = [str(cause) for cause, _ in error.failures.values()] or ["another rank failed"]
            raise TrainError(f"the checkpoint {folder} could not be written: {causes[0]}") from error
        (folder / "rng").mkdir(exist_ok=True)
        torch.save(device.random_state(), _rng_file(folder))
        torch.distributed.barrier()

    def load(self, path: str) -> None:
        """Raises TrainError if there is no checkpoint."""
        if not dist_checkpointing.check_is_distributed_checkpoint(path):
            raise TrainError(f"{path} holds no checkpoint")
        state: Any = dist_checkpointing.load(self._state(is_loading=True), path)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        if (file := _rng_file(Path(path))).exists():  # a rank that the saving run had
            device.set_random_state(torch.load(file, weights_only=True))

    def _state(self, *, is_loading: bool) -> dict[str, Any]:
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        model = self._model.sharded_state_dict(metadata=metadata)
        optimizer = self._optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer, "schedule": self._schedule.state_dict()}


def _rng_file(folder: Path) -> Path:
    return folder / "rng" / f"rank-{torch.distributed.get_rank()}.pt"


def export_hugging_face(
    model: PolicyModel,
    config: HuggingFaceConfig,
    dtype: torch.dtype,
    source: str,
    path: str,
    *,
    chat_template: str = "",
) -> None:
    """Weights in `dtype`; configuration, tokenizer and template copied from `source`, but for a
    `chat_template`, which takes the place of its own: who serves the model finds the one that it was trained
    with. Appears whole, and its files are on disk by then. Their modes are ordinary ones, whatever those of
    the source are."""
    folder = Path(path)
    new = folder.with_name(folder.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for file in Path(source).iterdir():
        if file.is_file() and not file.name.endswith(_NOT_COPIED):
            shutil.copyfile(file, new / file.name)
    if chat_template:  # this file is read before the template in tokenizer_config.json
        (new / "chat_template.jinja").write_text(chat_template)
    described = json.loads((new / "config.json").read_text())
    described.pop("torch_dtype", None)
    described["dtype"] = str(dtype).removeprefix("torch.")
    (new / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    layout = weight_specs(model, config, dtype)
    write_safetensors(new / "model.safetensors", layout, export_weights(model, config, dtype))
    flush_tree(new)
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)
    flush(folder.parent)
