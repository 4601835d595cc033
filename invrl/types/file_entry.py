"""Size and hash of a written file, so that damage is found when it is read."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file's size, and the hexadecimal xxh3-128 of its bytes."""

    bytes: int
    checksum: str


FileEntries = Mapping[str, FileEntry]
"""Entries of files by path, relative to their folder."""
