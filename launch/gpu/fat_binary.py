"""`python fat_binary.py IN OUT ARCHITECTURE...`: copies a CUDA library, and blanks what
is for other cards.

The section `.nv_fatbin` of the ELF file is a row of containers, each with one entry per
architecture (90 for Hopper). The code of the others is overwritten with zeros, so that
it compresses to nothing; all else stays where it is, and the driver loads the entry of
its own card.
"""

import shutil
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SECTION = ".nv_fatbin"
_CONTAINER_MAGIC = 0xBA55ED50
_ALIGNMENT = 8
_CONTAINER_HEADER = struct.Struct("<IHHQ")
"""Magic number, version, bytes of this header, bytes of the entries."""
_ENTRY_HEADER = struct.Struct("<HHIQ12xI")
"""Kind, version, bytes of this header, bytes of the code; at byte 28 the
architecture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The code for one architecture."""

    start: int
    """Of the code in the file."""
    num_bytes: int
    architecture: int


def section(library: bytes, name: str) -> tuple[int, int]:
    """Its first byte in the ELF file and the one after its last. Raises ValueError if
    there is none."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    entry_bytes, num_entries, names_index = struct.unpack_from("<HHH", library, 0x3A)

    def header(index: int) -> tuple[int, int, int]:
        """Place of its name among the names, first byte, number of bytes."""
        name_at, _, _, _, start, size = struct.unpack_from(
            "<IIQQQQ", library, table + index * entry_bytes
        )
        return name_at, start, size

    _, names_start, _ = header(names_index)
    for index in range(num_entries):
        name_at, start, size = header(index)
        name_start = names_start + name_at
        if library[name_start : library.index(b"\0", name_start)].decode() == name:
            return start, start + size
    raise ValueError(f"the library has no section {name}: it has no code for a GPU")


def entries(library: bytes) -> Iterator[Entry]:
    """Of all containers."""
    place, end = section(library, _SECTION)
    while place + _CONTAINER_HEADER.size <= end:
        magic, _, header_bytes, num_bytes = _CONTAINER_HEADER.unpack_from(
            library, place
        )
        if magic != _CONTAINER_MAGIC:
            place += _ALIGNMENT  # between two containers
            continue
        place += header_bytes
        container_end = place + num_bytes
        while place < container_end:
            _, _, entry_header, code_bytes, architecture = _ENTRY_HEADER.unpack_from(
                library, place
            )
            yield Entry(
                start=place + entry_header,
                num_bytes=code_bytes,
                architecture=architecture,
            )
            place += entry_header + code_bytes
        place = container_end


def blank_others(source: Path, target: Path, kept: set[int]) -> None:
    """Raises ValueError if nothing would be left."""
    found = list(entries(source.read_bytes()))
    others = [entry for entry in found if entry.architecture not in kept]
    if len(others) == len(found):
        architectures = sorted({entry.architecture for entry in found})
        raise ValueError(
            f"{source} has code for {architectures}, not for {sorted(kept)}"
        )
    shutil.copy(source, target)
    with target.open("r+b") as file:
        for entry in others:
            file.seek(entry.start)
            file.write(bytes(entry.num_bytes))
    blanked = sum(entry.num_bytes for entry in others)
    total = sum(entry.num_bytes for entry in found)
    print(
        f"{target.name}: {(total - blanked) / 1e6:.1f} MB of code kept, {blanked / 1e6:.1f} MB blanked"
    )


if __name__ == "__main__":
    blank_others(
        Path(sys.argv[1]), Path(sys.argv[2]), {int(number) for number in sys.argv[3:]}
    )
