"""A file whose checksum is computed from the written bytes, while they are in memory.

Hashing a file by reading it again costs a second pass over the disk, and would hash
whatever the disk holds by then. The checksum is xxh3 with 128 bits (see `manifest.py`).
"""

import os
from pathlib import Path
from typing import Self

from invrl.types.file_entry import FileEntry


class ChecksummedFile:
    """A new file, written from beginning to end. Raises OSError like `open`."""

    def __init__(self, path: Path) -> None:
        import xxhash

        self._file = path.open("wb")
        self._digest = xxhash.xxh3_128()
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, data: bytes | memoryview) -> int:
        written = self._file.write(data)
        self._digest.update(data)
        self._size += written
        return written

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._file.flush()

    def sync(self) -> None:
        """Flush the written bytes to disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def entry(self) -> FileEntry:
        """Return the entry of everything written."""
        return FileEntry(bytes=self._size, checksum=self._digest.hexdigest())
