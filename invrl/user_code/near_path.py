"""Suggests the existing file or folder that a wrong path may stand for."""

import difflib
from collections.abc import Iterable
from pathlib import Path


def path_fix(path: Path, fix: str, *, names: Iterable[str] = ()) -> str:
    """Return a fix for a path that does not exist: an existing name with a similar
    spelling, in the folder where the path goes wrong or among `names`, which stand for
    files too; otherwise `fix`."""
    missing = path.expanduser()
    while not missing.parent.is_dir() and missing.parent != missing:
        missing = missing.parent
    try:
        entries = [entry.name for entry in missing.parent.iterdir()]
    except OSError:
        entries = []
    close = difflib.get_close_matches(missing.name, [*entries, *names], n=1, cutoff=0.7)
    if missing.exists() or not close:
        return fix
    near = missing.with_name(close[0]) if close[0] in entries else close[0]
    return f"did you mean {near}? Otherwise {fix}"
