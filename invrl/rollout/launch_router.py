"""`python -m invrl.rollout.launch_router <the router's flags>`: sglang-router with its management key
taken from the environment, which other users of the machine cannot read. Run by `router_server`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping


def key_flags(environ: Mapping[str, str]) -> list[str]:
    """Management needs this key; the engines' keys are given per worker."""
    key = environ.get("INVRL_ROUTER_KEY", "")
    return ["--control-plane-api-keys", f"invrl:invrl:admin:{key}"] if key else []


def main(argv: list[str]) -> None:
    from sglang_router.launch_router import launch_router, parse_router_args

    launch_router(parse_router_args(argv))  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main([*sys.argv[1:], *key_flags(os.environ)])
