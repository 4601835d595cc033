"""Process groups of the weight transport `collective`: gloo between hosts, NCCL between
GPUs.

    gloo   a bucket goes from the trainer's host memory into that of each engine
    NCCL   the trainer copies a bucket to its GPU, and it goes from there into each engine's

By default torch ends a process in which NCCL fails or is late. A weight group must not
end an engine or the trainer when another member does, so its waits raise instead.

Invariant: each wait has the group's timeout. NCCL has none while it connects, so a
thread connects, and is left alone when it is late.
Imports torch only where a group is made.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from invrl.errors import BroadcastError
from invrl.host.network.rendezvous import interface_towards

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

TRAINER = 0
"""Rank that sends."""
_WAITS_RAISE = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""Torch reads these when a group is made. A wait then lasts until the GPU is done, or
raises, and no thread of torch watches the group."""
_ENVIRONMENT = threading.Lock()
"""Held while a thread has changed the variables of the process."""


class Work(Protocol):
    """A broadcast under way."""

    def wait(self) -> object:
        """Wait for its end. Raises RuntimeError, also after the group's timeout."""


class BroadcastGroup(Protocol):
    """Processes that broadcast from the trainer to all others."""

    def to_send(self, bucket: torch.Tensor) -> torch.Tensor:
        """Return the trainer's bucket in memory that can be sent."""
        ...

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Allocate memory in which a member can receive."""
        ...

    def broadcast(self, bucket: torch.Tensor) -> Work: ...

    def abort(self) -> None: ...


class GlooGroup:
    def __init__(
        self, store: Store, rank: int, size: int, *, host: str, timeout: timedelta
    ) -> None:
        """Wait for all members. `host`: the trainer's address."""
        from torch.distributed import ProcessGroupGloo as Gloo  # pyright: ignore[reportPrivateImportUsage]

        self._timeout = timeout
        options = Gloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._timeout = timeout
        options._devices = [Gloo.create_device(interface=interface_towards(host))]
        self._group: Any = Gloo(store, rank, size, options)

    def to_send(self, bucket: torch.Tensor) -> torch.Tensor:
        return bucket

    def buffer(self, num_bytes: int) -> torch.Tensor:
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8)

    def broadcast(self, bucket: torch.Tensor) -> Work:
        return self._group.broadcast(bucket, TRAINER, self._timeout)

    def abort(self) -> None:
        self._group.abort()


class NcclGroup:
    """Each member is on a GPU that no other member uses: NCCL refuses two on one."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        """Connect to all members, which have come. Raises BroadcastError if that takes
        longer than the timeout."""
        import torch
        from torch._C._distributed_c10d import BroadcastOptions
        from torch.distributed import ProcessGroupNCCL  # pyright: ignore[reportPrivateImportUsage]

        self._device = device
        self._is_trainer = rank == TRAINER
        self._options = BroadcastOptions()
        self._options.rootRank = TRAINER
        self._options.rootTensor = 0
        self._options.timeout = timeout
        self._stream = torch.cuda.Stream(device)
        """The trainer's copies do not queue behind its training step."""
        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        with _environment(_WAITS_RAISE):
            self._group: Any = ProcessGroupNCCL(store, rank, size, options)
        self._connect(timeout)

    def to_send(self, bucket: torch.Tensor) -> torch.Tensor:
        import torch

        with torch.cuda.stream(self._stream):
            return bucket.to(self._device, non_blocking=True)

    def buffer(self, num_bytes: int) -> torch.Tensor:
        import torch

        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def broadcast(self, bucket: torch.Tensor) -> Work:
        import torch

        # A bucket is received in the order of the stream that copied the one before out
        # of its buffer, and sent in that of the stream that copied it in.
        stream = torch.cuda.current_stream(self._device)
        if self._is_trainer:
            stream = self._stream
        with torch.cuda.stream(stream):
            return self._group.broadcast([bucket], self._options)

    def abort(self) -> None:
        self._group.abort()

    def _connect(self, timeout: timedelta) -> None:
        """Broadcast a byte, because NCCL connects with the first broadcast."""
        connected: Future[None] = Future()

        def connect() -> None:
            try:
                self.broadcast(self.buffer(1)).wait()
            except BaseException as error:
                connected.set_exception(error)
            else:
                connected.set_result(None)

        threading.Thread(target=connect, name="nccl-connect", daemon=True).start()
        try:
            connected.result(timeout.total_seconds())
        except TimeoutError:
            # Nobody waits for the abort either: NCCL may be in its way.
            threading.Thread(target=self.abort, name="nccl-abort", daemon=True).start()
            seconds = timeout.total_seconds()
            raise BroadcastError(f"NCCL did not connect within {seconds:g} s") from None


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the block, in one thread at a time."""
    with _ENVIRONMENT:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
