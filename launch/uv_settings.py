"""Prints `export` lines with which uv sees the package sources that pip is configured for.

uv reads none of pip's settings. On a machine that has a wheel folder, a mirror or a certificate of its
own, uv would otherwise resolve other packages than pip does. What is already set for uv stays.
"""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys


def pip_settings() -> dict[str, str]:
    """pip's effective settings by bare name; the environment wins over files, as in pip."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    settings: dict[str, str] = {}
    for line in sorted(listing.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2]] = str(ast.literal_eval(value))
    return settings


def main() -> None:
    pip = pip_settings()
    wanted = {
        "UV_FIND_LINKS": ",".join(pip.get("find-links", "").split()),
        "UV_DEFAULT_INDEX": pip.get("index-url", ""),
        # uv reads only indexes it can list over HTTP.
        "UV_INDEX": " ".join(u for u in pip.get("extra-index-url", "").split() if u.startswith("http")),
        "SSL_CERT_FILE": pip.get("cert", ""),
    }
    if wanted["UV_INDEX"]:  # pip takes the best version of all indexes
        wanted["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    for name, value in wanted.items():
        if value and name not in os.environ:
            print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
