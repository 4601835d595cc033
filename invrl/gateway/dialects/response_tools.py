"""Tools of a response request, and which of them may be called. Pure.

A tool may be in a namespace. The model knows it as `namespace.name`, the client by the
two names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from invrl.gateway.dialects import wire
from invrl.gateway.dialects.custom_tools import CustomFormat, custom_function
from invrl.gateway.dialects.response_calls import (
    CLIENT_TOOLS,
    FUNCTION,
    KINDS,
    CalledTool,
)
from invrl.gateway.dialects.wire import Fields
from invrl.gateway.types import Tool, ToolChoice

_IGNORED_TOOLS = ("web_search", "image_generation")


class _Skill(msgspec.Struct):
    name: str
    description: str = ""
    path: str = ""


class _Environment(msgspec.Struct):
    """Environment of a shell."""

    type: str
    skills: list[_Skill] | None = None


class ToolField(wire.Function, kw_only=True):
    type: str
    tools: list[ToolField] | None = None
    format: CustomFormat | None = None
    """Text that a custom tool takes."""
    environment: _Environment | None = None


class ToolChoiceField(msgspec.Struct):
    type: str
    name: str = ""
    namespace: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[ToolChoiceField] | None = None


def qualified_name(namespace: str | None, name: str) -> str:
    """Return the name by which the model knows a function."""
    if not namespace:
        return name
    return f"{namespace}.{name}"


def called_tools(
    tools: Sequence[ToolField], namespace: str = ""
) -> Mapping[str, CalledTool]:
    """Return the client's tools by the name that the model knows. Functions with only
    one name are left out."""
    called: dict[str, CalledTool] = {}
    for tool in tools:
        if tool.type == "namespace":
            called |= called_tools(tool.tools or (), tool.name)
        elif tool.type in CLIENT_TOOLS:
            kind = CLIENT_TOOLS[tool.type]
            called[kind.tool_name] = CalledTool(name=kind.tool_name, kind=kind)
        elif namespace or tool.type == "custom":
            model_name = qualified_name(namespace, tool.name)
            kind = KINDS.get(tool.type, FUNCTION)
            called[model_name] = CalledTool(
                name=tool.name, namespace=namespace, kind=kind
            )
    return called


def read_tools(tools: Sequence[ToolField], namespace: str = "") -> Iterator[Tool]:
    """Yield the tools as functions, including those in namespaces. Raises SessionError
    400 for an unsupported tool."""
    for index, tool in enumerate(tools):
        param = f"tools[{index}]"
        if tool.type == "namespace" and not namespace:
            yield from read_tools(tool.tools or (), tool.name)
        elif tool.type == "function":
            name = qualified_name(namespace, tool.name)
            yield wire.make_tool(tool, param, name)
        elif tool.type == "custom":
            name = qualified_name(namespace, tool.name)
            yield wire.make_tool(
                custom_function(name, tool.description, tool.format, param), param
            )
        elif tool.type in CLIENT_TOOLS:
            yield wire.make_tool(_client_function(tool, param), param)
        elif tool.type not in _IGNORED_TOOLS:
            reason = (
                f"{param}: only {', '.join(KINDS)} are supported, not {tool.type!r}"
            )
            raise wire.bad_request(reason, param=param)


def _client_function(tool: ToolField, param: str) -> wire.Function:
    """Return the function that represents a tool of OpenAI's that the client runs.
    Raises SessionError 400 for a shell that OpenAI would run."""
    function = CLIENT_TOOLS[tool.type].function()
    environment = tool.environment
    if environment is None:
        return function
    if environment.type != "local":
        param = f"{param}.environment.type"
        reason = (
            f"{param}: {environment.type!r} runs at OpenAI; only local is supported"
        )
        raise wire.bad_request(reason, param=param, code="unsupported_parameter")
    skills = [
        f"{skill.name} ({skill.path}): {skill.description}"
        for skill in environment.skills or ()
    ]
    if skills:
        function.description = "\n".join(
            [
                f"{function.description} Skills, each with the folder of its files:",
                *skills,
            ]
        )
    return function


def read_tool_choice(choice: str | ToolChoiceField | None) -> ToolChoice:
    plain = wire.plain_choice(choice)
    if plain is not None:
        return plain
    if isinstance(choice, ToolChoiceField):
        if choice.type in KINDS:
            return ToolChoice(mode="named", name=_chosen_name(choice))
        if choice.type == "allowed_tools":
            names = [_chosen_name(tool) for tool in choice.tools or ()]
            names = [name for name in names if name]
            return wire.allowed_choice(choice.mode, names)
    reason = "`tool_choice` must be auto, none, required, allowed_tools, or name a tool"
    raise wire.bad_request(reason, param="tool_choice")


def _chosen_name(choice: ToolChoiceField) -> str:
    """Return the name by which the model knows a chosen tool."""
    if choice.type in CLIENT_TOOLS:
        return choice.type
    return qualified_name(choice.namespace, choice.name)


def tool_fields(tool: Tool) -> Fields:
    """Return a tool as a response shows it, by the name that the model knows."""
    parameters = tool.parameters or "null"
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description or None,
        "parameters": msgspec.Raw(parameters.encode()),
        "strict": tool.strict,
    }
