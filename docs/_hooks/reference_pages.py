"""Writes two pages while the documentation is built: `reference/settings.md`, from the
code that reads the settings, and `reference/files.md`, from the docstrings of the
modules.

Neither is committed, so neither can be older than the code.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from invrl.algorithms.presets import PRESETS
from invrl.cli.flags import SETTING_FLAGS
from invrl.run.settings.config import SECTIONS, TABLES
from invrl.types.section import Section, present_type, section_fields, section_tables

ROOT = Path(__file__).parents[2]
FLAGS = {(setting.table, setting.key): setting.flag for setting in SETTING_FLAGS}
FILES_INTRODUCTION = """\
# Files

This page is generated from the code: what lives in each package, and the first sentence of each module's docstring.
"""
SETTINGS_INTRODUCTION = """\
# Settings

This page is generated from the code. Each table below is a table of the TOML file, and each setting is also
a flag of `invrl train`. What most runs set has a short flag, `lr` in `[train]` is `--lr`; in any other the
table comes first, `keep` in `[checkpoints]` is `--checkpoints.keep`. A boolean has two flags,
`--share-prefixes` and `--no-share-prefixes`. A list is an array in TOML, and `a,b` or `a b` on the command line.

Values come from four places. Later ones win: the defaults, an algorithm preset, a TOML file (`--config`),
the flags. A name that does not exist, and a value that contradicts another one, is refused before any
process starts; the error says what to write instead. `invrl show-config` prints the result of all four.

Options of other packages are passed through and checked against the installed version: `--sglang-*`
(SGLang's `ServerArgs`), `--router-*` (sglang-router) and `--megatron-*` (Megatron's transformer,
data-parallel and optimizer configuration). In TOML they have tables of their own: `[sglang]`, `[router]`
and `[megatron]`.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by MkDocs when it has collected the pages: adds the generated ones."""
    pages = {
        "reference/settings.md": settings_page(),
        "reference/files.md": files_page(),
    }
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def files_page() -> str:
    """The page as Markdown: one section per package, and a row for every module."""
    modules: dict[Path, list[Path]] = defaultdict(list)
    for path in sorted(ROOT.glob("invrl/**/*.py")):
        is_of_package = path.with_name("__init__.py").exists()  # environments are not
        if path.name != "__init__.py" and is_of_package:
            modules[path.parent].append(path)
    lines = [FILES_INTRODUCTION]
    for package in sorted(modules):
        lines += [f"## `{package.relative_to(ROOT)}/`", ""]
        lines += [first_sentence(package / "__init__.py") + ".", ""]
        lines += ["| file | what it is |", "|---|---|"]
        lines += [
            f"| `{path.relative_to(ROOT)}` | {first_sentence(path)} |"
            for path in modules[package]
        ]
        lines.append("")
    return "\n".join(lines)


def first_sentence(path: Path) -> str:
    """Return the first sentence of the module's docstring, on one line and without its
    full stop."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    sentence = re.split(r"(?<=[^.])\.(?:\s|$)", paragraph)[0]
    return sentence.replace("|", r"\|")


def settings_page() -> str:
    """The page as Markdown: one section per table of the configuration, and the
    algorithm presets."""
    parts = [SETTINGS_INTRODUCTION]
    for table, section in SECTIONS.items():
        parts.append(section_table(table, section))
    for table, (_, model) in TABLES.items():
        parts.append(section_table(table, model))
    parts.append(preset_table())
    return "\n".join(parts)


def section_table(table: str, section: type[Section]) -> str:
    summary = (section.__doc__ or "").strip().splitlines()[0]
    rows = [
        f"## [{table}] {{ #{table} }}",
        "",
        summary,
        "",
        "| setting | flag | type | default | meaning |",
        "|---|---|---|---|---|",
    ]
    tables = section_tables(section)
    for name, field in section_fields(section).items():
        if name in tables:
            continue
        cells = [
            f"`{name}`",
            f"`{FLAGS[table, name]}`",
            escaped(type_name(field)),
            default_text(field.default),
            escaped(field.description or ""),
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join([*rows, ""])


def preset_table() -> str:
    rows = [
        "## Algorithm presets { #presets }",
        "",
        "`--algorithm-preset NAME` sets these fields of `[algorithm]`. A field that you set yourself wins.",
        "",
        "| preset | sets |",
        "|---|---|",
    ]
    for name, values in PRESETS.items():
        settings = ", ".join(f"`{key} = {value}`" for key, value in values.items())
        rows.append(f"| `{name}` | {settings} |")
    return "\n".join([*rows, ""])


def type_name(field: FieldInfo) -> str:
    """What a reader may write: the choices of a Literal, or the kind of value."""
    annotation = present_type(field)
    if get_origin(annotation) is Literal:
        return " or ".join(
            f"`{choice}`" if choice else "empty" for choice in get_args(annotation)
        )
    if get_origin(annotation) is tuple:
        return "list"
    names = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    if annotation in names:
        return names[annotation]
    return str(annotation)


def default_text(default: Any) -> str:
    """The default as TOML writes it; empty if there is none."""
    if default is None or default is PydanticUndefined:
        return ""
    return f"`{toml_text(default)}`"


def toml_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(toml_text(item) for item in value) + "]"
    return str(value)


def escaped(text: str) -> str:
    """`text` for a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")
