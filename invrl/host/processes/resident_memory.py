"""Memory of the processes below this one, by kind, without calling the processes."""

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import psutil

_NAME_BYTES = 15
"""Bytes of a process's name that the kernel keeps."""


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
    processes: dict[int, dict[str, Any]] = {
        process.pid: process.info
        for process in psutil.process_iter(["name", "ppid", "memory_info"])
    }
    known = dict(kinds)
    for pid, process in processes.items():
        name = process["name"][:_NAME_BYTES]
        if name in kernel_names:
            known.setdefault(pid, kernel_names[name])
    totals: dict[str, int] = {}
    for pid, process in processes.items():
        kind = own
        if pid != os.getpid():
            kind = _kind_below(pid, processes, known, others)
        if kind:
            totals[kind] = totals.get(kind, 0) + process["memory_info"].rss
    return totals


def _kind_below(
    pid: int,
    processes: Mapping[int, Mapping[str, Any]],
    kinds: Mapping[int, str],
    others: str,
) -> str:
    """Return the kind of a process below this one; "" for one of another family."""
    while pid in processes:
        if pid in kinds:
            return kinds[pid]
        if pid == os.getpid():
            return others
        pid = processes[pid]["ppid"]
    return ""
