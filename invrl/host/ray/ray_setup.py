"""The environment of the Ray that a run starts, set before `ray` is imported, which
reads it once. A cluster named by RAY_ADDRESS has its own;
`run/processes/ray_session.py` then sends `worker_environment` along."""

import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from invrl.host.files.temporary_folder import TemporaryFolder, short_folder
from invrl.host.processes import lifeline
from invrl.host.processes.environment_keys import RAY_TOKEN, hold_key
from invrl.host.processes.lifeline import NoteKind

_RAYS_OWN = "r"
"""Ray's folder, in one that only its owner may enter. Short, as its sockets are below
it."""


def prepare_ray() -> None:
    """Prepare the environment. Call this before anything imports Ray.

    Its processes are only on this machine and listen on loopback, where only holders of
    a token made here may join. Only Ray's own processes get it: engines and the
    gateway, which start earlier, do not inherit it, nor do child processes of user code
    in this process. Idle workers started ahead and Ray's own metrics are off: on a
    laptop they take more time than they save.
    """
    if os.environ.get("RAY_ADDRESS") or "ray" in sys.modules:
        # too late: the code that imported Ray has Ray's own token, in the home folder
        return
    os.environ.update(
        worker_environment(),
        RAY_AUTH_MODE="token",
        # The only setting that makes Ray's processes listen on loopback, on any system.
        # (`_node_ip_address` turns 127.0.0.1 into another address of the machine, and
        # they listen on all of them.)
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        RAY_prestart_worker_first_driver="0",
        RAY_enable_metrics_collection="0",
        # Ray would give its workers nice 15: on a busy machine trainer, buffer and
        # rollout workers got 3.5 % of an engine's share, and their heartbeats ran out
        # first.
        RAY_worker_niceness="0",
        # What a rollout started ends with its worker, also when that is killed.
        RAY_process_group_cleanup_enabled="true",
    )
    # the end of a connection is no news for the console
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    hold_key(RAY_TOKEN, secrets.token_hex(32))


def worker_environment() -> dict[str, str]:
    """Return a worker process's variables: the user's modules and ours, UTF-8 in every
    locale, one thread per process.

    No uvloop: if user code leaves one of its transports open and another thread
    collects it, the process ends.
    """
    paths = [str(Path.cwd()), *sys.path]
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path for path in paths if path)),
        "PYTHONUTF8": "1",
        "OMP_NUM_THREADS": "1",
        "RAY_USE_UVLOOP": "0",
    }


@contextmanager
def ray_folder(logs: Path) -> Iterator[str]:
    """Make a new folder for the sockets and logs of a run's own Ray.

    By default Ray shares a folder with every other program of the machine, and searches
    it for the address of a running cluster; the address of a dead one made a start
    hang. Ray lets every user write into its folder, so it is within one that only this
    user can enter. At the end the folder is removed, and its logs go to `logs`. If this
    process is killed, the supervisor does that; if that is killed too, the next command
    removes the folder (`remove_abandoned`).
    """
    with TemporaryFolder("ray", parent=short_folder()) as folder:
        lifeline.tell(NoteKind.FOLDER, str(folder.path))
        try:
            yield str(folder.path / _RAYS_OWN)
        finally:
            remove_ray_folder(str(folder.path), logs)


def remove_ray_folder(folder: str, logs: Path) -> None:
    """Remove the folder, but keep the output of Ray's processes and the workers,
    including user code's."""
    with suppress(OSError):
        for pattern in ("*.out", "*.err"):
            for log in Path(folder).glob(f"{_RAYS_OWN}/session_2*/logs/{pattern}"):
                if log.stat().st_size:
                    (logs / Path(folder).name).mkdir(parents=True, exist_ok=True)
                    shutil.copy(log, logs / Path(folder).name / log.name)
    shutil.rmtree(folder, ignore_errors=True)
