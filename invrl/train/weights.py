"""Weights between a Hugging Face folder, Megatron's parameters, and whoever is sent them.

Invariant: what is exported right after loading is what was loaded, byte for byte, under the same
names."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from invrl.errors import TrainError
from invrl.interfaces import WeightLayout
from invrl.model_folder import tensor_files
from invrl.train.families.parameter import Parameter, join, split
from invrl.train.families.registry import FAMILIES
from invrl.train.hf_config import HuggingFaceConfig
from invrl.weights.tensor_spec import spec_of


def parameters(config: HuggingFaceConfig) -> list[Parameter]:
    """The model's parameters, in sending order."""
    family, layers = FAMILIES[config.model_type], config.num_hidden_layers
    return family.parameters(layers=layers, tied=config.tie_word_embeddings)


def load_weights(model: torch.nn.Module, config: HuggingFaceConfig, folder: str | Path) -> None:
    """Fill every parameter of `model` from the folder's safetensors, cast to the parameter's dtype.
    Raises TrainError unless names and shapes fit exactly, ConfigError for a folder without such files."""
    own = dict(model.named_parameters())
    table = parameters(config)
    if own.keys() != {parameter.megatron for parameter in table}:
        differ = own.keys() ^ {parameter.megatron for parameter in table}
        raise TrainError(f"{config.model_type}: the name file and the model differ in {sorted(differ)[:5]}")
    files = tensor_files(Path(folder))
    wanted = {name for parameter in table for name in parameter.hugging_face}
    ignored = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if differ := wanted ^ (files.keys() - ignored):
        raise TrainError(f"{folder}: tensors missing from it or unknown to us: {sorted(differ)[:5]}")
    opened = {file: safe_open(file, framework="pt") for file in set(files.values())}
    with torch.no_grad():
        for parameter in table:
            tensors = [opened[files[name]].get_tensor(name) for name in parameter.hugging_face]
            joined = join(parameter.fusion, tensors, groups=config.num_key_value_heads)
            target = own[parameter.megatron]
            if target.shape != joined.shape:
                found = f"{parameter.hugging_face} give {tuple(joined.shape)}"
                raise TrainError(f"{folder}: {found}, {parameter.megatron} is {tuple(target.shape)}")
            target.copy_(joined)


def export_weights(
    model: torch.nn.Module, config: HuggingFaceConfig, dtype: torch.dtype, at: str | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, contiguous tensor in `dtype`), in sending order, on device `at` (None: where it
    is). A tensor may be a view of the model's own memory: use it before the next training step."""
    own, groups = dict(model.named_parameters()), config.num_key_value_heads
    for parameter in parameters(config):
        fused = own[parameter.megatron].detach().to(at)
        parts = split(parameter.fusion, fused, groups=groups, head_dim=config.head_dim)
        for name, part in zip(parameter.hugging_face, parts, strict=True):
            yield name, part.to(dtype)


def weight_specs(model: torch.nn.Module, config: HuggingFaceConfig, dtype: torch.dtype) -> WeightLayout:
    """What `export_weights` will give."""
    return tuple(spec_of(name, tensor) for name, tensor in export_weights(model, config, dtype, "meta"))
