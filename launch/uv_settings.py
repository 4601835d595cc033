"""Prints `export` lines that give uv the package sources that pip is configured for.

uv does not read pip's settings. On a machine with its own wheel folder, mirror or
certificate, uv would resolve other packages than pip. Variables of uv that are set
already stay as they are.
"""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys


def pip_settings() -> dict[str, str]:
    """pip's effective settings by their names without a section. As in pip, the
    environment takes precedence over configuration files."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", check=False
    ).stdout
    settings: dict[str, str] = {}
    # Lines of the environment come last, so that their values replace others.
    lines = sorted(listing.splitlines(), key=lambda line: line.startswith(":env:"))
    for line in lines:
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2]] = str(ast.literal_eval(value))
    return settings


def uv_variables() -> dict[str, str]:
    """The variables of uv that are not set already."""
    pip = pip_settings()
    # uv reads only indexes that it can list over HTTP.
    extra_indexes = [
        url for url in pip.get("extra-index-url", "").split() if url.startswith("http")
    ]
    variables = {
        "UV_FIND_LINKS": ",".join(pip.get("find-links", "").split()),
        "UV_DEFAULT_INDEX": pip.get("index-url", ""),
        "UV_INDEX": " ".join(extra_indexes),
        "SSL_CERT_FILE": pip.get("cert", ""),
    }
    if extra_indexes:
        # As pip does: the best version that any of the indexes has.
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return {
        name: value
        for name, value in variables.items()
        if value and name not in os.environ
    }


def main() -> None:
    for name, value in uv_variables().items():
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
