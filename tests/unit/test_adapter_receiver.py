"""What the receiver of an adapter asks of its engine, and what it tells the health
check meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from invrl.engines.client.adapter_receiver import AdapterReceiver
from invrl.errors import DeadlineError, ServerError
from invrl.interfaces import StagedWeights
from invrl.types.weights import WeightVersion
from invrl.weights.config import AdapterWeights

STAGED = StagedWeights(
    version=WeightVersion(4),
    handle="folder",
    num_bytes=1,
    checksums={"A": "1"},
)


class FakeClient:
    """An engine that has room for a canary once it has retracted its requests."""

    def __init__(self) -> None:
        self.is_full = False
        self.calls: list[str] = []
        self.loading: dict[str, bool] = {}
        self.paused: dict[str, bool] = {}
        self.receiver: AdapterReceiver
        self.fails_in = ""

    def _called(self, name: str) -> None:
        self.calls.append(name)
        self.loading[name] = self.receiver.is_loading
        self.paused[name] = self.receiver.is_paused
        if name == self.fails_in:
            raise ServerError("failed")

    async def load_adapter(self, *_: Any, deadline_s: float) -> Mapping[str, str]:
        self._called("load")
        return STAGED.checksums

    async def adapter_checksums(
        self, version: str, *, deadline_s: float
    ) -> Mapping[str, str]:
        self._called("checksums")
        return STAGED.checksums

    async def weight_version(self) -> str:
        return "4"

    async def pause(self, mode: str) -> None:
        self.is_full = False
        self._called(f"pause {mode}")

    async def resume(self) -> None:
        self._called("resume")

    async def prompt_logprobs(
        self, prompts: Sequence[Sequence[int]], *, deadline_s: float
    ) -> list[NDArray[np.float32]]:
        self._called(f"canary {deadline_s:g} s")
        if self.is_full:
            raise DeadlineError("room", deadline_s)
        return [np.zeros(1, np.float32)]


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def receiver(client: FakeClient) -> AdapterReceiver:
    engine: Any = client
    client.receiver = AdapterReceiver(
        "engine-0", engine, AdapterWeights(timeout_s=100.0)
    )
    return client.receiver


async def test_a_canary_beside_requests_pauses_nobody(
    receiver: AdapterReceiver, client: FakeClient
) -> None:
    await receiver.logprobs([[1, 2]])
    assert client.calls == ["canary 10 s"]


async def test_a_full_engine_retracts_its_requests_for_the_canary(
    receiver: AdapterReceiver, client: FakeClient
) -> None:
    client.is_full = True
    await receiver.logprobs([[1, 2]])
    assert client.calls == ["canary 10 s", "pause retract", "resume", "canary 100 s"]
    assert client.paused["pause retract"]
    assert not receiver.is_paused


async def test_an_engine_resumes_after_a_retraction_that_failed(
    receiver: AdapterReceiver, client: FakeClient
) -> None:
    client.is_full = True
    client.fails_in = "pause retract"
    with pytest.raises(ServerError):
        await receiver.logprobs([[1, 2]])
    assert client.calls[-1] == "resume"
    assert not receiver.is_paused


async def test_the_health_check_knows_of_loads_and_checksums(
    receiver: AdapterReceiver, client: FakeClient
) -> None:
    await receiver.load(STAGED)
    assert await receiver.checksums(STAGED) == STAGED.checksums
    assert client.loading == {"load": True}
    await receiver.checksums(STAGED)
    assert client.loading.pop("checksums")
    await receiver.read_back(())
    assert client.loading["checksums"]
    assert not receiver.is_loading


async def test_an_engine_that_failed_to_load_is_not_loading(
    receiver: AdapterReceiver, client: FakeClient
) -> None:
    client.fails_in = "load"
    with pytest.raises(ServerError):
        await receiver.load(STAGED)
    assert not receiver.is_loading
