"""`/v1beta/models/NAME:generateContent`, `:streamGenerateContent` and `:countTokens`,
Google's API: the wire format, in both directions. Pure.

Every field of the API is in exactly one of these lists:
- honoured: `contents` (text, thoughts, functionCall, functionResponse), `tools`
  (functionDeclarations), `toolConfig.functionCallingConfig`, `systemInstruction`; of
  `generationConfig`: `candidateCount`, `maxOutputTokens`, `stopSequences`,
  `responseMimeType` with `responseSchema` or `responseJsonSchema`, and `thinkingConfig`
  (a budget of 0 or the level `MINIMAL`: no thinking; thoughts are shown with
  `includeThoughts`).
- set by the run: `temperature`, `topP`, `topK`, `frequencyPenalty`, `presencePenalty`,
  `seed`, as in `chat.py`.
- ignored, because they change no token: `safetySettings`, `labels`, `serviceTier`,
  `store`, `model` (the path names it), `mediaResolution`, and in contents
  `thoughtSignature`.
- refused with 400: see `_TABLE`, `_CONFIG_TABLE` and `body_fields.py`; parts that are
  not text; tools that Google runs; a stream that is no stream of events (`alt=sse`).
Any other field is ignored and counted. All names may be in snake case.

The texts of one content are joined without a separator, adjacent contents of the user
by a newline. A stream has a call only whole, in its last event, as Google's has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from invrl.errors import SessionError
from invrl.gateway.dialects import wire
from invrl.gateway.dialects.body_fields import FieldTable
from invrl.gateway.dialects.dialect import FindTurn, ParsedRequest, no_turn
from invrl.gateway.dialects.google.contents import (
    Content,
    Part,
    check_last,
    conversation,
)
from invrl.gateway.dialects.google.field_names import with_camel_case
from invrl.gateway.dialects.google.schemas import as_json_schema
from invrl.gateway.dialects.wire import Fields
from invrl.gateway.types import (
    Answer,
    ClientSampling,
    Piece,
    ResponseStart,
    Tool,
    ToolChoice,
    TurnRequest,
)

_Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
_TopK = Annotated[float, msgspec.Meta(ge=0)]
_Candidates = Annotated[int, msgspec.Meta(ge=1, le=8)]
_Seed = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


class _Declaration(wire.Function, kw_only=True):
    parameters_json_schema: msgspec.Raw = msgspec.field(
        default=wire.NO_JSON, name="parametersJsonSchema"
    )


class _Tools(msgspec.Struct):
    declarations: list[_Declaration] | None = msgspec.field(
        default=None, name="functionDeclarations"
    )


class _Calling(msgspec.Struct, rename="camel"):
    mode: Literal["MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", "VALIDATED"] | None = None
    allowed_function_names: list[str] | None = None


class _ToolConfig(msgspec.Struct):
    calling: _Calling | None = msgspec.field(default=None, name="functionCallingConfig")


class _Thinking(msgspec.Struct, rename="camel"):
    include_thoughts: bool | None = None
    thinking_budget: int | None = None
    thinking_level: str | None = None


class _Config(msgspec.Struct, rename="camel"):
    temperature: _Temperature | None = None
    top_p: wire.TopP | None = None
    top_k: _TopK | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    seed: _Seed | None = None
    candidate_count: _Candidates | None = None
    max_output_tokens: wire.Count | None = None
    stop_sequences: list[str] | None = None
    response_mime_type: Literal["text/plain", "application/json"] | None = None
    response_schema: msgspec.Raw = wire.NO_JSON
    response_json_schema: msgspec.Raw = wire.NO_JSON
    thinking_config: _Thinking | None = None


class _Body(msgspec.Struct, rename="camel"):
    contents: list[Content]
    system_instruction: Content | None = None
    tools: list[msgspec.Raw] | None = None
    tool_config: _ToolConfig | None = None
    generation_config: msgspec.Raw = wire.NO_JSON


class _CountBody(msgspec.Struct, rename="camel"):
    contents: list[Content] | None = None
    generate_content_request: _Body | None = None


_DECODER = msgspec.json.Decoder(_Body)
_TABLE = FieldTable(
    body=_Body,
    refused={"cachedContent": (), "continuationToken": ()},
    unreported=("model", "safetySettings", "labels", "serviceTier", "store"),
    entries="contents",
    entry=Content,
)
_CONFIG_DECODER = msgspec.json.Decoder(_Config)
_CONFIG_TABLE = FieldTable(
    body=_Config,
    refused={
        "responseLogprobs": (),
        "logprobs": (),
        "responseModalities": (["TEXT"],),
        "speechConfig": (),
        "imageConfig": (),
    },
    unreported=(
        "mediaResolution",
        "enableEnhancedCivicAnswers",
        "audioTranscriptionConfig",
    ),
)
_KNOWN_NAMES = frozenset(
    name
    for table in (_TABLE, _CONFIG_TABLE)
    for name in (*table.refused, *table.unreported)
).union(
    *(
        structure.__struct_encode_fields__
        for structure in (
            _Body,
            _Config,
            _CountBody,
            _Calling,
            _Declaration,
            _Thinking,
            _ToolConfig,
            _Tools,
            Part,
        )
    )
)
"""Names of the API's fields."""
_COUNT_DECODER = msgspec.json.Decoder(_CountBody)
_COUNT_TABLE = FieldTable(body=_CountBody, refused={}, unreported=("model",))
_TOOLS_DECODER = msgspec.json.Decoder(_Tools)
_TOOLS_TABLE = FieldTable(body=_Tools, refused={})


