"""Extra columns: declared, attached over HTTP or by a rollout function, checked,
stored, and read as columns and numbers of training rows."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from handmade_rollouts import branches, forests, rollout, summary, taken, turn
from hypothesis import given, settings
from hypothesis import strategies as st
from local_worker import worker_at
from numpy.typing import NDArray
from running_gateway import ASK, ENV_KEY, MORE, Running, running

from invrl.algorithms.advantages.advantages import advantage_function, dr_grpo
from invrl.buffer.samples.training_samples import build_batch
from invrl.cli.flags import parse_flags
from invrl.errors import ConfigError, PluginError
from invrl.gateway.config import SessionPolicy
from invrl.gateway.rendering.renderer import Renderer
from invrl.interfaces import RolloutResult
from invrl.rollout.workers.rewards import Rejected, valid_numbers
from invrl.rollout.workers.worker_actor import Assignment
from invrl.run.incarnations.on_saved_batches import _refuse_missing_columns
from invrl.run.settings.config import resolve
from invrl.store.batch_file import load_batch, save_batch
from invrl.store.run_store import RunStore
from invrl.train.batches.micro_batch import token_sequences as micro_batch_rows
from invrl.train.batches.packing import pack
from invrl.train.batches.sharding import shard_batch
from invrl.types.batches import TakenBatch, TrainBatch
from invrl.types.extra_columns import (
    MAX_COLUMNS,
    MAX_NUMBER,
    ExtraColumn,
    parse_extra_columns,
)
from invrl.types.groups import Group
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import FailedRollout, Rollout, RolloutSummary
from invrl.types.sessions import Session
from invrl.types.tasks import Task
from invrl.types.turns import Turn
from invrl.types.weights import WeightVersion

DECLARED = ("process_reward:token", "weight:turn=1", "score:rollout")
COLUMNS = parse_extra_columns(DECLARED)


@pytest.fixture
async def gateway(
    tmp_path: Path, model: Path, renderer: Renderer
) -> AsyncIterator[Running]:
    async with running(
        tmp_path, model, renderer, session={"extra_columns": DECLARED}
    ) as gateway_with_columns:
        yield gateway_with_columns


async def chat(gateway: Running, session: Session, *messages: Any) -> Any:
    client = gateway.client(session)
    return await client.chat.completions.create(
        model="tiny", messages=messages or [ASK]
    )


async def attach(
    gateway: Running,
    session: Session,
    body: object,
    key: str = ENV_KEY,
    *,
    route: str = "numbers",
) -> httpx.Response:
    return await gateway.http.post(
        f"{gateway.url}/sessions/{session.id}/{route}",
        content=json.dumps(body).encode(),  # as httpx, but NaN passes
        headers={"authorization": f"Bearer {key}", "content-type": "application/json"},
    )


def batch_of(store: RunStore, outcome: RolloutSummary) -> TrainBatch:
    """The batch of one rollout, as the run builds it from the store."""
    group = Group(id=outcome.group_id, task_id=outcome.task_id, rollouts_G=(outcome,))
    batch = TakenBatch(batch_id=0, version=WeightVersion(0), groups=(group,))
    rollouts = store.taken_rollouts(batch)
    return build_batch(batch, rollouts, dr_grpo, 1e-4, extra_columns=COLUMNS.values())


# ----------------------------------------------------------------- the declaration


def test_columns_are_declared_by_name_level_and_default() -> None:
    assert parse_extra_columns([" a:token", "b : turn = -0.5", "c_2:rollout=1e3"]) == {
        "a": ExtraColumn(name="a", level="token", default=0.0),
        "b": ExtraColumn(name="b", level="turn", default=-0.5),
        "c_2": ExtraColumn(name="c_2", level="rollout", default=1000.0),
    }
    assert SessionPolicy(extra_columns="a:token, b:turn=2").declared_columns.keys() == {
        "a",
        "b",
    }  # type: ignore[arg-type]
    assert parse_extra_columns([]) == {}


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        (["a"], "'a' is not NAME:LEVEL"),
        (["a:group"], "LEVEL is one of: token, turn, rollout"),
        (["a:token:turn"], "is not NAME:LEVEL"),
        (["a=1"], "is not NAME:LEVEL"),
        ([":token"], "'' is no name"),
        (["2a:token"], "'2a' is no name"),
        (["a-b:token"], "'a-b' is no name"),
        (["ü:token"], "'ü' is no name"),
        ([f"{'a' * 65}:token"], "at most 64 characters"),
        (
            ["old:token"],
            "invrl computes a column 'old' itself; use another name, such as my_old",
        ),
        (["advantages:rollout"], "invrl computes a column 'advantages'"),
        (["a:token", "a:turn"], "the column 'a' is given twice"),
        (["a:token="], "the default '' is not a finite number"),
        (["a:token=x"], "the default 'x' is not a finite number"),
        (["a:token=nan"], "the default 'nan' is not a finite number"),
        (["a:token=1e39"], "the default '1e39' is not a finite number"),
        ([f"a{n}:token" for n in range(MAX_COLUMNS + 1)], "65 columns: at most 64"),
    ],
)
def test_wrong_column_declaration_is_refused_with_the_reason(
    entries: Sequence[str], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_extra_columns(entries)
    with pytest.raises(ValueError, match=reason):
        SessionPolicy(extra_columns=tuple(entries))


def test_extra_columns_flag_takes_several_values_and_refuses_wrong_ones() -> None:
    config = resolve(
        *parse_flags(
            ["--session.extra-columns", "a:token", "b:rollout=1", "--seed", "3"]
        )
    )
    assert config.gateway.session.extra_columns == ("a:token", "b:rollout=1")
    with pytest.raises(
        ConfigError, match="invrl computes a column 'rewards'"
    ) as refused:
        resolve(*parse_flags(["--session.extra-columns", "rewards:turn"]))
    assert refused.value.field == "session.extra_columns"


def test_saved_batches_without_a_declared_column_are_refused() -> None:
    handmade_rollout = replace(
        rollout([turn("a", None, [1], [2])]), summary=summary("g.0")
    )
    group = Group(id="g", task_id="t", rollouts_G=(handmade_rollout.summary,))
    batch = TakenBatch(batch_id=3, version=WeightVersion(0), groups=(group,))
    with_columns = build_batch(
        batch, [handmade_rollout], dr_grpo, 1e-4, extra_columns=COLUMNS.values()
    )
    declaring = resolve(*parse_flags(["--session.extra-columns", *DECLARED]))
    _refuse_missing_columns(with_columns, declaring)
    without = build_batch(
        batch, [handmade_rollout], dr_grpo, 1e-4, extra_columns=[COLUMNS["weight"]]
    )
    _refuse_missing_columns(without, resolve(*parse_flags([])))
    with pytest.raises(
        ConfigError, match=r"batch 3 .* have no column 'process_reward' \(weight\)"
    ):
        _refuse_missing_columns(without, declaring)


# ----------------------------------------------- over HTTP, to the rows and to a file


async def test_extra_numbers_reach_the_samples_and_a_saved_batch(
    gateway: Running, tmp_path: Path
) -> None:
    [session] = await gateway.open()
    first = await chat(gateway, session)
    reply = first.choices[0].message.model_dump()
    await chat(gateway, session, ASK, reply, MORE)
    await chat(gateway, session, ASK, reply, {"role": "user", "content": "other"})
    shared, left, right = gateway.turns(session)
    steps_T = [0.25 * n for n in range(len(shared.sampled_ids_T))]
    right_T = [-1.0] * len(right.sampled_ids_T)
    assert first.id == f"chatcmpl-{shared.id}"
    for body in (
        {"numbers": {"score": 0.5}},
        {"numbers": {"score": 0.75}},  # the last one counts
        {"turn_numbers": {first.id: {"weight": 3.0}, right.id: {"weight": 7}}},
        {"token_numbers": {first.id: {"process_reward": steps_T}}},
        {},
    ):
        answer = await attach(gateway, session, body, key=session.key)
        assert answer.json() == {"session_id": session.id, "state": "open"}
    shown = (await gateway.env(f"/sessions/{session.id}")).json()
    assert shown["numbers"] == {"score": 0.75}
    assert shown["turn_numbers"] == {
        shared.id: {"weight": 3.0},
        right.id: {"weight": 7.0},
    }
    last = {
        "reward": 1.0,
        "token_numbers": {right.id: {"process_reward": right_T}},
    }
    answer = await gateway.env(f"/sessions/{session.id}/finish", last)
    assert answer.status_code == 200, answer.text
    [(_, outcome)] = gateway.store.outbox_after(0)
    assert isinstance(outcome, RolloutSummary)
    assert outcome.numbers == {"score": 0.75}
    assert outcome.turn_numbers == {
        shared.id: {"weight": 3.0},
        right.id: {"weight": 7.0},
    }

    batch = batch_of(gateway.store, outcome)
    first_row, second_row = batch.samples
    assert [row.turn_ids for row in (first_row, second_row)] == [
        (shared.id, left.id),
        (shared.id, right.id),
    ]
    assert [dict(row.numbers) for row in (first_row, second_row)] == [
        {"score": 0.75}
    ] * 2
    zeros_T = [0.0] * len(left.sampled_ids_T)
    assert trained(first_row, "process_reward") == steps_T + zeros_T
    assert trained(first_row, "weight") == [3.0] * len(steps_T) + [1.0] * len(zeros_T)
    # the shared turn is trained in the first row
    assert trained(second_row, "process_reward") == right_T
    assert trained(second_row, "weight") == [7.0] * len(right_T)
    for row in (first_row, second_row):
        for column_T in row.columns.values():
            assert column_T.dtype == np.float32
            assert (column_T[~row.loss_mask_T] == 0).all()

    save_batch(tmp_path / "step-000001.batch", batch)
    for saved, row in zip(
        load_batch(tmp_path / "step-000001.batch").samples, batch.samples, strict=True
    ):
        assert saved.numbers == row.numbers
        assert saved.columns.keys() == row.columns.keys()
        for name, column_T in row.columns.items():
            np.testing.assert_array_equal(saved.columns[name], column_T)
            assert saved.columns[name].dtype == np.float32


def trained(row: Any, name: str) -> list[float]:
    return row.columns[name][row.loss_mask_T].tolist()


async def test_undeclared_numbers_are_refused_with_field_reason_and_fix(
    gateway: Running,
) -> None:
    mine, other = await gateway.open(members=2)
    turn_id = (await chat(gateway, mine)).id
    foreign_id = (await chat(gateway, other)).id
    num_sampled = len(gateway.turns(mine)[0].sampled_ids_T)
    good_T = [0.0] * num_sampled
    token_field = f"token_numbers.{turn_id}.process_reward"
    refusals: list[tuple[dict[str, Any], int, str, str, str]] = [
        (
            {"numbers": {"scor": 1}},
            400,
            "unknown_column",
            "numbers.scor",
            "declared: process_reward, weight, sc",
        ),
        (
            {"numbers": {"weight": 1}},
            400,
            "wrong_level",
            "numbers.weight",
            "send it in turn_numbers",
        ),
        (
            {"turn_numbers": {turn_id: {"score": 1}}},
            400,
            "wrong_level",
            f"turn_numbers.{turn_id}.score",
            "",
        ),
        (
            {"token_numbers": {turn_id: {"score": good_T}}},
            400,
            "wrong_level",
            f"token_numbers.{turn_id}.score",
            "send it in numbers, or declare it as score:token",
        ),
        (
            {"turn_numbers": {"turn-0": {"weight": 1}}},
            404,
            "turn_not_found",
            "turn_numbers.turn-0",
            "has no turn",
        ),
        (
            {"turn_numbers": {foreign_id: {}}},
            404,
            "turn_not_found",
            f"turn_numbers.{foreign_id}",
            "",
        ),
        (
            {"numbers": {"score": math.nan}},
            400,
            "not_a_number",
            "numbers.score",
            "nan is not a finite number",
        ),
        (
            {"numbers": {"score": math.inf}},
            400,
            "not_a_number",
            "numbers.score",
            "leave the name out",
        ),
        (
            {"numbers": {"score": 3.5e38}},
            400,
            "not_a_number",
            "numbers.score",
            "float32",
        ),
    ]
    for wrong_T in (good_T[:-1], [*good_T, 0.0], []):
        reason = f"{len(wrong_T)} numbers: the turn sampled {num_sampled} tokens. Fix: send one number"
        body = {"token_numbers": {turn_id: {"process_reward": wrong_T}}}
        refusals.append((body, 400, "wrong_length", token_field, reason))
    for wrong in (math.nan, -math.inf, 1e39):
        body = {"token_numbers": {turn_id: {"process_reward": [*good_T[:-1], wrong]}}}
        refusals.append(
            (
                body,
                400,
                "not_a_number",
                f"{token_field}.{num_sampled - 1}",
                "not a finite number",
            )
        )
    for wrong in (None, "1", True, [1.0]):
        body = {"token_numbers": {turn_id: {"process_reward": [wrong, *good_T[1:]]}}}
        refusals.append(
            (body, 400, "invalid_request", f"{token_field}.0", "valid number")
        )
    refusals += [
        ({"numbers": [1.0]}, 400, "invalid_request", "numbers", "valid dictionary"),
        (
            {"turn_numbers": {turn_id: 1.0}},
            400,
            "invalid_request",
            f"turn_numbers.{turn_id}",
            "",
        ),
        (
            {"token_numbers": {turn_id: {"process_reward": 1.0}}},
            400,
            "invalid_request",
            token_field,
            "list",
        ),
        ({"columns": {}}, 400, "invalid_request", "columns", ""),
    ]
    for body, status, code, field, reason in refusals:
        for good_part in ({}, {"numbers": {"score": 9.0}}):
            body_with_more = {
                **body,
                "numbers": body.get("numbers") or good_part.get("numbers", {}),
            }
            for route, more in (("numbers", {}), ("finish", {"reward": 1.0})):
                answer = await attach(
                    gateway, mine, {**body_with_more, **more}, mine.key, route=route
                )
                error = answer.json()["error"]
                assert answer.status_code == status, error
                assert error["code"] == code, error
                assert error["param"] == field, error
                assert error["message"].startswith(f"{field}: ")
                assert reason in error["message"]
                assert code == "invalid_request" or ". Fix: " in error["message"]
    shown = (await gateway.env(f"/sessions/{mine.id}")).json()
    assert shown["state"] == "open"
    assert shown["numbers"] == {}
    assert shown["turn_numbers"] == {}
    outcome = await gateway.finish(mine)
    assert isinstance(outcome, RolloutSummary)
    [row] = batch_of(gateway.store, outcome).samples
    assert trained(row, "process_reward") == good_T
    assert trained(row, "weight") == [1.0] * num_sampled
    assert row.numbers == {"score": 0.0}
    late = await attach(gateway, mine, {"numbers": {"score": 1.0}})
    assert late.status_code == 409
    assert late.json()["error"]["code"] == "session_closed"
    late = await attach(gateway, mine, {"turn_numbers": {turn_id: {"weight": 1.0}}})
    assert late.status_code == 409
    assert late.json()["error"]["code"] == "session_closed"
    assert (await attach(gateway, other, {}, key=mine.key)).status_code == 401
    again = await gateway.env(
        f"/sessions/{mine.id}/finish", {"reward": 2.0, "numbers": {"score": 4.0}}
    )
    assert again.json()["reward"] == 1.0
    assert again.json()["numbers"] == {}


async def test_column_names_outside_of_unicode_are_refused(gateway: Running) -> None:
    [session] = await gateway.open()
    bodies = (
        '{"numbers": {"\\ud800": 1}}',
        '{"turn_numbers": {"\\ud800": {}}}',
        '{"token_numbers": {"": {}}}',
    )
    for body in bodies:
        for route in ("numbers", "finish"):
            answer = await gateway.http.post(
                f"{gateway.url}/sessions/{session.id}/{route}",
                content=body.encode(),
                headers={
                    "authorization": f"Bearer {ENV_KEY}",
                    "content-type": "application/json",
                },
            )
            assert answer.status_code in (400, 404), answer.text
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_every_column_name_is_unknown_without_a_declaration(
    tmp_path: Path, model: Path, renderer: Renderer
) -> None:
    async with running(tmp_path, model, renderer) as gateway:
        [session] = await gateway.open()
        answer = await attach(gateway, session, {"numbers": {"score": 1.0}})
        assert answer.status_code == 400
        assert (
            "declared: none). Fix: start the run with --session.extra-columns score:rollout"
            in answer.text
        )
        assert (await attach(gateway, session, {})).status_code == 200


async def test_turns_of_children_have_numbers_within_the_rollout_of_their_parent(
    gateway: Running,
) -> None:
    [parent] = await gateway.open()
    opened = []
    for _ in range(2):
        answer = await gateway.env(
            f"/sessions/{parent.id}/children", {}, key=parent.key
        )
        fields = {
            name: answer.json()["sessions"][0][name]
            for name in ("id", "key", "base_url")
        }
        opened.append(replace(parent, **fields, parent_id=parent.id))
    child, aborted = opened
    ids = [(await chat(gateway, session)).id for session in (parent, child, aborted)]
    answer = await attach(gateway, child, {"numbers": {"score": 1.0}}, key=child.key)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "child_session"
    assert f"send them for session {parent.id}" in answer.text
    answer = await attach(gateway, parent, {"turn_numbers": {ids[1]: {"weight": 2.0}}})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "turn_not_found"
    for session, turn_id, weight in zip(
        (parent, child, aborted), ids, (2.0, 3.0, 4.0), strict=True
    ):
        num_sampled = len(gateway.turns(session)[0].sampled_ids_T)
        body = {
            "turn_numbers": {turn_id: {"weight": weight}},
            "token_numbers": {turn_id: {"process_reward": [10 * weight] * num_sampled}},
        }
        assert (
            await attach(gateway, session, body, key=session.key)
        ).status_code == 200
    await gateway.env(f"/sessions/{aborted.id}/abort", {}, key=aborted.key)
    late = await attach(gateway, aborted, {"turn_numbers": {ids[2]: {"weight": 5.0}}})
    assert late.status_code == 409
    # A verifier may come after the child has finished, until its parent has.
    await gateway.env(f"/sessions/{child.id}/finish", {}, key=child.key)
    assert (
        await attach(gateway, child, {"turn_numbers": {ids[1]: {"weight": 6.0}}})
    ).status_code == 200
    await attach(gateway, parent, {"numbers": {"score": 0.5}})
    outcome = await gateway.finish(parent)
    assert isinstance(outcome, RolloutSummary)
    own_id, child_id, _ = (turn_id.removeprefix("chatcmpl-") for turn_id in ids)
    assert outcome.turn_numbers == {own_id: {"weight": 2.0}, child_id: {"weight": 6.0}}
    rows = batch_of(gateway.store, outcome).samples
    assert [set(trained(row, "weight")) for row in rows] == [{2.0}, {6.0}]
    assert [set(trained(row, "process_reward")) for row in rows] == [{20.0}, {30.0}]
    assert [row.numbers["score"] for row in rows] == [0.5, 0.5]


async def test_numbers_may_arrive_until_the_reward_and_survive_a_gateway_restart(
    tmp_path: Path, model: Path, renderer: Renderer
) -> None:
    options = {"session": {"extra_columns": DECLARED}, "late": {"deadline_s": 3600.0}}
    async with running(tmp_path, model, renderer, **options) as gateway:
        [session] = await gateway.open()
        turn_id = (await chat(gateway, session)).id
        await attach(
            gateway,
            session,
            {"numbers": {"score": 0.5}, "turn_numbers": {turn_id: {"weight": 2}}},
        )
        finished = await gateway.env(
            f"/sessions/{session.id}/finish", {"numbers": {"score": 0.25}}
        )
        assert finished.status_code == 202
    async with running(tmp_path, model, renderer, **options) as gateway:
        shown = (await gateway.env(f"/sessions/{session.id}")).json()
        turn_id = turn_id.removeprefix("chatcmpl-")
        assert shown["state"] == "unrewarded"
        assert shown["numbers"] == {"score": 0.25}
        assert shown["turn_numbers"] == {turn_id: {"weight": 2.0}}
        assert (await attach(gateway, session, {"numbers": {"score": 0.125}})).json()[
            "state"
        ] == "unrewarded"
        await gateway.env(f"/sessions/{session.id}/reward", {"reward": 1.0})
        [(_, outcome)] = gateway.store.outbox_after(0)
        assert isinstance(outcome, RolloutSummary)
        assert outcome.numbers == {"score": 0.125}
        assert outcome.turn_numbers == {turn_id: {"weight": 2.0}}
        stored = gateway.store.closed_session(session.id)
        assert stored is not None
        assert stored.numbers == {"score": 0.125}


async def test_numbers_of_a_long_turn_may_exceed_the_body_limit(
    gateway: Running,
) -> None:
    [session] = await gateway.open()
    turn_id = (await chat(gateway, session)).id
    numbers_T = [0.1234567890123456] * 100_000
    body = {"token_numbers": {turn_id: {"process_reward": numbers_T}}}
    answer = await attach(gateway, session, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "wrong_length"
    answer = await gateway.env(
        f"/sessions/{session.id}/finish", {"reward": 1.0, **body}
    )
    assert answer.status_code == 413


# ------------------------------------------------------------ from a rollout function


Make = Callable[[str, int], RolloutResult]


async def outcome_of(gateway: Running, make: Make) -> RolloutSummary | FailedRollout:
    """Of a rollout function whose one turn sampled so many tokens."""
    [session] = await gateway.open()

    async def function(task: Task, endpoint: Any) -> RolloutResult:
        answer = await chat(gateway, session)
        return make(answer.id, answer.usage.completion_tokens)

    assignment = Assignment(task=Task(id="t", payload={}), sessions=(session,))
    (outcome,) = (await worker_at(gateway.url, function).run(assignment)).outcomes
    assert isinstance(outcome, RolloutSummary | FailedRollout)
    return outcome


@pytest.mark.parametrize(
    "form", [list, tuple, np.array, lambda values: np.array(values, np.float16)]
)
async def test_numbers_returned_by_a_rollout_function_are_recorded(
    gateway: Running, form: Callable[[list], Any]
) -> None:
    outcome = await outcome_of(
        gateway,
        lambda turn_id, tokens: RolloutResult(
            reward=1.0,
            numbers={"score": np.float32(0.5)},  # type: ignore[dict-item]
            turn_numbers={turn_id: {"weight": True}},
            token_numbers={turn_id: {"process_reward": form([0.5] * tokens)}},
        ),
    )
    assert isinstance(outcome, RolloutSummary), outcome
    [row] = batch_of(gateway.store, outcome).samples
    assert set(trained(row, "process_reward")) == {0.5}
    assert set(trained(row, "weight")) == {1.0}
    assert row.numbers == {"score": 0.5}


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda t, n: RolloutResult(reward=1.0, numbers={"scor": 1.0}),
            "400 numbers.scor: the run declares no",
        ),
        (
            lambda t, n: RolloutResult(
                reward=1.0, token_numbers={t: {"process_reward": [0.0] * (n + 1)}}
            ),
            "14 numbers: the turn sampled 13 tokens. Fix: send one number",
        ),
        (
            lambda t, n: RolloutResult(reward=1.0, turn_numbers={"x": {"weight": 1.0}}),
            "404 turn_numbers.x:",
        ),
        (
            lambda t, n: RolloutResult(reward=1.0, numbers={"score": math.nan}),
            "RolloutResult.numbers['score'] is nan, not a finite number within ±3.40282e+38 (float32). Fix",
        ),
        (
            lambda t, n: RolloutResult(
                reward=1.0, token_numbers={t: {"process_reward": [0.0, None]}}
            ),
            "['process_reward'][1] is None (type NoneType), not a number. Fix: return a float",
        ),
    ],
)
async def test_a_bad_number_is_a_failed_rollout_with_a_reason(
    gateway: Running, make: Make, told: str
) -> None:
    outcome = await outcome_of(gateway, make)
    assert isinstance(outcome, FailedRollout)
    assert outcome.reason is FailureReason.BAD_RETURN
    assert told in outcome.detail


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        (
            "numbers",
            None,
            "numbers is None (type NoneType), not a mapping. Fix: return a dict",
        ),
        ("numbers", [1.0], "not a mapping"),
        (
            "numbers",
            {1: 1.0},
            "numbers has the key 1 (type int). Fix: use names of declared columns",
        ),
        ("numbers", {"\ud800": 1.0}, "has the key"),
        ("numbers", {"a" * 513: 1.0}, "has the key"),
        ("numbers", {"a": "1"}, "numbers['a'] is '1' (type str), not a number"),
        ("numbers", {"a": 10**400}, "numbers['a'] is inf, not a finite number"),
        ("numbers", {"a": 1e39}, "numbers['a'] is 1e+39, not a finite number"),
        (
            "turn_numbers",
            {"t": 1.0},
            "turn_numbers['t'] is 1.0 (type float), not a mapping",
        ),
        ("turn_numbers", {"t": {"a": None}}, "turn_numbers['t']['a'] is None"),
        (
            "token_numbers",
            {"t": [1.0]},
            "token_numbers['t'] is [1.0] (type list), not a mapping",
        ),
        (
            "token_numbers",
            {"t": {"a": 1.0}},
            "token_numbers['t']['a'] is 1.0 (type float), not a list",
        ),
        (
            "token_numbers",
            {"t": {"a": "12"}},
            "token_numbers['t']['a'] is '12' (type str), not a list",
        ),
        (
            "token_numbers",
            {"t": {"a": np.zeros((2, 1))}},
            "is an array of shape (2, 1)",
        ),
        ("token_numbers", {"t": {"a": np.array(["x"])}}, "dtype <U1"),
        (
            "token_numbers",
            {"t": {"a": np.array([0.0, np.inf])}},
            "token_numbers['t']['a'][1] is inf",
        ),
    ],
)
def test_return_value_that_is_not_numbers_is_named(
    field: str, value: Any, told: str
) -> None:
    result = RolloutResult(reward=1.0, **{field: value})
    with pytest.raises(Rejected) as rejected:
        valid_numbers(result)
    assert rejected.value.reason is FailureReason.BAD_RETURN
    assert rejected.value.detail.startswith(f"RolloutResult.{field}")
    assert told in rejected.value.detail


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(numbers=anything, turn_numbers=anything, token_numbers=anything)
def test_any_return_value_becomes_finite_numbers_or_is_rejected(
    numbers: Any, turn_numbers: Any, token_numbers: Any
) -> None:
    result = RolloutResult(
        numbers=numbers, turn_numbers=turn_numbers, token_numbers=token_numbers
    )
    try:
        extra = valid_numbers(result)
    except Rejected:
        return
    values = list(extra.numbers.values())
    for by_name in extra.turn_numbers.values():
        values += by_name.values()
    for by_name_T in extra.token_numbers.values():
        for values_T in by_name_T.values():
            values += values_T
    assert all(type(value) is float and abs(value) <= MAX_NUMBER for value in values)
    json.dumps(
        [extra.numbers, extra.turn_numbers, extra.token_numbers], allow_nan=False
    ).encode()


# ----------------------------------------------------------------- rows


number = st.floats(-100, 100, width=32)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), turns=forests())
def test_each_trained_token_has_its_own_number_in_exactly_one_sample(
    data: st.DataObject, turns: list[Turn]
) -> None:
    """Compared with a table by token id: every sampled id is unique."""
    turn_numbers: dict[str, dict[str, float]] = {}
    token_numbers: dict[str, dict[str, NDArray[np.float32]]] = {}
    expected: dict[int, tuple[float, float]] = {}
    for drawn_turn in turns:
        num_sampled = len(drawn_turn.sampled_ids_T)
        rewards_T = np.zeros(num_sampled, np.float32)
        weight = 1.0
        if data.draw(st.booleans()):
            rewards_T = np.array(
                data.draw(st.lists(number, min_size=num_sampled, max_size=num_sampled)),
                np.float32,
            )
            token_numbers[drawn_turn.id] = {
                "process_reward": rewards_T,
                "undeclared": rewards_T,
            }
        if data.draw(st.booleans()):
            weight = data.draw(number)
            turn_numbers[drawn_turn.id] = {"weight": weight}
        for token, reward in zip(
            drawn_turn.sampled_ids_T.tolist(), rewards_T.tolist(), strict=True
        ):
            expected[token] = (reward, weight)
    of = replace(summary("g.0"), numbers={"score": 2.0}, turn_numbers=turn_numbers)
    handmade_rollout = replace(
        rollout(*branches(turns), of=of), token_numbers=token_numbers
    )
    rows = token_sequences(handmade_rollout)
    measured: dict[int, tuple[float, float]] = {}
    for row in rows:
        assert row.columns.keys() == {"process_reward", "weight"}
        assert row.numbers == {"score": 2.0}
        for token, reward, weight in zip(
            row.tokens_T[row.loss_mask_T].tolist(),
            trained(row, "process_reward"),
            trained(row, "weight"),
            strict=True,
        ):
            assert token not in measured
            measured[token] = (reward, weight)
    for token, values in measured.items():
        assert values == expected[token]


def token_sequences(of: Rollout) -> Sequence[Any]:
    group = Group(id="g", task_id="t", rollouts_G=(of.summary,))
    batch = TakenBatch(batch_id=0, version=WeightVersion(0), groups=(group,))
    return build_batch(
        batch, [of], dr_grpo, 1e-4, extra_columns=COLUMNS.values()
    ).samples


def test_number_at_another_level_than_declared_does_not_count() -> None:
    """The declaration may change when a run resumes."""
    of = replace(
        summary("g.0"), numbers={"weight": 5.0}, turn_numbers={"a": {"score": 5.0}}
    )
    handmade_rollout = replace(
        rollout([turn("a", None, [1], [2])], of=of),
        token_numbers={"a": {"weight": np.ones(1, np.float32)}},
    )
    [row] = token_sequences(handmade_rollout)
    assert trained(row, "weight") == [1.0]
    assert row.numbers == {"score": 0.0}


@pytest.mark.parametrize("share_prefixes", [True, False])
def test_numbers_stay_with_their_tokens_through_mini_batches_shards_and_packing(
    share_prefixes: bool,
) -> None:
    """Token n has the process reward n/10, its turn the weight of its first token, its
    rollout its index."""
    members: list[RolloutSummary] = []
    rollouts: list[Rollout] = []
    for index in range(6):
        base = 10 * index
        a = turn(f"a{index}", None, [base + 1, base + 2], [base + 3, base + 4])
        b = turn(f"b{index}", f"a{index}", [base + 5], [base + 6])
        c = turn(f"c{index}", f"a{index}", [base + 7], [base + 8, base + 9])
        weights = {
            sampled_turn.id: {"weight": float(sampled_turn.sampled_ids_T[0])}
            for sampled_turn in (a, b, c)
        }
        of = replace(
            summary(f"g.{index}", f"g{index // 2}", index % 2, float(index)),
            turn_numbers=weights,
        )
        members.append(replace(of, numbers={"score": float(index)}))
        rewards = {
            sampled_turn.id: {
                "process_reward": np.float32(sampled_turn.sampled_ids_T / 10)
            }
            for sampled_turn in (a, b, c)
        }
        rollouts.append(
            replace(rollout([a, b], [a, c], of=members[-1]), token_numbers=rewards)
        )
    groups = tuple(
        Group(id=f"g{n}", task_id="t", rollouts_G=tuple(members[2 * n : 2 * n + 2]))
        for n in range(3)
    )
    batch = TakenBatch(batch_id=0, version=WeightVersion(0), groups=groups)
    train_batch = build_batch(
        batch, rollouts, dr_grpo, 1e-4, extra_columns=COLUMNS.values()
    )
    seen: list[int] = []
    for shares in shard_batch(train_batch, steps=2, ranks=2):
        for share in shares:
            for micro_batch in pack(
                micro_batch_rows(share.samples),
                max_tokens=9,
                share_prefixes=share_prefixes,
            ):
                tokens = micro_batch.targets_N.tolist()
                seen += tokens
                rewards_N = micro_batch.pick(
                    [sample.columns["process_reward"] for sample in share.samples]
                )
                np.testing.assert_array_equal(
                    rewards_N, np.array(tokens, np.float32) / 10
                )
                weights_N = micro_batch.pick(
                    [sample.columns["weight"] for sample in share.samples]
                )
                assert weights_N.tolist() == [
                    token - 1 if token % 10 in (4, 9) else token for token in tokens
                ]
                scores = [
                    share.samples[row].numbers["score"]
                    for row, wanted_N in micro_batch.sequences
                    for _ in wanted_N
                ]
                assert scores == [token // 10 for token in tokens]
    assert sorted(seen) == sorted(
        10 * index + place for index in range(6) for place in (3, 4, 6, 8, 9)
    )


# ----------------------------------------------------------------- a user's advantage


def by_length(
    rewards_G: NDArray[np.float64], *, eps: float, group: Group | None = None
) -> NDArray[np.float64]:
    """The final reward less the rollout's score, per sampled token."""
    if group is None:
        return np.full_like(rewards_G, -7.0)
    scores_G = np.array([member.numbers["score"] for member in group.rollouts_G])
    lengths_G = np.array([member.sampled_tokens for member in group.rollouts_G])
    return (rewards_G - scores_G) / lengths_G


