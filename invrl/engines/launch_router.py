"""`python -m invrl.engines.launch_router <the router's flags>`: starts sglang-router.

Its keys come from the environment, which other users of the machine cannot read.
"""

import argparse
import os
import sys


def main(argv: list[str]) -> None:
    # Not sglang_router.launch_router: that one imports sglang and with it torch (5 s) for a debug mode.
    from sglang_router.router import Router
    from sglang_router.router_args import RouterArgs

    parser = argparse.ArgumentParser(prog="sglang-router")
    RouterArgs.add_cli_args(parser)
    router_args = RouterArgs.from_cli_args(parser.parse_args(argv))
    router_args._validate_router_args()
    Router.from_args(router_args).start()


if __name__ == "__main__":
    key_flags = os.environ.pop("INVRL_KEY_FLAGS", "").split()
    main([*sys.argv[1:], *key_flags])
