"""`invrl train --colocate`: engine and trainer take turns with the memory of the
card."""

import re
import subprocess
import sys

from gpu_check.result import StageSkipped
from gpu_check.settings import CheckSettings
from gpu_check.stages.loop import train_and_check

_FLAG = "--colocate"
_DEADLINE_S = 120.0


def run(settings: CheckSettings) -> None:
    command = [sys.executable, "-m", "invrl.cli", "train", "--help"]
    help_text = subprocess.run(
        command,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=_DEADLINE_S,
        check=True,
    ).stdout
    if re.search(rf"{_FLAG}\b", help_text) is None:
        raise StageSkipped(f"`invrl train` has no flag {_FLAG} yet")
    train_and_check(settings, "colocate", [_FLAG])
