"""Common parts of the wire formats: reading a body, the errors that name a field of it,
events.

Every function that refuses a value raises SessionError 400 with the name of the field.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic_core import from_json

from invrl.errors import SessionError
from invrl.gateway.dialects.body_fields import FieldTable
from invrl.gateway.dialects.json_text import not_json
from invrl.gateway.types import Piece, Tool, ToolChoice

Body = TypeVar("Body")
Fields = dict[str, Any]
"""Fields of a JSON object in an answer or an event, in writing order."""
NO_JSON = msgspec.Raw(b"")
Unit = Annotated[float, msgspec.Meta(ge=0, le=1)]
TopP = Annotated[float, msgspec.Meta(gt=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=1)]
TopLogprobs = Annotated[int, msgspec.Meta(ge=0, le=20)]
_Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
_TopK = Annotated[int, msgspec.Meta(ge=-1)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
_RepetitionPenalty = Annotated[float, msgspec.Meta(gt=0, le=2)]
_Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
_Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""SGLang's own bounds are wider, but its sampler fails on a negative seed."""
_TEXT_PARTS = (
    "text",
    "input_text",
    "output_text",
    "refusal",
    "reasoning_text",
    "summary_text",
)
_MAX_STOPS = 16
_MAX_TOOLS = 4096
_MAX_TOOL_NAME = 128
_MAX_VALUES = 2**20
"""Maximum number of objects, lists and their items of a body or of a call's arguments.
Parsing is one step in which no other thread runs; for that many values it takes about
0.3 s."""
_MAX_SCHEMA_BYTES = 2**18
_ANY_OBJECT = '{"type": "object"}'
_MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON lacks; clients know this number."""
KEEP_ALIVE = b": waiting\n\n"


class SamplingFields(msgspec.Struct, kw_only=True):
    """Common sampling parameters of OpenAI's dialects, and those that servers of open
    models add."""

    temperature: _Temperature | None = None
    top_p: TopP | None = None
    top_k: _TopK | None = None
    min_p: Unit | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    repetition_penalty: _RepetitionPenalty | None = None
    logit_bias: dict[str, _Bias] | None = None
    sampling_seed: _Seed | None = msgspec.field(default=None, name="seed")


class Part(msgspec.Struct):
    """A part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Function(msgspec.Struct, kw_only=True):
    """Function of a tool. Some dialects give its fields other names."""

    name: str = ""
    description: str | None = None
    parameters: msgspec.Raw = NO_JSON
    strict: bool | None = None


class Format(msgspec.Struct):
    """Required format of a reply's text."""

    type: str
    schema: msgspec.Raw = NO_JSON


def bad_request(
    message: str,
    *,
    param: str | None = None,
    code: str = "invalid_request",
) -> SessionError:
    """Return SessionError 400 for the field `param`."""
    return SessionError(message, status=400, code=code, param=param)


def decode(
    decoder: msgspec.json.Decoder[Body],
    raw: bytes,
    table: FieldTable,
) -> tuple[Body, tuple[str, ...]]:
    """Decode the body of a request; return it and the names of its ignored fields."""
    check_number_of_values(raw, "the body")
    try:
        raw.decode()  # msgspec does not check the encoding of what it skips
        body = decoder.decode(raw)
        ignored = table.ignored(raw)
    except RecursionError:
        raise bad_request("the request's JSON is nested too deeply") from None
    except msgspec.ValidationError as error:
        reason = str(error)
        raise bad_request(reason, param=_field_in(reason)) from None
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise not_json(raw, error) from None
    return body, ignored


def _field_in(reason: str) -> str | None:
    """Return the field that an error of msgspec is about: its message ends with the
    field's path, as `$.a.b`."""
    _, _, path = reason.partition("`$.")
    return path.rstrip("`") or None


