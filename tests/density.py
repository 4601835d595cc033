"""How densely the code is written, per package: `python tests/density.py [FOLDER ...]`.
A sign, no gate.

Counted are the lines that hold code: blank lines, comments and docstrings are left out.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_NO_CODE = {
    tokenize.ENCODING,
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@dataclass(slots=True)
class Density:
    lines: int = 0
    """Lines that hold code."""
    tokens: int = 0
    packed: int = 0
    """Assignments of a tuple to names: `a, b = x, y`."""
    ternaries: int = 0

    def add(self, other: Density) -> None:
        self.lines += other.lines
        self.tokens += other.tokens
        self.packed += other.packed
        self.ternaries += other.ternaries

    def __str__(self) -> str:
        thousands = max(self.lines, 1) / 1000
        return (
            f"{self.lines:6d} {self.tokens / max(self.lines, 1):8.1f} "
            f"{self.packed / thousands:8.1f} {self.ternaries / thousands:10.1f}"
        )


def docstring_lines(tree: ast.Module) -> set[int]:
    """Lines of strings that stand as statements: docstrings, and those below an
    attribute."""
    found: set[int] = set()
    for node in ast.walk(tree):
        is_string = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_string and isinstance(node.value.value, str):
            found.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def code_tokens(source: str, left_out: set[int]) -> Iterator[tokenize.TokenInfo]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE and token.start[0] not in left_out:
            yield token


def density_of(source: str) -> Density:
    tree = ast.parse(source)
    tokens = list(code_tokens(source, docstring_lines(tree)))
    density = Density(
        lines=len({token.start[0] for token in tokens}), tokens=len(tokens)
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            density.ternaries += 1
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            density.packed += isinstance(node.targets[0], ast.Tuple)
    return density


def main(folders: list[str]) -> None:
    packages: dict[str, Density] = defaultdict(Density)
    whole = Density()
    for folder in folders or ["invrl"]:
        for path in sorted((ROOT / folder).rglob("*.py")):
            density = density_of(path.read_text())
            packages[str(path.parent.relative_to(ROOT))].add(density)
            whole.add(density)
    print(f"{'per line, per 1,000 lines':32s}  lines   tokens   packed  ternaries")
    for name, density in packages.items():
        print(f"{name:32s} {density}")
    print(f"{'all':32s} {whole}")


if __name__ == "__main__":
    main(sys.argv[1:])
