"""The programs under tests/clients/ in an environment of their own, made once and kept.

`python()` installs `requirements.txt` into a virtual environment, `codex()` an npm package into a
prefix, under `~/.cache/invrl/clients` (or $INVRL_CLIENTS), each in a folder named by a hash of what it holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).parent / "clients"
CODEX = "@openai/codex@0.169.0"
_INSTALL_S = 900


def cache() -> Path:
    return Path(os.environ.get("INVRL_CLIENTS") or Path.home() / ".cache/invrl/clients")


def python() -> Path:
    """The Python of the clients' environment, which is made if need be (about 90 s)."""
    requirements = PROGRAMS / "requirements.txt"
    folder = cache() / f"python-{_digest(sys.version + requirements.read_text())}"
    with _made(folder) as missing:
        if missing:
            run = [sys.executable, "-m", "venv", str(folder)]
            subprocess.run(run, check=True, timeout=_INSTALL_S)
            pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "-r", str(requirements)]
            subprocess.run(pip, check=True, timeout=_INSTALL_S)
    return folder / "bin/python"


def codex() -> Path:
    """The Codex CLI, installed by npm. FileNotFoundError where there is no npm."""
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("npm is not on PATH")
    folder = cache() / f"codex-{_digest(CODEX)}"
    with _made(folder) as missing:
        if missing:
            run = [npm, "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(folder), CODEX]
            subprocess.run(run, check=True, timeout=_INSTALL_S)
    return folder / "node_modules/.bin/codex"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What a program left."""

    code: int
    out: str
    err: str

    @property
    def seen(self) -> dict:
        """The JSON line that it printed."""
        assert self.code == 0, self.err[-3000:]
        return json.loads(self.out.strip().splitlines()[-1])


async def run_program(
    command: list[str],
    *,
    folder: Path,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    deadline_s: float = 400,
) -> Ended:
    """Runs in `folder` (or `cwd`), which is its home, with none of our settings; ended at the deadline."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "SSL_CERT_FILE") if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd or folder,
        env={**kept, "HOME": str(folder), **(env or {})},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), deadline_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
    assert process.returncode is not None
    return Ended(code=process.returncode, out=out.decode(), err=err.decode())


async def run_codex(
    task: str,
    session: Mapping[str, str],
    *,
    folder: Path,
    again: bool = False,
    settings: Mapping[str, str | bool] | None = None,
) -> Ended:
    """`codex exec` in `folder`/work, at our responses API by a provider of its own settings, in its own
    sandbox (only the work folder can be written). `again`: goes on with its last conversation. `settings`:
    more of its own. Its last message is left in `folder`/last.txt."""
    (folder / "work").mkdir(exist_ok=True)
    (folder / "codex").mkdir(exist_ok=True)
    provider = {"name": "invrl", "base_url": session["base_url"], "env_key": "INVRL_KEY"}
    all_settings: dict[str, str | bool] = {"model": "scripted", "model_provider": "invrl"}
    all_settings |= {f"model_providers.invrl.{name}": value for name, value in provider.items()}
    all_settings |= {"model_providers.invrl.wire_api": "responses", "sandbox_mode": "workspace-write"}
    all_settings |= {"analytics.enabled": False, "check_for_update_on_startup": False, **(settings or {})}
    command = [str(codex()), "exec", *(["resume", "--last"] if again else []), "--skip-git-repo-check"]
    command += [
        part for name, value in all_settings.items() for part in ("-c", f"{name}={json.dumps(value)}")
    ]
    command += ["--output-last-message", str(folder / "last.txt"), task]
    env = {"INVRL_KEY": session["key"], "CODEX_HOME": str(folder / "codex")}
    return await run_program(command, folder=folder, cwd=folder / "work", env=env)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[bool]:
    """Whether it must be made: one process at a time, and what broke off is made anew."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    done = folder / ".done"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = not done.exists()
        if missing:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        yield missing
        done.touch()
