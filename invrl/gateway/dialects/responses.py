"""`/v1/responses`, and one of them again by its id: only the wire, in both directions. Pure.

Every field of the API stands in exactly one of these lists:
- honoured: `input` (text, or items: messages with text parts, `function_call`, `function_call_output`,
  `reasoning`, `item_reference` to an item of an earlier response of this session; items of one reply become
  one message again), `model` (must be ours), `instructions`,
  `previous_response_id` (a response of this session, whatever `store` said), `stream`,
  `max_output_tokens` (bounded by the session's max_new_tokens), `tools` (functions, also in a
  `namespace`: the model knows them as `namespace.name`), `tool_choice`, `parallel_tool_calls` (false:
  calls after the first are not shown), `text.format`, `reasoning.effort` (none: no thinking; others:
  thinking), `include: message.output_text.logprobs` (in the message: every token sampled before its end),
  `top_logprobs` (to 20; shown where log-probs are).
- the run's: the sampling parameters of `chat.py`, under the same names and rules.
- ignored, for they change no token: `store`, `metadata`, `user`, `service_tier`, `safety_identifier`,
  `prompt_cache_*`, `client_metadata`, `max_tool_calls` (of built-in tools), `background_options`,
  `access_programs`, `image`, `text.verbosity`, `stream_options`, `reasoning` but for its effort (reasoning
  is shown itself, not summarized nor encrypted), `include` of what is never made; in items all but what
  is named above; in tools `strict` where the model chooses freely, `defer_loading`, `output_schema`.
- ignored tools, which Codex CLI offers unasked: `web_search`, `image_generation`.
- refused with 400: see `_TABLE` and `body_fields.py`; `truncation` auto; other tools and items; images,
  audio, files.
Any other field is ignored and counted. Reasoning tokens are counted up to the mark `</think>`.

A response is told again from its turn's record alone (one of another dialect too): of the request's settings
it repeats `instructions`, and `tools` as the model knows them; `previous_response_id` is what it went on
from, named or not. `include` is honoured, `stream` refused, others (`starting_after`, ...) change nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

import msgspec

from invrl.errors import SessionError
from invrl.gateway.dialects import wire
from invrl.gateway.dialects.body_fields import FieldTable, unsupported
from invrl.gateway.dialects.dialect import AnswerStream, Asked, FindTurn, no_turn
from invrl.gateway.dialects.response_output import Event, ResponseOutput, item_place
from invrl.gateway.types import (
    Answer,
    AnswerStart,
    CallDelta,
    Delta,
    Message,
    Piece,
    Tool,
    ToolCall,
    ToolChoice,
    TurnRequest,
)

_IGNORED_TOOLS = ("web_search", "image_generation")
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (
    "message.output_text.logprobs message.input_image.image_url reasoning.encrypted_content"
    " web_search_call.results web_search_call.action.sources file_search_call.results"
    " code_interpreter_call.outputs computer_call_output.output.image_url"
).split()
_ROLES = {each: each for each in ("system", "user", "assistant")} | {"developer": "system"}
_ID = "resp_"


class _Item(msgspec.Struct):
    type: str | None = None
    role: str = ""
    id: str | None = None
    content: str | list[wire.Part] | None = None
    summary: list[wire.Part] | None = None
    call_id: str | None = None
    namespace: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[wire.Part] | None = None


class _Tool(wire.Function, kw_only=True):
    type: str
    tools: list[_Tool] | None = None
    """Of a namespace."""


class _Choice(msgspec.Struct):
    type: str
    name: str = ""
    namespace: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[_Choice] | None = None


class _Text(msgspec.Struct):
    format: wire.Format | None = None


class _Reasoning(msgspec.Struct):
    effort: str | None = None


class _Body(wire.SamplingFields, kw_only=True):
    model: str
    input: str | list[_Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    max_output_tokens: wire.Count | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | _Choice | None = None
    parallel_tool_calls: bool | None = None
    text: _Text | None = None
    reasoning: _Reasoning | None = None
    include: list[str] | None = None
    top_logprobs: wire.Top | None = None


_ECHOED = {
    **dict.fromkeys(("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id")),
    **dict.fromkeys(("prompt_cache_key", "safety_identifier", "temperature", "top_p", "user")),
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "store": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
}
"""Settings of the request that its response repeats, and what it says where the request said nothing."""
_CONSTANT = {"background": False, "service_tier": "default", "truncation": "disabled"}


_DECODER = msgspec.json.Decoder(_Body)
_TABLE = FieldTable(
    body=_Body,
    refused={
        **dict.fromkeys(("conversation", "moderation", "prompt", "background", "context_management"), ()),
        "truncation": ("disabled",),
    },
    unsaid=(
        *("store", "metadata", "user", "service_tier", "safety_identifier", "max_tool_calls"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        *("background_options", "access_programs", "image", "stream_options", "client_metadata"),
    ),
    entries="input",
    entry=_Item,
    unsaid_in_entries=("status", "encrypted_content", "phase"),
)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Shown(msgspec.Struct, frozen=True, kw_only=True):
    logprobs: bool
    functions: Mapping[str, tuple[str, str]] = {}
    """Namespace and name of the functions in namespaces, by the name that the model knows."""
    echo: Mapping[str, Any]


class ResponsesRequest(Asked, frozen=True, kw_only=True):
    shown: _Shown


class ResponsesDialect(wire.OpenAIDialect):
    path = "/responses"

    def parse(self, raw: bytes, *, retry: bool, find: FindTurn = no_turn) -> ResponsesRequest:
        body, ignored = wire.decode(_DECODER, raw, self.model, _TABLE)
        for name in body.include or ():
            if name not in _INCLUDABLE:
                raise wire.bad(f"`include`: {name!r} is unknown", param="include")
        messages = _messages(body.input, find)
        if not messages:
            raise wire.bad("`input` must not be empty", param="input")
        groups = [(group.name, tool.name) for group in body.tools or () for tool in group.tools or ()]
        tools = wire.check_tools(list(_tools(body.tools or ())))
        logprobs = _LOGPROBS in (body.include or ())
        form, effort = body.text and body.text.format, body.reasoning and body.reasoning.effort
        turn = TurnRequest(
            messages=messages,
            tools=tools,
            tool_choice=_tool_choice(body.tool_choice),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            schema=wire.schema_text(form.type, form.schema, "text.format") if form else "",
            thinking=None if effort is None else effort not in ("none", "minimal"),
            top_logprobs=(logprobs and body.top_logprobs) or 0,
            after=_turn_id(body.previous_response_id),
            instructions=body.instructions or None,
            sampling=self.sampling(body, body.max_output_tokens),
            stop=(),
            stream=bool(body.stream),
            digest=wire.digest(b"responses", raw),
            ignored=ignored,
            retry=retry,
        )
        said = {name: value for name, value in _FIELDS.decode(raw).items() if bytes(value) != b"null"}
        echo = {name: said.get(name, unset) for name, unset in _ECHOED.items()}
        functions = {_known_as(*each): each for each in groups}
        return ResponsesRequest(turn=turn, shown=_Shown(logprobs=logprobs, functions=functions, echo=echo))

    def answer(self, request: ResponsesRequest, answers: Sequence[Answer]) -> bytes:
        [answer] = answers
        return self._whole(request.shown, answer)

    def again(self, response_id: str, find: FindTurn, query: Sequence[tuple[str, str]]) -> bytes:
        """A whole response of earlier. `find`: a turn by its id. SessionError 404 if there is none."""
        node = find(response_id.removeprefix(_ID)) if response_id.startswith(_ID) else None
        if node is None or node.raw:
            reason = f"Response with id {response_id!r} not found."
            raise SessionError(reason, status=404, code="response_not_found")
        asked = {(name.removesuffix("[]"), value) for name, value in query}
        if any(name == "stream" and value != "false" for name, value in asked):
            raise unsupported("stream")
        turn, first = node.turn, node.path()[0].messages[0]
        sampled = Piece(delta=Delta(), ids_T=turn.sampled_ids_T, logprobs_T=turn.logprobs_T)
        echo = {**_ECHOED, "tools": [_shown_tool(tool) for tool in node.tools]}
        echo["instructions"] = first.content if first.instructions else None
        echo["previous_response_id"] = _ID + turn.parent_id if turn.parent_id else None
        answer = Answer(turn=turn, message=node.messages[-1], pieces=(sampled,))
        return self._whole(_Shown(logprobs=("include", _LOGPROBS) in asked, echo=echo), answer)

    def _whole(self, shown: _Shown, answer: Answer) -> bytes:
        output, message = ResponseOutput(answer.turn.id, shown.functions), answer.message
        calls = [
            CallDelta(index=n, id=c.id, name=c.name, arguments=c.arguments)
            for n, c in enumerate(message.tool_calls)
        ]
        delta = Delta(content=message.content, reasoning=message.reasoning, calls=tuple(calls))
        output.add(delta, self.logprobs(shown, answer.pieces))
        output.close(complete=answer.turn.finish_reason == "stop")
        return msgspec.json.encode(self.ended(shown, answer, output))

    def stream(self, request: ResponsesRequest, begun: Sequence[AnswerStart]) -> AnswerStream:
        return _ResponseStream(self, request, begun[0])

    def logprobs(self, shown: _Shown, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        return self.token_logprobs(pieces) if shown.logprobs else []

    def response(self, shown: _Shown, turn_id: str, created: float, **more: Any) -> dict[str, Any]:
        """A response object; `more` has its status, and what is not as it is at the beginning."""
        head = {"id": _ID + turn_id, "object": "response", "created_at": int(created), "model": self.model}
        begun = {"error": None, "incomplete_details": None, "output": [], "usage": None}
        return {**head, **shown.echo, **_CONSTANT, **begun, **more}

    def ended(self, shown: _Shown, answer: Answer, output: ResponseOutput) -> dict[str, Any]:
        turn = answer.turn
        state: dict[str, Any] = {"status": "completed", "completed_at": int(turn.finished_at)}
        if turn.finish_reason != "stop":
            state = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        sampled = len(turn.sampled_ids_T)
        usage = {
            "input_tokens": turn.prompt_tokens,
            "input_tokens_details": {"cached_tokens": turn.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens(answer)},
            "total_tokens": turn.prompt_tokens + sampled,
        }
        return self.response(shown, turn.id, turn.started_at, **state, output=output.items, usage=usage)

    def _reasoning_tokens(self, answer: Answer) -> int:
        ids = answer.turn.sampled_ids_T.tolist() if answer.message.reasoning else []
        ends = accumulate(map(self.token_text, ids), lambda end, text: (end + text)[-64:])
        return next((count for count, end in enumerate(ends, 1) if "</think>" in end), len(ids))


class _ResponseStream:
    keep_alive = wire.KEEP_ALIVE

    def __init__(self, dialect: ResponsesDialect, request: ResponsesRequest, begun: AnswerStart) -> None:
        self._dialect, self._shown, self._begun = dialect, request.shown, begun
        self._output = ResponseOutput(begun.turn_id, request.shown.functions)
        self._sent = 0
        self._logprobs: list[dict[str, Any]] = []
        """Of tokens whose text is held back, or is none of the message."""

    def head(self, cached_tokens: int) -> bytes:
        response = self._response(status="in_progress")
        kinds = ("response.created", "response.in_progress")
        return self._events([{"type": kind, "response": response} for kind in kinds])

    def piece(self, choice: int, piece: Piece) -> bytes:
        self._logprobs += self._dialect.logprobs(self._shown, (piece,))
        logprobs: list[dict[str, Any]] = []
        if piece.delta.content:
            logprobs, self._logprobs = self._logprobs, []
        return self._events(self._output.add(piece.delta, logprobs))

    def tail(self, answers: Sequence[Answer]) -> bytes:
        [answer] = answers
        events = self._output.add(Delta(), self._logprobs)
        events += self._output.close(complete=answer.turn.finish_reason == "stop")
        response = self._dialect.ended(self._shown, answer, self._output)
        events.append({"type": f"response.{response['status']}", "response": response})
        return self._events(events)

    def error(self, error: SessionError) -> bytes:
        """Clients raise the first of the two events, or act on the second."""
        told = self._dialect.told(error)
        code = "server_error" if error.status >= 500 else error.code
        failed = {"code": code, "message": error.message}
        response = self._response(status="failed", error=failed, output=self._output.items)
        last = {"type": "response.failed", "response": response}
        return self._events([{**told, "type": "error", "error": told}, last])

    def _response(self, **more: Any) -> dict[str, Any]:
        return self._dialect.response(self._shown, self._begun.turn_id, self._begun.created, **more)

    def _events(self, events: Sequence[Event]) -> bytes:
        numbered = [{**event, "sequence_number": n} for n, event in enumerate(events, self._sent)]
        self._sent += len(numbered)
        return b"".join(wire.sent(event, event["type"]) for event in numbered)


def _turn_id(response_id: str | None) -> str:
    if not response_id:
        return ""
    if not response_id.startswith(_ID):
        reason = f"`previous_response_id` must be the id of a response, which begins with {_ID}"
        raise wire.bad(reason, param="previous_response_id")
    return response_id.removeprefix(_ID)


def _messages(items: str | Sequence[_Item], find: FindTurn) -> tuple[Message, ...]:
    """Adjacent items of the assistant are one reply, until one comes that begins another."""
    if isinstance(items, str):
        return (Message("user", items),)
    references = _References(find)
    joined = wire.JoinedMessages()
    reply_turn = ""
    """The turn that the last message's items were referred to in; "" if it was sent in full."""
    for at, item in enumerate(items):
        param = f"input[{at}]"
        turn_id = ""
        if item.id and _kind(item) == "item_reference":
            message, turn_id = references.resolve(item.id, param)
        else:
            message = _message(item, param)
        same_turn = bool(turn_id) and turn_id == reply_turn
        if same_turn or joined.continues_reply(message):
            joined.join(message)
        else:
            joined.add(message)
        reply_turn = turn_id
    return joined.messages()


