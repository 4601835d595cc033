"""Every reason why a request departs from what was recorded: listed with its advice,
counted, summed up."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from running_gateway import ASK, MORE, running

from invrl.gateway.rendering.loading import load_renderer
from invrl.gateway.rendering.replies.parsers import Parsers
from invrl.gateway.turns.matching.forest import Forest
from invrl.gateway.types import ADVICE, Change, ForkReason
from invrl.observe.metrics.step_metrics import rollout_metrics
from invrl.types.batches import TakenBatch
from invrl.types.groups import Group
from invrl.types.rollouts import RolloutSummary
from invrl.types.weights import WeightVersion

STRIPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COUNTS = "{{ messages | length }} messages" + STRIPS
REPLY = "<think>hm</think>4"
OTHER = {"role": "assistant", "content": "another"}
SAID = {"role": "assistant", "content": REPLY}
CALC = {
    "type": "function",
    "function": {"name": "calc", "parameters": {"type": "object"}},
}

TEMPLATES = {ForkReason.THINKING_STRIPPED: STRIPS, ForkReason.TEMPLATE_CHANGED: COUNTS}
REQUESTS = {
    ForkReason.NEW_CONVERSATION: (
        [ASK],
        [{"role": "user", "content": "A title, please."}],
        {},
    ),
    ForkReason.HISTORY_EDITED: ([ASK], [ASK, OTHER, MORE], {}),
    ForkReason.CONTEXT_EDITED: (
        [{"role": "system", "content": "It is 09:41."}, ASK],
        [{"role": "system", "content": "It is 09:42."}, ASK, SAID, MORE],
        {},
    ),
    ForkReason.HANDOFF: (
        [{"role": "system", "content": "You triage."}, ASK],
        [
            {"role": "system", "content": "Now you calculate, step by step."},
            ASK,
            SAID,
            MORE,
        ],
        {},
    ),
    ForkReason.TEXT_MOVED: (
        [ASK],
        [
            ASK,
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "own",
                        "type": "function",
                        "function": {"name": "calc", "arguments": "{}"},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "own", "content": "4"},
            {"role": "assistant", "content": "Sure."},
        ],
        {"tools": [CALC]},
    ),
    ForkReason.INTERRUPTED_REPLY: (
        [ASK],
        [ASK, {"role": "assistant", "content": "<think>h"}, MORE],
        {},
    ),
    ForkReason.COMPACTED: (
        [ASK, OTHER, MORE],
        [{"role": "user", "content": "so far: ..."}, SAID, MORE],
        {},
    ),
    ForkReason.TOOLS_CHANGED: (
        [ASK],
        [ASK, SAID, MORE],
        {"tools": [CALC]},
    ),
    ForkReason.THINKING_STRIPPED: ([ASK], [ASK, SAID, MORE], {}),
    ForkReason.TEMPLATE_CHANGED: ([ASK], [ASK, SAID, MORE], {}),
}
"""By reason: a request, and the next one that departs from it."""

REPLIES = {
    ForkReason.TEXT_MOVED: 'Sure.\n<tool_call>\n{"name": "calc", "arguments": {}}\n</tool_call>'
}
"""The engine's replies where they are not `REPLY`."""
LEVELS = {ForkReason.TEXT_MOVED: "canonical"}
"""The sessions' match levels where another is needed."""
FIRST_OPTIONS = {
    ForkReason.TEXT_MOVED: {"tools": [CALC]},
    ForkReason.INTERRUPTED_REPLY: {"max_tokens": 2},
}
CHANGED = {
    ForkReason.HISTORY_EDITED: {
        "message": 1,
        "role": "assistant",
        "part": "content",
        "recorded": "<think>hm</think>4",
        "sent": "another",
    },
    ForkReason.CONTEXT_EDITED: {
        "message": 0,
        "role": "system",
        "part": "content",
        "recorded": "It is 09:41.",
        "sent": "It is 09:42.",
    },
    ForkReason.HANDOFF: {
        "message": 0,
        "role": "system",
        "part": "content",
        "recorded": "You triage.",
        "sent": "Now you calculate, step by step.",
    },
    ForkReason.TEXT_MOVED: {
        "message": 1,
        "role": "assistant",
        "part": "content",
        "recorded": "Sure.",
        "sent": "",
    },
    ForkReason.INTERRUPTED_REPLY: {
        "message": 1,
        "role": "assistant",
        "part": "content",
        "recorded": "<think>hm",
        "sent": "<think>h",
    },
    ForkReason.COMPACTED: {
        "message": 0,
        "role": "user",
        "part": "messages",
        "recorded": "3 messages, the first is user: " + str(ASK["content"]),
        "sent": "1 messages, the first is user: so far: ...",
    },
    ForkReason.TOOLS_CHANGED: {
        "message": 0,
        "role": "",
        "part": "tools",
        "recorded": "",
        "sent": "calc",
    },
}
"""By reason: what the second request's turn shows of it."""


