"""Real tokenizers and chat templates: conversations go on exactly, or fork with a
reason."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_templates import MODELS, model_folder
from slow_cases import first_quick

from invrl.cli.main import main
from invrl.errors import SessionError
from invrl.gateway.rendering.loading import load_renderer
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.rendering.replies.parsers import Parsers, choose_parsers
from invrl.gateway.rendering.template_check.template_check import check_template
from invrl.gateway.rendering.template_check.template_corpus import CORPUS
from invrl.gateway.turns.matching.forest import Forest
from invrl.gateway.types import ForkReason, Message, Node, Prompt, Tool, ToolCall
from invrl.types.turns import Turn, VersionSpan
from invrl.types.weights import WeightVersion

CALLS = {
    name
    for name, prompt in CORPUS.items()
    if any(m.tool_calls for m in prompt.messages)
}
THINKING = {name for name in CORPUS if "thinking" in name} | {"thinking, cut short"}


@cache
def renderer(name: str, keep_thinking: bool = True) -> Renderer:
    return load_renderer(str(model_folder(name)), 2**31, keep_thinking=keep_thinking)


def others(name: str, *, keep: bool = True) -> dict[str, set[str]]:
    """The patterns of each outcome but "exact"."""
    found: dict[str, set[str]] = {}
    made = renderer(name, keep)
    for finding in check_template(made, choose_parsers("auto", "auto", made)):
        found.setdefault(finding.outcome, set()).add(finding.pattern)
    assert found.pop("exact")
    return found


@pytest.mark.parametrize("keep", first_quick([True, False]))
def test_each_template_continues_the_listed_conversations_exactly(keep: bool):
    assert others("qwen2.5", keep=keep) == others("smollm2", keep=keep) == {}
    assert others("llama3.2", keep=keep) == {
        "refused": {"parallel calls", "parallel calls in turn"}
    }
    # the last reply of a conversation gets an empty block of thinking
    respelled = {"consecutive replies"}
    if keep:
        assert others("qwen3") == {"kept": THINKING | respelled}
    else:
        assert others("qwen3", keep=False) == {"forks": THINKING, "kept": respelled}
    # A lone call has no end of turn, and a second round of calls begins in the middle
    # of the first.
    with_text = {"text and call", "parallel calls"}
    forks = {*(CALLS - with_text), "call, cut short", "later system message"}
    assert others("deepseek-v3", keep=keep) == {"forks": forks}


@pytest.mark.parametrize(
    ("name", "end", "calls", "reasoning", "parallel"),
    [
        ("qwen2.5", "<|im_end|>", "qwen25", "", True),
        ("qwen3", "<|im_end|>", "qwen25", "qwen3", True),
        ("llama3.2", "<|eot_id|>", "llama3", "", False),
        (
            "deepseek-v3",
            "<｜end▁of▁sentence｜>",
            "",
            "",
            True,
        ),  # it has calls, and shows no tools
        ("smollm2", "<|im_end|>", "", "", True),
    ],
)
def test_end_token_and_parsers_are_read_from_each_template(
    name: str, end: str, calls: str, reasoning: str, parallel: bool
):
    made = renderer(name)
    assert (made.end_of_turn, made.parallel_calls) == (end, parallel)
    assert made.end_of_turn_id in made.end_ids
    assert choose_parsers("auto", "auto", made) == Parsers(
        tool_calls=calls, reasoning=reasoning
    )
    prompt = Prompt(
        messages=(Message("user", "a"), Message("assistant", "b"), Message("user", "c"))
    )
    begin = {
        "llama3.2": "<|begin_of_text|>",
        "deepseek-v3": "<｜begin▁of▁sentence｜>",
    }.get(name)
    if begin:  # once, by the template
        [first] = made.encode(begin)
        ids = made.render_first(prompt)
        assert (ids[0], ids.count(first)) == (first, 1)


def on_the_last_day_of(year: int) -> type[datetime]:
    class Day(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(year, 12, 31)

    return Day


def test_conversation_continues_exactly_past_midnight(monkeypatch: pytest.MonkeyPatch):
    prompt = Prompt(
        messages=(Message("user", "a"), Message("assistant", "b"), Message("user", "c"))
    )
    monkeypatch.setattr(
        "invrl.gateway.rendering.chat_template.datetime", on_the_last_day_of(2023)
    )
    made = load_renderer(str(model_folder("llama3.2")), 2**31)
    today = made.text(prompt)
    assert "31 Dec 2023" in today
    monkeypatch.setattr(
        "invrl.gateway.rendering.chat_template.datetime", on_the_last_day_of(2099)
    )
    assert made.text(prompt) == today
    path = [
        *made.render_first(replace(prompt, messages=prompt.messages[:1])),
        *made.encode("b<|eot_id|>"),
    ]
    assert [*path, *made.render_tail(prompt, 2, path).ids] == made.render_first(prompt)


def test_history_that_grows_by_whitespace_forks_as_template_changed():
    """DeepSeek's template gathers system messages in front: two empty ones make two
    newlines."""
    made, empty = renderer("deepseek-v3"), Message("system", "")
    messages = (empty, Message("assistant", "a\n\nb"), empty)
    path = [*made.render_first(Prompt(messages=messages[:1])), *made.encode("a\n\nb")]
    assert (
        made.text(Prompt(messages=messages)).removeprefix("<｜begin▁of▁sentence｜>")[:2]
        == "\n\n"
    )
    assert (
        made.render_tail(Prompt(messages=messages), 2, path).fork
        is ForkReason.TEMPLATE_CHANGED
    )


def test_check_template_prints_a_table(capsys: pytest.CaptureFixture[str]):
    folder = str(model_folder("deepseek-v3"))
    assert main(["check-template", folder]) == 0
    assert re.search(
        r"later system message +forks: template_changed", capsys.readouterr().out
    )
    assert main(["check-template"]) == 2


def test_check_template_fails_on_a_wrong_rendering(monkeypatch: pytest.MonkeyPatch):
    tail = Renderer.render_tail

    def planted(self: Renderer, prompt: Prompt, depth: int, path: Sequence[int]):
        made = tail(self, prompt, depth, path)
        return replace(made, ids=[*made.ids[:-1], 42])

    monkeypatch.setattr(Renderer, "render_tail", planted)
    assert main(["check-template", str(model_folder("qwen2.5"))]) == 1


words = st.sampled_from(
    [
        "Hello",
        "Ünïcödé 漢字 🙂",
        "<think>",
        "</think>",
        "{{ x }}",
        "a\n\nb",
        "tool_call",
        "",
        "12*13",
    ]
)
roles = st.sampled_from(["user", "user", "user", "system"])
TOOLS = (
    Tool(
        name="calc",
        description="Computes.",
        parameters='{"type": "object", "properties": {}}',
    ),
)


@st.composite
def replies(draw: st.DrawFn, tools: bool, thinks: bool) -> Message:
    calls = draw(st.integers(0, 2)) if tools else 0
    made = tuple(
        ToolCall(f"callid{nth:03}", "calc", json.dumps({"a": draw(words)}))
        for nth in range(calls)
    )
    thought = draw(st.sampled_from(["", "", "I see."])) if thinks else ""
    return Message(
        "assistant", draw(words.filter(lambda word: "think" not in word)), thought, made
    )


def spelled(made: Renderer, prompt: Prompt, reply: Message, end: str) -> list[int]:
    """As the template writes the reply behind its prompt; in words of its own where it
    does not."""
    answered = made.text(
        replace(prompt, messages=(*prompt.messages, reply)), add_generation_prompt=False
    ).removesuffix(made.after_reply)
    asked = made.text(prompt)
    if not answered.startswith(
        asked
    ):  # an empty block that the template asks with, and then leaves out
        asked = asked.removesuffix("<think>\n\n</think>\n\n")
    return made.encode(
        (answered.removeprefix(asked) if answered.startswith(asked) else reply.content)
        + end
    )


def without_thinking(text: str) -> str:
    return "".join(re.sub(r"<think>\n[^<]*\n</think>\n\n", "", text).split())


def turn(name: str, context: Sequence[int], sampled: Sequence[int]) -> Turn:
    arrays = {
        "context_ids_T": np.array(context, np.int32),
        "sampled_ids_T": np.array(sampled, np.int32),
    }
    empty = {
        "session_id": "s",
        "parent_id": None,
        "logprobs_T": np.zeros(len(sampled), np.float32),
    }
    times = {
        "started_at": 0.0,
        "finished_at": 0.0,
        "prompt_tokens": 0,
        "cached_tokens": 0,
        "temperature": 1.0,
    }
    spans = (VersionSpan(version=WeightVersion(0), start=0, end=len(sampled)),)
    ends = {
        "spans": spans,
        "finish_reason": "stop",
        "request_digest": "",
        "delivered": True,
        "fork_reason": "",
    }
    return Turn(id=name, **arrays, **empty, **times, **ends)


@pytest.mark.parametrize("name", first_quick(MODELS))
@settings(max_examples=25, deadline=None)
@given(
    data=st.data(), tools=st.booleans(), thinking=st.sampled_from([None, True, False])
)
def test_random_conversations_continue_exactly_or_fork(
    name: str, data: st.DataObject, tools: bool, thinking
):
    """Each request goes on from some earlier reply of a forest, as the gateway would
    place it."""
    made, forest, nodes = renderer(name), Forest(), list[Node]()
    offered = TOOLS if tools else ()
    for number in range(data.draw(st.integers(2, 5))):
        start = data.draw(st.sampled_from(nodes)).conversation() if nodes else []
        results = [
            Message("tool", data.draw(words), tool_call_id=c.id)
            for m in start[-1:]
            for c in m.tool_calls
        ]
        asked = [Message(data.draw(roles), data.draw(words))] if not results else []
        messages = (*start, *results, *asked)
        prompt = Prompt(messages=messages, tools=offered, thinking=thinking)
        match = forest.match(messages, offered)
        try:
            whole = made.render_first(prompt)
            if match.node is None:
                ids, context, parent, depth = whole, whole, None, 0
            else:
                tail = made.render_tail(prompt, match.depth, match.node.ids())
                forked = tail.fork is not None
                parent, depth = (None, 0) if forked else (match.node, match.depth)
                context = whole if forked else tail.ids
                ids = [*(parent.ids() if parent else ()), *context]
            reply = data.draw(replies(tools, thinking is not False))
            sampled = spelled(
                made, prompt, reply, data.draw(st.sampled_from([made.end_of_turn, ""]))
            )
        except SessionError:  # refused by the template: the agent gets a 400
            continue
        if not sampled:
            continue
        texts = [
            made.reply_text([*each, 0][:-1], special=True) for each in (ids, whole)
        ]
        if name == "qwen3":
            texts = [without_thinking(text) for text in texts]
        assert texts[0] == texts[1], (match, ids, whole)
        path = Node(
            turn=turn(str(number), context, sampled),
            parent=parent,
            messages=(*messages[depth:], reply),
            closed=made.is_closed(sampled),
            tools=offered,
        )
        nodes.append(path)
        forest.add(path)
