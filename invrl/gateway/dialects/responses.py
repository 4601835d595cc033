"""`/v1/responses`, and the retrieval of a response by its id: the wire format, in both
directions. Pure.

Every field of the API is in exactly one of these lists:
- honoured: `input` (text, or items: messages with text parts, `function_call`,
  `custom_tool_call`, `local_shell_call`, `shell_call`, `apply_patch_call` and their
  outputs, `reasoning`, `item_reference` to an item of an earlier response of this
  session; the items of one reply become one message again), `model` (as in chat),
  `instructions`, `previous_response_id` (a response of this session, whatever `store`
  said), `stream`, `max_output_tokens` (bounded by the session's max_new_tokens),
  `tools` (functions and custom tools, also in a `namespace`: the model knows them as
  `namespace.name`; `local_shell`, `shell` in a local environment, `apply_patch`; the
  model knows all of them as functions, without enforcing a grammar), `tool_choice`,
  `parallel_tool_calls` (false: calls after the first are not shown), `text.format`,
  `reasoning.effort` (none: no thinking; others: thinking), `include:
  message.output_text.logprobs` (the message has those of every token that was sampled
  before its end), `top_logprobs` (to 20; shown with the log-probs).
- set by the run: the sampling parameters of `chat.py`, under the same names and rules.
- ignored, because they change no token: `store`, `metadata`, `user`, `service_tier`, `safety_identifier`,
  `prompt_cache_*`, `client_metadata`, `max_tool_calls` (of built-in tools), `background_options`,
  `access_programs`, `image`, `text.verbosity`, `stream_options`, all of `reasoning` except its effort
  (reasoning is shown as it is, neither summarized nor encrypted), an `include` of what the gateway never
  makes; in items everything that is not named above; in tools `strict` where the model chooses freely,
  `defer_loading`, `output_schema`.
- ignored tools, which Codex CLI always offers: `web_search`, `image_generation`.
- refused with 400: see `_TABLE` and `body_fields.py`; `truncation` auto; other tools and items; images,
  audio, files.
Any other field is ignored and counted. Reasoning tokens are counted up to the mark `</think>`.

A response is retrieved from the record of its turn alone (the turn may be of another
dialect). Of the settings of its request it repeats `instructions`, and `tools` as the
model knows them; `previous_response_id` is the turn that it continued, whether or not
the request named it; all calls are of functions. `include` is honoured, `stream` is
refused, other parameters (`starting_after`, ...) have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from invrl.errors import SessionError
from invrl.gateway.dialects import wire
from invrl.gateway.dialects.body_fields import FieldTable, unsupported
from invrl.gateway.dialects.dialect import (
    FindTurn,
    ParsedRequest,
    ResponseParts,
    no_turn,
)
from invrl.gateway.dialects.openai_dialect import OpenAIDialect
from invrl.gateway.dialects.response_calls import CalledTool
from invrl.gateway.dialects.response_input import InputItem, input_messages
from invrl.gateway.dialects.response_output import Event, ResponseOutput
from invrl.gateway.dialects.response_tools import (
    ToolChoiceField,
    ToolField,
    called_tools,
    read_tool_choice,
    read_tools,
    tool_fields,
)
from invrl.gateway.dialects.wire import Fields
from invrl.gateway.types import (
    Answer,
    Delta,
    Node,
    Piece,
    ResponseStart,
    TurnRequest,
)

_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
)
_ID_PREFIX = "resp_"
_END_THINK = "</think>"
_RECENT_CHARACTERS = 64
"""Characters of a reply's text that are searched for the end of thinking, which may be
in several tokens."""


class _Text(msgspec.Struct):
    format: wire.Format | None = None


class _Reasoning(msgspec.Struct):
    effort: str | None = None


class _Body(wire.SamplingFields, kw_only=True):
    model: str | None = None
    input: str | list[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    max_output_tokens: wire.Count | None = None
    tools: list[ToolField] | None = None
    tool_choice: str | ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    text: _Text | None = None
    reasoning: _Reasoning | None = None
    include: list[str] | None = None
    top_logprobs: wire.TopLogprobs | None = None


_ECHOED: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "temperature": None,
    "top_p": None,
    "user": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "store": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
}
"""Settings of the request that its response repeats, with their defaults."""
_CONSTANT = {
    "background": False,
    "service_tier": "default",
    "truncation": "disabled",
}
_INITIAL = {
    "error": None,
    "incomplete_details": None,
    "output": [],
    "usage": None,
}
"""Fields of a response at its beginning."""


_DECODER = msgspec.json.Decoder(_Body)
_TABLE = FieldTable(
    body=_Body,
    refused={
        "conversation": (),
        "moderation": (),
        "prompt": (),
        "background": (),
        "context_management": (),
        "truncation": ("disabled",),
    },
    unreported=(
        "store",
        "metadata",
        "user",
        "service_tier",
        "safety_identifier",
        "max_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "background_options",
        "access_programs",
        "image",
        "stream_options",
        "client_metadata",
    ),
    entries="input",
    entry=InputItem,
    unreported_in_entries=("encrypted_content", "phase", "max_output_length"),
)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Presentation(msgspec.Struct, frozen=True, kw_only=True):
    """Form of a response."""

    logprobs: bool
    tools: Mapping[str, CalledTool] = {}
    """The client's tools by the name that the model knows."""
    echo: Mapping[str, Any]
    """Settings of the request that the response repeats."""