class _References:
    """What the items that a request names by their ids stand for: parts of replies of this session.

    A reply's text may have been told in several items, and a record of the turn has it in one piece: the
    first of them that is named stands for all of the text, the others for none."""

    def __init__(self, find: FindTurn) -> None:
        self._find = find
        self._texts_of: set[str] = set()
        """Turns of which the text was named already."""

    def resolve(self, item_id: str, param: str) -> tuple[Message, str]:
        """The item as a message of the assistant, and its turn's id. SessionError 400 for an id that this
        session did not issue."""
        found = item_place(item_id)
        node = self._find(found.turn_id) if found else None
        if found is None or node is None or node.raw:
            raise _item_not_found(item_id, param)
        reply = node.messages[-1]
        if found.prefix == "rs":
            return Message("assistant", reasoning=reply.reasoning), found.turn_id
        if found.prefix == "msg":
            first = found.turn_id not in self._texts_of
            self._texts_of.add(found.turn_id)
            return Message("assistant", reply.content if first else ""), found.turn_id
        if found.place >= len(reply.tool_calls):
            raise _item_not_found(item_id, param)
        call = reply.tool_calls[found.place]
        return Message("assistant", tool_calls=(call,)), found.turn_id


def _item_not_found(item_id: str, param: str) -> SessionError:
    reason = f"{param}: Item with id {item_id!r} not found: it is not an output item of this session"
    return wire.bad(reason, param=f"{param}.id", code="item_not_found")


