"""smg, the successor of sglang-router, as the router in front of the engines (`--router
smg`).

It lives in a separate virtual environment, because both packages install a program
called `smg`. This process asks that environment's Python for its version and options,
and imports neither package.
"""

import argparse
import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from invrl.errors import ConfigError

VERSION = "1.13.0"
"""Only version that is started: others may have other flags, or send engines other
keys."""
INSTALLED_FOLDER = Path(sys.prefix) / "smg"
"""Virtual environment that `invrl install --router smg` makes."""

_PRINT_OPTIONS = Path(__file__).with_name("print_smg_options.py")
_ANSWER_DEADLINE_S = 120.0
_VALUE_TYPES: dict[str, Callable[[str], object]] = {
    "int": int,
    "_non_negative_int": int,
    "float": float,
}
"""Readers of values by their names in smg. Others are read as text; smg checks them
when it starts."""
_LISTS = {"_AppendAction": "append", "_ExtendAction": "extend"}

FLAGS = {
    # An engine makes no token while its weights change. By default an engine that makes
    # none for three seconds, while requests pile up, gets no new ones.
    "worker-wedge-secs": "86400",
    # Comments in waiting streams.
    "sse-keepalive-secs": "0",
    # The gateway keeps connections open indefinitely, and limits requests itself.
    "idle-connection-timeout-secs": "0",
    "max-concurrent-requests": "0",
}
"""Flags in addition to those of both routers."""
SWITCHES = (
    "--disable-worker-overload-protection",  # sessions stay on busy engines
    "--disable-load-monitoring",
    "--disable-tokenizer-autoload",  # a download for each engine
)

_LISTENS = "leave it out: the router listens on one port of loopback"
_REGISTERED = "leave it out: only engines with the current weights are registered"
OWNED = {
    **dict.fromkeys(
        ("enable_mesh", "mesh_", "health_check_port", "rdma_listen_ip"), _LISTENS
    ),
    **dict.fromkeys(
        ("discovery_", "remove_unhealthy_workers", "zmq_engine_count"), _REGISTERED
    ),
    **dict.fromkeys(
        ("encode", "epd_disaggregation"),
        "leave it out: every engine both prefills and decodes",
    ),
    **dict.fromkeys(
        ("worker_overload_", "disable_worker_overload_protection"),
        "leave it out: a session stays on the engine that caches it",
    ),
    "worker_wedge_secs": "leave it out: an engine makes no token while its weights change",
    "enable_rl": "leave it out: weights are changed by the trainer alone",
    "tenant_api_key": "leave it out: random keys are made",
}
"""Options that only smg has and that invrl sets itself -> alternative."""


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One command-line option of smg."""

    dest: str
    spellings: list[str]
    kind: str
    """Name of argparse's class."""
    nargs: str | int | None
    value_type: str
    """Name of the function that reads a value. Empty: text."""
    choices: list[str] | None


class Smg(msgspec.Struct, frozen=True, kw_only=True):
    """An installed smg."""

    python: Path
    version: str
    options: list[Option]

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the options as smg's own code does, except for value types that this
        module does not know."""
        for option in self.options:
            if option.kind == "_StoreTrueAction":
                parser.add_argument(
                    *option.spellings, dest=option.dest, action="store_true"
                )
            elif option.kind == "BooleanOptionalAction":
                positive = [
                    spelling
                    for spelling in option.spellings
                    if not spelling.startswith("--no-")
                ]
                parser.add_argument(
                    *positive, dest=option.dest, action=argparse.BooleanOptionalAction
                )
            else:
                parser.add_argument(
                    *option.spellings,
                    dest=option.dest,
                    action=_LISTS.get(option.kind, "store"),
                    nargs=option.nargs,
                    type=_VALUE_TYPES.get(option.value_type, str),
                    choices=option.choices,
                )


class _Output(msgspec.Struct, frozen=True):
    """Output of `print_smg_options.py`."""

    version: str
    options: list[Option]


@functools.cache
def find_smg(folder: str | None) -> Smg:
    """Return the smg of a virtual environment, by default of the one that `invrl
    install` makes. Takes half a second.

    Raises ConfigError if it is missing, or has another version.
    """
    environment = INSTALLED_FOLDER
    if folder:
        environment = Path(folder).expanduser().absolute()
    python = environment / "bin" / "python"

    def refusal(reason: str) -> ConfigError:
        fix = "run: invrl install --router smg; or name an environment that has it: --engine.smg-environment FOLDER"
        return ConfigError("engine.router", "smg", reason, fix)

    if not python.is_file():
        raise refusal(
            f"it is not installed: there is no virtual environment {environment}"
        )
    command = [str(python), "-I", str(_PRINT_OPTIONS)]
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            check=False,
            encoding="utf-8",
            errors="replace",
            timeout=_ANSWER_DEADLINE_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise refusal(
            f"its environment {environment} does not work: {error}"
        ) from error
    if process.returncode != 0:
        lines = process.stderr.strip().splitlines() or [
            f"exit code {process.returncode}"
        ]
        raise refusal(f"{environment} has none that works: {lines[-1]}")
    output = msgspec.json.decode(process.stdout, type=_Output)
    if output.version != VERSION:
        raise refusal(f"{environment} has version {output.version}, not {VERSION}")
    return Smg(python=python, version=VERSION, options=output.options)
