"""What SGLang's HTTP process knows of adapters and their requests."""

from __future__ import annotations

import asyncio
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch  # noqa: F401

from invrl.engines.inside_sglang.adapter_registry import count_nothing
from invrl.engines.inside_sglang.adapter_routes import SglangAdapters
from invrl.host import sglang_on_cpu

if TYPE_CHECKING:
    from sglang.srt.lora.lora_registry import LoRARegistry


@pytest.fixture
def registry() -> LoRARegistry:
    sglang_on_cpu.make_importable()
    from sglang.srt.lora.lora_registry import LoRARef, LoRARegistry

    class UncountedRegistry(LoRARegistry):
        """The change stays in this test."""

    count_nothing(UncountedRegistry)
    return UncountedRegistry([LoRARef(lora_id="a", lora_name="version-1")])


async def test_an_unload_waits_for_no_request_that_sglang_has_forgotten(
    registry: LoRARegistry,
) -> None:
    assert await registry.acquire("version-1") == "a"
    await registry.unregister("version-1")
    await asyncio.wait_for(registry.wait_for_unload("a"), 5)
    await registry.release("a")  # of a request that ended meanwhile


async def test_a_batch_gets_its_adapters(registry: LoRARegistry) -> None:
    names: Any = ["version-1", None]
    assert await registry.acquire(names) == ["a", None]
    await registry.release(["a", None])  # type: ignore[list-item]


async def test_an_adapter_that_is_not_loaded_is_an_error(
    registry: LoRARegistry,
) -> None:
    for wanted in ("version-2", ["version-1", "version-2"]):
        with pytest.raises(ValueError, match="not loaded: version-2"):
            await registry.acquire(wanted)


def state(version: str | None, *, dispatched: bool) -> types.SimpleNamespace:
    path = None if version is None else f"version-{version}"
    return types.SimpleNamespace(
        obj=types.SimpleNamespace(lora_path=path), dispatched=dispatched
    )


def test_requests_of_a_version_are_those_that_sglang_has_not_ended() -> None:
    aborted: list[str] = []
    manager: Any = types.SimpleNamespace(
        rid_to_state={
            "running": state("1", dispatched=True),
            "arriving": state("1", dispatched=False),
            "newer": state("11", dispatched=True),
            "bare": state(None, dispatched=True),
        },
        abort_request=aborted.append,
    )
    adapters = SglangAdapters(manager, max_versions=3)
    assert adapters.running("1") == 2
    assert adapters.running("2") == 0
    adapters.abort("1")
    # The scheduler does not have the other yet, and would not be told a second time.
    assert aborted == ["running"]
