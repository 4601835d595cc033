"""Weight updates of the shared engine, by a trainer that is a Hugging Face model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from torch_trainer import TorchSender

from invrl.interfaces import WeightReceiver
from invrl.types.weights import WeightUpdate, WeightVersion
from invrl.weights.update.canary import CanaryBound
from invrl.weights.update.committed import Load, load_alone
from invrl.weights.update.transaction import WeightTransaction

CANARY = [[1, 20, 35, 70, 300, 410, 9, 2], [5, 400, 33, 33, 90, 100, 511]]
FP32 = CanaryBound.for_dtypes("float32", "float32")


def receivers_of(
    *receivers: WeightReceiver,
) -> Callable[[], Awaitable[Sequence[WeightReceiver]]]:
    async def fixed() -> Sequence[WeightReceiver]:
        return receivers

    return fixed


class Update:
    """One transaction after another against the shared engine, versions counting on."""

    version = 0

    def __init__(
        self,
        sender: TorchSender,
        receivers: Sequence[WeightReceiver],
        load: Load = load_alone,
    ) -> None:
        self.sender = sender
        self.transaction = WeightTransaction(
            sender,
            receivers_of(*receivers),
            canary_prompts=CANARY,
            bound=FP32,
            load=load,
        )

    async def run(self) -> WeightUpdate:
        version = WeightVersion(Update.version + 1)
        update = await self.transaction.run(version)
        Update.version = version
        return update
