"""Checksums of many tensors, and copies verified by them: by threads on a CPU, by a few
kernels on a GPU.

On a CPU a tensor is hashed right after its copy, while it is in a core's cache. Where a
GPU copies, everything is copied first and then hashed, on a GPU in one kernel, so that
the host waits once instead of once per tensor.

Invariant: a checksum covers bytes read back from where they were written, but those of
`hash_and_copy` are of the sources: a wrong copy is found by who reads it. On a GPU all
work of the current stream has completed when the checksums are returned. Imports torch
only where tensors are touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from invrl.weights.checksums.multilinear_checksum import whole_checksums
from invrl.weights.checksums.tensor_threads import Named, batches, by_threads
from invrl.weights.tensors.tensor_spec import checksum, copy_hashed

if TYPE_CHECKING:
    import torch

    from invrl.weights.tensors.tensor_spec import Checksums, Tensors

HashTensors = Callable[["Tensors"], "Checksums"]
"""Tensors by name -> their checksums."""
_BATCH_BYTES = 64 << 20
"""Bytes copied to GPU memory in one batch, or one tensor if that is larger: bounds what
an iterator that makes tensors keeps in memory."""


def whole_hash(*, adds_up: bool) -> HashTensors:
    """Return the hash of whole tensors: checksums that add up
    (`multilinear_checksum.py`), or xxh3."""
    return whole_checksums if adds_up else xxh3_checksums


def xxh3_checksums(tensors: Tensors) -> Checksums:
    return {name: checksum(tensor) for name, tensor in tensors.items()}


def tensor_checksums(tensors: Tensors, hash_tensors: HashTensors) -> Checksums:
    """Return the checksums of tensors as they are. A process that uses a GPU takes
    those of host memory there."""
    import torch

    if _on_gpu(tensors):
        return hash_tensors(tensors)
    if torch.cuda.is_initialized() and hash_tensors is not xxh3_checksums:
        return _hash_on_gpu(tensors, hash_tensors)

    def hash_one(name: str, tensor: torch.Tensor) -> str:
        return hash_tensors({name: tensor})[name]

    return by_threads(hash_one, tensors.items())


def _hash_on_gpu(tensors: Tensors, hash_tensors: HashTensors) -> Checksums:
    checksums: Checksums = {}
    for batch in batches(tensors.items(), _BATCH_BYTES):
        on_gpu: dict[str, torch.Tensor] = {}
        for name, tensor in batch:
            on_gpu[name] = tensor.to("cuda", non_blocking=True)
        checksums |= hash_tensors(on_gpu)
    return checksums


def copy_all(
    places: Tensors,
    sources: Iterable[Named],
    hash_tensors: HashTensors,
) -> Checksums:
    """Copy each source into the place of its name. Returns the checksums of the places
    that were written.

    `places` are all in one memory. Raises ValueError for another shape.
    """
    import torch

    gpu_copies = _on_gpu(places) or torch.cuda.is_initialized()
    if not gpu_copies:

        def copy(name: str, source: torch.Tensor) -> str:
            def hash_target(target: torch.Tensor) -> str:
                return hash_tensors({name: target})[name]

            return copy_hashed(places[name], source, hash_target)

        return by_threads(copy, sources)
    written: dict[str, torch.Tensor] = {}
    for batch in batches(sources, _BATCH_BYTES):
        targets = {name: places[name] for name, _ in batch}
        _copy_batch(targets, dict(batch))
        written |= targets
    if not _on_gpu(places):
        torch.cuda.synchronize()  # the GPU has written what is hashed
    return tensor_checksums(written, hash_tensors)


def hash_and_copy(
    places: Tensors,
    sources: Iterable[Named],
    hash_tensors: HashTensors,
) -> Checksums:
    """Hash each source where it is, and copy it into its place: from a GPU to the host,
    whose own hash takes longer. Returns the checksums of the sources."""
    import torch

    checksums: Checksums = {}
    for batch in batches(sources, _BATCH_BYTES):
        checksums |= hash_tensors(dict(batch))
        targets = {name: places[name] for name, _ in batch}
        _copy_batch(targets, dict(batch))
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return checksums


def _copy_batch(targets: Tensors, sources: Tensors) -> None:
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
            list(targets.values()),
            list(sources.values()),
            non_blocking=True,
        )


def _on_gpu(tensors: Tensors) -> bool:
    return any(tensor.is_cuda for tensor in tensors.values())