def positional(
    rewards_G: NDArray[np.float64], group: object = None, *, eps: float
) -> NDArray[np.float64]:
    return np.full_like(rewards_G, 0.0 if group is None else 1.0)


def keywords(rewards_G: NDArray[np.float64], **options: object) -> NDArray[np.float64]:
    assert options.keys() == {"eps"}
    return rewards_G


def needs_group(
    rewards_G: NDArray[np.float64], *, eps: float, group: Group
) -> NDArray[np.float64]:
    return rewards_G


def test_advantage_function_over_the_group_reads_lengths_and_numbers() -> None:
    batch = taken(("g", [3.0, 5.0]))
    first, second = batch.groups[0].rollouts_G
    members = (
        replace(
            first, numbers={"score": 1.0}, sampled_tokens=2, turn_rewards={"b": 1.0}
        ),
        replace(second, numbers={"score": -1.0}, sampled_tokens=3),
    )
    batch = replace(batch, groups=(replace(batch.groups[0], rollouts_G=members),))
    a = turn("a", None, [1], [2])
    b = turn("b", "a", [3], [4])
    rollouts = [
        rollout([a, b], of=members[0]),
        rollout([a], of=members[1]),
    ]
    function = advantage_function(f"{__name__}:by_length")
    train_batch = build_batch(batch, rollouts, function, 1e-4)
    assert [row_T.tolist() for row_T in train_batch.advantages] == [
        [0, 1, 0, -7],
        [0, 2],
    ]
    for name, expected in (
        ("positional", [[0, 1, 0, 0], [0, 1]]),
        ("keywords", [[0, 3, 0, 1], [0, 5]]),
    ):
        train_batch = build_batch(
            batch, rollouts, advantage_function(f"{__name__}:{name}"), 1e-4
        )
        assert [row_T.tolist() for row_T in train_batch.advantages] == expected


def test_advantage_function_that_needs_the_group_is_refused_without_it() -> None:
    with pytest.raises(PluginError, match="missing a required argument: 'group'"):
        advantage_function(f"{__name__}:needs_group")
