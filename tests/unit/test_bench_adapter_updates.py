"""What `python -m benchmarks.adapter_updates` counts as a failed request, and its bad
input."""

from __future__ import annotations

import asyncio
import types
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest

from benchmarks.adapter_updates import (
    _TOKENS,
    Volley,
    benchmark_adapter_updates,
)
from invrl.engines.client.generation import GenerateChunk
from invrl.errors import ConfigError, ServerError
from invrl.types.turns import VersionSpan
from invrl.types.weights import WeightVersion


class FakeClient:
    """Samples tokens one by one, of these versions in turn."""

    limits = types.SimpleNamespace(vocab_size=100)

    def __init__(self, versions: Sequence[int], *, num_tokens: int = _TOKENS) -> None:
        self._spans = tuple(
            VersionSpan(version=WeightVersion(version), start=0, end=1)
            for version in versions
        )
        self._num_tokens = num_tokens

    async def stream(self, _: Any) -> AsyncIterator[GenerateChunk]:
        if not self._num_tokens:
            raise ServerError("aborted")
        for _ in range(self._num_tokens):
            await asyncio.sleep(0)
            yield GenerateChunk(
                ids_T=np.zeros(1, np.int32),
                logprobs_T=np.zeros(1, np.float32),
                spans=self._spans,
            )


@pytest.mark.parametrize(
    ("client", "says"),
    [
        (FakeClient([3]), None),
        (FakeClient([4]), "of the versions ['4'] instead of 3"),
        (FakeClient([3, 4]), "of the versions ['3', '4'] instead of 3"),
        (FakeClient([3], num_tokens=_TOKENS - 1), f"{_TOKENS - 1} of {_TOKENS}"),
        (FakeClient([3], num_tokens=0), "aborted"),
    ],
    ids=["whole", "newer", "both", "short", "aborted"],
)
async def test_a_request_fails_unless_it_is_whole_and_of_its_version(
    client: Any, says: str | None
) -> None:
    volley = Volley(client, 2, version=3)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        volley.begin(group)
        await volley.until(_TOKENS)
    assert len(volley.failures) == (0 if says is None else 2)
    assert all(says is not None and says in failure for failure in volley.failures)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "--model-path"),
        (("--model-path", "nowhere", "--updates"), "--updates"),
        (("--rank", "4"), "--rank"),
    ],
    ids=["no model", "no value", "unknown"],
)
def test_bad_input_is_refused_by_its_flag(flags: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        benchmark_adapter_updates(flags)
