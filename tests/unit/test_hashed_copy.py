"""Copies that are hashed while they are made: the same bytes and checksums as one after the other."""

from __future__ import annotations

import weakref

import pytest
import torch

from invrl.weights import hashed_copy
from invrl.weights.hashed_copy import checksums_of, copy_hashed
from invrl.weights.tensor_spec import checksum


@pytest.mark.parametrize(
    "source",
    [
        torch.arange(1000.0),
        torch.arange(1000).to(torch.bfloat16).view(10, 100),
        torch.arange(999, dtype=torch.uint8),
        torch.arange(1000.0).view(20, 50).t(),
        torch.zeros(0, 4),
        torch.tensor(3.5),
    ],
    ids=["flat", "bfloat16", "bytes", "transposed", "empty", "scalar"],
)
@pytest.mark.parametrize("block_bytes", [64, 1 << 20])
def test_bytes_and_checksum(source: torch.Tensor, block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashed_copy, "_BLOCK_BYTES", block_bytes)
    target = torch.full_like(source, 7, memory_format=torch.contiguous_format)
    assert copy_hashed([("a", target, source)]) == {"a": checksum(source)}
    assert torch.equal(target, source)


def test_a_target_with_gaps_and_another_dtype() -> None:
    """The checksum is that of the target's bytes."""
    whole = torch.zeros(6, 8, dtype=torch.bfloat16)
    source = torch.randn(6, 4)
    found = copy_hashed([("columns", whole[:, 2:6], source)])
    assert torch.equal(whole[:, 2:6], source.bfloat16())
    assert found == {"columns": checksum(source.bfloat16())}


def test_many_tensors_keep_their_names_and_order() -> None:
    sources = {str(index): torch.full((index + 1, 3), float(index)) for index in range(50)}
    copies = [(name, torch.empty_like(source), source) for name, source in sources.items()]
    found = copy_hashed(copies)
    assert list(found) == list(sources)
    assert found == checksums_of(sources)
    assert found == {name: checksum(source) for name, source in sources.items()}


def test_few_temporary_sources_are_alive_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashed_copy, "_MAX_WAITING_BYTES", 3 * 4000)
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most_alive = 0

    def copies():
        nonlocal most_alive
        for index in range(100):
            source = torch.full((1000,), float(index))
            alive.add(source)
            most_alive = max(most_alive, len(alive))
            yield str(index), torch.empty(1000), source

    copy_hashed(copies())
    assert most_alive <= 6  # those that wait, the next one, and what a loop still holds


def test_an_error_is_raised() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        copy_hashed([("a", torch.zeros(3), torch.zeros(3)), ("b", torch.zeros(3), torch.zeros(4))])

    def copies():
        yield "a", torch.zeros(3), torch.zeros(3)
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        copy_hashed(copies())
