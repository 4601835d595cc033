"""Rows of recorded conversations, with real chat templates: which of them are true to
what was sampled."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from model_templates import renderer_of

from invrl.datasets.recorded_rows import (
    Fidelity,
    RecordedTrajectory,
    fits_pair,
    pair_fields,
    restore,
)
from invrl.datasets.rows import read_row
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.types import Message, Prompt, Tool, ToolCall

ASK = Message("user", "12*13?")
MORE = Message("user", "Sure? ünïcödé 🙂")
CALC = Tool(
    name="calc",
    description="Computes.",
    parameters='{"type": "object", "properties": {}}',
)
CALL = ToolCall("call-1", "calc", '{"a": 12}')


def trajectory_of(
    renderer: Renderer,
    *turns: tuple[tuple[Message, ...], str, Message],
    thinking: bool | None = None,
    tools: tuple[Tool, ...] = (),
) -> RecordedTrajectory:
    """What the gateway records. Each turn: the new messages, the text that is sampled,
    the reply."""
    messages: list[Message] = []
    path: list[int] = []
    trained: list[bool] = []
    replies: list[int] = []
    first_ids: list[int] = []
    for new, text, reply in turns:
        depth = len(messages)
        messages += new
        prompt = Prompt(messages=tuple(messages), tools=tools, thinking=thinking)
        if path:
            tail = renderer.render_tail(prompt, depth, path)
            assert tail.fork is None
            context = tail.ids
        else:
            context = first_ids = renderer.render_first(prompt)
        assert renderer.end_of_turn_id is not None
        sampled = [*renderer.encode(text), renderer.end_of_turn_id]
        path = [*path, *context, *sampled]
        trained += [False] * len(context) + [True] * len(sampled)
        replies.append(len(messages))
        messages.append(reply)
    return RecordedTrajectory(
        messages=tuple(messages),
        tools=tools,
        replies=tuple(replies),
        prompt_messages=len(turns[0][0]),
        prompt_ids_T=np.array(first_ids, np.int32),
        tokens_T=np.array(path, np.int32),
        trained_T=np.array(trained),
        finished=True,
        cut=False,
    )


def said(text: str) -> Message:
    return Message("assistant", text)


@pytest.mark.parametrize(
    "model", ["qwen2.5", "qwen3", "llama3.2", "deepseek-v3", "smollm2"]
)
def test_conversation_of_texts_is_exported_exactly(model: str) -> None:
    renderer = renderer_of(model)
    # otherwise it writes a thought, which was not sampled
    thinking = False if model == "qwen3" else None
    turns = (
        ((ASK,), "156", said("156")),
        ((MORE,), "Yes, 🙂.", said("Yes, 🙂.")),
    )
    row = restore(renderer, trajectory_of(renderer, *turns[:1], thinking=thinking))
    assert row.fidelity is Fidelity.SAME_TOKENS
    row = restore(renderer, trajectory_of(renderer, *turns, thinking=thinking))
    assert row.fidelity is Fidelity.SAME_TOKENS
    assert json.loads(json.dumps(row.fields)) == row.fields
    assert fits_pair(row)


def test_thinking_is_exported_and_refused_thinking_is_read_from_the_prompt() -> None:
    renderer = renderer_of("qwen3")
    thought = "<think>\nHm.\n</think>\n\n156"
    turn = ((ASK,), thought, Message("assistant", "156", reasoning="Hm."))
    row = restore(renderer, trajectory_of(renderer, turn, ((MORE,), *turn[1:])))
    assert row.fidelity is Fidelity.SAME_TOKENS
    assert "chat_template_kwargs" not in row.fields
    refused = restore(
        renderer, trajectory_of(renderer, ((ASK,), "156", said("156")), thinking=False)
    )
    assert refused.fidelity is Fidelity.SAME_TOKENS
    assert refused.fields["chat_template_kwargs"] == {"enable_thinking": False}
    assert pair_fields(row, refused) is None  # they answer different prompts
    # Where thinking is not refused, the template writes an empty thought that was not
    # sampled.
    without_thought = restore(
        renderer, trajectory_of(renderer, ((ASK,), "156", said("156")))
    )
    assert without_thought.fidelity is Fidelity.OTHER_TEXT


def test_calls_are_exact_only_if_the_template_writes_the_sampled_text() -> None:
    renderer = renderer_of("qwen2.5")
    reply = Message("assistant", tool_calls=(CALL,))
    result = Message("tool", "156", tool_call_id="call-1")
    last = ((result,), "It is 156.", said("It is 156."))
    for arguments, fidelity in (
        ('{"a": 12}', Fidelity.SAME_TOKENS),
        ('{"a":12}', Fidelity.OTHER_TEXT),
    ):
        text = (
            f'<tool_call>\n{{"name": "calc", "arguments": {arguments}}}\n</tool_call>'
        )
        row = restore(
            renderer,
            trajectory_of(renderer, ((ASK,), text, reply), last, tools=(CALC,)),
        )
        assert row.fidelity is fidelity, arguments
        [dialogue] = read_row(1, row.fields, "conversations").sides
        assert dialogue.prompt.messages == (ASK, reply, result, said("It is 156."))
        assert [tool.name for tool in dialogue.prompt.tools] == ["calc"]


def test_inexact_row_is_refused_with_the_reason() -> None:
    renderer = renderer_of("smollm2")
    trajectory = trajectory_of(
        renderer, ((ASK,), "156", said("156")), ((MORE,), "Yes.", said("Yes."))
    )
    other_prompt = replace(trajectory, messages=(MORE, *trajectory.messages[1:]))
    other_reply = replace(trajectory, messages=(*trajectory.messages[:-1], said("No.")))
    unended = replace(
        trajectory,
        tokens_T=trajectory.tokens_T[:-1],
        trained_T=trajectory.trained_T[:-1],
    )
    assert restore(renderer, other_prompt).fidelity is Fidelity.OTHER_TEXT
    assert restore(renderer, other_reply).fidelity is Fidelity.OTHER_TEXT
    assert restore(renderer, unended).fidelity is Fidelity.OTHER_TEXT
    assert restore(renderer, replace(trajectory, cut=True)).fidelity is Fidelity.CUT
    assert (
        restore(renderer, replace(trajectory, finished=False)).fidelity
        is Fidelity.UNFINISHED
    )
    assert (
        restore(renderer, replace(trajectory, messages=())).fidelity
        is Fidelity.UNRECORDED
    )
    text = (Message("text", "12"), *trajectory.messages[1:])
    assert (
        restore(renderer, replace(trajectory, messages=text)).fidelity
        is Fidelity.COMPLETIONS
    )
    empty = (*trajectory.messages[:-1], said(""))
    refused = restore(renderer, replace(trajectory, messages=empty))
    assert refused.fidelity is Fidelity.REFUSED
    assert "empty" in refused.detail


def test_lone_surrogate_in_a_message_is_refused_without_ending_the_export() -> None:
    renderer = renderer_of("smollm2")
    trajectory = trajectory_of(renderer, ((ASK,), "156", said("156")))
    row = restore(renderer, replace(trajectory, messages=(ASK, said("\ud83d"))))
    assert row.fidelity is Fidelity.REFUSED


def test_pair_with_an_untrained_reply_is_refused() -> None:
    renderer = renderer_of("smollm2")
    trajectory = trajectory_of(
        renderer, ((ASK,), "156", said("156")), ((MORE,), "Yes.", said("Yes."))
    )
    second_only = replace(
        trajectory,
        replies=trajectory.replies[1:],
        trained_T=trajectory.trained_T.copy(),
    )
    first_reply = int(np.flatnonzero(trajectory.trained_T)[0])
    end = first_reply + int(np.argmin(trajectory.trained_T[first_reply:]))
    second_only.trained_T[first_reply:end] = False
    row = restore(renderer, second_only)
    assert row.fidelity is Fidelity.SAME_TOKENS
    assert not fits_pair(row)
    shot = said("An example.")
    few_shot = trajectory_of(renderer, ((ASK, shot, ASK), "156", said("156")))
    assert fits_pair(restore(renderer, few_shot))
