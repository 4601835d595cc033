"""The GPU as nvidia-smi sees it: its name, its driver, and who uses its memory."""

import subprocess
import time

_DEADLINE_S = 20.0
_IDLE_MB = 2048
"""What a driver may hold on a card that nobody uses."""
_POLL_S = 1.0


def query(section: str, *fields: str) -> list[list[str]]:
    """Rows of nvidia-smi's answer; none where there is no nvidia-smi. `section`: "gpu"
    or "compute-apps"."""
    command = [
        "nvidia-smi",
        f"--query-{section}={','.join(fields)}",
        "--format=csv,noheader,nounits",
    ]
    try:
        answer = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_DEADLINE_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.split(", ") for line in answer.stdout.splitlines() if line.strip()]


def card() -> dict[str, str]:
    """Empty where there is none."""
    rows = query("gpu", "name", "driver_version", "memory.total")
    if not rows:
        return {}
    name, driver, total = rows[0]
    return {"card": name, "driver": driver, "memory_mb": total}


def busy_reason() -> str | None:
    """Who uses the memory of the first card, None if nobody does."""
    cards = query("gpu", "memory.used")
    if not cards or int(cards[0][0]) <= _IDLE_MB:
        return None
    used = f"{cards[0][0]} MB of the card are in use"
    processes = query("compute-apps", "pid", "process_name", "used_memory")
    if not processes:
        return f"{used} by processes that nvidia-smi does not show, perhaps of another container: end them"
    named = ", ".join(
        f"pid {pid} ({name}, {process_mb} MB)" for pid, name, process_mb in processes
    )
    return f"{used} by {named}: end it, or wait for its end"


def busy_reason_after(wait_s: float) -> str | None:
    """As `busy_reason`, but what is just ending has so long to do so."""
    give_up_at = time.monotonic() + wait_s
    reason = busy_reason()
    while reason is not None and time.monotonic() < give_up_at:
        time.sleep(_POLL_S)
        reason = busy_reason()
    return reason
