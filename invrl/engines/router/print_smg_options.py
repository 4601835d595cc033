"""`print_smg_options.py`, run by the Python of smg's environment: prints smg's version
and options as JSON.

Imports nothing of invrl, which is not in that environment.
"""

import argparse
import json
from importlib.metadata import version


def options() -> list[dict[str, object]]:
    """Return the fields of `smg.Option` for each option."""
    from smg.router_args import RouterArgs  # pyright: ignore[reportMissingImports]

    parser = argparse.ArgumentParser(add_help=False)
    RouterArgs.add_cli_args(parser)
    return [
        {
            "dest": action.dest,
            "spellings": action.option_strings,
            "kind": type(action).__name__,
            "nargs": action.nargs,
            "value_type": getattr(action.type, "__name__", ""),
            "choices": None if action.choices is None else list(action.choices),
        }
        for action in parser._actions
    ]


if __name__ == "__main__":
    # Not smg.__version__: in 1.13.0 that is 1.1.0.
    print(json.dumps({"version": version("smg"), "options": options()}))
