"""Builds invrl's wheel as `pip wheel` would, from a copy of the sources."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_SOURCES = ("pyproject.toml", "README.md", "LICENSE", "invrl", "rollout_fns")
_BUILD = "from setuptools import build_meta; import sys; build_meta.build_wheel(sys.argv[1])"  # PEP 517


def build_wheel(folder: Path) -> Path:
    """The wheel, in `folder`. A build leaves folders beside the sources, so it works on
    a copy."""
    copy = folder / "sources"
    copy.mkdir()
    for name in _SOURCES:
        subprocess.run(["cp", "-a", str(ROOT / name), str(copy / name)], check=True)
    process = subprocess.run(
        [sys.executable, "-c", _BUILD, str(folder)],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    [wheel] = folder.glob("*.whl")
    return wheel
