"""A trainer rank as a Ray actor: receives, calls, replies."""

import asyncio
import faulthandler
import gc
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from invrl.algorithms.config import AlgorithmConfig
from invrl.host.environment_keys import forget_keys
from invrl.host.heartbeat import Pulse, pulse
from invrl.train.config import TrainConfig
from invrl.train.group_store import listen
from invrl.train.megatron_args import Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """What a rank is started with. `weight_dtype` is what the engines hold. `master_addr`: where rank 0
    listens, an address of its node that every other rank reaches; loopback on one machine. `store_key`: the
    prefix of all names in the ranks' common store, so that nobody else can guess them."""

    rank: int
    world_size: int
    master_addr: str
    store_key: str = field(repr=False)
    model_path: str
    chat_template: str = ""
    """The Jinja text that the run uses in place of the model's own; "": the model's."""
    train: TrainConfig
    algorithm: AlgorithmConfig
    weight_dtype: str
    transport: str = "arena"
    megatron: dict[str, Scalar] = field(default_factory=dict)
    seed: int = 0


class TrainActor:
    """All work is done by one thread, a call at a time, so that `beat` can answer meanwhile. The model is
    built by `start`, so that making the actor is quick and all ranks can be made before they wait for each
    other."""

    def __init__(self, settings: RankSettings) -> None:
        forget_keys()  # the policy loss may be user code
        self._settings = settings
        self._listener: socket.socket | None = None
        self._worker = ThreadPoolExecutor(1, "rank")
        faulthandler.enable(sys.stderr)

    async def beat(self) -> Pulse:
        return pulse()

    async def listen(self) -> int:
        """On rank 0: takes a free port for the ranks' common store and keeps it. Returns the port."""
        self._listener = listen(self._settings.master_addr)
        return self._listener.getsockname()[1]

    async def start(self, port: int) -> None:
        """`port`: what rank 0 listens on."""
        await asyncio.get_running_loop().run_in_executor(self._worker, self._build, port)

    async def call(self, method: str, *arguments: object) -> object:
        """A method of `TrainRank`."""
        work = getattr(self._rank, method)
        return await asyncio.get_running_loop().run_in_executor(self._worker, work, *arguments)

    def _build(self, port: int) -> None:
        gc.disable()  # an eighth of the time that torch and Megatron take to import
        from invrl.train.rank import TrainRank

        self._rank = TrainRank(self._settings, port, self._listener)
        gc.freeze()
        gc.enable()
