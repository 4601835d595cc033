"""The weight transaction over the fleet as it is now. What an update loses leaves the fleet and is started
again in the background; an engine that comes back is given the version that the fleet holds then.

Invariant: no update stages, loads or commits while a restarted engine takes the fleet's version, so what it
reads stays whole, and an engine is admitted with the newest version or not at all."""

import asyncio
from pathlib import Path

from tokenizers import Tokenizer

from invrl.engines.fleet import Admit, Fleet
from invrl.errors import WeightSyncError
from invrl.interfaces import WeightReceiver, WeightSender
from invrl.run.config import Config
from invrl.types import WeightUpdate, WeightVersion
from invrl.weights.transaction import CanaryBound, WeightTransaction

_CANARY_TEXTS = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "def add(a: int, b: int) -> int:\n    return a + b\n\nprint(add(12, 30))  # 42",
    "In 1969 two people walked on the Moon; a third one waited for them in orbit.",
)
_CANARY_TOKENS = 32


def fleet_updater(config: Config, sender: WeightSender, fleet: Fleet) -> "FleetUpdater":
    """With the run's deadlines, and canaries that its dtypes allow."""
    transaction = WeightTransaction(
        sender,
        fleet.receivers,
        canary_prompts=canary_prompts(config.model.folder),
        bound=CanaryBound.for_dtypes(config.engine.engine_dtype, config.train.train_dtype),
        deadline_s=config.weight_sync.weight_sync_timeout_s,
    )
    return FleetUpdater(transaction, fleet)


class FleetUpdater:
    """`run` once per version."""

    def __init__(self, transaction: WeightTransaction, fleet: Fleet) -> None:
        self._transaction = transaction
        self._fleet = fleet
        self._weights_in_use = asyncio.Lock()
        """Held by an update from its staging to its canary, and by an engine that comes back."""

    async def run(self, version: WeightVersion) -> WeightUpdate:
        """Raises WeightSyncError; engines that it lost get no more traffic."""
        async with self._weights_in_use:
            try:
                update = await self._transaction.run(version)
            except WeightSyncError as error:
                for name in error.unrestored:
                    self._fleet.evict(name, str(error))
                raise
            for name, reason in update.lost_engines.items():
                self._fleet.evict(name, f"lost in the update to version {version}: {reason}")
        self._fleet.restart_evicted(self._bring_up)
        return update

    async def _bring_up(self, engine: WeightReceiver, admit: Admit) -> None:
        async with self._weights_in_use:
            await self._transaction.bring_up(engine)
            await admit()


def canary_prompts(model_folder: Path) -> list[list[int]]:
    """Token ids of a few texts, at most 32 each: prose, code and numbers, so that most of a
    vocabulary's kinds of token are asked for. Needs tokenizer.json only."""
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    return [tokenizer.encode(text, add_special_tokens=False).ids[:_CANARY_TOKENS] for text in _CANARY_TEXTS]