def _kind(item: _Item) -> str:
    return item.type or ("message" if item.role else "item_reference")


def _message(item: _Item, param: str) -> Message:
    kind = _kind(item)
    if kind == "item_reference":
        raise wire.bad(f"{param}.id: an item reference needs the item's id", param=f"{param}.id")
    if kind == "message":
        role = wire.role_of(item.role, _ROLES, param)
        if item.content is None:
            raise wire.bad(f"{param}.content must be text", param=f"{param}.content")
        return Message(role, wire.text_of(item.content, f"{param}.content"))
    if kind == "reasoning":
        text = wire.text_of(item.content or item.summary or "", f"{param}.content")
        return Message("assistant", reasoning=text)
    if kind == "function_call":
        if not item.call_id or not item.name:
            raise wire.bad(f"{param} needs `call_id` and `name`", param=param)
        arguments = "{}" if item.arguments is None else item.arguments
        wire.call_arguments(arguments, f"{param}.arguments")
        call = ToolCall(item.call_id, _known_as(item.namespace, item.name), arguments)
        return Message("assistant", tool_calls=(call,))
    if kind == "function_call_output":
        if not item.call_id or item.output is None:
            raise wire.bad(f"{param} needs `call_id` and `output`", param=param)
        return Message("tool", wire.text_of(item.output, f"{param}.output"), tool_call_id=item.call_id)
    reason = f"{param}: items of type {kind!r} are not supported"
    raise wire.bad(reason, param=f"{param}.type", code="unsupported_item")


