"""The manifest of a folder: size and checksum of every file in it, and the format of
the folder.

PyTorch's and Megatron's readers check no contents, so they would load a file of a
checkpoint that changed after it was written (a flipped bit, a lost block, a truncation)
without an error. The checksum is xxh3 with 128 bits: it protects against chance, not
against forgery, and it reads 12 GB/s on one core, blake2b 0.44 GB/s, so the disk is the
limit. The checksum of a large file is computed from the written bytes
(`checksummed_file.py`); only small ones, which other libraries write, are read again.
Files are checked in parallel; xxhash releases the GIL meanwhile. An interrupt or the
first damaged file ends the check immediately.
"""

import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from invrl.errors import DamagedFileError, NewerFormatError
from invrl.types.file_entry import FileEntries, FileEntry

MANIFEST_NAME = "manifest.json"
FORMAT = 1
"""Format of the written folders. A folder in a newer format is not read."""
_ALGORITHM = "xxh3_128"
_BLOCK_BYTES = 8 << 20
_MAX_THREADS = 16


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `manifest.json`."""

    format: int
    algorithm: str
    files: dict[str, FileEntry]
    """Entries by path relative to the folder, with forward slashes."""


def write_manifest(folder: Path, written: FileEntries) -> None:
    """Write the manifest of every file below `folder`. `written` has the entries known
    from writing; the other files are read. The caller flushes the manifest to disk."""
    names = [
        path.relative_to(folder).as_posix()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]
    unread = [name for name in names if name not in written]
    with _reader() as reader:
        entries = list(
            reader.threads.map(reader.hash_file, [folder / name for name in unread])
        )
    read = dict(zip(unread, entries, strict=True))
    files = {name: read.get(name) or written[name] for name in names}
    manifest = Manifest(format=FORMAT, algorithm=_ALGORITHM, files=files)
    (folder / MANIFEST_NAME).write_text(
        json.dumps(msgspec.to_builtins(manifest), indent=1), encoding="utf-8"
    )


def is_manifest(path: Path) -> bool:
    """Whether this file is a manifest of ours, and not another file of that name."""
    try:
        msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError):
        return False
    return True


def read_entries(folder: Path) -> FileEntries:
    """Return the entries of the folder's manifest. Raises DamagedFileError."""
    return _read_manifest(folder).files


def check_manifest(folder: Path, *, below: str = "") -> int:
    """Check every file in the manifest of `folder`, and return the number of bytes
    read. `below` limits the check to one subfolder. Raises DamagedFileError that names
    the first damaged file, NewerFormatError. Files outside of the manifest are not
    checked: nothing of ours reads them."""
    manifest = _read_manifest(folder)
    entries = manifest.files
    if below:
        entries = {
            name: entry
            for name, entry in entries.items()
            if name.startswith(f"{below}/")
        }
    if not entries:
        raise DamagedFileError(
            folder / MANIFEST_NAME, f"it names no file of {below or folder.name}"
        )
    paths = [folder / name for name in entries]
    with _reader() as reader:
        for damage in reader.threads.map(reader.compare, paths, entries.values()):
            if damage is not None:
                raise damage
    return sum(entry.bytes for entry in entries.values())


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST_NAME
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise DamagedFileError(
            path, "it is missing, so nothing in its folder can be checked"
        ) from None
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise DamagedFileError(path, f"it cannot be read: {error}") from error
    if manifest.format > FORMAT:
        reason = f"it is of format {manifest.format}, and this version of invrl reads formats up to {FORMAT}"
        raise NewerFormatError(path, reason, "use the version of invrl that wrote it")
    if manifest.algorithm != _ALGORITHM:
        reason = f"its checksums are {manifest.algorithm!r}, not {_ALGORITHM!r}"
        raise DamagedFileError(path, reason)
    return manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """Threads that compute the checksums of several files at once, until `stopped` is
    set."""

    threads: ThreadPoolExecutor
    stopped: threading.Event = field(default_factory=threading.Event)

    def hash_file(self, path: Path) -> FileEntry:
        """Return size and checksum of a file. Raises OSError; _Stopped once `stopped`
        is set."""
        import xxhash

        digest = xxhash.xxh3_128()
        size = 0
        block = bytearray(_BLOCK_BYTES)
        view = memoryview(block)
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(block):
                digest.update(view[:count])
                size += count
                if self.stopped.is_set():
                    raise _Stopped
        return FileEntry(bytes=size, checksum=digest.hexdigest())

    def compare(self, path: Path, expected: FileEntry) -> DamagedFileError | None:
        """Describe how the file differs from its entry; None if it does not."""
        try:
            entry = self.hash_file(path)
        except FileNotFoundError:
            return DamagedFileError(path, "it is missing")
        except OSError as error:
            return DamagedFileError(path, f"it cannot be read: {error.strerror}")
        if entry.bytes != expected.bytes:
            return DamagedFileError(
                path, f"it has {entry.bytes} bytes, and {expected.bytes} were written"
            )
        if entry.checksum != expected.checksum:
            found = f"its checksum is {entry.checksum}"
            return DamagedFileError(
                path, f"{found}, and {expected.checksum} was written"
            )
        return None


class _Stopped(Exception):
    """Ends a thread's reading. Nothing catches it, because nothing waits for the
    result."""


@contextmanager
def _reader() -> Iterator[_Reader]:
    """Run threads that read files. On exit they have ended; on an error they stop in
    the middle of their files. There are more threads than cores, since they wait for
    the disk."""
    num_threads = min(_MAX_THREADS, 2 * len(os.sched_getaffinity(0)))
    reader = _Reader(threads=ThreadPoolExecutor(num_threads, "checksum"))
    try:
        yield reader
    except BaseException:
        reader.stopped.set()
        raise
    finally:
        reader.threads.shutdown(cancel_futures=True)
