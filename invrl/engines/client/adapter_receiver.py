"""One engine's side of an update that sends an adapter alone: the engine loads it beside
the version that it serves, and its requests keep their caches.

They make no token while SGLang's scheduler reads the folder and hashes it, which takes
seconds for a large adapter.

The engine chooses the version of a request itself, when it arrives
(`engines/inside_sglang/adapter_routes.py`). Its own weights are never written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from invrl.engines.client.weight_receiver import EngineReceiver
from invrl.errors import LayoutError
from invrl.interfaces import StagedWeights, WeightLayout
from invrl.types.weights import WeightVersion
from invrl.weights.update.verification import ReadBack


class AdapterReceiver(EngineReceiver):
    """Loads PEFT folders that the trainer writes on a disk of this machine."""

    async def check(self, layout: WeightLayout, staged: StagedWeights) -> None:
        """Raise LayoutError unless the staged factors are those of the layout. The
        engine compares their shapes with its own when it loads them, into memory that
        nothing uses yet."""
        if set(staged.checksums) != {spec.name for spec in layout}:
            raise LayoutError(
                "the staged tensors are not those of the layout", engine=self.name
            )

    async def pause(self) -> None:
        """Let requests continue: they end with the version that they have."""

    async def resume(self) -> None:
        """Do nothing: no request has stopped."""

    async def _load(self, staged: StagedWeights) -> Mapping[str, str]:
        with self._loading():
            return await self._client.load_adapter(
                staged.version,
                staged.handle,
                staged.checksums,
                deadline_s=self._deadline_s,
            )

    async def checksums(self, staged: StagedWeights) -> Mapping[str, str]:
        """Return the checksums of the engine's own factors."""
        answered = self._answered
        self._answered = None
        if answered is not None and answered[0] == staged.version:
            return answered[1]
        return await self._read_checksums(str(staged.version))

    async def read_back(self, layout: WeightLayout) -> ReadBack:
        """Read the factors of the version that the engine serves, while it serves."""
        version = await self._client.weight_version()
        return ReadBack(
            version=version,
            checksums=await self._read_checksums(version),
            paused_s=0.0,
        )

    async def _read_checksums(self, version: str) -> Mapping[str, str]:
        with self._loading():
            return await self._client.adapter_checksums(
                version, deadline_s=self._deadline_s
            )

    async def commit(self, version: WeightVersion) -> None:
        await self._client.serve_adapter(version)
        await super().commit(version)

    async def logprobs(
        self, prompts: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]]:
        """Return the prompts' log-probs. If requests leave no room for them, the engine
        retracts these: the one pause of such an update."""
        return await self._logprobs_beside_requests(prompts)
