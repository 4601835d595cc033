"""The weight transaction over the fleet as it is now. What an update loses is evicted, and an engine that
left is given a new process with the committed weights, a few times. Called by `training.py`."""

import logging
from collections import Counter
from pathlib import Path

from tokenizers import Tokenizer

from invrl.config import Config
from invrl.errors import InvrlError, WeightSyncError
from invrl.rollout.fleet import Fleet
from invrl.train.train_handle import TrainHandle
from invrl.types import WeightUpdate, WeightVersion
from invrl.weight_sync import CanaryBound, WeightTransaction

logger = logging.getLogger(__name__)
_MAX_RESTARTS = 3
"""Of one engine in a run."""
_CANARY_TEXTS = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "def add(a: int, b: int) -> int:\n    return a + b\n\nprint(add(12, 30))  # 42",
    "In 1969 two people walked on the Moon; a third one waited for them in orbit.",
)
_CANARY_TOKENS = 32


class FleetUpdater:
    def __init__(self, config: Config, trainer: TrainHandle, fleet: Fleet) -> None:
        self._trainer, self._fleet = trainer, fleet
        self._restarts: Counter[str] = Counter()
        self._transaction = WeightTransaction(
            trainer,
            fleet.receivers,
            canary_prompts=canary_prompts(config.model.folder),
            bound=CanaryBound.for_dtypes(config.engine.engine_dtype, config.train.train_dtype),
            deadline_s=config.weight_sync.weight_sync_timeout_s,
        )

    async def run(self, version: WeightVersion) -> WeightUpdate:
        """Raises WeightSyncError; engines that it lost get no more traffic."""
        try:
            update = await self._transaction.run(version)
        except WeightSyncError as error:
            for name in error.unrestored:
                await self._fleet.evict(name, str(error))
            raise
        for name in update.lost_engines:
            await self._fleet.evict(name, f"lost in the update to version {version}")
        await self._restart_evicted()
        return update

    async def _restart_evicted(self) -> None:
        """A fleet that lost an engine goes on with the others if the engine does not come back."""
        staged = self._transaction.committed
        for name in list(self._fleet.evicted):
            if staged is None or self._restarts[name] >= _MAX_RESTARTS:
                continue
            self._restarts[name] += 1
            logger.warning("restarting %s, which left: %s", name, self._fleet.evicted[name])
            try:
                await self._fleet.restart(name, await self._trainer.layout(), staged)
            except InvrlError:
                logger.exception("%s did not come back (try %d)", name, self._restarts[name])


def canary_prompts(model_folder: Path) -> list[list[int]]:
    """Token ids of a few texts, at most 32 each: prose, code and numbers, so that most of a
    vocabulary's kinds of token are asked for. Needs tokenizer.json only."""
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    return [tokenizer.encode(text, add_special_tokens=False).ids[:_CANARY_TOKENS] for text in _CANARY_TEXTS]
