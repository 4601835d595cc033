"""SGLang's registry of adapters without its count of requests.

SGLang does not lower its count for a health question that it drops on a busy engine, for
a request that is aborted in the waiting queue, and for one that is refused after its
adapter has been looked up. Its unload waits without a deadline until the count is 0, and
holds the lock that every load needs. So SGLang counts nothing, and `ServedVersions`
waits for the requests of a version before it unloads the version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.lora.lora_registry import LoRARegistry


def count_nothing(registry: type[LoRARegistry]) -> None:
    """Change the class. Call this in the engine's HTTP process before it serves."""

    async def look_up(
        self: LoRARegistry, lora_name: str | list[str | None]
    ) -> str | list[str | None]:
        if isinstance(lora_name, str):
            return _id_of(self, lora_name)
        return [None if name is None else _id_of(self, name) for name in lora_name]

    async def release(self: LoRARegistry, lora_id: object) -> None:
        """Do nothing: no request has been counted."""

    async def wait_for_unload(self: LoRARegistry, lora_id: str) -> None:
        """Wait for nobody: no request uses the adapter any more."""
        self._counters.pop(lora_id, None)

    changed: Any = registry
    changed.acquire = look_up
    changed.release = release
    changed.wait_for_unload = wait_for_unload


def _id_of(registry: LoRARegistry, name: str) -> str:
    """Raises ValueError, as SGLang's own look-up does."""
    loaded = registry.get_all_adapters()
    if name not in loaded:
        raise ValueError(
            f"The following requested LoRA adapters are not loaded: {name}"
        )
    return loaded[name].lora_id
