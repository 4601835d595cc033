"""Conversations that `invrl check-template` plays: typical requests of agents, in which
templates differ."""

from dataclasses import replace

from invrl.gateway.types import Message, Prompt, Tool, ToolCall

_CITY = "Ürümqi"
_ARGUMENTS = f'{{"city": "{_CITY}", "days": [1, 2]}}'
_PARAMETERS = '{"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}}'
_TOOLS = (
    Tool(name="get_weather", description="The weather.", parameters=_PARAMETERS),
    Tool(name="halt"),
)


def _call_id(number: int) -> str:
    return f"callid{number:03}"


def _reply_with_calls(*numbers: int, arguments: str = _ARGUMENTS) -> Message:
    calls = []
    for number in numbers:
        call = ToolCall(_call_id(number), "get_weather", arguments)
        calls.append(call)
    return Message("assistant", tool_calls=tuple(calls))


def _result(number: int) -> Message:
    return Message("tool", f'{{"sky": "{number}"}}', tool_call_id=_call_id(number))


_SYSTEM = Message("system", "Be brief.")
_BRIEFER = Message("system", "Be briefer.")
_ASK = Message("user", "Hello?")
_MORE = Message("user", "And then?")
_LAST = Message("user", "Thank you.")
_REPLY = Message("assistant", "Yes, of course.")
_THOUGHT = replace(_REPLY, reasoning="Let me see.\n\nIt is so.")
_CALL = _reply_with_calls(1)
_TWO_CALLS = _reply_with_calls(1, 2)
_LATER_CALL = _reply_with_calls(3)
_TEXT_AND_CALL = replace(_CALL, content="I look.")
_CALL_WITHOUT_ARGUMENTS = _reply_with_calls(1, arguments="{}")
_CUT_CALL = _reply_with_calls(1, arguments='{"city": "Ür')
_THOUGHT_AND_CALL = replace(_CALL, reasoning="I need the weather.")
_RESULT = _result(1)
_RESULTS = (_result(1), _result(2))
_LATER_RESULT = _result(3)
_UNICODE = (
    Message("user", "漢字 und Ünïcödé 🙂\u200d🔥"),
    Message("assistant", "zero\u00a0width\u200b"),
    Message("user", "\ttabs\n\n\nand  spaces"),
    Message("assistant", "كيف الحال؟"),
)
_MARKUP = Message("user", "<think>a</think> {{x}}")
_THINKING_TEXT = Message("assistant", "<think>\nHm.\n</think>\n\nYes.")


def _chat(
    *messages: Message,
    tools: bool = False,
    thinking: bool | None = None,
) -> Prompt:
    return Prompt(
        messages=(*messages, _LAST),
        tools=_TOOLS if tools else (),
        thinking=thinking,
    )


CORPUS: dict[str, Prompt] = {
    "several turns": _chat(_ASK, _REPLY, _MORE, _REPLY),
    "system message": _chat(_SYSTEM, _ASK, _REPLY, _MORE, _REPLY),
    "later system message": _chat(_SYSTEM, _ASK, _REPLY, _BRIEFER, _MORE, _REPLY),
    "unicode": _chat(*_UNICODE),
    "empty reply": _chat(_ASK, Message("assistant"), _MORE, _REPLY),
    "empty question": _chat(Message("user"), _REPLY, Message("user"), _REPLY),
    "consecutive questions": _chat(_ASK, _MORE, _REPLY, _ASK, _MORE, _REPLY),
    "consecutive replies": _chat(_ASK, _REPLY, _REPLY, _MORE, _REPLY),
    "markup in texts": _chat(_MARKUP, _REPLY, _MORE, _REPLY),
    "whitespace around texts": _chat(
        Message("user", " \n a \n"), _REPLY, Message("user", "b \n\n"), _REPLY
    ),
    "tools, no call": _chat(_SYSTEM, _ASK, _REPLY, _MORE, _REPLY, tools=True),
    "call": _chat(_ASK, _CALL, _RESULT, _REPLY, tools=True),
    "text and call": _chat(_ASK, _TEXT_AND_CALL, _RESULT, _REPLY, tools=True),
    "call without arguments": _chat(
        _ASK, _CALL_WITHOUT_ARGUMENTS, _RESULT, _REPLY, tools=True
    ),
    "call cut in its arguments": _chat(_ASK, _CUT_CALL, _RESULT, _REPLY, tools=True),
    "parallel calls": _chat(_SYSTEM, _ASK, _TWO_CALLS, *_RESULTS, _REPLY, tools=True),
    "calls in turn": _chat(
        _ASK, _CALL, _RESULT, _LATER_CALL, _LATER_RESULT, _REPLY, tools=True
    ),
    "parallel calls in turn": _chat(
        _ASK, _CALL, _RESULT, _TWO_CALLS, *_RESULTS, _REPLY, tools=True
    ),
    "empty result": _chat(
        _ASK, _CALL, replace(_RESULT, content=""), _REPLY, tools=True
    ),
    "thinking": _chat(_ASK, _THOUGHT, _MORE, _THOUGHT, thinking=True),
    "thinking, some replies": _chat(_ASK, _REPLY, _MORE, _THOUGHT, _MORE, _REPLY),
    "thinking between calls": _chat(
        _ASK,
        _THOUGHT_AND_CALL,
        _RESULT,
        _THOUGHT_AND_CALL,
        _RESULT,
        _THOUGHT,
        tools=True,
    ),
    "question after thinking between calls": _chat(
        _ASK,
        _THOUGHT_AND_CALL,
        _RESULT,
        _THOUGHT,
        _MORE,
        _THOUGHT_AND_CALL,
        _RESULT,
        _THOUGHT,
        tools=True,
    ),
    "thinking refused": _chat(_ASK, _REPLY, _MORE, _REPLY, thinking=False),
    "thinking refused, calls": _chat(
        _ASK,
        _CALL,
        _RESULT,
        _REPLY,
        _MORE,
        _CALL,
        _RESULT,
        _REPLY,
        tools=True,
        thinking=False,
    ),
    "thinking as text": _chat(_ASK, _THINKING_TEXT, _MORE, _REPLY),
}
"""Conversations by their special feature. Each ends with a question."""
