"""An engine that serves versions of an adapter, in this process: the real choice of
versions over adapters that are read from PEFT folders, and a client to it that can
die."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file

from invrl.engines.inside_sglang.served_versions import AdapterError, ServedVersions
from invrl.errors import ServerError
from invrl.types.weights import WeightVersion
from invrl.weights.tensors.tensor_spec import checksum

MAX_RANK = 2


class FolderAdapters:
    """Adapters by version, each with the checksums of what its folder held. Like
    SGLang, it refuses a file that it cannot read and a rank above its maximum, and
    compares no tensor with its name's shape."""

    max_versions = 3

    def __init__(self) -> None:
        self.held: dict[str, dict[str, str]] = {}
        self.aborted: list[str] = []
        self.unended: Counter[str] = Counter()

    def loaded(self) -> list[str]:
        return list(self.held)

    async def load(self, version: str, folder: str) -> Mapping[str, str]:
        try:
            config = json.loads(Path(folder, "adapter_config.json").read_bytes())
            tensors = load_file(Path(folder, "adapter_model.safetensors"))
        except (OSError, ValueError, SafetensorError) as error:
            raise AdapterError(str(error)) from error
        if config["r"] > MAX_RANK:
            raise AdapterError(f"rank {config['r']} is incompatible")
        self.held[version] = {name: checksum(t) for name, t in tensors.items()}
        return self.held[version]

    async def checksums(self, version: str) -> Mapping[str, str]:
        return self.held[version]

    async def unload(self, version: str) -> None:
        assert not self.unended[version], "a running request would kill the engine"
        del self.held[version]

    def abort(self, version: str) -> None:
        self.aborted.append(version)

    def running(self, version: str) -> int:
        return self.unended[version]


class AdapterEngine:
    """The engine and its client. `dies`: its calls fail from now on."""

    def __init__(self) -> None:
        self.adapters = FolderAdapters()
        self.versions = ServedVersions()
        self.named = ""
        self.is_dead = False
        self._requests = ExitStack()

    def die(self) -> None:
        self.is_dead = True

    def begin_request(self) -> str | None:
        """Begin a request that does not end. Returns its version."""
        version = self._requests.enter_context(self.versions.request())
        if version is not None:
            self.adapters.unended[version] += 1
        return version

    @property
    def served(self) -> Mapping[str, str]:
        """Checksums of the version that new requests get."""
        assert self.versions.newest is not None
        return self.adapters.held[self.versions.newest]

    def _check_alive(self) -> None:
        if self.is_dead:
            raise ServerError("connection refused")

    async def load_adapter(
        self,
        version: WeightVersion,
        folder: str,
        checksums: Mapping[str, str],
        *,
        deadline_s: float,
    ) -> Mapping[str, str]:
        self._check_alive()
        try:
            return await self.versions.load(
                self.adapters, str(version), folder, checksums
            )
        except AdapterError as error:
            raise ServerError(f"HTTP 400: {error}") from error

    async def adapter_checksums(
        self, version: str, *, deadline_s: float
    ) -> Mapping[str, str]:
        self._check_alive()
        return await self.adapters.checksums(version)

    async def serve_adapter(self, version: WeightVersion) -> None:
        self._check_alive()
        self.versions.serve(self.adapters, str(version))

    async def name_weights(self, version: WeightVersion) -> str:
        self._check_alive()
        self.named = str(version)
        return self.named

    async def weight_version(self) -> str:
        self._check_alive()
        return self.named

    async def prompt_logprobs(
        self, prompts: Sequence[Sequence[int]], **_: Any
    ) -> list[NDArray[np.float32]]:
        self._check_alive()
        return [np.zeros(len(ids) - 1, np.float32) for ids in prompts]

    async def pause(self, *_: object) -> None:
        raise AssertionError("an update of an adapter pauses nobody")

    pause_and_flush = drain = resume = pause
