"""Plain gloo broadcasts of as many bytes as an update has, to a process that does
nothing else with them."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch

from invrl.host.network.rendezvous import interface_towards, listen, serve_store
from invrl.host.processes.process import ServerProcess

_HOST = "127.0.0.1"


class RawBroadcasts(ServerProcess):
    """The process that receives (`raw_broadcast_program.py`), and this process's end.
    This process must be in no other default process group. Start it from a thread that
    lives as long as it should."""

    def __init__(
        self, num_bytes: int, *, count: int, deadline_s: float, folder: Path
    ) -> None:
        """`count`: of the calls of `seconds`. `deadline_s`: of each wait for the other
        process. `folder` takes its log."""
        self._source = torch.ones(num_bytes, dtype=torch.uint8)
        self._timeout = timedelta(seconds=deadline_s)
        self._listener = listen(_HOST)
        port = self._listener.getsockname()[1]
        module = "benchmarks.weight_updates.raw_broadcast_program"
        arguments = [str(argument) for argument in (port, num_bytes, count, deadline_s)]
        interface = {"GLOO_SOCKET_IFNAME": interface_towards(_HOST)}
        os.environ.update(interface)
        super().__init__(
            "the receiver of raw broadcasts",
            [sys.executable, "-m", module, *arguments],
            log=folder / "raw_broadcasts.log",
            env=interface,
        )

    def join(self) -> None:
        """Raises torch's error if the other process does not come in time."""
        store = serve_store(self._listener, world_size=2, timeout=self._timeout)
        torch.distributed.init_process_group(
            "gloo", store=store, rank=0, world_size=2, timeout=self._timeout
        )

    def seconds(self) -> float:
        """Of one broadcast, until the other process has all of it."""
        torch.distributed.barrier()
        start = time.monotonic()
        torch.distributed.broadcast(self._source, src=0)
        torch.distributed.barrier()
        return time.monotonic() - start

    def stop(self) -> None:
        try:
            super().stop()
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            self._listener.close()
