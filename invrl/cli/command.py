"""A command of `invrl`: the place of its function, and its unsuccessful end."""

import ast
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

_COMMANDS = Path(__file__).with_name("commands")


class CommandFailed(Exception):
    """Ends the command with this exit code. The user has already seen the reason."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class Command(NamedTuple):
    """A row of the table in `main.py`. It names its function instead of importing it,
    so that help loads no command."""

    function: str
    """Takes the arguments after the command's name. Its docstring is the command's
    help."""
    summary: str = ""
    """One line for `invrl --help`."""
    takes_settings: bool = False
    """Whether the flags of the configuration are flags of this command."""
    file: str = ""
    """Module below `invrl.cli.commands`; "": the one named like the function."""

    @property
    def module(self) -> str:
        return self.file or self.function

    def load(self) -> Callable[[Sequence[str]], None]:
        return getattr(
            import_module(f"invrl.cli.commands.{self.module}"), self.function
        )

    def help(self) -> str:
        """Return the docstring of the function, without its indentation. It is read
        from the source, because importing a command is slow."""
        source = _COMMANDS.joinpath(f"{self.module}.py").read_text(encoding="utf-8")
        docstrings = {
            node.name: ast.get_docstring(node)
            for node in ast.parse(source).body
            if isinstance(node, ast.FunctionDef)
        }
        return docstrings[self.function] or ""
