"""`launch_router.py PACKAGE <the router's flags>`: starts sglang-router (PACKAGE
`sglang_router`) or `smg`.

Its keys come from the environment, which other users of the machine cannot read.
Imports nothing of invrl: smg's environment does not have it.
"""

import argparse
import os
import sys
from importlib import import_module


def main(package: str, argv: list[str]) -> None:
    # Not PACKAGE.launch_router: sglang-router's imports sglang and torch (5 s) for a
    # debug mode.
    router_class = import_module(f"{package}.router").Router
    arguments_class = import_module(f"{package}.router_args").RouterArgs

    parser = argparse.ArgumentParser(prog=package)
    arguments_class.add_cli_args(parser)
    router_args = arguments_class.from_cli_args(parser.parse_args(argv))
    router_args._validate_router_args()
    router_class.from_args(router_args).start()


if __name__ == "__main__":
    key_flags = os.environ.pop("INVRL_KEY_FLAGS", "").split()
    main(sys.argv[1], [*sys.argv[2:], *key_flags])
