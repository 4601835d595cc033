"""The adapter of a whole copy of the model: what a run saves of it, and under which
base. Imported after `device.prepare()`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from invrl.errors import TrainError
from invrl.families.model_config import HuggingFaceConfig
from invrl.interfaces import WeightLayout
from invrl.train.adapters.adapter import factor_table, own_factors
from invrl.train.adapters.base_checksum import kept_checksum, weights_checksum
from invrl.train.adapters.peft_folder import (
    WEIGHTS_NAME,
    check_base,
    peft_layout,
    read_factors,
    with_peft_names,
    write_description,
    write_factors,
)
from invrl.train.config import LoraConfig
from invrl.train.parallel_layout import ParallelLayout
from invrl.train.weights.conversion import ReplicaWeights, own_part
from invrl.train.weights.disk_staging import WeightFolders
from invrl.train.weights.hf_export import writing_folder
from invrl.types.file_entry import FileEntries
from invrl.types.weights import TensorSpec


class TrainedAdapter:
    """The factors of one copy of the model, which its ranks offer together."""

    def __init__(
        self,
        chunks: Sequence[Any],
        config: HuggingFaceConfig,
        lora: LoraConfig,
        layout: ParallelLayout,
        *,
        base_path: str,
        base_specs: WeightLayout,
        checksum_path: str | None,
    ) -> None:
        """`base_specs` are the base's tensors in the dtype of training. The base's
        checksum is kept in the file `checksum_path`, if there is one. All ranks call it
        together. Raises ConfigError for an adapter of another base."""
        self._lora = lora
        self._base_path = base_path
        self._base_checksum = _from_first_rank(base_path, checksum_path)
        projections = lora.projections(config)
        self._kinds = sorted({projection.kind for projection in projections})
        shapes = {spec.name: spec.shape for spec in base_specs}
        specs: list[TensorSpec] = []
        for projection in projections:
            outputs, inputs = shapes[f"{projection.name}.weight"]
            for factor, shape in (
                (projection.factor_a, (lora.rank, inputs)),
                (projection.factor_b, (outputs, lora.rank)),
            ):
                specs.append(
                    TensorSpec(
                        name=factor.megatron, shape=shape, dtype=base_specs[0].dtype
                    )
                )
        self._specs = tuple(specs)
        table = factor_table(config, lora)
        factors = own_factors(chunks)
        if lora.path is not None:
            folder = Path(lora.path).expanduser()
            check_base(folder, base_path, self._base_checksum)
            _load(factors, folder, table)
        self.weights = ReplicaWeights(factors, config, layout, table=table)

    @property
    def record(self) -> dict[str, Any]:
        """What a checkpoint says of the adapter whose factors it has."""
        return {
            "base": self._base_checksum,
            "rank": self._lora.rank,
            "alpha": self._lora.alpha,
            "targets": self._kinds,
            "experts": self._lora.experts,
        }

    def write(
        self,
        factors: Iterable[tuple[str, torch.Tensor]],
        path: str,
        *,
        chat_template: str,
    ) -> FileEntries:
        """Write a PEFT folder, as `export_hugging_face` writes a model's."""
        with writing_folder(self._base_path, path, chat_template) as folder:
            self.describe(folder)
            return write_factors(folder, self._specs, factors)

    def describe(self, folder: Path) -> None:
        """Write the files of a PEFT folder that say what the adapter is."""
        write_description(
            folder,
            self._lora,
            self._kinds,
            base_path=self._base_path,
            base_checksum=self._base_checksum,
        )

    def folders(self, layout: WeightLayout, parent: Path) -> WeightFolders:
        """Return the sender of the transport `adapter`: a PEFT folder per version."""
        return WeightFolders(
            layout, parent, file_name=WEIGHTS_NAME, describe=self.describe
        )

    def served_layout(self, dtype: torch.dtype) -> WeightLayout:
        """Return the factors as engines get them."""
        name = str(dtype).removeprefix("torch.")
        return tuple(replace(spec, dtype=name) for spec in peft_layout(self._specs))

    def served(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the factors of `served_layout` on the rank that collects them. On the
        others it yields nothing but must still be exhausted, because they send."""
        return with_peft_names(self.weights.export(dtype))


def check_record(
    path: str, saved: Mapping[str, Any] | None, adapter: TrainedAdapter | None
) -> None:
    """Raise TrainError if a checkpoint is not of this adapter. `saved` is what it says
    of its own; None: it has a whole model."""
    if adapter is None:
        if saved is not None:
            raise TrainError(
                f"{path} holds an adapter, and this run trains the whole model. Give its settings of [lora]"
            )
        return
    if saved is None:
        raise TrainError(
            f"{path} holds a whole model, and this run trains an adapter. Leave [lora] out, or begin a new "
            "run with --model-path"
        )
    for name, value in adapter.record.items():
        if saved[name] != value:
            raise TrainError(
                f"{path} holds an adapter with another {name}: {saved[name]}, and the run has {value}"
            )


def _load(
    factors: Mapping[str, torch.Tensor], folder: Path, table: Sequence[Any]
) -> None:
    """Fill this rank's factors, or its parts of them, from a PEFT folder."""
    with torch.no_grad():
        for entry, whole in read_factors(folder, table):
            factor = factors.get(entry.megatron)
            if factor is None:
                continue
            own = own_part(whole, entry.divided_dimension)
            if own.shape != factor.shape:
                raise TrainError(
                    f"{folder}: {entry.megatron} is {tuple(own.shape)}, the model's {tuple(factor.shape)}"
                )
            factor.copy_(own)


def _from_first_rank(base_path: str, checksum_path: str | None) -> str:
    """Return the checksum of the base's weights, which the first rank reads."""
    checksum: list[str] = [""]
    if torch.distributed.get_rank() == 0:
        folder = Path(base_path)
        if checksum_path is None:
            checksum = [weights_checksum(folder)]
        else:
            checksum = [kept_checksum(folder, Path(checksum_path))]
    torch.distributed.broadcast_object_list(checksum, 0)
    return checksum[0]
