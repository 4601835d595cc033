"""An adapter merged into its base, tensor by tensor, without a trainer: the weights that
the engines had.

Imports torch only where weights are touched.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from invrl.errors import ConfigError
from invrl.families.hf_config import read_hf_config
from invrl.families.registry import FAMILIES
from invrl.interfaces import WeightLayout
from invrl.train.adapters.base_checksum import weights_checksum
from invrl.train.adapters.peft_folder import (
    BASE_NAME,
    open_factors,
    read_peft_config,
)
from invrl.types.weights import TensorSpec
from invrl.user_code.model_folder import tensor_files

if TYPE_CHECKING:
    import torch


def read_base(folder: Path) -> Path:
    """Return the base of an adapter that invrl has written. Raises ConfigError if it is
    gone, or has other weights by now."""
    base: dict[str, str] = json.loads((folder / BASE_NAME).read_bytes())
    path = Path(base["path"])
    fix = "put the model that the run began with back to this folder"
    if not path.is_dir():
        reason = f"the base of the adapter in {folder} is gone"
        raise ConfigError("model.model_path", str(path), reason, fix)
    if weights_checksum(path) != base["checksum"]:
        reason = (
            f"its weights are not those that the adapter in {folder} was trained beside"
        )
        raise ConfigError("model.model_path", str(path), reason, fix)
    return path


def merged_weights(
    base: Path, folder: Path
) -> tuple[WeightLayout, Iterator[tuple[str, torch.Tensor]]]:
    """Return the layout of the merged model and its tensors, in the order and the
    dtypes of the trainer."""
    import torch

    config = read_hf_config(base)
    files = tensor_files(base)
    opened: dict[Path, Any] = {
        file: safe_open(file, framework="pt") for file in set(files.values())
    }
    factors = open_factors(folder)
    settings = read_peft_config(folder)
    scale = settings.lora_alpha / settings.r
    common_dtype = str(next(iter(factors.values())).dtype).removeprefix("torch.")
    layout = tuple(
        TensorSpec(
            name=name,
            shape=tuple(opened[files[name]].get_slice(name).get_shape()),
            dtype=parameter.dtype or common_dtype,
        )
        for parameter in FAMILIES[config.model_type].parameters(config)
        for name in parameter.hugging_face
    )

    def merged(spec: TensorSpec) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, spec.dtype)
        weight: torch.Tensor = opened[files[spec.name]].get_tensor(spec.name).to(dtype)
        module = spec.name.removesuffix(".weight")
        factor_b = factors.get(f"{module}.lora_B.weight")
        if factor_b is None:
            return weight
        factor_a = factors[f"{module}.lora_A.weight"]
        change = scale * (factor_b.float() @ factor_a.float())
        return (weight.float() + change).to(dtype)

    return layout, ((spec.name, merged(spec)) for spec in layout)