class ResponsesRequest(ParsedRequest, frozen=True, kw_only=True):
    presentation: _Presentation


class ResponsesDialect(OpenAIDialect):
    path = "/responses"

    def parse(
        self, raw: bytes, *, retry: bool, find: FindTurn = no_turn
    ) -> ResponsesRequest:
        body, ignored = wire.decode(_DECODER, raw, _TABLE)
        include = body.include or ()
        for name in include:
            if name not in _INCLUDABLE:
                raise wire.bad_request(
                    f"`include`: {name!r} is unknown", param="include"
                )
        messages = input_messages(body.input, find)
        if not messages:
            raise wire.bad_request("`input` must not be empty", param="input")
        tool_list = body.tools or ()
        tools = list(read_tools(tool_list))
        shows_logprobs = _LOGPROBS in include
        top_logprobs = 0
        if shows_logprobs and body.top_logprobs is not None:
            top_logprobs = body.top_logprobs
        thinking = None
        if body.reasoning is not None:
            thinking = wire.wants_thinking(body.reasoning.effort)
        turn = TurnRequest(
            messages=messages,
            tools=wire.check_tools(tools),
            tool_choice=read_tool_choice(body.tool_choice),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            schema=_schema(body.text),
            thinking=thinking,
            top_logprobs=top_logprobs,
            after=_turn_id(body.previous_response_id),
            instructions=body.instructions or None,
            sampling=self.sampling(body, body.max_output_tokens),
            stop=(),
            stream=bool(body.stream),
            model=body.model,
            digest=wire.digest(b"responses", raw),
            ignored=ignored,
            retry=retry,
        )
        presentation = _Presentation(
            logprobs=shows_logprobs,
            tools=called_tools(tool_list),
            echo=_echo(raw),
        )
        return ResponsesRequest(turn=turn, presentation=presentation)

    def answer(self, request: ResponsesRequest, answers: Sequence[Answer]) -> bytes:
        [answer] = answers
        return self._encode_response(request.presentation, answer)

    def stream(
        self, request: ResponsesRequest, starts: Sequence[ResponseStart]
    ) -> ResponseParts:
        return _ResponseStream(self, request, starts[0])

    def retrieve(
        self,
        response_id: str,
        find: FindTurn,
        query: Sequence[tuple[str, str]],
    ) -> bytes:
        """Return an earlier response, whole. `find` returns a turn by its id. Raises
        SessionError 404 if there is no such response."""
        node = None
        if response_id.startswith(_ID_PREFIX):
            turn_id = response_id.removeprefix(_ID_PREFIX)
            node = find(turn_id)
        if node is None or node.raw:
            reason = f"Response with id {response_id!r} not found."
            raise SessionError(reason, status=404, code="response_not_found")
        shows_logprobs = False
        for name, value in query:
            parameter = name.removesuffix("[]")
            if parameter == "stream" and value != "false":
                raise unsupported("stream")
            if parameter == "include" and value == _LOGPROBS:
                shows_logprobs = True
        presentation = _Presentation(logprobs=shows_logprobs, echo=_recorded_echo(node))
        return self._encode_response(presentation, Answer.recorded(node))

    def logprobs(
        self, presentation: _Presentation, pieces: Sequence[Piece]
    ) -> list[Fields]:
        """Return the log-probs of the pieces; empty if the request did not ask for
        them."""
        if not presentation.logprobs:
            return []
        return self.token_logprobs(pieces)

    def response(
        self,
        presentation: _Presentation,
        turn_id: str,
        created: float,
        **changed: Any,
    ) -> Fields:
        """Return a response object. `changed` are the fields that differ from those at
        its beginning."""
        return {
            "id": _ID_PREFIX + turn_id,
            "object": "response",
            "created_at": int(created),
            "model": self.model,
            **presentation.echo,
            **_CONSTANT,
            **_INITIAL,
            **changed,
        }

    def ended_response(
        self,
        presentation: _Presentation,
        answer: Answer,
        output: ResponseOutput,
    ) -> Fields:
        """Return the response object of a whole answer."""
        turn = answer.turn
        changed: Fields = {}
        if _is_complete(answer):
            changed["status"] = "completed"
            changed["completed_at"] = int(turn.finished_at)
        else:
            changed["status"] = "incomplete"
            changed["incomplete_details"] = {"reason": "max_output_tokens"}
        changed["output"] = output.items
        changed["usage"] = self._usage(answer)
        return self.response(presentation, turn.id, turn.started_at, **changed)

    def _encode_response(self, presentation: _Presentation, answer: Answer) -> bytes:
        output = ResponseOutput(answer.turn.id, presentation.tools)
        logprobs = self.logprobs(presentation, answer.pieces)
        output.add(Delta.of_reply(answer.message), logprobs)
        output.close(complete=_is_complete(answer))
        response = self.ended_response(presentation, answer, output)
        return msgspec.json.encode(response)

    def _usage(self, answer: Answer) -> Fields:
        turn = answer.turn
        sampled_tokens = len(turn.sampled_ids_T)
        reasoning_tokens = self._count_reasoning_tokens(answer)
        return {
            "input_tokens": turn.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": turn.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
            "total_tokens": turn.prompt_tokens + sampled_tokens,
        }

    def _count_reasoning_tokens(self, answer: Answer) -> int:
        """Count the tokens up to the end of thinking; all tokens if it has not
        ended."""
        if not answer.message.reasoning:
            return 0
        ids = answer.turn.sampled_ids_T.tolist()
        recent_text = ""
        for count, token_id in enumerate(ids, start=1):
            recent_text += self.token_text(token_id)
            recent_text = recent_text[-_RECENT_CHARACTERS:]
            if _END_THINK in recent_text:
                return count
        return len(ids)


