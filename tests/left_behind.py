"""What a session of tests left on the machine, said at its end: temporary files,
processes, shared memory.

A session has a TMPDIR of its own, so that nothing of other programs is taken for its
own.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path

import psutil
import pytest

from invrl.host.processes import guardian
from invrl.host.processes.process import still_running

_GRACE_S = 30.0
"""For processes that end by themselves once their parent has, such as guardians, which
also remove files."""
_WITH_US = re.compile(
    rf"{re.escape(guardian.__name__)} {os.getpid()} |multiprocessing\.(resource_tracker|forkserver)"
    rf"|torch_shm_manager|wandb-core .*--pid {os.getpid()}"
)
"""Processes that end right after this one."""
_FILES_WITH_US = re.compile(
    r"pymp-.*|torch-shm-dir-.*|torchinductor_.*|wandb-.*|tmp\w+wandb-\w+"
)
"""Folders that libraries have for as long as this process lives."""
_SHARED_WITH_US = re.compile(rf"torch_{os.getpid()}_\d+_\d+")
"""Tensors of this process that others may read. Torch removes them when it ends."""


class LeftBehind:
    """A plugin of pytest."""

    def __init__(self) -> None:
        shared = Path(tempfile.gettempdir())
        # short, for the sockets in it
        self.folder = Path(tempfile.mkdtemp(prefix="it-"))
        os.environ["TMPDIR"] = str(self.folder)
        tempfile.tempdir = None
        # pytest keeps the folders of three sessions, and torch its compiled kernels.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(shared))
        kernels = shared / f"torchinductor_{getpass.getuser()}"
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kernels))
        self.found: list[str] = []
        after_the_folders_of_multiprocessing = -200
        Finalize(
            None,
            shutil.rmtree,
            args=(self.folder,),
            kwargs={"ignore_errors": True},
            exitpriority=after_the_folders_of_multiprocessing,
        )

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        self.found = [*self._processes(), *self._files(), *_shared_memory()]

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> None:
        if self.found:
            terminalreporter.section("left behind by these tests", sep="=", red=True)
            for line in self.found:
                terminalreporter.line(line)

    def _files(self) -> Iterator[str]:
        for path in sorted(self.folder.iterdir()):
            if not _FILES_WITH_US.fullmatch(path.name):
                yield f"in TMPDIR: {path.name}"

    def _processes(self) -> Iterator[str]:
        """Those that have our TMPDIR in their environment, or one within it."""
        started: list[psutil.Process] = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                variables = process.environ()
                is_ours = Path(variables.get("TMPDIR", "/")).is_relative_to(self.folder)
                if (
                    process.pid != os.getpid()
                    and is_ours
                    and not _WITH_US.search(_command(process))
                ):
                    started.append(process)
        for process in still_running(started, within_s=_GRACE_S):
            with suppress(psutil.Error):
                yield f"process {process.pid}: {_command(process)[:200]}"


def _command(process: psutil.Process) -> str:
    return " ".join(process.cmdline())


def _shared_memory() -> Iterator[str]:
    """Names that hold the number of this process. Names without it may be other
    programs'."""
    own = re.compile(rf"(?<!\d){os.getpid()}(?!\d)")
    for path in sorted(Path("/dev/shm").glob("*")):
        if own.search(path.name) and not _SHARED_WITH_US.fullmatch(path.name):
            yield f"in shared memory: {path}"
