"""The Jinja in which chat templates are written, as transformers extends it: a sandbox
with loop controls, `tojson`, `raise_exception` and `{% generation %}` blocks. To import
transformers itself would take a second in every process that renders;
`tests/unit/test_template_language.py` compares with it."""

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
    """The text so far."""
    blocks: list[tuple[int, int]] = field(default_factory=list)
    """Beginning and end of each `{% generation %}` block in the text."""


_RENDERING: ContextVar[_Rendering] = ContextVar("rendering")
"""The one that goes on in this thread: a template and its extensions are shared by all
of them."""


class _GenerationBlocks(Extension):
    """`{% generation %}`, around what the model has generated."""

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
    """Jinja's own filter escapes what HTML would not show."""
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
    """The text of a conversation, and beginning and end of each `{% generation %}`
    block in it.

    `variables`: what the template may name; `messages` and `strftime_now` among them.
    Raises what the template raises: any exception.
    """
    rendering = _Rendering()
    _RENDERING.set(rendering)
    for piece in _compiled(source).generate(variables):
        rendering.pieces.append(piece)
    return "".join(rendering.pieces), rendering.blocks
