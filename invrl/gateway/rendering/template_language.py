"""The Jinja in which chat templates are written, as transformers extends it: a sandbox
with loop controls, `tojson`, `raise_exception` and `{% generation %}` blocks. Importing
transformers itself would take a second in every process that renders;
`tests/unit/test_template_language.py` compares with it.
"""

import functools
import json
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment


@dataclass(slots=True)
class _Rendering:
    pieces: list[str] = field(default_factory=list)
    """Text so far."""
    blocks: list[tuple[int, int]] = field(default_factory=list)
    """Beginning and end of each `{% generation %}` block in the text."""


_RENDERING: ContextVar[_Rendering] = ContextVar("rendering")
"""Current rendering of this thread: a template and its extensions are shared by all
threads."""


class _GenerationBlocks(Extension):
    """`{% generation %}`, around the model's output."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = nodes.CallBlock(self.call_method("_render_block"), [], [], body)
        return block.set_lineno(line)

    def _render_block(self, caller: Macro) -> str:
        text = str(caller())
        rendering = _RENDERING.get()
        begin = sum(map(len, rendering.pieces))
        rendering.blocks.append((begin, begin + len(text)))
        return text


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Dump JSON. Jinja's own filter escapes HTML characters."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


@functools.lru_cache(maxsize=64)
def _compiled(source: str) -> Template:
    extensions = [_GenerationBlocks, LoopControlExtension]
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(source)


def render_template(
    source: str, variables: Mapping[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a conversation, and beginning and end of each `{% generation
    %}` block in it.

    `variables` are those of the template, including `messages` and `strftime_now`.
    Raises any exception of the template.
    """
    rendering = _Rendering()
    _RENDERING.set(rendering)
    for piece in _compiled(source).generate(variables):
        rendering.pieces.append(piece)
    return "".join(rendering.pieces), rendering.blocks
