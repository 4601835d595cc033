"""What the dialects' wire formats share: reading a body, naming what is wrong with it, events. Pure.

Used by the files beside it."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from invrl.errors import SessionError
from invrl.gateway.dialects.body_fields import FieldTable
from invrl.gateway.types import ClientSampling, Message, Piece, Tool, ToolChoice

Body = TypeVar("Body")
NO_JSON = msgspec.Raw(b"")
Unit = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=1)]
_Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""SGLang's own bounds are wider, but its sampler fails on a negative seed."""
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
_TEXTS = ("text", "input_text", "output_text", "refusal", "reasoning_text", "summary_text")
_MOST_STOPS, _MOST_TOOLS = 16, 128
Top = Annotated[int, msgspec.Meta(ge=0, le=20)]
_MOST_VALUES = 2**20
"""Objects, lists and what is in them, of a body or of a call's arguments. Reading them takes one step, in
which no other thread runs: about 0.3 s for so many."""
_LONGEST_SCHEMA = 2**18
"""Bytes of one JSON schema."""
_NO_SCHEMA = '{"type": "object"}'
KEEP_ALIVE = b": waiting\n\n"


class SamplingFields(msgspec.Struct, kw_only=True):
    """What OpenAI's dialects name alike, and the extensions that servers of open models share."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: Unit | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, msgspec.Meta(ge=-100, le=100)]] | None = None
    sampling_seed: _Seed | None = msgspec.field(default=None, name="seed")


class Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class Function(msgspec.Struct, kw_only=True):
    """What a tool is, under whatever names."""

    name: str = ""
    description: str | None = None
    parameters: msgspec.Raw = NO_JSON
    strict: bool | None = None


class Format(msgspec.Struct):
    """What the text of a reply must look like."""

    type: str
    schema: msgspec.Raw = NO_JSON


def decode(
    decoder: msgspec.json.Decoder[Body], raw: bytes, served: str, table: FieldTable
) -> tuple[Body, tuple[str, ...]]:
    """A body for the model `served`, and the names of its fields that nothing reads. SessionError 400 that
    names the field, 404 for another model."""
    _check_values(raw, "the body")
    try:
        raw.decode()  # msgspec does not look into what it skips
        body: Any = decoder.decode(raw)
        ignored = table.ignored(raw)
    except RecursionError:
        raise bad("the request's JSON is nested too deeply") from None
    except UnicodeDecodeError:
        raise bad("the request's JSON is not UTF-8") from None
    except msgspec.DecodeError as error:
        message = str(error)
        param = message.partition("`$.")[2].rstrip("`") or None
        raise bad(message, param=param) from None
    check_model(body.model, served)
    return body, ignored


def _check_values(raw: bytes, name: str) -> None:
    """SessionError 400 for more values than are read in one step. Values are counted by the signs between
    them, first all, then, if those are too many, the ones outside of strings."""
    if len(raw) <= _MOST_VALUES or _signs(raw) <= _MOST_VALUES:
        return
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # all quotes that are left begin or end a string
    if plain.count(b'"') <= 2 * _MOST_VALUES and _signs(b"".join(plain.split(b'"')[::2])) <= _MOST_VALUES:
        return
    raise bad(f"{name} has more than {_MOST_VALUES} values", code="too_many_values")


def _signs(raw: bytes) -> int:
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{")


def call_arguments(text: str, param: str) -> str:
    """The arguments of a call. SessionError 400 for more values than are read in one step."""
    if len(text) > _MOST_VALUES:
        _check_values(text.encode("utf-8", "surrogatepass"), param)
    return text


def bad(message: str, *, param: str | None = None, code: str = "invalid_request") -> SessionError:
    return SessionError(message, status=400, code=code, param=param)


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


def make_tool(function: Function, param: str, name: str = "") -> Tool:
    """SessionError 400 for a name that no client's parser takes, or a schema that is no object. `name`: the
    function's where it goes by another one."""
    name = name or function.name
    if not 0 < len(name) <= 128 or not all(each.isalnum() or each in "_-." for each in name):
        raise bad(f"{param}.name: {name!r} must be 1 to 128 letters, digits, _ - .", param=f"{param}.name")
    return Tool(
        name=name,
        description=function.description or "",
        parameters=json_schema(function.parameters, f"{param}.parameters"),
        strict=bool(function.strict),
    )


def json_object(raw: msgspec.Raw, param: str) -> str:
    """The text of a JSON object that the request holds; "" where it holds none or null."""
    text = bytes(raw).decode()
    if text in ("", "null"):
        return ""
    try:
        msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise bad(f"{param} must be a JSON object", param=param) from None
    return text


def json_schema(raw: msgspec.Raw, param: str) -> str:
    """As `json_object`. SessionError 400 for one that is too long, too."""
    if len(raw) > _LONGEST_SCHEMA:
        reason = f"{param} has {len(raw)} bytes, at most {_LONGEST_SCHEMA} are taken"
        raise bad(reason, param=param, code="schema_too_long")
    return json_object(raw, param)


def role_of(role: str, roles: Mapping[str, str], param: str) -> str:
    """The model's name of a client's `role`."""
    if role not in roles:
        raise bad(f"{param}.role: {role!r} is not one of {', '.join(roles)}", param=f"{param}.role")
    return roles[role]