class _ResponseStream:
    keep_alive = wire.KEEP_ALIVE

    def __init__(
        self,
        dialect: ResponsesDialect,
        request: ResponsesRequest,
        start: ResponseStart,
    ) -> None:
        self._dialect = dialect
        self._presentation = request.presentation
        self._start = start
        self._output = ResponseOutput(start.turn_id, self._presentation.tools)
        self._num_events = 0
        self._logprobs: list[Fields] = []
        """Log-probs of tokens whose text is held back, or is not part of the
        message."""

    def head(self, cached_tokens: int) -> bytes:
        response = self._response(status="in_progress")
        created = {"type": "response.created", "response": response}
        in_progress = {"type": "response.in_progress", "response": response}
        return self._encode_events([created, in_progress])

    def piece(self, choice: int, piece: Piece) -> bytes:
        self._logprobs += self._dialect.logprobs(self._presentation, (piece,))
        logprobs: list[Fields] = []
        if piece.delta.content:
            logprobs = self._logprobs
            self._logprobs = []
        events = self._output.add(piece.delta, logprobs)
        return self._encode_events(events)

    def tail(self, answers: Sequence[Answer]) -> bytes:
        [answer] = answers
        events = self._output.add(Delta(), self._logprobs)
        events += self._output.close(complete=_is_complete(answer))
        response = self._dialect.ended_response(
            self._presentation, answer, self._output
        )
        status = response["status"]
        events.append({"type": f"response.{status}", "response": response})
        return self._encode_events(events)

    def error(self, error: SessionError) -> bytes:
        """Return two events: some clients raise the first one, others act on the
        second."""
        code = error.code
        if error.status >= 500:
            code = "server_error"
        response = self._response(
            status="failed",
            error={"code": code, "message": error.message},
            output=self._output.items,
        )
        fields = self._dialect.error_fields(error)
        raised = {**fields, "type": "error", "error": fields}
        failed = {"type": "response.failed", "response": response}
        return self._encode_events([raised, failed])

    def _response(self, **changed: Any) -> Fields:
        return self._dialect.response(
            self._presentation,
            self._start.turn_id,
            self._start.created,
            **changed,
        )

    def _encode_events(self, events: Sequence[Event]) -> bytes:
        encoded = []
        for event in events:
            numbered = {**event, "sequence_number": self._num_events}
            self._num_events += 1
            encoded.append(wire.encode_event(numbered, event["type"]))
        return b"".join(encoded)


def _is_complete(answer: Answer) -> bool:
    """Whether the model ended the reply itself."""
    return answer.turn.finish_reason == "stop"


def _turn_id(response_id: str | None) -> str:
    """Return the turn of a response; "" for none."""
    if not response_id:
        return ""
    if not response_id.startswith(_ID_PREFIX):
        reason = f"`previous_response_id` must be the id of a response, which begins with {_ID_PREFIX}"
        raise wire.bad_request(reason, param="previous_response_id")
    return response_id.removeprefix(_ID_PREFIX)


def _schema(text: _Text | None) -> str:
    """Return the JSON schema that the reply must follow; "" for none."""
    if text is None or text.format is None:
        return ""
    text_format = text.format
    return wire.schema_text(text_format.type, text_format.schema, "text.format")


def _echo(raw: bytes) -> Fields:
    """Return the settings in a request's body that its response repeats."""
    fields = _FIELDS.decode(raw)
    echo: Fields = {}
    for name, default in _ECHOED.items():
        value = fields.get(name)
        if value is None or bytes(value) == b"null":
            echo[name] = default
        else:
            echo[name] = value
    return echo


def _recorded_echo(node: Node) -> Fields:
    """Return the settings that a retrieved response repeats, if its record has them."""
    echo = dict(_ECHOED)
    echo["tools"] = [tool_fields(tool) for tool in node.tools]
    root = node.path()[0]
    first_message = root.messages[0]
    if first_message.instructions:
        echo["instructions"] = first_message.content
    parent_id = node.turn.parent_id
    if parent_id:
        echo["previous_response_id"] = _ID_PREFIX + parent_id
    return echo
