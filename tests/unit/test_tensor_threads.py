"""Work on tensors by threads: each tensor once, few at a time, and errors that wait
for what has begun."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from invrl.weights.checksums import tensor_threads
from invrl.weights.checksums.tensor_threads import by_threads

Named = tuple[str, torch.Tensor]
TENSOR_BYTES = 16


@pytest.fixture
def num_cores(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> int:
    cores = set(range(request.param))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    monkeypatch.setattr(tensor_threads, "_BATCH_BYTES", 2 * TENSOR_BYTES)
    return request.param


def tensors(count: int) -> Iterator[Named]:
    for index in range(count):
        tensor = torch.full((4,), index, dtype=torch.int32)
        assert tensor.nbytes == TENSOR_BYTES
        yield f"tensor {index}", tensor


def name_of(name: str, tensor: torch.Tensor) -> str:
    return name


@pytest.mark.parametrize("num_cores", [1, 3], indirect=True)
def test_each_tensor_is_processed_once(num_cores: int) -> None:
    processed: list[str] = []

    def process(name: str, tensor: torch.Tensor) -> str:
        processed.append(name)
        return f"{name}: {tensor.sum()}"

    results = by_threads(process, tensors(23))
    names = [f"tensor {index}" for index in range(23)]
    assert sorted(processed) == sorted(names)
    assert list(results) == names
    for index, result in enumerate(results.values()):
        assert result == f"tensor {index}: {4 * index}"


@pytest.mark.parametrize("num_cores", [1, 3], indirect=True)
def test_no_tensors_give_no_results(num_cores: int) -> None:
    assert by_threads(name_of, []) == {}


@pytest.mark.parametrize("num_cores", [3], indirect=True)
def test_several_threads_work_at_the_same_time(num_cores: int) -> None:
    """Each batch waits for two others."""
    together = threading.Barrier(num_cores, timeout=60)
    waited: set[str] = set()

    def wait(name: str, tensor: torch.Tensor) -> str:
        index = int(tensor[0])
        if index % 2 == 0:  # two tensors are a batch
            together.wait()
            waited.add(name)
        return name

    by_threads(wait, tensors(2 * num_cores))
    assert len(waited) == num_cores


@pytest.mark.parametrize("num_cores", [3], indirect=True)
def test_only_a_few_tensors_of_an_iterator_are_in_memory(num_cores: int) -> None:
    """A batch for each thread, and the one that is being made: two tensors each."""
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    num_alive: list[int] = []

    def tracked() -> Iterator[Named]:
        for name, tensor in tensors(60):
            alive.add(tensor)
            num_alive.append(len(alive))
            yield name, tensor

    by_threads(name_of, tracked())
    assert len(num_alive) == 60
    assert max(num_alive) <= 2 * (num_cores + 1) + 1


@pytest.mark.parametrize("num_cores", [1, 3], indirect=True)
def test_error_is_raised_after_started_work_has_ended(num_cores: int) -> None:
    def fail(name: str, tensor: torch.Tensor) -> str:
        if name == "tensor 5":
            raise ValueError("no")
        return name

    with pytest.raises(ValueError, match="no"):
        by_threads(fail, tensors(9))
    for thread in threading.enumerate():
        assert not thread.name.startswith("tensors")


@pytest.mark.parametrize("num_cores", [1, 3], indirect=True)
def test_threads_can_write_tensors_made_in_inference_mode(num_cores: int) -> None:
    """SGLang calls the loader in inference mode, and its own tensors may be of that
    mode."""
    with torch.inference_mode():
        written = [torch.zeros(4) for _ in range(6)]

        def write(name: str, tensor: torch.Tensor) -> str:
            tensor.fill_(1)
            return name

        by_threads(
            write,
            [(f"tensor {index}", tensor) for index, tensor in enumerate(written)],
        )
    for tensor in written:
        assert tensor.tolist() == [1, 1, 1, 1]