def check_tools(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    names = [tool.name for tool in tools]
    if len(names) > _MOST_TOOLS or len(set(names)) != len(names):
        raise bad(f"`tools` takes up to {_MOST_TOOLS} tools, each name once", param="tools")
    return tuple(tools)


def plain_choice(choice: Any) -> ToolChoice | None:
    """A tool choice that names no tool; None for others."""
    return ToolChoice(mode=choice or "auto") if choice in (None, "auto", "none", "required") else None


def allowed_choice(mode: Literal["auto", "required"], names: Sequence[str]) -> ToolChoice:
    """Some of the tools may, or one of them must, be called; the prompt shows all."""
    if not names:
        reason = "`tool_choice`: allowed_tools must name at least one function"
        raise bad(reason, param="tool_choice")
    return ToolChoice(mode=mode, allowed=tuple(dict.fromkeys(names)))


class JoinedMessages:
    """Messages in their order, of which adjacent ones may be parts of one. Parts are joined once, when all
    are there: joining two at a time would copy the text so far for each part that follows."""

    def __init__(self) -> None:
        self._groups: list[list[Message]] = []
        """The parts of each message."""
        self._betweens: list[str] = []
        """What comes between the texts of each message's parts."""
        self._has_content = False
        self._has_calls = False
        """Of the last message so far."""

    @property
    def last_role(self) -> str:
        """Empty if there is no message yet."""
        return self._groups[-1][-1].role if self._groups else ""

    def continues_reply(self, message: Message) -> bool:
        """Whether the last message and this one were one reply of the model: text and calls that the client
        keeps apart. Two texts are two replies, unless the first has none."""
        if not self.last_role == message.role == "assistant":
            return False
        return self._has_calls or bool(message.tool_calls) or not self._has_content

    def add(self, message: Message) -> None:
        self._groups.append([message])
        self._betweens.append("")
        self._has_content = bool(message.content)
        self._has_calls = bool(message.tool_calls)

    def join(self, message: Message, between: str = "") -> None:
        """Makes this one a part of the last one, which has the same role. `between`: what comes between the
        texts of the parts, the same for all parts of a message."""
        self._groups[-1].append(message)
        self._betweens[-1] = between
        self._has_content = self._has_content or bool(message.content)
        self._has_calls = self._has_calls or bool(message.tool_calls)

    def messages(self) -> tuple[Message, ...]:
        return tuple(map(_joined, self._groups, self._betweens))


def _joined(parts: Sequence[Message], between: str) -> Message:
    if len(parts) == 1:
        return parts[0]
    return Message(
        parts[0].role,
        between.join(part.content for part in parts),
        "".join(part.reasoning for part in parts),
        tuple(call for part in parts for call in part.tool_calls),
    )


def text_of(content: str | Sequence[Part], param: str) -> str:
    """SessionError 400 for parts that are no text."""
    if isinstance(content, str):
        return content
    for part in content:
        if part.type not in _TEXTS or (part.text is None and part.refusal is None):
            reason = f"{param}: {part.type!r} is refused, this model takes text only"
            raise bad(reason, param=param, code="unsupported_content")
    return "".join(part.text or part.refusal or "" for part in content)


def schema_text(kind: str, schema: msgspec.Raw, param: str) -> str:
    """The JSON schema that a response format asks for; "" for plain text."""
    if kind == "text":
        return ""
    if kind == "json_object":
        return _NO_SCHEMA
    if kind == "json_schema" and (text := json_schema(schema, param)):
        return text
    raise bad(f"{param} must be text, json_object, or json_schema with a schema", param=param)


def digest(dialect: bytes, raw: bytes) -> str:
    """Equal for a retry of the same request in the same dialect."""
    return hashlib.blake2b(dialect + raw, digest_size=16).hexdigest()


def finite(logprob: float) -> float:
    """JSON has no infinity; clients know this number for it."""
    return logprob if math.isfinite(logprob) else -9999.0


def sampled(pieces: Sequence[Piece]) -> Iterator[tuple[int, float, list[tuple[int, float]]]]:
    """Of every sampled token: id, log-prob, and the likeliest in its place if they were asked for."""
    for piece in pieces:
        top, each = piece.top.tolist(), len(piece.top) // max(len(piece.ids_T), 1)
        told = zip(piece.ids_T.tolist(), piece.logprobs_T.tolist(), strict=True)
        for at, (token_id, logprob) in enumerate(told):
            yield token_id, logprob, top[at * each : (at + 1) * each]


def sent(event: Any, name: str = "") -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(event) + b"\n\n"


class OpenAIDialect:
    """What the dialects of OpenAI's API share."""

    def __init__(self, *, model: str, vocab_size: int, token_text: Callable[[int], str]) -> None:
        self.model, self.vocab_size, self.token_text = model, vocab_size, token_text

    def sampling(self, body: SamplingFields, max_new_tokens: int | None) -> ClientSampling:
        """SessionError 400 for what the fields' types do not say."""
        asked = msgspec.convert(body, ClientSampling, from_attributes=True)  # the fields of both
        if asked.top_k == 0:
            raise bad("`top_k` must be -1 (off) or at least 1", param="top_k")
        for token in asked.logit_bias or ():
            if not token.isdecimal() or int(token) >= self.vocab_size:
                raise bad(f"`logit_bias` names no token: {token!r}", param="logit_bias")
        return replace(asked, max_new_tokens=max_new_tokens)

    def token_logprobs(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Of every sampled token, as chat completions and responses show them."""
        return [
            {**self._shown(token_id, logprob), "top_logprobs": [self._shown(*each) for each in top]}
            for token_id, logprob, top in sampled(pieces)
        ]

    def _shown(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.token_text(token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}

    def error(self, error: SessionError) -> bytes:
        return msgspec.json.encode({"error": self.told(error)})

    def told(self, error: SessionError) -> dict[str, str | None]:
        """What stands under `error` in every body."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
            error.status, "invalid_request_error" if error.status < 500 else "server_error"
        )
        return {"message": error.message, "type": kind, "param": error.param, "code": error.code}
