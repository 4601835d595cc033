"""Memory of the processes below this one, by kind.

Reads one line of the kernel per process, without calling the processes.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_NAME_BYTES = 15
"""Bytes of a process's name that the kernel keeps."""
_PARENT = 1
_RESIDENT_PAGES = 21
"""Positions in /proc/PID/stat after the name, which may itself contain spaces and
parentheses."""


@dataclass(frozen=True, slots=True)
class _Process:
    name: str
    parent: int
    resident_bytes: int


def resident_memory(
    kinds: Mapping[int, str],
    *,
    own: str,
    others: str,
    names: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, int]:
    """Return the resident bytes of this process and of those below it, by kind: `own`
    for this process, else by `kinds` (by pid), or `names` (by the process's name), of
    the process or of its nearest ancestor, else `others`. Shared memory counts once for
    each process. Processes on other machines are not seen."""
    kernel_names = {name[:_NAME_BYTES]: kind for name, kind in names.items()}
    processes = _all_processes()
    known = {
        pid: kernel_names[process.name]
        for pid, process in processes.items()
        if process.name in kernel_names
    }
    known.update(kinds)
    totals: dict[str, int] = {}
    for pid, process in processes.items():
        kind = own
        if pid != os.getpid():
            kind = _kind_below(pid, processes, known, others)
        if kind:
            totals[kind] = totals.get(kind, 0) + process.resident_bytes
    return totals


def _kind_below(
    pid: int, processes: Mapping[int, _Process], kinds: Mapping[int, str], others: str
) -> str:
    """Return the kind of a process below this one; "" for one of another family."""
    while pid in processes:
        if pid in kinds:
            return kinds[pid]
        if pid == os.getpid():
            return others
        pid = processes[pid].parent
    return ""


def _all_processes() -> dict[int, _Process]:
    processes: dict[int, _Process] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            head, _, tail = (
                (folder / "stat")
                .read_text(errors="replace", encoding="utf-8")
                .rpartition(")")
            )
        except OSError:  # it has ended
            continue
        fields = tail.split()
        processes[int(folder.name)] = _Process(
            name=head.partition("(")[2],
            parent=int(fields[_PARENT]),
            resident_bytes=int(fields[_RESIDENT_PAGES]) * _PAGE_BYTES,
        )
    return processes
