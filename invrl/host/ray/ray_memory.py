"""Explains in a sentence what Ray's memory monitor did.

When the machine's memory is nearly full, for whatever reason, Ray kills processes of
ours and explains that in twenty lines. A reader needs to know what was killed, whether
the run itself used the memory, and which setting helps.
"""

import contextlib
import os
import re

import psutil

_THRESHOLD = "RAY_memory_usage_threshold"
_DEFAULT_THRESHOLD = 0.95
_SIGN = re.compile(r"running low on memory|OutOfMemoryError", re.IGNORECASE)
_GB = 1e9


def threshold() -> float:
    """Return the share of the machine's memory at which Ray begins to kill."""
    with contextlib.suppress(ValueError):
        return float(os.environ.get(_THRESHOLD, _DEFAULT_THRESHOLD))
    return _DEFAULT_THRESHOLD


def killed_for_memory(error: BaseException | None, who: str) -> str:
    """Return the sentence if `error` says that Ray's monitor killed `who`, else "".

    An error that the actor itself raised does not count: torch's error for a full GPU
    has the same name.
    """
    # Late: Ray's environment may not be prepared yet when this file is imported.
    from ray.exceptions import RayTaskError

    raised_inside = error is None or isinstance(error, RayTaskError)
    if raised_inside or not _SIGN.search(f"{type(error).__name__}: {error}"):
        return ""
    memory = psutil.virtual_memory()
    left = (
        f"the run's other processes use {_used_by_this_run() / _GB:.1f} GB of the machine's "
        f"{memory.total / _GB:.1f} GB, and {memory.available / _GB:.1f} GB are free now"
    )
    return (
        f"Ray's memory monitor killed {who}, because the machine's memory was more than {threshold():.0%} "
        f"full, whoever filled it; {left}. End other programs, or let the run use less (--num-engines, "
        f"--data-parallel-size, --workers.memory-gb), or raise {_THRESHOLD} in the environment "
        "(0.98, say); `invrl doctor` checks the margin"
    )


def _used_by_this_run() -> int:
    """Return the bytes of this process and all below it; shared memory counts once
    (PSS)."""
    used = 0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.Error, AttributeError):
            used += process.memory_full_info().pss
    return used
