"""Weights between a Hugging Face folder, Megatron's parameters, and the engines.

Invariant: what is exported right after loading is what was loaded, byte for byte, under the same names.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from invrl.errors import TrainError
from invrl.interfaces import WeightLayout
from invrl.model_folder import tensor_files
from invrl.train.families.model_config import HuggingFaceConfig
from invrl.train.families.parameter import Parameter, join, split
from invrl.train.families.registry import FAMILIES
from invrl.weights.tensor_spec import spec_of


def parameters(config: HuggingFaceConfig) -> list[Parameter]:
    """The model's parameters, in sending order."""
    return FAMILIES[config.model_type].parameters(config)


def load_weights(model: torch.nn.Module, config: HuggingFaceConfig, folder: str | Path) -> None:
    """Fills every parameter of `model` from the folder's safetensors files, cast to the parameter's dtype.

    Raises TrainError unless names and shapes fit exactly, ConfigError for a folder without such files.
    """
    model_parameters = dict(model.named_parameters())
    table = parameters(config)
    mismatch = model_parameters.keys() ^ {parameter.megatron for parameter in table}
    if mismatch:
        names = sorted(mismatch)[:5]
        raise TrainError(f"{config.model_type}: the family file and the model differ in {names}")
    files = tensor_files(Path(folder))
    expected_names = {name for parameter in table for name in parameter.hugging_face}
    file_names = set(files)
    if config.tie_word_embeddings:
        file_names.discard("lm_head.weight")
    mismatch = expected_names ^ file_names
    if mismatch:
        raise TrainError(f"{folder}: tensors missing from it or unknown to us: {sorted(mismatch)[:5]}")
    opened = {file: safe_open(file, framework="pt") for file in set(files.values())}
    with torch.no_grad():
        for parameter in table:
            tensors = [opened[files[name]].get_tensor(name) for name in parameter.hugging_face]
            joined = join(parameter.fusion, tensors, groups=config.num_key_value_heads)
            target = model_parameters[parameter.megatron]
            if target.shape != joined.shape:
                raise TrainError(
                    f"{folder}: {parameter.hugging_face} give {tuple(joined.shape)}, "
                    f"{parameter.megatron} is {tuple(target.shape)}"
                )
            target.copy_(joined)


def export_weights(
    model: torch.nn.Module, config: HuggingFaceConfig, dtype: torch.dtype, device: str | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (Hugging Face name, contiguous tensor in `dtype`), in sending order.

    The tensors are on `device` (None: where the model is). A tensor may be a view of the model's own memory:
    use it before the next training step.
    """
    model_parameters = dict(model.named_parameters())
    for parameter in parameters(config):
        fused = model_parameters[parameter.megatron].detach().to(device)
        parts = split(parameter.fusion, fused, groups=config.num_key_value_heads, head_dim=config.head_dim)
        for name, part in zip(parameter.hugging_face, parts, strict=True):
            yield name, part.to(dtype)


def weight_specs(model: torch.nn.Module, config: HuggingFaceConfig, dtype: torch.dtype) -> WeightLayout:
    """The names, shapes and dtypes that `export_weights` yields, without copying a weight."""
    return tuple(spec_of(name, tensor) for name, tensor in export_weights(model, config, dtype, "meta"))
