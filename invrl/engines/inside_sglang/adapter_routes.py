"""Routes of an engine's HTTP process by which it serves versions of an adapter beside
each other.

`POST /load_adapter` loads a version, and replies with checksums of what the engine then
holds of it. `POST /serve_adapter`: from now on requests get this version. `GET
/adapter_checksums`: of a version that is loaded.

Nobody outside the engine names a version in a request: SGLang would silently load a
version that is named after its unload, and it evicts versions silently where
`--max-loaded-loras` is set, which invrl leaves out. A loaded name cannot be replaced,
so each version has its own (`served_versions.py`).
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

from invrl.engines.inside_sglang.adapter_loads import NAME_PREFIX, adapter_name
from invrl.engines.inside_sglang.adapter_registry import count_nothing
from invrl.engines.inside_sglang.engine_routes import tokenizer_manager
from invrl.engines.inside_sglang.served_versions import AdapterError, ServedVersions

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import LoRAUpdateOutput
    from sglang.srt.managers.tokenizer_manager import ReqState, TokenizerManager

LOAD_ADAPTER_PATH = "/load_adapter"
SERVE_ADAPTER_PATH = "/serve_adapter"
ADAPTER_CHECKSUMS_PATH = "/adapter_checksums"


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /load_adapter`."""

    version: str
    folder: str
    """PEFT folder on a disk of this machine."""
    checksums: dict[str, str]
    """Checksums by tensor. A version that the engine holds with others is replaced."""


class SglangAdapters:
    """The adapters that SGLang has loaded."""

    def __init__(self, manager: "TokenizerManager", max_versions: int) -> None:
        self._manager = manager
        self.max_versions = max_versions

    def loaded(self) -> list[str]:
        names = self._manager.lora_registry.get_all_adapters()
        return [name.removeprefix(NAME_PREFIX) for name in names]

    async def load(self, version: str, folder: str) -> Mapping[str, str]:
        from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput

        name = adapter_name(version)
        result = await self._manager.load_lora_adapter(
            LoadLoRAAdapterReqInput(lora_name=name, lora_path=folder)
        )
        if not result.success and name in self._manager.pending_lora_unloads:
            await self.unload(version)
        return _checksums(result)

    async def checksums(self, version: str) -> Mapping[str, str]:
        from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput

        name = adapter_name(version)
        reference = self._manager.lora_registry.get_all_adapters().get(name)
        if reference is None:
            raise AdapterError(f"version {version} is not loaded")
        question = LoadLoRAAdapterReqInput(
            lora_name=name,
            lora_path=reference.lora_path or "",
            lora_id=reference.lora_id,
        )
        async with self._manager.lora_update_lock:
            manager: Any = self._manager
            results = await manager.update_lora_adapter_communicator(question)
        return _checksums(results[0])

    async def unload(self, version: str) -> None:
        from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

        name = adapter_name(version)
        result = await self._manager.unload_lora_adapter(
            UnloadLoRAAdapterReqInput(lora_name=name)
        )
        # SGLang would load it again from its path.
        self._manager.lora_ref_cache.pop(name, None)
        if not result.success:
            raise AdapterError(
                f"version {version} is not unloaded: {result.error_message}"
            )

    def running(self, version: str) -> int:
        return len(self._states(version))

    def abort(self, version: str) -> None:
        for rid, state in self._states(version).items():
            # SGLang would note the abort of a request that its scheduler does not have
            # yet, and send it no second one.
            if state.dispatched:
                self._manager.abort_request(rid)

    def _states(self, version: str) -> dict[str, "ReqState"]:
        """Return the requests that use a version, by id. They stay until the scheduler
        has reported their end, also after their client has left."""
        name = adapter_name(version)
        states = self._manager.rid_to_state
        return {
            rid: state for rid, state in states.items() if state.obj.lora_path == name
        }


def _checksums(result: "LoRAUpdateOutput") -> dict[str, str]:
    """Return the checksums that `adapter_loads.py` replies with. Raises
    AdapterError."""
    if not result.success:
        raise AdapterError(str(result.error_message))
    return {name: str(value) for name, value in (result.loaded_adapters or {}).items()}


def add_adapter_routes() -> None:
    """Add the routes, and give requests their version. Call this in the engine's HTTP
    process before it serves. Imports SGLang."""
    from fastapi import HTTPException, Request
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.lora.lora_registry import LoRARegistry
    from sglang.srt.utils.auth import AuthLevel, auth_level

    count_nothing(LoRARegistry)
    versions = ServedVersions()
    _give_newest(versions)

    @app.post(LOAD_ADAPTER_PATH)
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def load_adapter(request: Request) -> dict[str, Mapping[str, str]]:
        body = msgspec.json.decode(await request.body(), type=LoadAdapter)
        try:
            held = await versions.load(
                _adapters(), body.version, body.folder, body.checksums
            )
        except AdapterError as error:
            raise HTTPException(400, str(error)) from error
        return {"checksums": held}

    @app.post(SERVE_ADAPTER_PATH)
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def serve_adapter(version: str) -> dict[str, str]:
        try:
            versions.serve(_adapters(), version)
        except AdapterError as error:
            raise HTTPException(400, str(error)) from error
        return {"served": version}

    @app.get(ADAPTER_CHECKSUMS_PATH)
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def adapter_checksums(version: str) -> dict[str, Mapping[str, str]]:
        try:
            return {"checksums": await _adapters().checksums(version)}
        except AdapterError as error:
            raise HTTPException(400, str(error)) from error


def _adapters() -> SglangAdapters:
    from sglang.srt.runtime_context import get_lora

    return SglangAdapters(tokenizer_manager(), get_lora().max_loras_per_batch)


def _give_newest(versions: ServedVersions) -> None:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    generate = TokenizerManager.generate_request

    async def generate_with_newest(
        self: TokenizerManager, obj: Any, request: Any = None
    ) -> AsyncIterator[Any]:
        with versions.request() as version:
            if version is not None:
                obj.lora_path = adapter_name(version)
            async with aclosing(generate(self, obj, request)) as replies:
                async for reply in replies:
                    yield reply

    manager: Any = TokenizerManager
    manager.generate_request = generate_with_newest
