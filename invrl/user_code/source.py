"""Static hints from user code's source before it runs: the attributes that it reads,
whether it uses an argument, and calls that block an async function's event loop.

Only the user's own files are read, found through the globals of the function's module.
A finding is a hint, not a proof: code may be called in ways that no source shows.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from invrl.user_code.frame import is_user_file, own_nodes, undecorated

BLOCKING = frozenset(
    {
        "Anthropic",
        "AzureOpenAI",
        "OpenAI",
        "anthropic.Anthropic",
        "httpx.Client",
        "httpx.get",
        "httpx.post",
        "httpx.request",
        "litellm.completion",
        "openai.AzureOpenAI",
        "openai.OpenAI",
        "requests.Session",
        "requests.get",
        "requests.post",
        "requests.put",
        "requests.request",
        "time.sleep",
        "urllib.request.urlopen",
    }
)
"""Synchronous clients, and calls that wait without letting other tasks run."""
OTHER_LOOPS = frozenset(
    {
        "asyncio.run",
        "loop.run_until_complete",
        "asyncio.get_event_loop().run_until_complete",
    }
)
"""Calls that start an event loop, which a running one refuses."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def reads_attribute(function: Callable[..., Any], name: str) -> str:
    """Return the user's file, of the function or imported by it, that reads `.NAME` of
    anything. Empty if there is none."""
    for file in _user_files(function):
        for node in ast.walk(_parsed(file)):
            if (
                isinstance(node, ast.Attribute)
                and node.attr == name
                and isinstance(node.ctx, ast.Load)
            ):
                return file.name
    return ""


def uses_argument(function: Callable[..., Any], position: int) -> bool:
    """Whether the function names its argument at `position` anywhere; also True if its
    source is unknown."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
        source = textwrap.dedent(inspect.getsource(undecorated(function)))
        tree = ast.parse(source)
    except (OSError, SyntaxError, TypeError, ValueError):
        return True
    if (
        position >= len(parameters)
        or parameters[position].kind is inspect.Parameter.VAR_POSITIONAL
    ):
        return True
    name = parameters[position].name
    return any(
        isinstance(node, ast.Name) and node.id == name for node in ast.walk(tree)
    )


def calls_in_async(function: Callable[..., Any], names: Collection[str]) -> str:
    """Return the first call of one of these names from an async function of the user's,
    directly or in a function of the same file that it calls: "requests.post
    (my_agent.py:12)". Empty if there is none."""
    for file in _user_files(function):
        for name, line in _async_calls(_parsed(file), names):
            return f"{name} ({file.name}:{line})"
    return ""


def _async_calls(tree: ast.Module, names: Collection[str]) -> Iterator[tuple[str, int]]:
    """Yield the called names, each with its line."""
    definitions = [node for node in ast.walk(tree) if isinstance(node, _Function)]
    reached = {
        definition.name: definition
        for definition in definitions
        if isinstance(definition, ast.FunctionDef)
    }
    pending: list[_Function] = [
        node for node in definitions if isinstance(node, ast.AsyncFunctionDef)
    ]
    while pending:
        for node in own_nodes(pending.pop(0)):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called in names:
                yield called, node.lineno
            elif called in reached:
                pending.append(reached.pop(called))


def _user_files(function: Callable[..., Any]) -> Iterator[Path]:
    """Yield the file of the function, wherever it is, then the user's files that it
    imports, directly or indirectly."""
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
    """Return the modules that its globals are, or come from."""
    modules: list[ModuleType] = []
    for value in list(vars(module).values()):
        imported = value if inspect.ismodule(value) else inspect.getmodule(value)
        if imported is not None:
            modules.append(imported)
    return modules


def _parsed(file: Path) -> ast.Module:
    """Return the syntax tree of a file; an empty one if it is not source."""
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])
