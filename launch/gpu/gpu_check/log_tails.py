"""The ends of the logs of a run, printed into the log of the stage, where `failure.py`
reads them."""

from pathlib import Path

_LINES = 40


def print_tails(folder: Path) -> None:
    """Of every log below the folder."""
    for path in sorted(folder.rglob("*.log")):
        print(
            f"--- the end of {path.name}",
            *last_lines(path, _LINES),
            sep="\n",
            flush=True,
        )


def last_lines(path: Path, number: int) -> list[str]:
    return path.read_text(errors="replace", encoding="utf-8").splitlines()[-number:]
