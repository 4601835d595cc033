import os
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from invrl.weights.checksums import tensor_threads
from invrl.weights.checksums.tensor_threads import by_threads

Named = tuple[str, torch.Tensor]


@pytest.fixture
def num_cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(request.param)))
    monkeypatch.setattr(tensor_threads, "_BATCH_BYTES", 32)
    return request.param


def tensors(count: int) -> Iterator[Named]:
    for index in range(count):
        yield f"tensor {index}", torch.full((4,), index, dtype=torch.int32)


@pytest.mark.parametrize("num_cores", [1, 3], indirect=True)
def test_each_tensor_is_processed_once(num_cores: int) -> None:
    results = by_threads(lambda name, tensor: f"{name}: {tensor.sum()}", tensors(23))
    assert list(results.items()) == [
        (f"tensor {index}", f"tensor {index}: {4 * index}") for index in range(23)
    ]


@pytest.mark.parametrize("num_cores", [1, 3], indirect=True)
def test_no_tensors_give_no_results(num_cores: int) -> None:
    assert by_threads(lambda name, tensor: name, []) == {}


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
    most = 0

    def tracked() -> Iterator[Named]:
        nonlocal most
        for name, tensor in tensors(60):
            alive.add(tensor)
            most = max(most, len(alive))
            yield name, tensor

    by_threads(lambda name, tensor: name, tracked())
    assert most <= 2 * (num_cores + 1) + 1


@pytest.mark.parametrize("num_cores", [1, 3], indirect=True)
def test_error_is_raised_after_started_work_has_ended(num_cores: int) -> None:
    def fail(name: str, tensor: torch.Tensor) -> str:
        if name == "tensor 5":
            raise ValueError("no")
        return name

    with pytest.raises(ValueError, match="no"):
        by_threads(fail, tensors(9))
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("tensors")
    ]


@pytest.mark.parametrize("num_cores", [1, 3], indirect=True)
def test_threads_can_write_tensors_made_in_inference_mode(num_cores: int) -> None:
    """SGLang calls the loader in inference mode, and its own tensors may be of that
    mode."""
    with torch.inference_mode():
        tensors_by_name = {f"tensor {index}": torch.zeros(4) for index in range(6)}

        def write(name: str, tensor: torch.Tensor) -> str:
            tensor.fill_(1)
            return name

        by_threads(write, tensors_by_name.items())
    assert all(bool(tensor.eq(1).all()) for tensor in tensors_by_name.values())
