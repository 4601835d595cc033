"""Gives new weights to the current fleet: runs the transaction
(`weights/update/transaction.py`) over its engines, and evicts engines that the
transaction loses.

A lost engine leaves the fleet and is started again in the background. When it is up it
loads the fleet's version, while updates continue (`weights/update/joining_engines.py`).
"""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

from invrl.engines.fleet.fleet import Fleet
from invrl.errors import (
    CanaryError,
    ChecksumError,
    InvrlError,
    LayoutError,
    WeightSyncError,
)
from invrl.host.files.disk_waits import until_written
from invrl.interfaces import WeightSender
from invrl.run.loop.gpu_turns import SenderThatSleeps
from invrl.run.settings.config import Config
from invrl.train.trainer.train_handle import TrainHandle
from invrl.types.weights import WeightUpdate, WeightVersion
from invrl.user_code.model_folder import read_tokenizer
from invrl.weights.config import (
    AdapterWeights,
    BucketWeights,
    CollectiveWeights,
    FileWeights,
)
from invrl.weights.transports.broadcast_loads import BroadcastLoads
from invrl.weights.transports.bucket_loads import BucketLoads
from invrl.weights.update.canary import CanaryBound
from invrl.weights.update.committed import Committed, load_alone
from invrl.weights.update.transaction import WeightTransaction
from invrl.weights.update.verification import EngineVerification, Verification, compare

_CANARY_TEXTS = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "def add(a: int, b: int) -> int:\n    return a + b\n\nprint(add(12, 30))  # 42",
    "In 1969 two people walked on the Moon; a third one waited for them in orbit.",
)
_CANARY_TOKENS = 32


def create_weight_updater(
    config: Config,
    sender: TrainHandle,
    fleet: Fleet,
    announce: Callable[[WeightVersion], object],
    *,
    run_folder: Path,
) -> "WeightUpdater":
    """Create an updater with the run's deadlines, and a canary bound for its dtypes.
    `announce`: as in `WeightUpdater`."""
    settings = config.weights
    stages: WeightSender = SenderThatSleeps(sender) if config.run.colocate else sender
    load = load_alone
    if isinstance(settings, CollectiveWeights):
        load = BroadcastLoads(sender, timeout_s=settings.bucket_timeout_s).load
    if isinstance(settings, BucketWeights):
        load = BucketLoads(sender, timeout_s=settings.bucket_timeout_s).load
    drains = settings.inflight == "drain"
    transaction = WeightTransaction(
        stages,
        fleet.receivers,
        canary_prompts=canary_prompts(config.model.folder),
        bound=CanaryBound.for_dtypes(config.engine.dtype, config.train.train_dtype),
        until_engine=fleet.until_engine,
        deadline_s=settings.timeout_s,
        drain_timeout_s=settings.drain_timeout_s if drains else 0.0,
        is_rolling=settings.update == "rolling",
        load=load,
        pauses=not isinstance(settings, AdapterWeights),
    )
    folder = run_folder
    if isinstance(settings, FileWeights) and settings.folder:
        folder = Path(settings.folder)
    return WeightUpdater(transaction, fleet, announce, folder=folder)


