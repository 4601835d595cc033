"""Gives new weights to the fleet as it is now: the transaction (`weights/transaction.py`) over its engines,
and what becomes of an engine that the transaction loses.

A lost engine leaves the fleet and is started again in the background. When it is up it loads the version that
the fleet holds, beside the updates that go on (`weights/newcomers.py`)."""

from pathlib import Path

from tokenizers import Tokenizer

from invrl.engines.fleet import Fleet
from invrl.errors import WeightSyncError
from invrl.interfaces import WeightSender
from invrl.run.config import Config
from invrl.types import WeightUpdate, WeightVersion
from invrl.weights.transaction import CanaryBound, WeightTransaction

_CANARY_TEXTS = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "def add(a: int, b: int) -> int:\n    return a + b\n\nprint(add(12, 30))  # 42",
    "In 1969 two people walked on the Moon; a third one waited for them in orbit.",
)
_CANARY_TOKENS = 32


def create_weight_updater(config: Config, sender: WeightSender, fleet: Fleet) -> "WeightUpdater":
    """With the run's deadlines, and a canary bound for its dtypes."""
    transaction = WeightTransaction(
        sender,
        fleet.receivers,
        canary_prompts=canary_prompts(config.model.folder),
        bound=CanaryBound.for_dtypes(config.engine.engine_dtype, config.train.train_dtype),
        deadline_s=config.weight_sync.weight_sync_timeout_s,
        is_rolling=config.weight_sync.weight_update == "rolling",
    )
    return WeightUpdater(transaction, fleet)


class WeightUpdater:
    """`update` runs once per version."""

    def __init__(self, transaction: WeightTransaction, fleet: Fleet) -> None:
        self._transaction = transaction
        self._fleet = fleet

    async def update(self, version: WeightVersion) -> WeightUpdate:
        """Gives the trainer's weights to every engine as this version. Raises WeightSyncError. Engines that
        the update loses get no more requests."""
        try:
            update = await self._transaction.run(version)
        except WeightSyncError as error:
            for engine in error.unrestored:
                self._fleet.evict(engine, str(error))
            raise
        for engine, reason in update.lost_engines.items():
            self._fleet.evict(engine, f"lost in the update to version {version}: {reason}")
        self._fleet.restart_evicted(self._transaction.bring_up)
        return update


def canary_prompts(model_folder: Path) -> list[list[int]]:
    """Token ids of prose, code and numbers, at most 32 per text, so that most kinds of token of a vocabulary
    are compared. Needs tokenizer.json only."""
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    prompts = []
    for text in _CANARY_TEXTS:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        prompts.append(encoding.ids[:_CANARY_TOKENS])
    return prompts
