"""The rules that keep the tree readable: names, layers, no import circles, and a map that is true."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(ROOT.glob("invrl/**/*.py"))
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "tools", "stuff"}

# Imports run one way, downwards: a module may import its own layer's and lower layers' modules.
VOCABULARY = {"types", "errors"}
SEAMS = {
    "interfaces", "metrics", "section", "process", "plugins", "private_file", "environment_keys",
    "weight_sync", "guardian", "heartbeat", "group_store", "ray_memory", "weight_arena", "weight_buckets",
    "cpu_stand_ins", "run_store", "lease_store", "model_folder", "disk", "manifest", "user_line",
}  # fmt: skip
PACKAGES = {"train", "rollout", "gateway", "buffer", "algorithms"}
LAYERS: list[tuple[str, set[str]]] = [
    ("vocabulary", VOCABULARY),
    ("seams", SEAMS),
    ("packages", PACKAGES),
    ("composition", set()),  # every other module: config, loop, sinks, ...
    ("cluster", {"cluster"}),
    ("fleet_updater", {"fleet_updater"}),
    ("commands", {"training", "serving", "replay", "evaluating"}),
    ("cli", {"cli"}),
]
STRANGERS = {"train", "rollout", "gateway", "buffer"}
"""Packages that never import each other ..."""
SHARED = {"invrl.rollout.sglang_client"}
"""... but for the client of the engines, which the gateway shares with the rollout half."""


def name_of(path: Path) -> str:
    """`invrl/train/model.py` -> `train.model`."""
    parts = path.relative_to(ROOT / "invrl").with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def layer_of(top: str) -> int:
    named = [index for index, (_, members) in enumerate(LAYERS) if top in members]
    return named[0] if named else next(i for i, (name, _) in enumerate(LAYERS) if name == "composition")


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
        assert len(docstring or "") > 20, "a module docstring says role, invariant, who calls it"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_run_downwards(path: Path) -> None:
    top = name_of(path).split(".")[0]
    for imported, line, for_types_only in imports_of(path):
        target = [*imported.split("."), ""][1]
        if for_types_only or not target or target == top:
            continue
        # A section of settings is a leaf wherever it stands.
        if imported.startswith(f"invrl.{target}.config."):
            continue
        assert layer_of(target) <= layer_of(top), f"line {line}: {top} may not import {imported}"
        if top in STRANGERS and target in STRANGERS:
            assert imported.rpartition(".")[0] in SHARED, f"line {line}: {top} may not import {imported}"


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


def test_the_map_lists_every_file_and_no_other() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    listed = set(re.findall(r"^\| `(invrl/[\w/]+\.py)` \|", text, re.MULTILINE))
    files = {str(path.relative_to(ROOT)) for path in SOURCES if path.name != "__init__.py"}
    assert sorted(files - listed) == [], "not in ARCHITECTURE.md"
    assert sorted(listed - files) == [], "in ARCHITECTURE.md, but gone"


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
