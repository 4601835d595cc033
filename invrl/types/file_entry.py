"""What was written into a file, so that a damaged one is found when it is read."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """What was written into a file: its size, and the hexadecimal xxh3-128 of its
    bytes."""

    bytes: int
    checksum: str


FileEntries = Mapping[str, FileEntry]
"""Entries of files, by their path relative to the folder that they were written
into."""