def check_number_of_values(raw: bytes, name: str) -> None:
    """Raise SessionError 400 if there are more values than may be parsed in one step.
    Values are counted by the signs between them: first all signs, then, if those are
    too many, only the signs outside of strings."""
    if len(raw) <= _MAX_VALUES or _count_signs(raw) <= _MAX_VALUES:
        return
    # Without escapes, every quote that is left begins or ends a string.
    unescaped = raw.replace(b"\\\\", b"")
    unescaped = unescaped.replace(b'\\"', b"")
    if unescaped.count(b'"') <= 2 * _MAX_VALUES:
        parts = unescaped.split(b'"')
        outside_of_strings = b"".join(parts[::2])
        if _count_signs(outside_of_strings) <= _MAX_VALUES:
            return
    raise bad_request(
        f"{name} has more than {_MAX_VALUES} values", code="too_many_values"
    )


def _count_signs(raw: bytes) -> int:
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{")


def call_arguments(text: str, param: str) -> str:
    """Return the arguments of a call. Raises SessionError 400 if they have too many
    values to be parsed in one step."""
    if len(text) > _MAX_VALUES:
        raw = text.encode("utf-8", "surrogatepass")
        check_number_of_values(raw, param)
    return text


def arguments_object(arguments: str) -> object:
    """Return a call's arguments as an object, character by character if they are a
    whole one."""
    try:
        msgspec.json.decode(arguments, type=dict)
        return msgspec.Raw(arguments.encode())
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        partial = from_json(arguments, allow_partial=True, allow_inf_nan=False)
    except ValueError:
        return {}
    if isinstance(partial, dict):
        return partial
    return {}


def stop_strings(
    stop: str | Sequence[str] | None, param: str = "stop"
) -> tuple[str, ...]:
    """Return the stop strings of a body. Raises SessionError 400 for too many of them,
    or for an empty one."""
    if stop is None:
        return ()
    if isinstance(stop, str):
        stop = (stop,)
    if len(stop) > _MAX_STOPS or "" in stop:
        reason = f"{param} takes up to {_MAX_STOPS} strings, none of them empty"
        raise bad_request(reason, param=param)
    return tuple(stop)


def model_role(role: str, roles: Mapping[str, str], param: str) -> str:
    """Return the model's name of a client's role, by the mapping `roles`."""
    if role not in roles:
        reason = f"{param}.role: {role!r} is not one of {', '.join(roles)}"
        raise bad_request(reason, param=f"{param}.role")
    return roles[role]


def content_text(content: str | Sequence[Part], param: str) -> str:
    """Return the text of a message's content. Raises SessionError 400 for a part that
    is not text."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        has_text = part.text is not None or part.refusal is not None
        if part.type not in _TEXT_PARTS or not has_text:
            reason = f"{param}: {part.type!r} is refused, this model takes text only"
            raise bad_request(reason, param=param, code="unsupported_content")
        texts.append(part.text or part.refusal or "")
    return "".join(texts)


def make_tool(function: Function, param: str, name: str = "") -> Tool:
    """Make a tool. Raises SessionError 400 for a name that clients' parsers do not
    take, or for a schema that is not an object. `name` is the name shown to the model,
    if it is not the function's own."""
    name = name or function.name
    if not _is_tool_name(name):
        param = f"{param}.name"
        reason = (
            f"{param}: {name!r} must be 1 to {_MAX_TOOL_NAME} letters, digits, _ - ."
        )
        raise bad_request(reason, param=param)
    return Tool(
        name=name,
        description=function.description or "",
        parameters=json_schema(function.parameters, f"{param}.parameters"),
        strict=bool(function.strict),
    )


def _is_tool_name(name: str) -> bool:
    if not 0 < len(name) <= _MAX_TOOL_NAME:
        return False
    return all(letter.isalnum() or letter in "_-." for letter in name)


def check_tools(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """Return the tools. Raises SessionError 400 for too many tools, or for two of one
    name."""
    names = {tool.name for tool in tools}
    if len(tools) > _MAX_TOOLS or len(names) < len(tools):
        reason = f"`tools` takes up to {_MAX_TOOLS} tools, each name once"
        raise bad_request(reason, param="tools")
    return tuple(tools)


def plain_choice(choice: Any) -> ToolChoice | None:
    """Return a tool choice that is one word; None for a choice that names tools."""
    if choice is None:
        return ToolChoice(mode="auto")
    if choice in ("auto", "none", "required"):
        return ToolChoice(mode=choice)
    return None


def allowed_choice(
    mode: Literal["auto", "required"],
    names: Sequence[str],
) -> ToolChoice:
    """Return a choice that allows only the named tools ("auto"), or requires one of
    them ("required"). The prompt shows all tools."""
    if not names:
        reason = "`tool_choice`: allowed_tools must name at least one function"
        raise bad_request(reason, param="tool_choice")
    unique_names = tuple(dict.fromkeys(names))
    return ToolChoice(mode=mode, allowed=unique_names)


def json_object(raw: msgspec.Raw, param: str) -> str:
    """Return the text of a JSON object; "" for null or nothing."""
    text = bytes(raw).decode()
    if text in ("", "null"):
        return ""
    try:
        msgspec.json.decode(text, type=dict)
    except (msgspec.DecodeError, RecursionError):
        raise bad_request(f"{param} must be a JSON object", param=param) from None
    return text


def json_schema(raw: msgspec.Raw, param: str) -> str:
    """Return text like `json_object`; also raises SessionError 400 for a schema that is
    too long."""
    if len(raw) > _MAX_SCHEMA_BYTES:
        reason = f"{param} has {len(raw)} bytes, at most {_MAX_SCHEMA_BYTES} are taken"
        raise bad_request(reason, param=param, code="schema_too_long")
    return json_object(raw, param)


def schema_text(kind: str, schema: msgspec.Raw, param: str) -> str:
    """Return the JSON schema that a response format of this kind asks for; "" for plain
    text."""
    if kind == "text":
        return ""
    if kind == "json_object":
        return _ANY_OBJECT
    text = ""
    if kind == "json_schema":
        text = json_schema(schema, param)
    if not text:
        reason = f"{param} must be text, json_object, or json_schema with a schema"
        raise bad_request(reason, param=param)
    return text


def wants_thinking(effort: str | None) -> bool | None:
    """Whether a reasoning effort asks for thinking; None if the request has none."""
    if effort is None:
        return None
    return effort not in ("none", "minimal")


def digest(dialect: bytes, raw: bytes) -> str:
    """Hash a request; a retry in the same dialect has the same digest."""
    return hashlib.blake2b(dialect + raw, digest_size=16).hexdigest()


def finite(logprob: float) -> float:
    """Return the log-prob as JSON can write it."""
    if math.isfinite(logprob):
        return logprob
    return _MIN_LOGPROB


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A sampled token. `top` has the likeliest tokens (id, log-prob) at its position,
    if the client asked for them."""

    id: int
    logprob: float
    top: Sequence[tuple[int, float]]


def sampled_tokens(pieces: Sequence[Piece]) -> Iterator[SampledToken]:
    """Yield the tokens of the pieces in order."""
    for piece in pieces:
        ids = piece.ids_T.tolist()
        logprobs = piece.logprobs_T.tolist()
        top = piece.top.tolist()
        top_per_token = len(top) // max(len(ids), 1)
        top_begin = 0
        for token_id, logprob in zip(ids, logprobs, strict=True):
            top_end = top_begin + top_per_token
            yield SampledToken(token_id, logprob, top[top_begin:top_end])
            top_begin = top_end


def encode_event(data: Any, name: str = "") -> bytes:
    """Encode a server-sent event."""
    lines = b"data: " + msgspec.json.encode(data)
    if name:
        lines = f"event: {name}\n".encode() + lines
    return lines + b"\n\n"
