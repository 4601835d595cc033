"""A trainer whose checkpoints are small text files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from invrl.errors import TrainError
from invrl.interfaces import Trainer
from invrl.store.checksummed_file import ChecksummedFile
from invrl.types.file_entry import FileEntries

NO_MODEL = Path("/nowhere")
"""Nothing is compared with it: the saved folders have no config.json."""


class FolderTrainer:
    """Writes what it is asked to; `fails_in` names the call that leaves half and
    raises."""

    def __init__(self, weights: str = "weights", *, fails_in: str = "") -> None:
        self._weights = weights
        self._fails_in = fails_in
        self.calls: list[str] = []

    async def export_hugging_face(self, path: str) -> FileEntries:
        Path(path).mkdir()
        return self._write("export_hugging_face", Path(path) / "model.safetensors")

    async def save_checkpoint(self, path: str) -> FileEntries:
        Path(path).mkdir()
        return self._write("save_checkpoint", Path(path) / "state")

    def _write(self, call: str, file: Path) -> FileEntries:
        self.calls.append(call)
        if call == self._fails_in:
            file.write_text(self._weights[:3])
            raise TrainError("no memory is left")
        with ChecksummedFile(file) as opened:
            opened.write(self._weights.encode())
        return {file.name: opened.entry()}


def trainer(weights: str = "weights", *, fails_in: str = "") -> Trainer:
    return cast(Any, FolderTrainer(weights, fails_in=fails_in))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
