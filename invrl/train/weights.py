"""Weights between a Hugging Face folder, Megatron's parameters, and the engines.

A rank reads only its own part of a tensor that tensor-parallel ranks divide. To export, the ranks of one
replica send their parts to the writer, bucket by bucket, so that no process ever holds a second model.

Invariant: what is exported right after loading is what was loaded, byte for byte, under the same names.
Imported after `device.prepare()`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from safetensors import safe_open

from invrl.errors import TrainError
from invrl.interfaces import WeightLayout
from invrl.model_folder import tensor_files
from invrl.train.families.model_config import HuggingFaceConfig
from invrl.train.families.parameter import Parameter, join, split
from invrl.train.families.registry import FAMILIES
from invrl.types import TensorSpec

BUCKET_BYTES = 64 << 20
"""What a rank sends at a time, or one parameter if that is larger."""


def parameters(config: HuggingFaceConfig) -> list[Parameter]:
    """The model's parameters, in sending order."""
    return FAMILIES[config.model_type].parameters(config)


def load_weights(model: torch.nn.Module, config: HuggingFaceConfig, folder: str | Path) -> None:
    """Fills every parameter of `model`, or this rank's part of it, from the folder's safetensors files, cast
    to the parameter's dtype.

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
            target = model_parameters[parameter.megatron]
            tensors = [
                _own_part(opened[files[name]], name, parameter.divided_dimension)
                for name in parameter.hugging_face
            ]
            joined = join(parameter.fusion, tensors, groups=_own_groups(config))
            if target.shape != joined.shape:
                raise TrainError(
                    f"{folder}: {parameter.hugging_face} give {tuple(joined.shape)}, "
                    f"{parameter.megatron} is {tuple(target.shape)}"
                )
            target.copy_(joined)


def _own_part(file: Any, name: str, dimension: int | None) -> torch.Tensor:
    """A tensor of an open safetensors file: this tensor-parallel rank's part along `dimension`, all of it
    where that is None."""
    if dimension is None:
        return file.get_tensor(name)
    whole = file.get_slice(name)
    part_size = whole.get_shape()[dimension] // parallel_state.get_tensor_model_parallel_world_size()
    start = parallel_state.get_tensor_model_parallel_rank() * part_size
    own = slice(start, start + part_size)
    return whole[own] if dimension == 0 else whole[:, own]


def _own_groups(config: HuggingFaceConfig) -> int:
    """Key-value heads of this tensor-parallel rank."""
    return config.num_key_value_heads // parallel_state.get_tensor_model_parallel_world_size()


def export_weights(
    model: torch.nn.Module,
    config: HuggingFaceConfig,
    ranks: Sequence[int],
    dtype: torch.dtype,
    values: Mapping[str, torch.Tensor] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (Hugging Face name, contiguous tensor in `dtype`), in sending order, on the first of `ranks`.

    `ranks` are those that hold this copy of the model. The others yield nothing, and must be exhausted all
    the same, because they send the first one their parts. `values`: what to export in the place of each
    parameter, by its name (None: the parameters themselves). A tensor may be a view of the model's own
    memory: use it before the next training step.
    """
    first, *others = ranks
    is_first = torch.distributed.get_rank() == first
    model_parameters = dict(model.named_parameters())
    values = values or model_parameters
    for bucket in _buckets(parameters(config), model_parameters, dtype):
        own_parts = {name: values[name].detach().to(dtype) for name in bucket}
        divided = [name for name, parameter in bucket.items() if parameter.divided_dimension is not None]
        if not is_first:
            if divided:
                flat = torch.cat([own_parts[name].reshape(-1) for name in divided])
                torch.distributed.send(flat, first)
            continue
        parts = {name: [own_part] for name, own_part in own_parts.items()}
        for sender in others:
            for name, part in _receive(sender, {name: own_parts[name] for name in divided}):
                parts[name].append(part)
        for name, parameter in bucket.items():
            yield from _assemble(parameter, parts[name], config)


def _buckets(
    table: Sequence[Parameter], model_parameters: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> Iterator[dict[str, Parameter]]:
    """The parameters in order by their names, in buckets of at most `BUCKET_BYTES` of one rank's parts, or of
    one parameter."""
    bucket: dict[str, Parameter] = {}
    bucket_bytes = 0
    for parameter in table:
        num_bytes = model_parameters[parameter.megatron].numel() * dtype.itemsize
        if bucket and bucket_bytes + num_bytes > BUCKET_BYTES:
            yield bucket
            bucket = {}
            bucket_bytes = 0
        bucket[parameter.megatron] = parameter
        bucket_bytes += num_bytes
    yield bucket


def _receive(sender: int, own_parts: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Another rank's parts of these parameters, which are like our own in shape and dtype."""
    if not own_parts:
        return
    sizes = [own_part.numel() for own_part in own_parts.values()]
    flat = next(iter(own_parts.values())).new_empty(sum(sizes))
    torch.distributed.recv(flat, sender)
    for (name, own_part), part in zip(own_parts.items(), flat.split(sizes), strict=True):
        yield name, part.view(own_part.shape)


def _assemble(
    parameter: Parameter, parts: Sequence[torch.Tensor], config: HuggingFaceConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """The Hugging Face tensors of a parameter from its parts, in the order of the tensor-parallel ranks."""
    groups = _own_groups(config)
    split_parts = [split(parameter.fusion, part, groups=groups, head_dim=config.head_dim) for part in parts]
    for name, *pieces in zip(parameter.hugging_face, *split_parts, strict=True):
        if len(pieces) == 1:
            yield name, pieces[0]
        else:
            assert parameter.divided_dimension is not None, f"{parameter.megatron} is on every rank"
            yield name, torch.cat(pieces, dim=parameter.divided_dimension)


def weight_specs(config: HuggingFaceConfig, folder: str | Path, dtype: torch.dtype) -> WeightLayout:
    """The names, shapes and dtypes that `export_weights` yields for a model that was loaded from `folder`."""
    files = tensor_files(Path(folder))
    opened = {file: safe_open(file, framework="pt") for file in set(files.values())}
    dtype_name = str(dtype).removeprefix("torch.")
    specs: list[TensorSpec] = []
    for parameter in parameters(config):
        for name in parameter.hugging_face:
            shape = opened[files[name]].get_slice(name).get_shape()
            specs.append(TensorSpec(name=name, shape=tuple(shape), dtype=dtype_name))
    return tuple(specs)