class GenerateContentRequest(ParsedRequest, frozen=True, kw_only=True):
    shows_thoughts: bool


class GenerateContentDialect:
    """The route that answers whole, or the one that streams."""

    def __init__(self, *, model: str, streams: bool = False) -> None:
        self.model = model
        self.path = "/models:generateContent"
        if streams:
            self.path = "/models:streamGenerateContent"
        self._streams = streams

    def parse(
        self, raw: bytes, *, retry: bool, find: FindTurn = no_turn
    ) -> GenerateContentRequest:
        body, ignored = wire.decode(
            _DECODER, with_camel_case(raw, _KNOWN_NAMES), _TABLE
        )
        check_last(body.contents)
        config, ignored_in_config = _config(body)
        thinking = config.thinking_config
        turn = _turn_request(
            body,
            config,
            stream=self._streams,
            digest=wire.digest(b"generateContent", raw),
            ignored=(*ignored, *ignored_in_config),
            retry=retry,
        )
        return GenerateContentRequest(
            turn=turn,
            n=config.candidate_count or 1,
            shows_thoughts=thinking is not None and bool(thinking.include_thoughts),
        )

    def answer(
        self, request: GenerateContentRequest, answers: Sequence[Answer]
    ) -> bytes:
        candidates = []
        for index, answer in enumerate(answers):
            parts = _parts(request, answer)
            candidates.append(_candidate(index, parts, answer))
        return msgspec.json.encode(self.response(candidates, answers))

    def stream(
        self, request: GenerateContentRequest, starts: Sequence[ResponseStart]
    ) -> _GenerateContentStream:
        return _GenerateContentStream(self, request, starts)

    def error(self, error: SessionError) -> bytes:
        """Return the body of an error."""
        status = _STATUSES.get(error.status, "INTERNAL")
        if 400 <= error.status < 500:
            status = _STATUSES.get(error.status, "INVALID_ARGUMENT")
        fields = {"code": error.status, "message": error.message, "status": status}
        return msgspec.json.encode({"error": fields})

    def response(
        self, candidates: Sequence[Fields], answers: Sequence[Answer]
    ) -> Fields:
        """Return the body of an answer, or of a stream's last event."""
        return {
            "candidates": candidates,
            "usageMetadata": _usage(answers),
            "modelVersion": self.model,
            "responseId": answers[0].turn.id,
        }

    def models(self, names: Sequence[str], context_length: int) -> bytes:
        """Return the body of `ChatDialect.models` for a client of Google's."""
        cards = [_model_card(name, context_length) for name in names]
        return msgspec.json.encode({"models": cards})

    def show_model(self, name: str, context_length: int) -> bytes:
        """Return the body of `ChatDialect.show_model` for a client of Google's."""
        return msgspec.json.encode(_model_card(name, context_length))


