"""What the dialects' wire formats share: reading a body, naming what is wrong with it, events. Pure.

Used by the files beside it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from invrl.errors import SessionError
from invrl.gateway.message import Tool

Body = TypeVar("Body")
NO_JSON = msgspec.Raw(b"")
Unit = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=1)]
_MOST_STOPS, _MOST_TOOLS = 16, 128
_NO_SCHEMA = '{"type": "object"}'


def decode(decoder: msgspec.json.Decoder[Body], raw: bytes) -> Body:
    """SessionError 400 that names the field."""
    try:
        return decoder.decode(raw)
    except RecursionError:
        raise bad("the request's JSON is nested too deeply") from None
    except UnicodeDecodeError:
        raise bad("the request's JSON is not UTF-8") from None
    except msgspec.DecodeError as error:
        message = str(error)
        param = message.partition("`$.")[2].rstrip("`") or None
        raise bad(message, param=param) from None


def unread(name: str, *fields: str) -> type[msgspec.Struct]:
    """Optional fields of any shape: taken, so that they are not refused as unknown."""
    return msgspec.defstruct(name, [(field, Any, None) for field in fields], kw_only=True)


def bad(message: str, *, param: str | None = None, code: str = "invalid_request") -> SessionError:
    return SessionError(message, status=400, code=code, param=param)


def unsupported(name: str) -> SessionError:
    return bad(f"`{name}` is not supported", param=name, code="unsupported_parameter")


def check_model(asked: str, served: str) -> None:
    """SessionError 404 for a model that is not ours."""
    if asked != served:
        reason = f"The model `{asked}` does not exist; this server has `{served}`."
        raise SessionError(reason, status=404, code="model_not_found", param="model")


def stop_strings(stop: str | Sequence[str] | None, param: str = "stop") -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > _MOST_STOPS or "" in stops:
        raise bad(f"{param} takes up to {_MOST_STOPS} strings, none of them empty", param=param)
    return stops


def make_tool(name: str, description: str | None, parameters: msgspec.Raw, strict: bool, param: str) -> Tool:
    """SessionError 400 for a name that no client's parser takes, or a schema that is no object."""
    if not 0 < len(name) <= 128 or not all(each.isalnum() or each in "_-." for each in name):
        raise bad(f"{param}.name: {name!r} must be 1 to 128 letters, digits, _ - .", param=f"{param}.name")
    schema = json_object(parameters, f"{param}.parameters")
    return Tool(name=name, description=description or "", parameters=schema, strict=strict)


def json_object(raw: msgspec.Raw, param: str) -> str:
    """The text of a JSON object that the request holds; "" where it holds none or null."""
    text = bytes(raw).decode()
    if text in ("", "null"):
        return ""
    if not text.startswith("{"):
        raise bad(f"{param} must be a JSON object", param=param)
    return text


def check_tools(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    names = [tool.name for tool in tools]
    if len(names) > _MOST_TOOLS or len(set(names)) != len(names):
        raise bad(f"`tools` takes up to {_MOST_TOOLS} tools, each name once", param="tools")
    return tuple(tools)


def schema_text(kind: str, schema: msgspec.Raw, param: str) -> str:
    """The JSON schema that a response format asks for; "" for plain text."""
    if kind == "text":
        return ""
    if kind == "json_object":
        return _NO_SCHEMA
    if kind == "json_schema" and (text := json_object(schema, param)):
        return text
    raise bad(f"{param} must be text, json_object, or json_schema with a schema", param=param)


def digest(dialect: bytes, raw: bytes) -> str:
    """Equal for a retry of the same request in the same dialect."""
    return hashlib.blake2b(dialect + raw, digest_size=16).hexdigest()


def finite(logprob: float) -> float:
    """JSON has no infinity; clients know this number for it."""
    return logprob if math.isfinite(logprob) else -9999.0


def sent(event: Any, name: str = "") -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(event) + b"\n\n"
