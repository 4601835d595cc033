"""Parsers are chosen by what they read, and `check-template` plays what they read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizer_kinds import CHATML, KINDS, make_tokenizer_folder
from tokenizers import Tokenizer

from invrl.cli.main import main
from invrl.gateway.rendering.loading import load_renderer
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.rendering.replies.parsers import Parsers, choose_parsers
from invrl.gateway.rendering.template_check.template_check import (
    check_calls,
    check_template,
)
from invrl.gateway.types import ToolChoice

TOOLS = "{%- if tools %}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{%- endif %}"
HEAD = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"


def chatml_with(call: str) -> str:
    """A template in ChatML that shows tools, and writes calls in this way."""
    return (
        TOOLS
        + "{%- for message in messages %}"
        + "{{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
        + "{%- for tool_call in message.tool_calls or [] %}{%- set c = tool_call.function %}"
        + call
        + "{%- endfor %}{{- '<|im_end|>\n' }}{%- endfor %}"
        + HEAD
    )


HERMES_CALL = (
    """{{- '<tool_call>\n{"name": "' + c.name + '", "arguments": ' + (c.arguments | tojson) }}"""
    "{{- '}\n</tool_call>' }}"
)
GLM_CALL = (
    "{{- '\n<tool_call>' + c.name + '\n' }}{%- for k, v in c.arguments.items() %}"
    "{{- '<arg_key>' + k + '</arg_key>\n<arg_value>' }}{{- v if v is string else v | tojson }}"
    "{{- '</arg_value>\n' }}{%- endfor %}{{- '</tool_call>' }}"
)
CODER_CALL = (
    "{{- '<tool_call>\n<function=' + c.name + '>\n' }}{%- for k, v in c.arguments.items() %}"
    "{{- '<parameter=' + k + '>\n' }}{{- v if v is string else v | tojson }}{{- '\n</parameter>\n' }}"
    "{%- endfor %}{{- '</function>\n</tool_call>' }}"
)
MISTRAL_CALL = """{{- '[TOOL_CALLS] [{"name": "' + c.name + '", "arguments": ' + (c.arguments | tojson) + '}]' }}"""
UNREADABLE_CALL = "{{- '<tool_call> please run ' + c.name + ' </tool_call>' }}"
HISTORY_ONLY = CHATML.replace(
    "(message.content or '')", "message.content.split('</think>')[-1]"
)
OPENS_THINKING = CHATML.replace(
    "assistant\n' }}{%- endif %}", "assistant\n<think>\n' }}{%- endif %}"
)
GLM_TURNS = (
    "[gMASK]"
    + TOOLS
    + "{%- for message in messages %}{%- if message.role == 'assistant' %}"
    "{{- '<|assistant|>\n<think></think>' }}"
    "{%- if message.content %}{{- '\n' + message.content }}{%- endif %}"
    "{%- for tool_call in message.tool_calls or [] %}{%- set c = tool_call.function %}"
    + GLM_CALL
    + "{%- endfor %}{%- elif message.role == 'tool' %}"
    "{{- '<|observation|>\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- else %}{{- '<|' + message.role + '|>\n' + message.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
"""As GLM-4.5's: no end of turn is written, and a reply ends where the mark of the next
message begins."""


def renderer(tmp_path: Path, template: str) -> Renderer:
    folder = make_tokenizer_folder(KINDS["byte level"], tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = ["<|user|>", "<|observation|>"]
    tokenizer.add_special_tokens([*ends, "<|assistant|>", "<|system|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    if template == GLM_TURNS:
        ids = [tokenizer.token_to_id(end) for end in ends]
        (folder / "generation_config.json").write_text(
            json.dumps({"eos_token_id": ids})
        )
    return load_renderer(str(folder), 2**31)


@pytest.mark.parametrize(
    ("template", "tool_calls", "reasoning"),
    [
        (CHATML, "", ""),
        (chatml_with(HERMES_CALL), "qwen25", ""),
        (chatml_with(GLM_CALL), "glm45", ""),
        (chatml_with(CODER_CALL), "qwen3_coder", ""),
        (chatml_with(MISTRAL_CALL), "mistral", ""),
        (chatml_with(UNREADABLE_CALL), "", ""),
        (HISTORY_ONLY, "", "qwen3"),
        (OPENS_THINKING, "", "qwen3"),
        (GLM_TURNS, "glm45", "qwen3"),
    ],
)
def test_the_parser_is_the_first_that_reads_what_the_template_writes(
    tmp_path: Path, template: str, tool_calls: str, reasoning: str
):
    chosen = choose_parsers("auto", "auto", renderer(tmp_path, template))
    assert chosen == Parsers(tool_calls=tool_calls, reasoning=reasoning)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "template",
    [
        chatml_with(HERMES_CALL),
        chatml_with(GLM_CALL),
        chatml_with(CODER_CALL),
        GLM_TURNS,
    ],
)
def test_turns_go_on_exactly_behind_calls_as_they_are_parsed(
    tmp_path: Path, template: str, stream: bool
):
    template_renderer = renderer(tmp_path, template)
    finding = check_calls(
        template_renderer,
        choose_parsers("auto", "auto", template_renderer),
        stream=stream,
    )
    assert finding.outcome == "exact"
    assert finding.reason == ""


@pytest.mark.parametrize("stream", [False, True])
def test_a_parser_that_does_not_read_the_calls_is_found(tmp_path: Path, stream: bool):
    template_renderer = renderer(tmp_path, chatml_with(GLM_CALL))
    finding = check_calls(
        template_renderer, Parsers(tool_calls="qwen25"), stream=stream
    )
    assert finding.outcome == "wrong"
    assert "the parser qwen25 reads" in finding.reason


def test_a_reply_that_does_not_think_stays_content_if_only_the_history_knows_thinking(
    tmp_path: Path,
):
    template_renderer = renderer(tmp_path, HISTORY_ONLY)
    findings = {
        finding.pattern: finding.outcome
        for finding in check_template(template_renderer, Parsers(reasoning="qwen3"))
    }
    assert findings["several turns"] == "exact"
    parsers = choose_parsers("auto", "auto", template_renderer)
    for stream in (False, True):
        parser = parsers.reply(
            (), ToolChoice(), parallel=True, prompt_text="", stream=stream
        )
        deltas = [parser.push("Yes, of course."), *parser.finish()]
        assert "".join(delta.content for delta in deltas) == "Yes, of course."


@pytest.mark.parametrize(
    ("template", "first_words"),
    [
        (CHATML, "The template shows no tools"),
        (chatml_with(UNREADABLE_CALL), "No parser reads the calls"),
    ],
)
def test_the_first_line_says_what_the_template_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str, first_words: str
):
    renderer(tmp_path, template)
    main(["check-template", str(tmp_path / "model")])
    first_line = capsys.readouterr().out.splitlines()[0]
    assert first_line.startswith(first_words)
    assert "--chat-template-path" in first_line
