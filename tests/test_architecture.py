"""The rules that keep the tree readable: names, layers, no import circles, and a map that is true."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from file_map import MAP, with_table

ROOT = Path(__file__).parents[1]
SOURCES = sorted(ROOT.glob("invrl/**/*.py"))
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "tools", "stuff"}

# Imports run one way. `root` stands for the modules of `invrl/` itself, which every package may import. A
# section of settings (`config.py`) is a leaf that everybody may import too.
MAY_IMPORT: dict[str, set[str]] = {
    "root": set(),
    "host": set(),
    "algorithms": set(),
    "store": {"host"},
    "weights": {"host", "train.families.registry"},
    "engines": {"host", "weights", "train.families.registry", "train.hf_config"},
    "train": {"host", "store", "weights", "algorithms"},
    "buffer": {"host", "store", "algorithms"},
    "rollout": {"host", "store"},
    "gateway": {"host", "store", "engines.sglang_client", "engines.routed_experts"},
    "observe": {"host", "store", "buffer", "gateway.types"},
    "datasets": {
        "store",
        "gateway.types",
        "gateway.dialects.chat",
        "gateway.dialects.joined_messages",
        "gateway.rendering.loading",
        "gateway.rendering.renderer",
    },
}
MAY_IMPORT["viewer"] = {"host", "store", "buffer", "observe", "gateway.types"}
MAY_IMPORT["bench"] = {"host", "train", "algorithms", "engines", "weights"}
MAY_IMPORT["run"] = set(MAY_IMPORT)
MAY_IMPORT["cli"] = set(MAY_IMPORT)
INSIDE_THE_GATEWAY: dict[str, set[str]] = {
    "types": set(),
    "config": set(),
    "keys": set(),
    "session_record": set(),
    "registry": {"keys", "session_record"},
    "rendering": {"types"},
    "dialects": {"types"},
    "turns": {"types", "session_record", "rendering"},
    "sessions": {"types", "session_record", "registry", "turns"},
    "server": {
        "types",
        "keys",
        "session_record",
        "registry",
        "rendering",
        "dialects",
        "turns",
        "sessions",
    },
}
"""What a package of the gateway may import of the others, besides the settings."""
WITHOUT_EVENT_LOOP = ("types", "rendering", "dialects")
"""Packages of the gateway that are plain functions and values: they import no event loop and no engine."""


def name_of(path: Path) -> str:
    """`invrl/train/model.py` -> `train.model`."""
    parts = path.relative_to(ROOT / "invrl").with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def package_of(module: str) -> str:
    """`train.model` -> `train`; `types` -> `root`."""
    package, _, rest = module.partition(".")
    if rest or (ROOT / "invrl" / package).is_dir():
        return package
    return "root"


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports_of(path: Path) -> Iterator[tuple[str, int, bool]]:
    """Our own modules that a file imports: dotted name, line, and whether only for type checks."""
    for_types = {
        id(inner)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree_of(path)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.split(".")[0] == "invrl":
                yield name, node.lineno, id(node) in for_types


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_file_is_named_by_its_noun_and_says_its_role(path: Path) -> None:
    assert not EMPTY_NAMES & set(path.relative_to(ROOT).with_suffix("").parts)
    if path.name != "__init__.py":
        docstring = ast.get_docstring(tree_of(path))
        assert len(docstring or "") > 20, "a module docstring says what the module is for, and its invariant"


MODULES = {name_of(path): path for path in SOURCES}


def imported_modules(path: Path) -> Iterator[tuple[str, int]]:
    """Our own modules that a file imports at run time, without `invrl.`, and the line."""
    for name, line, for_types_only in imports_of(path):
        if not for_types_only:
            inner = name.removeprefix("invrl").removeprefix(".")
            yield (inner if inner in MODULES else inner.rpartition(".")[0]), line


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_package_imports_only_what_it_may(path: Path) -> None:
    package = package_of(name_of(path))
    for target, line in imported_modules(path):
        is_settings = target.endswith(".config") and target != "run.config"
        if package_of(target) in {package, "root"} or is_settings or not target:
            continue
        assert {package_of(target), target} & MAY_IMPORT[package], f"line {line}: {package} imports {target}"


GATEWAY_SOURCES = [path for path in SOURCES if name_of(path).startswith("gateway.")]


@pytest.mark.parametrize("path", GATEWAY_SOURCES, ids=name_of)
def test_the_packages_of_the_gateway_import_downwards(path: Path) -> None:
    package = name_of(path).split(".")[1]
    allowed = INSIDE_THE_GATEWAY[package] | {package, "config"}
    for target, line in imported_modules(path):
        if target.startswith("gateway."):
            assert target.split(".")[1] in allowed, f"line {line}: gateway.{package} imports {target}"


@pytest.mark.parametrize("path", GATEWAY_SOURCES, ids=name_of)
def test_dialects_and_rendering_have_no_event_loop(path: Path) -> None:
    if name_of(path).split(".")[1] not in WITHOUT_EVENT_LOOP:
        return
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            assert all(alias.name != "asyncio" for alias in node.names), f"line {node.lineno}"
        assert not isinstance(node, ast.AsyncFunctionDef | ast.Await), f"line {node.lineno}"
    for target, line in imported_modules(path):
        assert package_of(target) in {"gateway", "root"}, f"line {line}: imports {target}"


def test_every_package_says_what_lives_in_it() -> None:
    for path in SOURCES:
        if path.name == "__init__.py":
            assert len(ast.get_docstring(tree_of(path)) or "") > 60, path


def test_modules_import_each_other_in_no_circle() -> None:
    modules = {f"invrl.{name_of(path)}".rstrip("."): path for path in SOURCES}
    edges: dict[str, set[str]] = {}
    for name, path in modules.items():
        found = [
            (n if n in modules else n.rpartition(".")[0], line)
            for n, line, types in imports_of(path)
            if not types
        ]
        at_top = {node.lineno for node in tree_of(path).body if isinstance(node, ast.Import | ast.ImportFrom)}
        edges[name] = {target for target, line in found if target in modules and line in at_top} - {name}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for target in sorted(edges[name]):
                visit(target, (*trail, name))
            done.add(name)

    for name in modules:
        visit(name, ())


def test_the_map_lists_every_file_with_what_it_is() -> None:
    text = MAP.read_text()
    assert with_table(text) == text, "run: python tests/file_map.py"


def is_defined(symbol: str, path: Path) -> bool:
    """Whether the file, or a file of the folder, defines a function, a class, a field or a variable of this
    name."""
    files = path.rglob("*.py") if path.is_dir() else [path]
    definition = re.compile(
        rf"^\s*(?:(?:async )?def|class) {symbol}\b|^\s*{symbol}\b(?:: .*)?(?: = |$)", re.MULTILINE
    )
    return any(definition.search(file.read_text()) for file in files)


def test_the_prose_of_the_map_names_files_that_exist() -> None:
    text = MAP.read_text()
    for name in re.findall(r"`((?:invrl|tests|launch|docs)/[\w./]*)`", text):
        assert (ROOT / name).exists(), f"ARCHITECTURE.md names {name}, which is gone"


def test_the_map_names_symbols_that_are_defined_where_it_says() -> None:
    text = MAP.read_text()
    for symbol, name in re.findall(r"`(\w+)`[^`|;]* in `(invrl/[\w./]*)`", text):
        assert is_defined(symbol, ROOT / name), f"ARCHITECTURE.md: {name} defines no {symbol}"


def test_the_classes_and_methods_that_the_map_names_exist() -> None:
    prose = MAP.read_text().partition("<!-- files -->")[0]
    bodies: dict[str, str] = {}
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                bodies[node.name] = bodies.get(node.name, "") + ast.unparse(node)
    for name in re.findall(r"`([A-Z]\w*(?:\.\w+)?)`", prose):
        class_name, _, member = name.partition(".")
        assert class_name in bodies, f"ARCHITECTURE.md names the class {class_name}, which is gone"
        if member:
            assert f"def {member}(" in bodies[class_name], f"ARCHITECTURE.md names {name}, which is gone"


def test_no_file_names_a_registry_or_the_machine_it_was_written_on() -> None:
    """Package sources are the user's configuration; a path of one machine helps nobody."""
    hosts = r"pypi\.(org|python)|pythonhosted|registry\.npmjs|download\.pytorch|huggingface\.co"
    machine = r"/work/(main|scratch|shared)|/opt/(wheels|pypi)|/root/"
    pattern = re.compile(f"{hosts}|{machine}")
    listing = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout
    tracked = [ROOT / name for name in listing.splitlines()] or SOURCES
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked
        if path.is_file()
        and path != Path(__file__).resolve()
        and path.suffix in {".py", ".md", ".toml", ".sh", ".txt", ""}
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports test files by their names alone, so two of one name end the whole suite."""
    names = Counter(path.name for path in ROOT.glob("tests/**/test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_wildcard_and_no_bare_except() -> None:
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom):
                assert all(alias.name != "*" for alias in node.names), f"{path}:{node.lineno}"
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"{path}:{node.lineno}: a bare except"


def test_no_wait_loses_a_cancellation() -> None:
    """In Python 3.11 `asyncio.wait_for` returns its result in the place of a cancellation that comes together
    with it, and whoever has cancelled waits for ever. `asyncio.timeout` does not."""
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("asyncio", "wait_for"), f"{path}:{node.lineno}"
