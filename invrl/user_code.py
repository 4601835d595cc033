"""Where in a user's own code a failure comes from: file, line, function and the line's text. Pure.

User code is what neither Python, an installed package nor this package brings; the file of the user's
function is user code wherever it lies."""

import ast
import inspect
import linecache
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

_LINE_CHARS = 160
_BRINGERS = tuple(
    str(Path(folder).resolve())
    for folder in {
        *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        str(Path(__file__).parent),
    }
)
"""Folders of Python, of installed packages and of this package."""
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def raised_at(error: BaseException, function: Callable[..., Any] | None = None) -> str:
    """The innermost line of user code that the error passed through, as "FILE:LINE, in NAME: TEXT"; "" if
    there is none. Of a group of exceptions, the line of the first one in it. `function`: the user's that was
    called, where it is known."""
    own_file = _file_of(function) if function is not None else ""
    for each in _innermost_first(error):
        found = _last_user_line(each.__traceback__, own_file)
        if found:
            return found
    return ""


def said_by(error: BaseException) -> str:
    """Its type and its message, which user code may fail to give."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"a {type(error).__name__} that cannot be shown"


def returned_at(function: Callable[..., Any]) -> str:
    """Where the function's result comes from, in the same form: its only `return`, or else its first line.
    "" for what has no source."""
    code = _code_of(function)
    try:
        lines, first = inspect.getsourcelines(code)
        file = inspect.getsourcefile(code) or ""
    except (OSError, TypeError):
        return ""
    number = first
    try:
        returns = list(_returns(ast.parse(textwrap.dedent("".join(lines))).body[0]))
    except (SyntaxError, IndexError):  # a lambda in the middle of an expression
        returns = []
    if len(returns) == 1:
        number = first + returns[0].lineno - 1
    return _shown(file, number, getattr(code, "__name__", ""))


def _innermost_first(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        yield from _innermost_first(error.exceptions[0])
    yield error


def _last_user_line(trace: TracebackType | None, own_file: str) -> str:
    found = ""
    for frame, number in traceback.walk_tb(trace):
        file = frame.f_code.co_filename
        if file == own_file or _is_users(file):
            found = _shown(file, number, frame.f_code.co_name)
    return found


def _is_users(file: str) -> bool:
    if file.startswith("<"):
        return False
    path = Path(file).resolve()
    return not any(path.is_relative_to(folder) for folder in _BRINGERS)


def _code_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function below its decorators; of an object that can be called, its `__call__`."""
    inner = inspect.unwrap(function)
    return inner if inspect.isroutine(inner) else type(inner).__call__


def _file_of(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsourcefile(_code_of(function)) or ""
    except TypeError:  # written in C
        return ""


def _returns(function: ast.AST) -> Iterator[ast.Return]:
    """Those of the function itself, not of functions inside of it."""
    for child in ast.iter_child_nodes(function):
        if isinstance(child, ast.Return):
            yield child
        elif not isinstance(child, _SCOPES):
            yield from _returns(child)


def _shown(file: str, number: int, name: str) -> str:
    path = Path(file)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    text = linecache.getline(file, number).strip()[:_LINE_CHARS]
    return f"{path}:{number}, in {name}: {text}"
