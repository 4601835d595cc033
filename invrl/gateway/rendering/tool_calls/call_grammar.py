"""The grammar of a reply that must call a tool, in the form that the model was trained
on."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from invrl.gateway.rendering.tool_calls.call_parser import call_parser
from invrl.gateway.types import Tool, ToolChoice
from invrl.types.tasks import Json


@functools.lru_cache(maxsize=256)
def reply_grammar(
    parser_name: str,
    tools: tuple[Tool, ...],
    choice: ToolChoice,
    parallel: bool,
    schema: str,
) -> str:
    """Return the grammar, as EBNF, of a reply that calls tools; with a `schema`, of a
    reply that either calls tools or follows the schema. Raises ValueError or
    RuntimeError if there is no such grammar.

    It is EBNF because sglang-router 0.3.2 passes on only this one of SGLang's forms: it
    drops structural tags.
    """
    from xgrammar import Grammar

    calls = Grammar.from_structural_tag(_call_tag(parser_name, tools, choice, parallel))
    if not schema:
        return str(calls)
    return str(Grammar.union(calls, Grammar.from_json_schema(schema)))


def _call_tag(
    parser_name: str, tools: tuple[Tool, ...], choice: ToolChoice, parallel: bool
) -> dict[str, Json]:
    """Return XGrammar's structural tag of a reply that consists of calls."""
    from sglang.srt.entrypoints.openai.protocol import ToolChoice as SglangChoice

    # `strict`: the arguments of a forced call follow the tool's schema.
    strict_tools = [
        replace(tool, strict=True) for tool in _callable_tools(tools, choice)
    ]
    parser = call_parser(parser_name, strict_tools)
    sglang_choice: SglangChoice | str = "required"
    if choice.mode == "named":
        sglang_choice = SglangChoice.model_validate({"function": {"name": choice.name}})
    constraint = parser.get_structure_constraint(
        sglang_choice, parallel_tool_calls=parallel
    )
    if constraint is None:
        raise ValueError("their schemas make no grammar")
    kind, value = constraint
    if kind != "structural_tag":
        # Another kind of constraint gives a forced call another form than a free one,
        # and another parser.
        raise ValueError(f"the parser {parser_name} has no grammar of its calls")
    if isinstance(value, BaseModel):
        value = value.model_dump(by_alias=True)
    tag = json.loads(value) if isinstance(value, str) else value
    if "structures" in tag:
        return _converted_tag(tag, parallel)
    return tag


def _callable_tools(tools: Sequence[Tool], choice: ToolChoice) -> list[Tool]:
    if choice.mode == "named":
        return [tool for tool in tools if tool.name == choice.name]
    return [tool for tool in tools if not choice.allowed or tool.name in choice.allowed]


def _converted_tag(tag: dict[str, Any], parallel: bool) -> dict[str, Json]:
    """Convert a structural tag in SGLang's older form to XGrammar's."""
    tags = []
    for structure in tag["structures"]:
        fields = dict(structure)
        schema = fields.pop("schema")
        fields["content"] = {"type": "json_schema", "json_schema": schema}
        tags.append({"type": "tag", **fields})
    calls = {
        "type": "triggered_tags",
        "triggers": tag["triggers"],
        "tags": tags,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    return {"type": "structural_tag", "format": calls}
