"""Token truth over a short load on a scripted engine and on a real one; and that it
finds what is planted."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from engine_tap import Generation
from model_templates import model_folder
from tiny_model import make_tiny_model
from token_truth import Reference, StoredTurn, Verdict, judge, stored_turns
from truth_load import Load, chatter, thoughtful
from truth_stack import real_stack, scripted_stack

from invrl.engines.fleet.fleet import Fleet
from invrl.host.processes.fork_parent import ForkParent


@dataclasses.dataclass(slots=True)
class Recorded:
    """What a load left behind."""

    load: Load
    store: Path
    turns: list[StoredTurn]
    wire: list[Generation]
    reference: Reference
    verdict: Verdict


@pytest.fixture(scope="module")
async def recorded(
    engine_parent: ForkParent, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Recorded]:
    folder = tmp_path_factory.mktemp("truth")
    model = make_tiny_model(folder / "model", max_positions=32768)
    async with scripted_stack(
        folder, model, chatter, token_delay_s=0.001, parent=engine_parent
    ) as stack:
        load = Load(stack=stack, turns=300, tools=True)
        await load.run()
        verdict = await stack.verdict(load.sent)
        store = Path(stack.settings.store_path)
        assert (verdict.mismatches, load.errors) == ([], [])
        yield Recorded(
            load,
            store,
            stored_turns(store),
            stack.tap.generations,
            Reference(model),
            verdict,
        )


def kinds(recorded: Recorded, *, session_id: str = "", **changed) -> set[str]:
    """Mismatches of the load with some of it changed. `session_id`: the only one that
    is judged."""
    given = {
        "turns": recorded.turns,
        "wire": recorded.wire,
        "sent": recorded.load.sent,
        **changed,
    }
    sent = given.pop("sent")
    unthinking = recorded.load.unthinking
    turns = given["turns"]
    if session_id:
        turns = [turn for turn in turns if turn.session_id == session_id]
        ids = {turn.id for turn in turns}
        sent = [reply for reply in sent if reply.turn_id in ids]
    verdict = judge(
        turns,
        given["wire"],
        recorded.reference,
        sent=sent,
        all_turns=not session_id,
        unthinking=unthinking,
    )
    return set(verdict.kinds)


def stopped(recorded: Recorded) -> list[StoredTurn]:
    """Turns that ended by themselves and that a client has: not the second of two
    answers, not one that was cut off too late. Their order in the store is decided by
    time."""
    seen = {reply.turn_id for reply in recorded.load.sent}
    return [
        turn
        for turn in recorded.turns
        if turn.finish_reason == "stop" and turn.id in seen
    ]


def test_scripted_load_covers_every_agent_behaviour_without_a_mismatch(
    recorded: Recorded,
):
    did = recorded.load.did
    for step in (
        "plain",
        "edited",
        "branches",
        "repeated",
        "joined",
        "cancelled",
        "aside",
        "cut",
        "streamed",
    ):
        assert did[step] > 2, step
    verdict = recorded.verdict
    assert (verdict.kinds, verdict.turns > 200, verdict.continued > 100) == (
        {},
        True,
        True,
    )
    assert verdict.unrecorded <= did["cut"]
    # the spelling is not the tokenizer's own: ids made again from text would differ
    again = [
        recorded.reference.ids(recorded.reference.tokenizer.decode(generation.ids))
        for generation in recorded.wire
    ]
    assert (
        sum(ids != one.ids for ids, one in zip(again, recorded.wire, strict=True)) > 20
    )


def test_judge_finds_one_token_changed_in_the_store(recorded: Recorded, tmp_path: Path):
    copy = tmp_path / "run.sqlite"
    with sqlite3.connect(recorded.store) as source, sqlite3.connect(copy) as target:
        source.backup(target)
        [(turn_id, blob)] = target.execute(
            "SELECT id, sampled_ids FROM turns WHERE parent_id IS NOT NULL AND finish_reason='stop' LIMIT 1"
        )
        ids = np.frombuffer(blob, np.int32).copy()
        ids[len(ids) // 2] ^= 1
        target.execute(
            "UPDATE turns SET sampled_ids=? WHERE id=?", (ids.tobytes(), turn_id)
        )
    verdict = judge(stored_turns(copy), recorded.wire, recorded.reference)
    assert [(who, what) for who, what, _ in verdict.mismatches] == [(turn_id, "ids")]


@pytest.mark.parametrize("field", ["ids", "logprobs", "spans", "input_ids"])
def test_judge_finds_one_value_changed_on_the_wire(recorded: Recorded, field: str):
    rid = next(turn.id for turn in stopped(recorded) if len(turn.sampled_ids) > 1)
    at = next(n for n, generation in enumerate(recorded.wire) if generation.rid == rid)
    value = list(getattr(recorded.wire[at], field))
    value[-2:] = (
        [(value[0][0] + 1, *value[0][1:])]
        if field == "spans"
        else [value[-2] + 1, value[-1]]
    )
    wire = [*recorded.wire]
    wire[at] = dataclasses.replace(wire[at], **{field: value})
    found = kinds(recorded, wire=wire)
    assert {"input_ids": "prompt"}.get(field, field) in found


def test_judge_finds_every_other_kind_of_planted_mismatch(recorded: Recorded):
    turn = next(turn for turn in stopped(recorded) if turn.parent_id)
    at = recorded.turns.index(turn)
    tail = [*turn.context_ids[:-1], turn.context_ids[-1] ^ 1]

    def with_turn(**changes) -> list[StoredTurn]:
        return [
            *recorded.turns[:at],
            dataclasses.replace(turn, **changes),
            *recorded.turns[at + 1 :],
        ]

    assert {"prompt", "tail"} <= kinds(recorded, turns=with_turn(context_ids=tail))
    other = [{**turn.messages[0], "content": "another question"}, *turn.messages[1:]]
    assert {"tail", "messages"} <= kinds(recorded, turns=with_turn(messages=other))
    assert "finish" in kinds(recorded, turns=with_turn(finish_reason="length"))
    parents = {one.parent_id for one in recorded.turns}
    leaf = next(one for one in stopped(recorded) if one.id not in parents)
    assert "unrecorded" in kinds(
        recorded, turns=[one for one in recorded.turns if one is not leaf]
    )
    assert "missing" in kinds(
        recorded,
        wire=[generation for generation in recorded.wire if generation.rid != turn.id],
    )
    sent = [
        dataclasses.replace(reply, text=reply.text + "x")
        for reply in recorded.load.sent
    ]
    assert "text" in kinds(recorded, sent=sent)


@pytest.fixture(scope="module")
async def thinking(
    engine_parent: ForkParent, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Recorded]:
    """Qwen3's own tokenizer and template, which takes earlier thinking out of the
    history."""
    folder = tmp_path_factory.mktemp("thinking")
    model = folder / "model"
    shutil.copytree(model_folder("qwen3"), model)
    (model / "config.json").write_text(json.dumps({"vocab_size": 151_936}))
    async with scripted_stack(
        folder, model, thoughtful, token_delay_s=0.001, parent=engine_parent
    ) as stack:
        load = Load(stack=stack, turns=300, tools=True, thinking=True)
        await load.run()
        verdict = await stack.verdict(load.sent, unthinking=load.unthinking)
        store = Path(stack.settings.store_path)
        assert (verdict.mismatches, load.errors) == ([], [])
        yield Recorded(
            load,
            store,
            stored_turns(store),
            stack.tap.generations,
            Reference(model),
            verdict,
        )


@pytest.mark.slow
def test_judge_covers_thinking_models(thinking: Recorded):
    sent = thinking.load.sent
    refusing = thinking.load.unthinking
    verdict = thinking.verdict
    assert (verdict.kinds, verdict.turns > 200, verdict.continued > 100) == (
        {},
        True,
        True,
    )
    assert sum(bool(reply.reasoning) for reply in sent) > 50
    assert len(refusing) > 3
    assert "tail" in {
        what
        for _, what, _ in judge(
            thinking.turns, thinking.wire, thinking.reference
        ).mismatches
    }
    # there are turns whose history the template re-writes: the path holds thinking that
    # it leaves out
    kept = [
        turn for turn in thinking.turns if turn.parent_id and rewritten(thinking, turn)
    ]
    assert len(kept) > 30
    turn = kept[len(kept) // 2]
    at = thinking.turns.index(turn)
    for place in (
        0,
        len(turn.context_ids) // 2,
        -1,
    ):  # of such a tail too every id is compared
        context = list(turn.context_ids)
        context[place] ^= 1
        changed = dataclasses.replace(turn, context_ids=context)
        turns = [*thinking.turns[:at], changed, *thinking.turns[at + 1 :]]
        assert "tail" in kinds(thinking, session_id=turn.session_id, turns=turns)
    other = [{**turn.messages[0], "content": "another question"}, *turn.messages[1:]]
    turns = [
        *thinking.turns[:at],
        dataclasses.replace(turn, messages=other),
        *thinking.turns[at + 1 :],
    ]
    assert "tail" in kinds(thinking, session_id=turn.session_id, turns=turns)
    altered = [
        dataclasses.replace(reply, reasoning=reply.reasoning + "x") for reply in sent
    ]
    assert "text" in kinds(thinking, sent=altered)


def rewritten(recorded: Recorded, turn: StoredTurn) -> bool:
    """The template shows the turn's history otherwise than it showed it before."""
    stored = {one.id: one for one in recorded.turns}
    path = [turn]
    while (parent := path[0].parent_id) is not None:
        path.insert(0, stored[parent])
    messages = [message for one in path for message in one.messages][:-1]
    depth = len(messages) + 1 - len(turn.messages)
    reference = recorded.reference
    tools = path[0].tools
    whole = reference.text(messages, tools, head=True)
    return not whole.startswith(reference.text(messages[:depth], tools, head=False))


async def test_tokens_of_a_real_engine_behind_the_router_match_the_store(
    tiny_fleet: Fleet, tiny_model: Path, tmp_path: Path
):
    async with real_stack(tmp_path, tiny_model, tiny_fleet) as stack:
        load = Load(stack=stack, turns=40, at_once=8, session_turns=4, max_tokens=12)
        await load.run()
        verdict = await stack.verdict(load.sent)
    assert (verdict.mismatches, load.errors) == ([], [])
    assert verdict.turns >= 30
    assert verdict.unrecorded <= load.did["cut"]
