"""The programs under tests/clients/ in environments of their own, made once and kept.

`python()` and `python_beside_ours()` install a file of requirements into a virtual
environment, `npm()` packages into a prefix, under `~/.cache/invrl/clients` (or
$INVRL_CLIENTS), each in a folder named by a hash of what it holds. Whatever asks for
the network beyond this machine finds a proxy that is not there.
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
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.uv_settings import uv_variables

PROGRAMS = Path(__file__).parent / "clients"
_REQUIREMENTS = {"google_adk_agent.py": "requirements-adk.txt"}
"""File of requirements of a program that cannot have those of the others."""
CODEX = "@openai/codex@0.169.0"
CLAUDE_CODE = "@anthropic-ai/claude-code@2.1.330"
GEMINI_CLI = "@google/gemini-cli@0.61.0"
OPENCODE = "opencode-ai@1.18.33"
VERCEL = (
    "ai@7.0.173",
    "@ai-sdk/openai@4.0.118",
    "@ai-sdk/anthropic@4.0.105",
    "zod@4.6.7",
)
OFFLINE = {
    "HTTP_PROXY": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "NO_PROXY": "127.0.0.1,localhost",
}
"""What a program is given that must reach this machine alone."""
VERCEL_ENV = {**OFFLINE, "AI_SDK_LOG_WARNINGS": "false"}
_INSTALL_S = 900


def cache() -> Path:
    return Path(os.environ.get("INVRL_CLIENTS") or Path.home() / ".cache/invrl/clients")


def python(requirements: str = "requirements.txt") -> Path:
    """The Python of an environment with a file of requirements, which is made if need
    be."""
    pinned = PROGRAMS / requirements
    folder = cache() / f"python-{_digest(sys.version + pinned.read_text())}"
    with _made(folder) as missing:
        if missing:
            _install(folder, "-r", str(pinned))
    return folder / "bin/python"


def python_beside_ours(requirements: Path) -> Path:
    """The Python of an environment that has these packages, without what they require,
    over those of this environment, torch among them."""
    ours = sysconfig.get_path("purelib")
    folder = (
        cache() / f"beside-{_digest(sys.version + ours + requirements.read_text())}"
    )
    with _made(folder) as missing:
        if missing:
            _install(folder, "--no-deps", "-r", str(requirements))
            [site] = folder.glob("lib/python*/site-packages")
            (site / "ours.pth").write_text(f"{ours}\n")
    return folder / "bin/python"


def _install(environment: Path, *arguments: str) -> None:
    """Make an environment with these packages. uv takes a tenth of pip's time."""
    uv = [sys.executable, "-m", "uv"]
    variables = {**os.environ, **uv_variables()}
    for command in (
        [
            *uv,
            "venv",
            "--quiet",
            "--seed",
            "--python",
            sys.executable,
            str(environment),
        ],
        [*uv, "pip", "install", "--quiet", "--python", str(environment), *arguments],
    ):
        subprocess.run(command, check=True, timeout=_INSTALL_S, env=variables)


def npm(name: str, *packages: str) -> Path:
    """The `node_modules` of a folder with these packages. FileNotFoundError where there
    is no npm."""
    found = shutil.which("npm")
    if found is None:
        raise FileNotFoundError("npm is not on PATH")
    folder = cache() / f"{name}-{_digest(' '.join(packages))}"
    with _made(folder) as missing:
        if missing:
            run = [
                found,
                "install",
                "--silent",
                "--no-fund",
                "--no-audit",
                "--prefix",
                str(folder),
                *packages,
            ]
            subprocess.run(run, check=True, timeout=_INSTALL_S)
    return folder / "node_modules"


def codex() -> Path:
    """The Codex CLI."""
    return npm("codex", CODEX) / ".bin/codex"


