"""The process of `loader_program.py`, as the receiver of weight updates sees it: a
server like an engine."""

from pathlib import Path

import msgspec

from benchmarks.weight_updates.loader_program import KEY_VARIABLE
from invrl.engines.client.sglang_client import EngineLimits, SglangClient
from invrl.host.network.ports import ReservedPort
from invrl.host.processes.fork_parent import ForkParent
from invrl.host.processes.process import PYTHON_MODULE, ServerProcess, random_key
from invrl.interfaces import WeightLayout

LOADER_MODULE = "benchmarks.weight_updates.loader_program"


class LoaderServer(ServerProcess):
    """Start it from a thread that lives as long as it should."""

    grace_s = 0.0  # it has nothing to bring to an end

    def __init__(
        self,
        layout: WeightLayout,
        folder: Path,
        device: str = "cpu",
        parent: ForkParent | None = None,
    ) -> None:
        """`folder` takes its log and the layout. `device`: where its parameters are, by
        torch's name. `parent`: has imported the module, and forks the process."""
        self._port = ReservedPort()
        self._key = random_key()
        layout_file = folder / "layout.json"
        layout_file.write_bytes(msgspec.json.encode(layout))
        command = [
            *PYTHON_MODULE,
            LOADER_MODULE,
            str(self._port.number),
            str(layout_file),
            device,
        ]
        super().__init__(
            "the loader",
            command,
            log=folder / "loader.log",
            env={KEY_VARIABLE: self._key},
            parent=parent,
        )

    def wait_ready(self, *, deadline_s: float) -> None:
        """Raises ServerError or DeadlineError."""
        self.wait_until(self._port.is_listened_on, deadline_s=deadline_s)

    def client(self) -> SglangClient:
        """It takes control requests only: this server generates nothing."""
        limits = EngineLimits(vocab_size=1, context_length=1)
        url = f"http://127.0.0.1:{self._port.number}"
        return SglangClient(
            url, limits=limits, api_key=self._key, admin_key=self._key, name=self.name
        )

    def stop(self) -> None:
        try:
            super().stop()
        finally:
            self._port.close()
