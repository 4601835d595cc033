"""The table of files in ARCHITECTURE.md, made from the first sentence of each module's
docstring.

`python tests/file_map.py` writes it; `tests/test_architecture.py` holds that it is up
to date.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAP = ROOT / "ARCHITECTURE.md"
_BEGIN = "<!-- files -->\n"
_END = "<!-- /files -->"


def first_sentence(path: Path) -> str:
    """Of the module's docstring, on one line and without its full stop."""
    paragraph = (ast.get_docstring(ast.parse(path.read_text())) or "").partition(
        "\n\n"
    )[0]
    sentence = re.split(r"(?<=[^.])\.(?:\s|$)", " ".join(paragraph.split()))[0]
    return sentence.replace("|", r"\|")


def table_of_files() -> str:
    """One section for each package: what lives in it, and a row for every module."""
    modules: dict[Path, list[Path]] = defaultdict(list)
    for path in sorted(ROOT.glob("invrl/**/*.py")):
        if path.name != "__init__.py":
            modules[path.parent].append(path)
    lines: list[str] = []
    for package in sorted(modules):
        lines += [f"### `{package.relative_to(ROOT)}/`", ""]
        lines += [first_sentence(package / "__init__.py") + ".", ""]
        lines += ["| file | what it is |", "|---|---|"]
        lines += [
            f"| `{path.relative_to(ROOT)}` | {first_sentence(path)} |"
            for path in modules[package]
        ]
        lines.append("")
    return "\n".join(lines)


def with_table(text: str) -> str:
    """The text of ARCHITECTURE.md with the table as it should be."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return before + _BEGIN + table_of_files() + _END + after


if __name__ == "__main__":
    MAP.write_text(with_table(MAP.read_text()))
