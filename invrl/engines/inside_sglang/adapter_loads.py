"""Loads of adapters in the scheduler: their reply has checksums of what the engine
holds, and the tokens of a request have the version of its adapter.

SGLang stacks the factors of some projections (q, k and v; gate and up). The checksums
are of the stacked tensors, taken apart again. These are copies in host memory, from
which SGLang fills the memory that its kernels read whenever a request needs the adapter:
the checksums do not cover that copy, and only the canary does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.lora.lora_registry import LoRARef
    from sglang.srt.managers.io_struct import LoRAUpdateOutput

STACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Projections that SGLang stacks and adapts together, in their order, by its own
names."""
NAME_PREFIX = "version-"

_versions: dict[str, str] = {}
"""Versions of the loaded adapters, by SGLang's ids. A scheduler is one process."""


def adapter_name(version: str) -> str:
    """Return the name under which an engine holds a version of the adapter."""
    return f"{NAME_PREFIX}{version}"


def version_of_adapter(lora_id: str | None) -> str | None:
    """Return the version of a request's adapter. None: the request has none, or one of
    `invrl serve --adapter`."""
    return None if lora_id is None else _versions.get(lora_id)


def unstacked(
    tensors: Mapping[str, torch.Tensor], rows: Mapping[str, int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the factors under the names under which they arrived. `rows`: of each
    factor that arrived. Where one of a stack has not arrived, SGLang puts zeros in its
    place: nothing of that stack is yielded, so that its checksums are missing."""
    for name, tensor in tensors.items():
        names = [name]
        for stacked, parts in STACKED.items():
            if f".{stacked}." in name:
                names = [name.replace(f".{stacked}.", f".{part}.") for part in parts]
        if not all(part in rows for part in names):
            continue
        yield from zip(names, tensor.split([rows[part] for part in names]), strict=True)


def reply_with_checksums() -> None:
    """Change the loads. Call this in the scheduler's process or the one that it is
    forked from. Imports SGLang."""
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.lora.lora_manager import LoRAManager

    process_weight = LoRAAdapter._process_weight
    load_adapter = LoRAManager.load_lora_adapter
    unload_adapter = LoRAManager.unload_lora_adapter

    def process_and_note(
        self: LoRAAdapter, name: str, loaded_weight: torch.Tensor
    ) -> None:
        rows: dict[str, int] = self.__dict__.setdefault("invrl_rows", {})
        rows[name] = loaded_weight.shape[0]
        process_weight(self, name, loaded_weight)

    def load_and_hash(self: LoRAManager, lora_ref: LoRARef) -> LoRAUpdateOutput:
        """Reply with checksums in place of the list of adapters. For an adapter that is
        loaded, do nothing else."""
        if lora_ref.lora_id in self.loras:
            result = self.create_lora_update_result(success=True)
        else:
            result = load_adapter(self, lora_ref)
        if result.success:
            name = lora_ref.lora_name or ""
            if name.startswith(NAME_PREFIX):
                _versions[lora_ref.lora_id] = name.removeprefix(NAME_PREFIX)
            reply: Any = result  # the one field that can hold checksums
            reply.loaded_adapters = _checksums(self.loras[lora_ref.lora_id])
        return result

    def unload_and_forget(self: LoRAManager, lora_ref: LoRARef) -> LoRAUpdateOutput:
        _versions.pop(lora_ref.lora_id, None)
        return unload_adapter(self, lora_ref)

    LoRAAdapter._process_weight = process_and_note
    LoRAManager.load_lora_adapter = load_and_hash
    LoRAManager.unload_lora_adapter = unload_and_forget


def _checksums(adapter: LoRAAdapter) -> dict[str, str]:
    from invrl.weights.tensors.tensor_spec import checksum

    rows: Mapping[str, int] = adapter.__dict__["invrl_rows"]
    return {
        name: checksum(tensor)
        for layer in adapter.layers
        for name, tensor in unstacked(layer.weights, rows)
    }