@pytest.mark.parametrize("reason", ForkReason)
async def test_a_fork_is_listed_with_its_advice_and_reaches_the_metrics(
    tmp_path: Path, model: Path, reason: ForkReason
):
    first, second, options = REQUESTS[reason]
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATES.get(reason, ""))
    source = str(template) if reason in TEMPLATES else ""
    renderer = load_renderer(str(model), 512, chat_template=source, keep_thinking=False)
    async with running(
        tmp_path,
        model,
        renderer,
        Parsers(tool_calls="qwen25"),
        match_level=LEVELS.get(reason, "rewritten"),
        max_new_tokens=128,
    ) as gateway:
        reply = renderer.encode(REPLIES.get(reason, REPLY))
        gateway.engine.script = lambda _: [*reply, 2]
        [session] = await gateway.open()
        client = gateway.client(session)
        first_options = FIRST_OPTIONS.get(reason, {})
        for messages, extra in ((first, first_options), (second, options)):
            await client.chat.completions.create(
                model="tiny", messages=messages, **extra
            )
        begun, forked = (await gateway.env(f"/sessions/{session.id}")).json()["turns"]
        assert "advice" not in begun
        assert forked["fork_reason"] == reason.value
        assert forked["advice"] == ADVICE[reason]
        assert forked.get("changed") == CHANGED.get(reason)
        assert (await gateway.env("/metrics")).json()["forks"] == {reason.value: 1}
        summary = await gateway.finish(session)
    assert isinstance(summary, RolloutSummary)
    assert summary.counts == {
        f"forks/{reason.value}": 1,
        "forked_tokens": forked["prompt_tokens"],
    }
    group = Group(id="g", task_id="t", rollouts_G=(summary,))
    taken = TakenBatch(batch_id=0, version=WeightVersion(0), groups=(group,))
    assert rollout_metrics(taken)[f"forks/{reason.value}"].value() == 1.0


@pytest.mark.parametrize("reason", CHANGED)
async def test_fork_explanation_survives_a_restart(
    tmp_path: Path, model: Path, reason: ForkReason, monkeypatch: pytest.MonkeyPatch
):
    """It is found again when somebody asks: of a session that departs in every turn it
    takes seconds, in which the worker that follows would serve nobody."""
    first, second, options = REQUESTS[reason]
    renderer = load_renderer(str(model), 512)
    threads: list[threading.Thread] = []

    def counted(self: Forest) -> dict[str, Change]:
        threads.append(threading.current_thread())
        return changes(self)

    changes = Forest.changes
    monkeypatch.setattr(Forest, "changes", counted)
    async with running(
        tmp_path,
        model,
        renderer,
        Parsers(tool_calls="qwen25"),
        match_level=LEVELS.get(reason, "rewritten"),
        max_new_tokens=128,
    ) as gateway:
        reply = renderer.encode(REPLIES.get(reason, REPLY))
        gateway.engine.script = lambda _: [*reply, 2]
        [session] = await gateway.open()
        client = gateway.client(session)
        first_options = FIRST_OPTIONS.get(reason, {})
        for messages, extra in ((first, first_options), (second, options)):
            await client.chat.completions.create(
                model="tiny", messages=messages, **extra
            )
    async with running(
        tmp_path,
        model,
        renderer,
        Parsers(tool_calls="qwen25"),
        match_level=LEVELS.get(reason, "rewritten"),
        max_new_tokens=128,
    ) as gateway:
        again = {
            "messages": [{"role": "user", "content": "again"}],
            "model": "tiny",
        }
        assert (
            await gateway.env("/v1/chat/completions", again, key=session.key)
        ).status_code == 200
        assert not threads
        for _ in range(2):
            [_, forked, _] = (await gateway.env(f"/sessions/{session.id}")).json()[
                "turns"
            ]
        assert len(threads) == 1
        assert threads[0] is not threading.main_thread()
    assert forked["advice"] == ADVICE[reason]
    assert forked["changed"] == CHANGED[reason]


async def test_kept_thinking_is_counted_in_ids(tmp_path: Path, model: Path):
    template = tmp_path / "template.jinja"
    template.write_text(STRIPS)
    renderer = load_renderer(str(model), 512, chat_template=str(template))
    async with running(tmp_path, model, renderer) as gateway:
        gateway.engine.script = lambda _: [*renderer.encode(REPLY), 2]
        [session] = await gateway.open()
        client = gateway.client(session)
        for messages in ([ASK], [ASK, SAID, MORE]):
            await client.chat.completions.create(model="tiny", messages=messages)
        summary = await gateway.finish(session)
    assert isinstance(summary, RolloutSummary)
    thought = len(renderer.encode("<think>hm</think>"))
    assert summary.counts == {
        "matches/exact": 1,
        "thinking_kept": 1,
        "thinking_kept_tokens": thought,
    }
