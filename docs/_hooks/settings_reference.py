"""Writes the page `reference/settings.md` while the documentation is built, from the
code that reads the settings. The page is never committed, so it cannot be older than
the code."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic.fields import FieldInfo

from invrl.algorithms.presets import PRESETS
from invrl.run.settings.config import SECTIONS
from invrl.types.section import Section

PAGE = "reference/settings.md"
INTRODUCTION = """\
# Settings

This page is generated from the code. Each table below is a table of the TOML file, and each setting is also
a flag of `invrl train`: `lr` in `[train]` is `--lr`. A boolean has two flags, `--share-prefixes` and
`--no-share-prefixes`. A list is an array in TOML, and `a,b` or `a b` on the command line.

Values come from four places. Later ones win: the defaults, an algorithm preset, a TOML file (`--config`),
the flags. A name that does not exist, and a value that contradicts another one, is refused before any
process starts; the error says what to write instead. `invrl show-config` prints the result of all four.

Options of other packages are passed through and checked against the installed version: `--sglang-*`
(SGLang's `ServerArgs`), `--router-*` (sglang-router) and `--megatron-*` (Megatron's transformer,
data-parallel and optimizer configuration). In TOML they have tables of their own: `[sglang]`, `[router]`
and `[megatron]`.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by MkDocs when it has collected the pages: adds the generated one."""
    files.append(File.generated(config, PAGE, content=settings_page()))
    return files


def settings_page() -> str:
    """The page as Markdown: one section per table of the configuration, and the
    algorithm presets."""
    parts = [INTRODUCTION]
    for table, section in SECTIONS.items():
        parts.append(section_table(table, section))
    parts.append(preset_table())
    return "\n".join(parts)


def section_table(table: str, section: type[Section]) -> str:
    summary = (section.__doc__ or "").strip().splitlines()[0]
    rows = [
        f"## [{table}] {{ #{table} }}",
        "",
        summary,
        "",
        "| setting | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for name, field in section.model_fields.items():
        cells = [
            f"`{name}`",
            escaped(type_name(field)),
            f"`{default_text(field.default)}`",
        ]
        cells.append(escaped(field.description or ""))
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
    annotation = field.annotation
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
    """The default as TOML writes it."""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, str):
        return f'"{default}"'
    if isinstance(default, tuple):
        return "[" + ", ".join(default_text(item) for item in default) + "]"
    return str(default)


def escaped(text: str) -> str:
    """`text` for a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")