class CountTokensDialect(GenerateContentDialect):
    """The route that counts the tokens of a prompt."""

    def parse_count(self, raw: bytes) -> TurnRequest:
        sent, ignored = wire.decode(
            _COUNT_DECODER, with_camel_case(raw, _KNOWN_NAMES), _COUNT_TABLE
        )
        body = sent.generate_content_request or _Body(sent.contents or [])
        config, _ = _config(body)
        digest = wire.digest(b"countTokens", raw)
        return _turn_request(
            body, config, stream=False, digest=digest, ignored=ignored, retry=False
        )

    def counted(self, tokens: int) -> bytes:
        return msgspec.json.encode({"totalTokens": tokens})


class _GenerateContentStream:
    """Writes one streamed answer: an event for each piece of text, then one with the
    calls and the end."""

    keep_alive = b"\n"
    """An empty event: some of Google's clients take a comment for JSON."""

    def __init__(
        self,
        dialect: GenerateContentDialect,
        request: GenerateContentRequest,
        starts: Sequence[ResponseStart],
    ) -> None:
        self._dialect = dialect
        self._request = request
        self._starts = starts

    def head(self, cached_tokens: int) -> bytes:
        return b""

    def piece(self, choice: int, piece: Piece) -> bytes:
        delta = piece.delta
        parts: list[Fields] = []
        if delta.reasoning and self._request.shows_thoughts:
            parts.append({"text": delta.reasoning, "thought": True})
        if delta.content:
            parts.append({"text": delta.content})
        if not parts:
            return self.keep_alive if delta.reasoning else b""
        event = {
            "candidates": [_content_fields(choice, parts)],
            "modelVersion": self._dialect.model,
            "responseId": self._starts[0].turn_id,
        }
        return wire.encode_event(event)

    def tail(self, answers: Sequence[Answer]) -> bytes:
        candidates = []
        for index, answer in enumerate(answers):
            parts = _call_parts(answer) or [{"text": ""}]
            candidates.append(_candidate(index, parts, answer))
        return wire.encode_event(self._dialect.response(candidates, answers))

    def error(self, error: SessionError) -> bytes:
        return b"data: " + self._dialect.error(error) + b"\n\n"


def _model_card(name: str, context_length: int) -> Fields:
    return {
        "name": f"models/{name}",
        "displayName": name,
        "version": "1",
        "inputTokenLimit": context_length,
        "outputTokenLimit": context_length,
        "supportedGenerationMethods": ["generateContent", "countTokens"],
    }


def _parts(request: GenerateContentRequest, answer: Answer) -> list[Fields]:
    reply = answer.message
    parts: list[Fields] = []
    if reply.reasoning and request.shows_thoughts:
        parts.append({"text": reply.reasoning, "thought": True})
    if reply.content:
        parts.append({"text": reply.content})
    parts += _call_parts(answer)
    return parts or [{"text": ""}]


def _call_parts(answer: Answer) -> list[Fields]:
    parts = []
    for call in answer.message.tool_calls:
        fields = {
            "id": call.id,
            "name": call.name,
            "args": wire.arguments_object(call.arguments),
        }
        parts.append({"functionCall": fields})
    return parts


def _candidate(index: int, parts: Sequence[Fields], answer: Answer) -> Fields:
    """Return a candidate that has ended."""
    reason = "MAX_TOKENS" if answer.turn.finish_reason == "length" else "STOP"
    return {**_content_fields(index, parts), "finishReason": reason}


def _content_fields(index: int, parts: Sequence[Fields]) -> Fields:
    return {"index": index, "content": {"role": "model", "parts": parts}}


def _usage(answers: Sequence[Answer]) -> Fields:
    """Count the tokens of the prompt, once, and of all candidates."""
    turn = answers[0].turn
    sampled_tokens = sum(len(answer.turn.sampled_ids_T) for answer in answers)
    return {
        "promptTokenCount": turn.prompt_tokens,
        "cachedContentTokenCount": turn.cached_tokens,
        "candidatesTokenCount": sampled_tokens,
        "totalTokenCount": turn.prompt_tokens + sampled_tokens,
    }