def _codex_sandbox(folder: Path) -> Path:
    """A folder for PATH in which Codex finds its sandbox: with a system's bubblewrap
    before 0.9 it starts it by this name."""
    programs = codex().parent.parent.glob("@openai/codex-*/vendor/*/bin/codex")
    named = folder / "bin/codex-linux-sandbox"
    named.parent.mkdir(exist_ok=True)
    named.unlink(missing_ok=True)
    named.symlink_to(next(programs))
    return named.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What a program left."""

    code: int
    out: str
    err: str

    def json_lines(self) -> list[dict]:
        """What it printed: one JSON object a line."""
        assert self.code == 0, self.err[-3000:]
        return [json.loads(line) for line in self.out.splitlines()]


async def run_program(
    command: list[str],
    *,
    folder: Path,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    deadline_s: float = 400,
) -> Ended:
    """Runs in `folder` (or `cwd`), which is its home, with none of our settings; ended
    at the deadline."""
    kept = {
        name: os.environ[name]
        for name in ("PATH", "LANG", "SSL_CERT_FILE")
        if name in os.environ
    }
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


async def run_every_mode(
    program: str,
    sessions: Sequence[Mapping[str, str]],
    modes: Sequence[Sequence[str]],
    *,
    folder: Path,
    deadline_s: float = 900,
) -> list[dict]:
    """What a program of `tests/clients/` prints in each mode (its flags), played one
    after the other in one process, each in a session of its own."""
    arguments = [
        [session["base_url"], session["key"], *flags]
        for session, flags in zip(sessions, modes, strict=True)
    ]
    if program.endswith(".mjs"):
        for name in ("every_mode.mjs", program):
            shutil.copy(PROGRAMS / name, folder)
        _link_vercel_packages(folder)
        command = [_node(), "every_mode.mjs", program, json.dumps(arguments)]
        env = VERCEL_ENV
    else:
        every_mode = str(PROGRAMS / "every_mode.py")
        requirements = _REQUIREMENTS.get(program, "requirements.txt")
        command = [
            str(python(requirements)),
            every_mode,
            str(PROGRAMS / program),
            json.dumps(arguments),
        ]
        env = {}
    ended = await run_program(command, folder=folder, env=env, deadline_s=deadline_s)
    return ended.json_lines()


async def run_codex(
    task: str,
    session: Mapping[str, str],
    *,
    folder: Path,
    again: bool = False,
    settings: Mapping[str, str | bool] | None = None,
) -> Ended:
    """`codex exec` in `folder`/work, at our responses API by a provider of its own
    settings, in its own sandbox (only the work folder can be written). `again`: goes on
    with its last conversation. `settings`: more of its own. Its last message is left in
    `folder`/last.txt."""
    (folder / "work").mkdir(exist_ok=True)
    (folder / "codex").mkdir(exist_ok=True)
    provider = {
        "name": "invrl",
        "base_url": session["base_url"],
        "env_key": "INVRL_KEY",
    }
    all_settings: dict[str, str | bool] = {
        "model": "scripted",
        "model_provider": "invrl",
    }
    all_settings |= {
        f"model_providers.invrl.{name}": value for name, value in provider.items()
    }
    all_settings |= {
        "model_providers.invrl.wire_api": "responses",
        "sandbox_mode": "workspace-write",
    }
    all_settings |= {
        "analytics.enabled": False,
        "check_for_update_on_startup": False,
        **(settings or {}),
    }
    command = [
        str(codex()),
        "exec",
        *(["resume", "--last"] if again else []),
        "--skip-git-repo-check",
    ]
    command += [
        part
        for name, value in all_settings.items()
        for part in ("-c", f"{name}={json.dumps(value)}")
    ]
    command += ["--output-last-message", str(folder / "last.txt"), task]
    env = {
        "INVRL_KEY": session["key"],
        "CODEX_HOME": str(folder / "codex"),
        "PATH": f"{_codex_sandbox(folder)}:{os.environ['PATH']}",
    }
    return await run_program(command, folder=folder, cwd=folder / "work", env=env)


async def run_claude_code(
    task: str, session: Mapping[str, str], *, folder: Path, deadline_s: float = 900
) -> Ended:
    """`claude -p` in `folder`/work, at our messages API; it may use its tools for files
    and its shell."""
    work = folder / "work"
    work.mkdir(exist_ok=True)
    env = {
        **OFFLINE,
        "ANTHROPIC_BASE_URL": session["base_url"].removesuffix("/v1"),
        "ANTHROPIC_AUTH_TOKEN": session["key"],
        "ANTHROPIC_MODEL": "scripted",
        "ANTHROPIC_SMALL_FAST_MODEL": "scripted",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
    }
    command = [str(npm("claude-code", CLAUDE_CODE) / ".bin/claude"), "-p", task]
    command += ["--output-format", "json", "--permission-mode", "acceptEdits"]
    command += ["--allowedTools", "Bash", "Read", "Write", "Edit"]
    return await run_program(
        command, folder=folder, cwd=work, env=env, deadline_s=deadline_s
    )


async def run_gemini_cli(
    task: str, session: Mapping[str, str], *, folder: Path, deadline_s: float = 900
) -> Ended:
    """`gemini -p` in `folder`/work, at our generateContent; it may use all its
    tools."""
    work = folder / "work"
    work.mkdir(exist_ok=True)
    settings = {
        "security": {"auth": {"selectedType": "gemini-api-key"}},
        "general": {"disableAutoUpdate": True, "disableUpdateNag": True},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
    }
    (folder / ".gemini").mkdir(exist_ok=True)
    (folder / ".gemini/settings.json").write_text(json.dumps(settings))
    env = {
        **OFFLINE,
        "GOOGLE_GEMINI_BASE_URL": session["base_url"].removesuffix("/v1"),
        "GEMINI_API_KEY": session["key"],
        "GEMINI_CLI_TRUST_WORKSPACE": "true",
    }
    command = [str(npm("gemini-cli", GEMINI_CLI) / ".bin/gemini"), "-p", task, "--yolo"]
    return await run_program(
        command, folder=folder, cwd=work, env=env, deadline_s=deadline_s
    )


async def run_opencode(
    task: str, session: Mapping[str, str], *, folder: Path, deadline_s: float = 900
) -> Ended:
    """`opencode run` in `folder`/work, at our chat completions by a provider of its own
    settings."""
    work = folder / "work"
    work.mkdir(exist_ok=True)
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "invrl",
        "options": {"baseURL": session["base_url"], "apiKey": session["key"]},
        "models": {
            "scripted": {
                "name": "scripted",
                "limit": {"context": 1_000_000, "output": 8192},
            }
        },
    }
    settings = {
        "provider": {"invrl": provider},
        "model": "invrl/scripted",
        "small_model": "invrl/scripted",
        "autoupdate": False,
        "share": "disabled",
        "permission": {"bash": "allow", "edit": "allow", "webfetch": "deny"},
    }
    (folder / "opencode.json").write_text(json.dumps(settings))
    env = {
        **OFFLINE,
        "OPENCODE_CONFIG": str(folder / "opencode.json"),
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    }
    command = [str(npm("opencode", OPENCODE) / ".bin/opencode"), "run", task]
    return await run_program(
        command, folder=folder, cwd=work, env=env, deadline_s=deadline_s
    )


async def run_mini_swe_agent(
    task: str, session: Mapping[str, str], *, folder: Path, deadline_s: float = 900
) -> Ended:
    """`mini` in `folder`/work, at our chat completions through litellm."""
    work = folder / "work"
    work.mkdir(exist_ok=True)
    env = {
        **OFFLINE,
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_GLOBAL_CONFIG_DIR": str(folder / "mini"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    command = [
        str(python().parent / "mini"),
        "--task",
        task,
        "--model",
        "openai/scripted",
        "--yolo",
    ]
    command += ["--exit-immediately", "--config", "mini.yaml"]
    command += ["--config", f"model.model_kwargs.api_base={session['base_url']}"]
    command += ["--config", f"model.model_kwargs.api_key={session['key']}"]
    command += ["--output", str(folder / "trajectory.json")]
    return await run_program(
        command, folder=folder, cwd=work, env=env, deadline_s=deadline_s
    )


async def run_vercel_ai(
    session: Mapping[str, str], *flags: str, folder: Path, deadline_s: float = 900
) -> Ended:
    """`vercel_ai.mjs` in `folder`, where node finds its packages."""
    shutil.copy(PROGRAMS / "vercel_ai.mjs", folder)
    _link_vercel_packages(folder)
    command = [_node(), "vercel_ai.mjs", session["base_url"], session["key"], *flags]
    return await run_program(
        command, folder=folder, env=VERCEL_ENV, deadline_s=deadline_s
    )


def _node() -> str:
    found = shutil.which("node")
    if found is None:
        raise FileNotFoundError("node is not on PATH")
    return found


def _link_vercel_packages(folder: Path) -> None:
    packages = folder / "node_modules"
    if not packages.exists():
        packages.symlink_to(npm("vercel", *VERCEL))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[bool]:
    """Whether it must be made: one process at a time, and what broke off is made
    anew."""
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
