"""A token for the Ray that a run starts. Ray listens on all interfaces whatever it is told, so only who
has the token may join. Invariant: set before `ray` is imported, which reads the environment once."""

from __future__ import annotations

import os
import secrets
import sys


def guard_ray() -> None:
    """Token authentication with a token that only this process and its children know. A cluster named by
    RAY_ADDRESS has its own. Called by `cli.py` before it imports what imports Ray."""
    if os.environ.get("RAY_ADDRESS"):
        return
    if "ray" in sys.modules:
        raise RuntimeError("ray was imported before its token was set")
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
