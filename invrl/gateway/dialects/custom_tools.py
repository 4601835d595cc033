"""Custom tools of OpenAI's dialects, which take a text instead of JSON. Pure.

The model sees such a tool as a function with one argument, `input`. A grammar of the
text is described to it, but not enforced.
"""

from __future__ import annotations

import msgspec

from invrl.gateway.dialects import wire

_SCHEMA = b'{"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}'
_SYNTAXES = ("lark", "regex")


class Grammar(msgspec.Struct):
    syntax: str = ""
    definition: str = ""


class CustomFormat(msgspec.Struct):
    """The text that a custom tool takes: any, or that of a grammar. Chat completions
    nest the grammar in an object."""

    type: str
    syntax: str = ""
    definition: str = ""
    grammar: Grammar | None = None


class _Arguments(msgspec.Struct, forbid_unknown_fields=True):
    input: str


def custom_function(
    name: str, description: str | None, text_format: CustomFormat | None, param: str
) -> wire.Function:
    """Return the function that represents a custom tool. Raises SessionError 400 for a
    format that cannot be described; it calls the tool `param`."""
    lines = []
    if description:
        lines.append(description)
    if text_format is not None and text_format.type != "text":
        grammar = _grammar(text_format, f"{param}.format")
        lines.append(
            f"The input follows this {grammar.syntax} grammar:\n{grammar.definition}"
        )
    return wire.Function(
        name=name,
        description="\n\n".join(lines),
        parameters=msgspec.Raw(_SCHEMA),
    )


def _grammar(text_format: CustomFormat, param: str) -> Grammar:
    if text_format.type != "grammar":
        param = f"{param}.type"
        reason = f"{param}: {text_format.type!r} is not one of text, grammar"
        raise wire.bad_request(reason, param=param)
    grammar = text_format.grammar
    if grammar is None:
        grammar = Grammar(text_format.syntax, text_format.definition)
    else:
        param = f"{param}.grammar"
    if grammar.syntax not in _SYNTAXES:
        param = f"{param}.syntax"
        reason = f"{param}: {grammar.syntax!r} is not one of {', '.join(_SYNTAXES)}"
        raise wire.bad_request(reason, param=param)
    if not grammar.definition:
        param = f"{param}.definition"
        raise wire.bad_request(f"{param} must not be empty", param=param)
    return grammar


def custom_input(arguments: str) -> str:
    """Return the input of a call with these arguments; the arguments unchanged if the
    model has not written an input."""
    try:
        return msgspec.json.decode(arguments, type=_Arguments).input
    except (msgspec.DecodeError, RecursionError):
        return arguments


def custom_arguments(text: str) -> str:
    """Return the arguments of a call, from the input that the client sends back."""
    return msgspec.json.encode({"input": text}).decode()
