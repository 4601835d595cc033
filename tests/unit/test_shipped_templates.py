"""The chat templates that come with us: every conversation goes on exactly, and calls
are read back."""

from __future__ import annotations

from pathlib import Path

import pytest

from invrl.errors import ConfigError
from invrl.gateway.rendering.chat_template import SHIPPED_TEMPLATES
from invrl.gateway.rendering.loading import load_renderer
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.rendering.replies.parsers import choose_parsers
from invrl.gateway.rendering.replies.reply_parser import join_deltas, reply_message
from invrl.gateway.rendering.template_check.template_check import check_template
from invrl.gateway.types import Message, Prompt, Tool, ToolCall, ToolChoice

every_template = pytest.mark.parametrize("name", list(SHIPPED_TEMPLATES))
ASK = Message("user", "x")
TOOL = Tool(
    name="calc",
    description="Adds “a”.",
    parameters='{"type": "object", "properties": {}}',
)


def shown(renderer: Renderer, *messages: Message, tools: tuple[Tool, ...] = ()) -> str:
    return renderer.decode(
        renderer.render_first(Prompt(messages=messages, tools=tools))
    )


@every_template
def test_shipped_templates_continue_every_conversation_exactly(model: Path, name: str):
    renderer = load_renderer(str(model), 512, chat_template=name)
    findings = list(check_template(renderer, choose_parsers("auto", "auto", renderer)))
    assert len(findings) > 20
    assert {finding.outcome for finding in findings} == {"exact"}


@every_template
def test_call_of_a_reply_is_parsed_as_it_was_made(model: Path, name: str):
    """What the template shows of a call is what its parser reads, and the other way
    round."""
    renderer = load_renderer(str(model), 512, chat_template=name)
    parsers = choose_parsers("auto", "auto", renderer)
    called = Message(
        "assistant",
        "Let me see.",
        tool_calls=(ToolCall("", "calc", '{"a": "é", "b": [1]}'),),
    )
    before = shown(renderer, ASK, tools=(TOOL,))
    whole = shown(renderer, ASK, called, Message("user", "y"), tools=(TOOL,))
    assert whole.startswith(before)
    said = whole.removeprefix(before).partition("<|im_end|>")[0]
    parser = parsers.reply(
        (TOOL,), ToolChoice(), parallel=True, prompt_text=before, stream=False
    )
    read = reply_message(join_deltas([parser.push(said), *parser.finish()]))
    [call] = read.tool_calls
    assert call.name == "calc"
    assert call.arguments == '{"a": "é", "b": [1]}'
    assert read.content.strip() == "Let me see."


def test_chatml_tools_is_plain_chatml_without_tools(model: Path):
    renderer = load_renderer(str(model), 512, chat_template="chatml-tools")
    messages = (
        Message("system", "Be brief."),
        ASK,
        Message("assistant", "Hi"),
        ASK,
    )
    user = "<|im_start|>user\nx<|im_end|>\n"
    head = f"<|im_start|>system\nBe brief.<|im_end|>\n{user}"
    assert shown(renderer, *messages) == (
        f"{head}<|im_start|>assistant\nHi<|im_end|>\n{user}<|im_start|>assistant\n"
    )
    assert shown(renderer, messages[0], ASK, tools=(TOOL,)).startswith(
        "<|im_start|>system\nBe brief.\n\n"
    )


def test_unknown_template_name_lists_the_shipped_templates(model: Path):
    with pytest.raises(ConfigError, match="chatml-tools"):
        load_renderer(str(model), 512, chat_template="chatml")
