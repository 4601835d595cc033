"""Checksums of many tensors, and copies verified by them: by threads on a CPU, by a few
kernels on a GPU.

On a CPU a tensor is hashed right after its copy, while it is in a core's cache. On a
GPU everything is copied first and then hashed in one kernel, so that the host waits
once instead of once per tensor.

Invariant: a checksum covers bytes read back from where they were written. On a GPU all
work of the current stream has completed when the checksums are returned. Imports torch
only where tensors are touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from invrl.weights.checksums.multilinear_checksum import whole_checksums
from invrl.weights.checksums.tensor_threads import Named, batches, by_threads
from invrl.weights.tensors.tensor_spec import checksum, copy_hashed

if TYPE_CHECKING:
    import torch

HashTensors = Callable[[Mapping[str, "torch.Tensor"]], dict[str, str]]
"""Tensors by name -> their checksums."""
_BATCH_BYTES = 64 << 20
"""Bytes copied to GPU memory in one batch, or one tensor if that is larger: bounds what
an iterator that makes tensors keeps in memory."""


def whole_hash(*, adds_up: bool) -> HashTensors:
    """Return the hash of whole tensors: checksums that add up
    (`multilinear_checksum.py`), or xxh3."""
    return whole_checksums if adds_up else xxh3_checksums


def xxh3_checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: checksum(tensor) for name, tensor in tensors.items()}


def tensor_checksums(
    tensors: Mapping[str, torch.Tensor], hash_tensors: HashTensors
) -> dict[str, str]:
    """Return the checksums of tensors as they are."""
    if _on_gpu(tensors):
        return hash_tensors(tensors)
    return by_threads(
        lambda name, tensor: hash_tensors({name: tensor})[name], tensors.items()
    )


def copy_all(
    places: Mapping[str, torch.Tensor],
    sources: Iterable[Named],
    hash_tensors: HashTensors,
) -> dict[str, str]:
    """Copy each source into the place of its name. Returns the checksums of the places
    that were written.

    `places` are all in one memory. Raises ValueError for another shape.
    """
    if not _on_gpu(places):

        def copy(name: str, source: torch.Tensor) -> str:
            return copy_hashed(
                places[name], source, lambda target: hash_tensors({name: target})[name]
            )

        return by_threads(copy, sources)
    written: dict[str, torch.Tensor] = {}
    for batch in batches(sources, _BATCH_BYTES):
        targets = {name: places[name] for name, _ in batch}
        _copy_batch(targets, dict(batch))
        written |= targets
    return hash_tensors(written)


def _copy_batch(
    targets: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]
) -> None:
    """Copy with as few kernels as torch allows. Does not wait: the current stream keeps
    the order."""
    import torch

    for name, target in targets.items():
        if target.shape != sources[name].shape:
            shape = tuple(sources[name].shape)
            raise ValueError(
                f"{name}: a tensor {shape} does not fit into {tuple(target.shape)}"
            )
    with torch.no_grad():
        torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
            list(targets.values()), list(sources.values())
        )


def _on_gpu(tensors: Mapping[str, torch.Tensor]) -> bool:
    return any(tensor.is_cuda for tensor in tensors.values())
