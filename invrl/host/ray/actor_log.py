"""The last lines that an actor's process printed, for the error about its death."""

import os
from pathlib import Path
from typing import Any

import ray

from invrl.host.processes.process import log_tail
from invrl.host.ray.actor_heartbeat import Pulse
from invrl.host.ray.actor_output import PROCESS_MARK

_NUM_LINES = 12
_NUM_SEARCHED = 200
_MARKS = (":job_id:", ":actor_name:", ":task_name:", PROCESS_MARK)
"""Beginnings of lines that identify the output that follows."""


def last_lines(pulse: Pulse | None) -> str:
    """Return the process's last lines, and the file that has them, for the end of an
    error. Empty if it has printed nothing, ran on another machine, or never
    answered."""
    if pulse is None or pulse.host != os.uname().nodename:
        return ""
    for log in sorted(_ray_logs().glob(f"worker-*-{pulse.pid}.err")):
        lines = [
            line
            for line in log_tail(log, _NUM_SEARCHED).splitlines()
            if line.strip() and not line.startswith(_MARKS)
        ]
        if lines:
            return f". Last lines of {log.name} (in logs/ray):\n" + "\n".join(
                lines[-_NUM_LINES:]
            )
    return ""


def _ray_logs() -> Path:
    """Return the folder into which Ray's processes write while they run; `ray_setup.py`
    copies it into the run's folder."""
    ray_private: Any = vars(ray)["_private"]
    node = ray_private.worker.global_worker.node
    if node is None:
        return Path("/nonexistent")
    return Path(node.get_session_dir_path()) / "logs"
