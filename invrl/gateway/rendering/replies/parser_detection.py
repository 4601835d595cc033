"""Finds the parsers of a model: an example is rendered with its chat template, and the
first parser that reads it back correctly is the model's. A mark in the template's text
proves nothing: several families write `<tool_call>`, each followed by something
else."""

import json

from invrl.errors import SessionError
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.rendering.replies.template_reply import template_reply
from invrl.gateway.rendering.thinking import END_THINK, THINK
from invrl.gateway.rendering.tool_calls.call_reader import CallReader
from invrl.gateway.types import Message, Prompt, Tool, ToolCall

_CALL_PARSERS = (
    "llama3",
    "deepseekv32",
    "deepseekv3",
    "deepseekv31",
    "mistral",
    "qwen3_coder",
    "qwen25",
    "glm45",
    "glm47",
    "hermes",
    "kimi_k2",
    "minimax-m2",
    "step3",
    "lfm2",
    "pythonic",
)
"""SGLang's names, in the order of trying."""
_THINKING_PARSER = "qwen3"
"""Reads `<think>` at the beginning of a reply, or after a prompt that opens it."""
_PARAMETERS = '{"type": "object", "properties": {"probe_key": {"type": "string"}}}'
_TOOL = Tool(name="probe_tool", description="Probes.", parameters=_PARAMETERS)
_ARGUMENTS = {"probe_key": "probe value"}
_ASK = Message("user", "x")
_CALL = Message(
    "assistant", tool_calls=(ToolCall("callid001", _TOOL.name, json.dumps(_ARGUMENTS)),)
)
_THOUGHT = "probe-thought"
_REPLY = Message("assistant", "y")


def shows_tools(renderer: Renderer) -> bool:
    """Whether the template shows tools to the model."""
    try:
        return _TOOL.name in renderer.text(Prompt(messages=(_ASK,), tools=(_TOOL,)))
    except SessionError:
        return False


def detect_call_parser(renderer: Renderer) -> str:
    """Return SGLang's name of the parser of tool calls; "" if the template shows no
    tools, or if no parser reads a call as the template writes it."""
    if not shows_tools(renderer):
        return ""
    prompt = Prompt(messages=(_ASK, _CALL), tools=(_TOOL,))
    try:
        ids = template_reply(renderer, prompt, 1)
    except SessionError:  # the template takes no calls
        return ""
    reply = renderer.reply_text(ids, special=True)
    if _TOOL.name not in reply:
        return ""
    for name in _CALL_PARSERS:
        if _reads_call(name, reply):
            return name
    return ""


def _reads_call(parser_name: str, reply: str) -> bool:
    reader = CallReader(parser_name, [_TOOL], turn_id="", max_calls=None, stream=False)
    reader.push(reply)
    calls = [call for delta in reader.finish() for call in delta.calls]
    if len(calls) != 1 or calls[0].name != _TOOL.name:
        return False
    try:
        return json.loads(calls[0].arguments) == _ARGUMENTS
    except ValueError:
        return False


def detect_reasoning_parser(renderer: Renderer) -> str:
    """Return SGLang's name of the parser of thinking; "" if the template neither writes
    thinking nor removes it from earlier replies."""
    thoughtful = Message("assistant", f"{THINK}\n{_THOUGHT}\n{END_THINK}\n\ny")
    reasoned = Message("assistant", "y", _THOUGHT)
    for thinking in (None, True, False):
        asked = Prompt(messages=(_ASK,), thinking=thinking)
        answered = Prompt(messages=(_ASK, reasoned), thinking=thinking)
        if _writes_thinking(renderer, asked) or _writes_thinking(renderer, answered):
            return _THINKING_PARSER
    history = Prompt(messages=(_ASK, thoughtful, _ASK))
    try:
        removes_thinking = _THOUGHT not in renderer.text(history)
    except SessionError:
        return ""
    return _THINKING_PARSER if removes_thinking else ""


def _writes_thinking(renderer: Renderer, prompt: Prompt) -> bool:
    is_question = prompt.messages[-1].role == "user"
    try:
        text = renderer.text(prompt, add_generation_prompt=is_question)
    except SessionError:
        return False
    return THINK in text or END_THINK in text
