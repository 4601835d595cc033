"""What the source of user code says before it runs: which attributes it reads, what an async function calls.

Only the user's own files are read, found through the globals of the function's module. A finding is a hint,
never a proof: code may be called in ways that no source shows."""

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from invrl.user_frame import is_user_file, undecorated


def reads_attribute(function: Callable[..., Any], name: str) -> str:
    """The file of the user's, among that of the function and those that it imports, which reads `.NAME` of
    anything. Empty if there is none."""
    for file in _user_files(function):
        for node in ast.walk(_parsed(file)):
            if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Load):
                return file.name
    return ""


def _user_files(function: Callable[..., Any]) -> Iterator[Path]:
    """The file of the function, wherever it is, then the user's files that it imports, directly or not."""
    first = inspect.getmodule(undecorated(function))
    pending = [first] if first is not None else []
    seen: set[str] = set()
    while pending:
        module = pending.pop(0)
        file = getattr(module, "__file__", None)
        if file is None or module.__name__ in seen:
            continue
        seen.add(module.__name__)
        if module is not first and not is_user_file(file):
            continue
        yield Path(file)
        pending += _imported_modules(module)


def _imported_modules(module: ModuleType) -> list[ModuleType]:
    """The modules that its globals are, or come from."""
    modules: list[ModuleType] = []
    for value in list(vars(module).values()):
        imported = value if inspect.ismodule(value) else inspect.getmodule(value)
        if imported is not None:
            modules.append(imported)
    return modules


def _parsed(file: Path) -> ast.Module:
    """The syntax tree of a file; an empty one for what is no source."""
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])