def _config(body: _Body) -> tuple[_Config, tuple[str, ...]]:
    """Return the `generationConfig` of a body, and the names of its ignored fields."""
    raw = bytes(body.generation_config)
    if raw in (b"", b"null"):
        return _Config(), ()
    config, ignored = wire.decode(_CONFIG_DECODER, raw, _CONFIG_TABLE)
    return config, tuple(f"generationConfig.{name}" for name in ignored)


def _turn_request(
    body: _Body,
    config: _Config,
    *,
    stream: bool,
    digest: str,
    ignored: tuple[str, ...],
    retry: bool,
) -> TurnRequest:
    sampling = ClientSampling(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=_top_k(config.top_k),
        frequency_penalty=config.frequency_penalty,
        presence_penalty=config.presence_penalty,
        sampling_seed=config.seed,
        max_new_tokens=config.max_output_tokens,
    )
    param = "generationConfig.stopSequences"
    return TurnRequest(
        messages=conversation(body.system_instruction, body.contents),
        tools=_tools(body.tools or ()),
        tool_choice=_tool_choice(body.tool_config),
        schema=_schema(config),
        thinking=_wants_thinking(config.thinking_config),
        sampling=sampling,
        stop=wire.stop_strings(config.stop_sequences, param),
        stream=stream,
        digest=digest,
        ignored=ignored,
        retry=retry,
    )


def _top_k(value: float | None) -> int | None:
    """Return `topK`, which clients send as 40.0, too; None if it is 0 or absent."""
    if not value:
        return None
    if not value.is_integer():
        param = "generationConfig.topK"
        raise wire.bad_request(f"{param} must be a whole number", param=param)
    return int(value)


def _wants_thinking(thinking: _Thinking | None) -> bool | None:
    """Whether a request asks for thinking; None if it has no word on it."""
    if thinking is None:
        return None
    if thinking.thinking_budget is not None:
        return thinking.thinking_budget != 0
    level = thinking.thinking_level
    if level is not None and level != "THINKING_LEVEL_UNSPECIFIED":
        return wire.wants_thinking(level.lower())
    return True if thinking.include_thoughts else None


def _schema(config: _Config) -> str:
    """Return the JSON schema that the reply must follow; "" for none."""
    param = "generationConfig.responseJsonSchema"
    schema = config.response_json_schema
    if not wire.json_schema(schema, param):
        param = "generationConfig.responseSchema"
        schema = as_json_schema(config.response_schema, param)
    if config.response_mime_type != "application/json":
        if schema:
            reason = f"{param} needs `responseMimeType` application/json"
            raise wire.bad_request(reason, param=param)
        return ""
    kind = "json_schema" if schema else "json_object"
    return wire.schema_text(kind, schema, param)


def _tools(sent: Sequence[msgspec.Raw]) -> tuple[Tool, ...]:
    tools = []
    for index, raw in enumerate(sent):
        group, others = wire.decode(_TOOLS_DECODER, bytes(raw), _TOOLS_TABLE)
        if others:
            param = f"tools[{index}].{others[0]}"
            reason = f"{param} is not supported: only functionDeclarations are, which the client runs"
            raise wire.bad_request(reason, param=param, code="unsupported_parameter")
        for number, declaration in enumerate(group.declarations or ()):
            param = f"tools[{index}].functionDeclarations[{number}]"
            tools.append(_tool(declaration, param))
    return wire.check_tools(tools)


def _tool(declaration: _Declaration, param: str) -> Tool:
    parameters = declaration.parameters_json_schema
    if not wire.json_schema(parameters, f"{param}.parametersJsonSchema"):
        parameters = as_json_schema(declaration.parameters, f"{param}.parameters")
    function = wire.Function(
        name=declaration.name,
        description=declaration.description,
        parameters=parameters,
    )
    return wire.make_tool(function, param)


def _tool_choice(config: _ToolConfig | None) -> ToolChoice:
    calling = _Calling()
    if config is not None and config.calling is not None:
        calling = config.calling
    if calling.mode == "NONE":
        return ToolChoice(mode="none")
    mode: Literal["auto", "required"] = "auto"
    if calling.mode == "ANY":
        mode = "required"
    if calling.allowed_function_names:
        return wire.allowed_choice(mode, calling.allowed_function_names)
    return ToolChoice(mode=mode)
