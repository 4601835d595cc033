"""A temporary folder goes with its owner; what a killed one left goes with the next
command. A trainer rank, which is always killed, makes none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from invrl.host.files.temporary_folder import TemporaryFolder, remove_abandoned

OWNER = """
import sys
from pathlib import Path
from invrl.host.files.temporary_folder import TemporaryFolder

folder = TemporaryFolder("engine", parent=Path(sys.argv[1]))
(folder.path / "socket").touch()
print(folder.path, flush=True)
sys.stdin.readline()
"""


RANK = """
import os
import signal
from invrl.train.runtime import device

device.prepare()
import invrl.train.trainer.train_rank

print(os.listdir(os.environ["TMPDIR"]))
import wandb

print(wandb.__name__)
"""


ROLLOUT_WORKER = """
import asyncio, os, signal, subprocess, sys, tempfile
from invrl.rollout.config import RolloutConfig
from invrl.rollout.workers.worker_actor import RolloutWorker, WorkerSettings

async def rollout(task, endpoint):
    return 0.0

tempfile.gettempdir()  # as a library may have done
settings = WorkerSettings(
    gateway_url="http://127.0.0.1:9",
    model="m",
    rollout=RolloutConfig(rollout_function_path="__main__:rollout"),
    own_temporary_folder=True,
)
worker = RolloutWorker(settings)
asyncio.run(worker.ready())
print(tempfile.mkdtemp())
print(subprocess.check_output(["mktemp"], text=True), end="", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_temporary_folder_is_removed_after_its_block(parent: Path) -> None:
    with TemporaryFolder("engine", parent=parent) as folder:
        (folder.path / "file").touch()
        assert folder.path.parent == parent
    assert list(parent.iterdir()) == []
    folder.remove()


def test_folder_of_a_killed_process_is_removed_and_that_of_a_living_one_stays(
    parent: Path,
) -> None:
    command = [sys.executable, "-c", OWNER, str(parent)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip())
        others = [parent / "invrl-engine-mine", parent / "invrl-engine-7-abcdefg8.txt"]
        for other in others:
            other.mkdir()
        (parent / "invrl-engine-7-abcdefgh").symlink_to(others[0])
        remove_abandoned()
        assert (path / "socket").exists()
        owner.kill()
        owner.wait()
        assert path.exists()
        remove_abandoned()
    assert not path.exists()
    assert all(other.exists() for other in others)
    assert (parent / "invrl-engine-7-abcdefgh").is_symlink()


def test_new_folder_removed_by_another_command_is_recreated(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = tempfile.mkdtemp
    taken: list[str] = []

    def make_and_lose(**names: str) -> str:
        path = make(**names)
        if not taken:
            taken.append(path)
            remove_abandoned()
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_lose)
    with TemporaryFolder("engine", parent=parent) as folder:
        assert str(folder.path) not in taken
        remove_abandoned()
        assert folder.path.exists()


def test_parent_path_is_short_enough_for_sockets(parent: Path) -> None:
    with (
        TemporaryFolder("driver") as folder,
        TemporaryFolder("engine", parent=folder.path) as inner,
    ):
        assert len(f"{inner.path}/tmpabcdefgh.0") < 107


def test_what_user_code_leaves_in_the_temporary_folder_goes_with_its_rollout_worker(
    tmp_path: Path,
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary)}
    command = [sys.executable, "-c", ROLLOUT_WORKER]
    worker = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=200
    )
    assert worker.returncode == -signal.SIGKILL, worker.stderr
    folders = {Path(line).parent for line in worker.stdout.splitlines()}
    assert len(folders) == 1
    [folder] = folders
    assert folder.name.startswith("invrl-rollouts-")
    give_up_at = time.monotonic() + 100
    while folder.exists():
        assert time.monotonic() < give_up_at, f"{folder} is still there"
        time.sleep(0.1)
    assert list(temporary.iterdir()) == []


def test_imports_of_a_trainer_rank_leave_no_temporary_file(tmp_path: Path) -> None:
    """Megatron imports wandb, which makes folders that a killed process leaves. A
    user's loss still can."""
    if find_spec("wandb") is None:  # an import would make those folders here
        pytest.skip("wandb is not installed")
    folders = {
        "TMPDIR": tmp_path / "tmp",
        "TORCHINDUCTOR_CACHE_DIR": tmp_path / "kernels",
    }
    folders["TMPDIR"].mkdir()
    environment = os.environ | {name: str(folder) for name, folder in folders.items()}
    printed = subprocess.check_output(
        [sys.executable, "-c", RANK], env=environment, text=True
    )
    assert printed.splitlines() == ["[]", "wandb"]