class WeightUpdater:
    """Weight updates of a fleet. `update` runs once per version."""

    def __init__(
        self,
        transaction: WeightTransaction,
        fleet: Fleet,
        announce: Callable[[WeightVersion], object] = lambda _: None,
        *,
        folder: Path = Path(),
    ) -> None:
        """`announce` is called with each version before an engine gets it. `folder`: on
        the disk of the weight files, if there are any."""
        self._folder = folder
        self._transaction = transaction
        self._fleet = fleet
        self._announce = announce
        self._verifying = asyncio.Lock()
        """Held while engines are verified: of two readers of one engine, one would
        resume it under the other."""

    async def phase_text(self) -> str:
        """Describe what the current update waits for; "" if there is none."""
        phase = self._transaction.phase
        if not phase:
            return ""
        return (
            "weights: the trainer stages them"
            if phase == "stage"
            else f"weights: {phase} by the engines"
        )

    async def suspend(self) -> None:
        """Begin the next update, which `update` continues: engines are paused and
        give back the memory of their caches. Engines that are lost leave the fleet; if
        all of them died, there is nothing to pause. Raises WeightSyncError."""
        lost = None
        while lost is None:
            try:
                lost = await self._transaction.suspend()
            except WeightSyncError as error:
                for engine in error.unrestored:
                    self._fleet.evict(engine, str(error))
                if not await self._has_lost_all_engines(error):
                    raise
        for engine, reason in lost.items():
            self._fleet.evict(engine, f"lost when the trainer took the GPU: {reason}")

    async def update(self, version: WeightVersion) -> WeightUpdate:
        """Give the trainer's weights to every engine as this version. Raises
        WeightSyncError. Engines that the update loses get no more requests. If it loses
        all of them, it continues with the first that comes back; raises ServerError if
        none does."""
        self._announce(version)
        update = None
        while update is None:
            try:
                run = partial(self._transaction.run, version)
                update = await until_written(self._folder, "the weights' files", run)
            except WeightSyncError as error:
                for engine in error.unrestored:
                    self._fleet.evict(engine, str(error))
                if not await self._waits_for_engine(error, version):
                    raise
                await self._fleet.until_engine()
                update = self._transaction.committed_update(version)
        for engine, reason in update.lost_engines.items():
            self._fleet.evict(
                engine, f"lost in the update to version {version}: {reason}"
            )
        self._fleet.restart_evicted(self._transaction.bring_up)
        return update

    async def _waits_for_engine(
        self, error: WeightSyncError, version: WeightVersion
    ) -> bool:
        """Whether the update failed because the last engine died, and may continue once
        an engine is back. Where GPUs are shared, none may start before the weights are
        staged and the trainer sleeps."""
        if self._fleet.shares_gpus and self._transaction.staged != version:
            return False
        return await self._has_lost_all_engines(error)

    async def _has_lost_all_engines(self, error: WeightSyncError) -> bool:
        """Whether a call of the engines failed because the last of them died, and one
        may come back."""
        is_fault = isinstance(error, LayoutError | ChecksumError | CanaryError)
        if is_fault or self._transaction.committed is None:
            return False
        await self._fleet.evict_silent()
        return not self._fleet.engines

    async def verify(self, wait_s: float) -> Verification:
        """Compare the engines' weights with the committed ones, one engine after the
        other, while they serve. Waits up to `wait_s` for an update to end; one that
        begins meanwhile waits in turn. An engine that does not resume leaves the
        fleet."""
        reader = "the verification of weights"
        try:
            async with (
                self._verifying,
                self._transaction.holding_committed(reader, wait_s) as committed,
            ):
                names = list(self._fleet.engines)
                engines = [await self._verify_engine(name, committed) for name in names]
        except WeightSyncError as error:
            return Verification(error=str(error))
        return Verification(
            version=str(committed.staged.version), engines=tuple(engines)
        )

    async def _verify_engine(
        self, name: str, committed: Committed
    ) -> EngineVerification:
        engine = self._fleet.engines.get(name)
        if engine is None:
            return EngineVerification(engine=name, error="it has left the fleet")
        try:
            read_back = await engine.receiver.read_back(committed.layout)
        except InvrlError as error:
            if engine.receiver.is_paused:
                self._fleet.evict(
                    name, f"it did not resume after its weights were verified: {error}"
                )
            return EngineVerification(engine=name, error=str(error))
        return compare(committed, name, read_back)


def canary_prompts(model_folder: Path) -> list[list[int]]:
    """Return token ids of prose, code and numbers, at most 32 per text, so that most
    kinds of token are compared. Needs only the tokenizer's files. Raises ConfigError if
    they are broken."""
    tokenizer = read_tokenizer(model_folder)
    prompts = []
    for text in _CANARY_TEXTS:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        prompts.append(encoding.ids[:_CANARY_TOKENS])
    return prompts
