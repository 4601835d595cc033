"""The place in the user's own code where a failure comes from: file, line, function and
the text of the line. Pure.

User code is every file outside of Python, installed packages and this package. The file
of the user's function always counts as user code.
"""

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

USER_FRAME_PREFIX = "at "
"""Beginning of the last line of a failure's detail if it names a line of user code."""
_MAX_LINE_CHARS = 160
_INNER_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def _library_folders() -> tuple[str, ...]:
    """Return the folders of Python, of installed packages and of this package."""
    installed = sysconfig.get_paths()
    folders = {
        installed[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
    folders.add(str(Path(__file__).parents[1]))
    return tuple(str(Path(folder).resolve()) for folder in folders)


_LIBRARY_FOLDERS = _library_folders()


def raised_at(error: BaseException, function: Callable[..., Any] | None = None) -> str:
    """Return the innermost line of user code that the error passed through, as
    "FILE:LINE, in NAME: TEXT".

    Returns "" if there is none. In a group of exceptions, the first one is examined
    first; the cause of an exception only if that has no such line: a coroutine turns
    a StopIteration into a RuntimeError that begins outside of it. `function` is the
    user's function that was called, if known.
    """
    function_file = ""
    if function is not None:
        function_file = _source_file(function)
    for examined in _examined(error):
        line = _last_user_line(examined.__traceback__, function_file)
        if line:
            return line
    return ""


def describe_exception(error: BaseException) -> str:
    """Return the error's type and message. The message is computed by the user's code,
    and may fail in turn."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"a {type(error).__name__} that cannot be shown"


def returned_at(function: Callable[..., Any]) -> str:
    """Return the place of the function's result, as "FILE:LINE, in NAME: TEXT": its
    `return` if it has exactly one, else its first line. Returns "" for a function
    without source."""
    code = undecorated(function)
    try:
        lines, first_line = inspect.getsourcelines(code)
        file = inspect.getsourcefile(code) or ""
    except (OSError, TypeError):
        return ""
    try:
        definition = ast.parse(textwrap.dedent("".join(lines))).body[0]
        returns = [
            node for node in own_nodes(definition) if isinstance(node, ast.Return)
        ]
    except (SyntaxError, IndexError):  # a lambda in the middle of an expression
        returns = []
    line_number = first_line
    if len(returns) == 1:
        line_number = first_line + returns[0].lineno - 1
    return _format_line(file, line_number, getattr(code, "__name__", ""))


def _examined(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        yield from _examined(error.exceptions[0])
    yield error
    if error.__cause__ is not None:
        yield error.__cause__


def _last_user_line(trace: TracebackType | None, function_file: str) -> str:
    line = ""
    for frame, line_number in traceback.walk_tb(trace):
        file = frame.f_code.co_filename
        if file == function_file or is_user_file(file):
            line = _format_line(file, line_number, frame.f_code.co_name)
    return line


def is_user_file(file: str) -> bool:
    if file.startswith("<"):
        return False
    path = Path(file).resolve()
    return not any(path.is_relative_to(folder) for folder in _LIBRARY_FOLDERS)


def undecorated(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function below its decorators; for a callable object, its
    `__call__`."""
    inner = inspect.unwrap(function)
    if inspect.isroutine(inner):
        return inner
    return type(inner).__call__


def _source_file(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsourcefile(undecorated(function)) or ""
    except TypeError:  # written in C
        return ""


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of the function itself, without functions and classes inside
    it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, _INNER_SCOPES):
            yield child
            yield from own_nodes(child)


def _format_line(file: str, line_number: int, function_name: str) -> str:
    path = Path(file)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    text = linecache.getline(file, line_number).strip()[:_MAX_LINE_CHARS]
    return f"{path}:{line_number}, in {function_name}: {text}"