def _known_as(namespace: str | None, name: str) -> str:
    return f"{namespace}.{name}" if namespace else name


def _tools(tools: Sequence[_Tool], namespace: str = "") -> Iterator[Tool]:
    for at, tool in enumerate(tools):
        param = f"tools[{at}]"
        if tool.type == "namespace" and not namespace:
            yield from _tools(tool.tools or (), tool.name)
        elif tool.type == "function":
            yield wire.make_tool(tool, param, _known_as(namespace, tool.name))
        elif tool.type not in _IGNORED_TOOLS:
            raise wire.bad(f"{param}: only functions are supported, not {tool.type!r}", param=param)


def _shown_tool(tool: Tool) -> dict[str, Any]:
    shown = {"type": "function", "name": tool.name, "description": tool.description or None}
    return {**shown, "parameters": msgspec.Raw((tool.parameters or "null").encode()), "strict": tool.strict}


def _tool_choice(choice: str | _Choice | None) -> ToolChoice:
    if plain := wire.plain_choice(choice):
        return plain
    if isinstance(choice, _Choice) and choice.type == "function":
        return ToolChoice(mode="named", name=_known_as(choice.namespace, choice.name))
    if isinstance(choice, _Choice) and choice.type == "allowed_tools":
        allowed = [_known_as(tool.namespace, tool.name) for tool in choice.tools or () if tool.name]
        return wire.allowed_choice(choice.mode, allowed)
    reason = "`tool_choice` must be auto, none, required, allowed_tools, or name a function"
    raise wire.bad(reason, param="tool_choice")
