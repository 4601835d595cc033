"""Plays another program of this folder in each of its modes, in one process that
imports its libraries once.

`python every_mode.py PROGRAM MODES`: MODES is a JSON list with the arguments of the
program in each mode. Each mode runs the whole file with fresh globals, and the last
line that it prints goes to standard output.
"""

import contextlib
import io
import json
import runpy
import sys


def last_line(program: str, arguments: list[str]) -> str:
    sys.argv = [program, *arguments]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(program, run_name="__main__")
    except BaseException as error:
        error.add_note(f"{program} failed in the mode {arguments[2:]}")
        raise
    return printed.getvalue().strip().splitlines()[-1]


def main() -> None:
    program = sys.argv[1]
    modes = json.loads(sys.argv[2])
    for arguments in modes:
        print(last_line(program, arguments), flush=True)


if __name__ == "__main__":
    main()
