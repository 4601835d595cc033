"""`python -m invrl.rollout.launch_router <the router's flags>`: sglang-router with its keys
taken from the environment, which other users of the machine cannot read. Run by `router_server`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping


def key_flags(environ: Mapping[str, str]) -> list[str]:
    """Sampling needs one key, management another; each engine's own is given when it is registered."""
    flags: list[str] = []
    if environ.get("INVRL_ROUTER_API_KEY"):
        flags += ["--api-key", environ["INVRL_ROUTER_API_KEY"]]
    if environ.get("INVRL_ROUTER_MANAGEMENT_KEY"):
        flags += ["--control-plane-api-keys", f"invrl:invrl:admin:{environ['INVRL_ROUTER_MANAGEMENT_KEY']}"]
    return flags


def main(argv: list[str]) -> None:
    from sglang_router.launch_router import launch_router, parse_router_args

    launch_router(parse_router_args(argv))  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main([*sys.argv[1:], *key_flags(os.environ)])
