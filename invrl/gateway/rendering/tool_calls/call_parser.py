"""SGLang's parser of tool calls, built from our `Tool` type. SGLang is imported when
the first one is made."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from invrl.gateway.types import Tool

if TYPE_CHECKING:
    from sglang.srt.entrypoints.openai.protocol import Tool as SglangTool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser


def call_parser(name: str, tools: Sequence[Tool]) -> FunctionCallParser:
    """Return SGLang's parser of that name. Raises ValueError if there is none."""
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    return FunctionCallParser(_sglang_tools(tuple(tools)), name)


@functools.lru_cache(maxsize=256)
def _sglang_tools(tools: tuple[Tool, ...]) -> list[SglangTool]:
    from sglang.srt.entrypoints.openai.protocol import Tool as SglangTool

    converted = []
    for tool in tools:
        function = asdict(tool)
        function["parameters"] = json.loads(tool.parameters or "null")
        converted.append(
            SglangTool.model_validate({"type": "function", "function": function})
        )
    return converted
