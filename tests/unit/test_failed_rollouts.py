"""What becomes of failed rollouts: counted with a reward, dropped, tried again; and the
same failure over and over, which is told at once and ends the run."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from running_gateway import ENV_KEY, Running
from small_buffer import failure, make, summary, tasks, through_bytes

from invrl.algorithms.advantages.advantages import advantage_function
from invrl.buffer.config import BufferConfig, FailuresConfig
from invrl.buffer.failures import (
    GROUP_FILTER,
    FailureLimits,
    FailureReport,
    FailureReporter,
    with_failure_reward,
)
from invrl.buffer.groups.group_buffer import GroupBuffer
from invrl.buffer.ledger.ledger import LedgerEntry
from invrl.buffer.process.buffer_actor import BufferActor
from invrl.buffer.samples.training_samples import build_batch
from invrl.cli.flags import parse_flags
from invrl.errors import ConfigError, IdenticalFailuresError
from invrl.observe.metrics.step_metrics import rollout_metrics
from invrl.observe.screen.progress import PlainProgress
from invrl.rollout.config import RolloutConfig
from invrl.rollout.workers.runner import Failure, Runner
from invrl.run.loop.failed_rollouts import command_for_failures
from invrl.run.settings.config import resolve
from invrl.store.run_folder import RunFolder
from invrl.types.metrics import resolve as resolved
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import FailedRollout
from invrl.types.tasks import Task


def failing(
    group: str, index: int, attempt: int = 0, *, reason: FailureReason, tokens: int = 5
) -> FailedRollout:
    whole = summary(group, index, attempt, reward=0.0, tokens=tokens)
    return replace(
        failure(group, index, attempt), reason=reason, partial=whole if tokens else None
    )


def buffer_with(*rules: str, entries: list[LedgerEntry] | None = None) -> GroupBuffer:
    return GroupBuffer(
        BufferConfig(failures=FailuresConfig(reward=rules), group_filter="none"),
        RolloutConfig(
            rollout_batch_size=1, n_samples_per_prompt=2, rollout_max_attempts=3
        ),
        tasks=tasks(),
        group_filter=lambda group: None,
        emit=(entries if entries is not None else []).append,
    )


# ----------------------------------------------------------------- by reason


def test_failed_rollout_that_counts_is_in_the_batch_with_reward_and_reason() -> None:
    entries: list[LedgerEntry] = []
    buffer = buffer_with("timeout=-0.5", entries=entries)
    buffer.lease()
    buffer.record(summary("g0", 0, reward=1.0))
    buffer.record(failing("g0", 1, reason=FailureReason.TIMEOUT))
    batch = buffer.take()
    assert batch is not None
    rewards = [
        (rollout.reward, rollout.failure) for rollout in batch.groups[0].rollouts_G
    ]
    assert rewards == [(1.0, None), (-0.5, FailureReason.TIMEOUT)]
    assert buffer.events.failed == {"timeout": 1}
    values = resolved(buffer.metrics())
    assert values["failed_share/timeout"] == 0.5
    assert values["rollouts_counted/timeout"] == 1
    assert values["finished_reward_mean"] == 0.25
    assert resolved(rollout_metrics(batch))["failed_share/timeout"] == 0.5
    timeout_entries = [
        entry for entry in entries if entry.failure is FailureReason.TIMEOUT
    ]
    assert [str(timeout_entry.state) for timeout_entry in timeout_entries] == [
        "finished"
    ]


@pytest.mark.parametrize(
    ("rule", "tokens", "places", "dropped"),
    [
        ("timeout=0", 0, 1, {}),  # no token to train: tried again
        ("timeout=retry", 5, 1, {}),
        ("context=0", 5, 1, {}),  # another reason
        ("timeout=drop", 5, 0, {"incomplete": 1}),
    ],
)
def test_failed_rollout_that_does_not_count_is_retried_or_drops_its_group(
    rule: str, tokens: int, places: int, dropped: dict[str, int]
) -> None:
    buffer = buffer_with(rule)
    buffer.lease()
    buffer.record(summary("g0", 0, reward=1.0))
    buffer.record(failing("g0", 1, reason=FailureReason.TIMEOUT, tokens=tokens))
    lease = buffer.lease()
    assert lease is not None
    again = (
        [(member.index, member.attempt) for member in lease.members]
        if lease.group_id == "g0"
        else []
    )
    assert again == [(1, 1)] * places
    assert buffer.events.dropped == dropped


def test_only_failures_caused_by_the_policy_count_by_default() -> None:
    rules = BufferConfig().failures.rules()
    assert rules == {
        FailureReason.TIMEOUT: 0.0,
        FailureReason.CONTEXT: 0.0,
        FailureReason.LIMIT: 0.0,
    }


def test_children_without_a_reward_of_their_own_inherit_it() -> None:
    whole = replace(
        summary("g0", 0, reward=0.0),
        child_rewards={"a": 0.0, "b": 0.75, "c": 0.75},
        child_reward_from={"a": "g0.0.0", "b": "b", "c": "b"},
    )
    counted = with_failure_reward(whole, FailureReason.TIMEOUT, -1.0)
    assert counted.child_rewards == {"a": -1.0, "b": 0.75, "c": 0.75}


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (
            ["--failures.reward", "timeout=0", "context=-0.5"],
            ("timeout=0", "context=-0.5"),
        ),
        (
            ["--failures.reward", "timeout=0,context=drop", "--seed", "3"],
            ("timeout=0", "context=drop"),
        ),
        (
            ["--failures.reward=timeout=-1", "exception=retry"],
            ("timeout=-1", "exception=retry"),
        ),
    ],
)
def test_failure_reward_flag_takes_several_rules(
    arguments: list[str], wanted: tuple[str, ...]
) -> None:
    assert resolve(*parse_flags(arguments)).buffer.failures.reward == wanted


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("timeot=0", "REASON is one of: exception, timeout"),
        ("timeout", "is not REASON=REWARD"),
        ("timeout=nan", "not a number within"),
        ("timeout=2e9", "not a number within"),
        ("timeout=never", "drop or retry"),
        ("timeout=0,timeout=1", "is given twice"),
    ],
)
def test_wrong_failure_rule_is_refused_before_the_run(entry: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        resolve(*parse_flags(["--failures.reward", entry]))


# ----------------------------------------------------------- through the real gateway


async def ended_session(
    gateway: Running, *, reason: str, turns: int, reward: float | None = None
) -> Any:
    [session] = await gateway.open()
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    for _ in range(turns):
        reply = await gateway.client(session).chat.completions.create(
            model="tiny", messages=messages
        )
        messages += [reply.choices[0].message, {"role": "user", "content": "go on"}]
    key = {"authorization": f"Bearer {ENV_KEY}"}
    if reward is not None:
        path = f"{gateway.url}/sessions/{session.id}/reward"
        await gateway.http.post(path, json={"reward": reward}, headers=key)
    path = f"{gateway.url}/sessions/{session.id}/abort"
    answer = await gateway.http.post(
        path, json={"reason": reason, "detail": "it went on"}, headers=key
    )
    assert answer.status_code == 200
    return session


async def test_the_tokens_of_a_failed_rollout_train_under_its_reward(
    gateway: Running, tmp_path: Path
) -> None:
    """From the gateway's abort through the store to the rows of a batch."""
    session = await ended_session(gateway, reason="timeout", turns=2, reward=0.9)
    silent = await ended_session(gateway, reason="timeout", turns=0)
    beside = await ended_session(gateway, reason="aborted", turns=1)
    store = gateway.store
    outcomes = {outcome.session_id: outcome for _, outcome in store.outbox_after(0)}
    failed = outcomes[session.id]
    empty = outcomes[silent.id]
    assert isinstance(failed, FailedRollout)
    assert isinstance(empty, FailedRollout)
    assert empty.partial is None
    assert failed.partial is not None
    assert failed.partial.num_turns == 2
    assert failed.partial.reward == 0.0
    other = outcomes[beside.id]
    assert isinstance(other, FailedRollout)
    assert other.partial is not None
    buffer = buffer_with("timeout=-2")
    lease = buffer.lease()
    assert lease is not None
    buffer.record(replace(failed, group_id=lease.group_id, index=0))
    buffer.record(replace(other.partial, group_id=lease.group_id, index=1, reward=1.0))
    taken = buffer.take()
    assert taken is not None
    assert store.without_tokens(taken.groups[0].rollouts_G) == {}
    rollouts = store.taken_rollouts(taken)
    assert [rollout.summary.reward for rollout in rollouts] == [-2.0, 1.0]
    batch = build_batch(taken, rollouts, advantage_function("dr_grpo"), 1e-6)
    trained = [int(row.loss_mask_T.sum()) for row in batch.samples]
    sampled = [
        sum(len(turn.sampled_ids_T) for turn in store.turns(one.id))
        for one in (session, beside)
    ]
    assert trained == sampled
    advantages = [
        set(own[row.loss_mask_T].tolist())
        for own, row in zip(batch.advantages, batch.samples, strict=True)
    ]
    assert advantages == [{-1.5}, {1.5}]


async def asked(client: Any, model: str = "tiny") -> None:
    await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "hi " * 3000}]
    )


async def test_prompt_over_the_context_length_fails_with_reason_context(
    gateway: Running,
) -> None:
    [session] = await gateway.open()

    async def through_openai(task: Task, endpoint: Any) -> float:
        await asked(gateway.client(session))
        return 1.0

    async def through_messages(task: Task, endpoint: Any) -> float:
        body = {
            "model": "tiny",
            "max_tokens": 8,
            "messages": [{"role": "user", "content": "hi " * 3000}],
        }
        headers = {"x-api-key": session.key, "anthropic-version": "2023-06-01"}
        answer = await gateway.http.post(
            f"{session.base_url}/messages", json=body, headers=headers
        )
        answer.raise_for_status()
        return 1.0

    class At:
        base_url = session.base_url
        api_key = session.key

    for function in (through_openai, through_messages):
        (outcome,) = await Runner(function, None, timeout_s=600.0).run(
            Task(id="t", payload={}), [At()]
        )  # type: ignore[arg-type, list-item]
        assert isinstance(outcome, Failure)
        assert outcome.reason is FailureReason.CONTEXT, outcome.detail


@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [
        (400, "context_length_exceeded", FailureReason.CONTEXT),
        (403, "max_turns_exceeded", FailureReason.LIMIT),
        (403, "max_tokens_exceeded", FailureReason.LIMIT),
        (401, "session_timeout", FailureReason.TIMEOUT),
        (400, "invalid_request", FailureReason.EXCEPTION),
        (503, "context_length_exceeded", FailureReason.ENGINE),
    ],
)
@pytest.mark.parametrize("ours", [True, False])
async def test_refusals_by_the_gateway_have_the_reason_of_the_exhausted_limit(
    status: int, code: str, reason: FailureReason, ours: bool
) -> None:
    url = "http://gw:8000/s/k/v1"
    asked_at = (
        f"{url}/chat/completions" if ours else "http://judge:9/v1/chat/completions"
    )

    async def rollout(task: Task, endpoint: Any) -> float:
        request = httpx.Request("POST", asked_at)
        response = httpx.Response(
            status, request=request, json={"error": {"code": code}}
        )
        raise RuntimeError("wrapped") from openai.APIStatusError(
            "refused", response=response, body=None
        )

    class At:
        base_url = url
        api_key = "k"

    (outcome,) = await Runner(rollout, None, timeout_s=600.0).run(
        Task(id="t", payload={}), [At()]
    )  # type: ignore[arg-type, list-item]
    assert isinstance(outcome, Failure)
    assert outcome.reason is (reason if ours else FailureReason.EXCEPTION)


# ----------------------------------------------------- the same failure over and over


def told(number: int, text: str = "returned str, not a float") -> FailedRollout:
    failed_rollout = failure(f"g{number}", 0)
    return replace(failed_rollout, reason=FailureReason.BAD_RETURN, detail=text)


async def actor_after(
    path: Path, most: int | None, record: Callable[[GroupBuffer], None]
) -> BufferActor:
    actor = BufferActor(
        BufferConfig(
            failures=FailuresConfig(max_identical=most, max_at_start=None),
            max_staleness=50,
            group_filter="none",
        ),
        RolloutConfig(
            rollout_batch_size=20, n_samples_per_prompt=1, rollout_max_attempts=1
        ),
        tasks_factory=lambda: (Task(id=f"t{n}", payload={}) for n in itertools.count()),
        run_store_path=path,
        poll_interval_s=0.001,
    )
    await actor.start()
    while await actor.lease() is not None:
        pass
    record(actor._buffer)
    return actor


async def test_run_whose_rollouts_all_fail_alike_ends_with_their_message(
    tmp_path: Path,
) -> None:
    def fail(buffer: GroupBuffer) -> None:
        for number in range(12):
            buffer.record(
                told(
                    number,
                    f"Traceback\n  line {number}\nTypeError: at 0x{number:x}: no 'x{number}'",
                )
            )

    actor = await actor_after(tmp_path / "run.sqlite", 12, fail)
    with pytest.raises(IdenticalFailuresError) as caught:
        await asyncio.wait_for(actor.take(600.0), 120)
    text = str(caught.value)
    assert text.startswith("the last 12 rollouts all failed alike")
    assert "\n" not in text
    assert "(bad_return): Traceback line 11 TypeError: at 0xb: no 'x11'" in text
    assert "--failures.max-identical" in text
    report = await actor.failures()
    assert report.alike == 12
    assert report.failed == {"bad_return": 12}
    assert report.finished == 0
    await actor.close()


@pytest.mark.parametrize(
    "between", ["a rollout that finished", "another failure", "no limit"]
)
async def test_only_the_same_failure_without_a_success_between_ends_it(
    tmp_path: Path, between: str
) -> None:
    def fail(buffer: GroupBuffer) -> None:
        for number in range(24):
            if number == 12 and between == "a rollout that finished":
                buffer.record(summary("g12", 0))
            elif number == 12 and between == "another failure":
                buffer.record(told(number, "something else"))
            else:
                buffer.record(told(number))

    most = None if between == "no limit" else 13
    actor = await actor_after(tmp_path / "run.sqlite", most, fail)
    waiting = asyncio.create_task(actor.take(600.0))
    for _ in range(50):
        await asyncio.sleep(0.001)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait({waiting})
    await actor.close()


@pytest.mark.parametrize(
    "reason",
    [
        FailureReason.WORKER_DIED,
        FailureReason.MEMORY,
        FailureReason.ENGINE,
        FailureReason.ENVIRONMENT_GONE,
    ],
)
async def test_worker_death_that_fails_many_rollouts_does_not_end_the_run(
    tmp_path: Path, reason: FailureReason
) -> None:
    """A worker with hundreds of rollouts in it, or an engine, is replaced; the run goes
    on."""

    def fail(buffer: GroupBuffer) -> None:
        for number in range(20):
            buffer.record(replace(told(number, "rollout worker 0 died"), reason=reason))

    actor = await actor_after(tmp_path / "run.sqlite", 12, fail)
    waiting = asyncio.create_task(actor.take(600.0))
    for _ in range(50):
        await asyncio.sleep(0.001)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait({waiting})
    report = await actor.failures()
    assert report.alike == 20
    assert "the run goes on" in FailureReporter(limits(12)).texts(report)[1], (
        "it is told all the same"
    )
    await actor.close()


def limits(identical: int, at_start: int = 0) -> FailureLimits:
    return FailureLimits(identical=identical, at_start=at_start)


def report(alike: int, finished: int = 0) -> FailureReport:
    lines = "\n".join(f"line {n}" for n in range(20))
    return FailureReport(
        failed={"bad_return": alike},
        finished=finished,
        alike=alike,
        reason="bad_return",
        detail=lines,
    )


def test_warnings_about_failures_in_a_row_are_printed_at_growing_counts() -> None:
    reporter = FailureReporter(limits(128))
    heard = [count for count in range(1, 129) if reporter.texts(report(count))]
    assert heard == [4, 16, 64]
    later = FailureReporter(limits(128))
    assert [
        count for count in range(1, 129) if later.texts(report(count, finished=1))
    ] == [64]
    assert later.texts(report(0, finished=2)) == []
    assert later.texts(report(64, finished=2)) != [], (
        "a new row of failures is told again"
    )
    (text,) = FailureReporter(limits(128)).texts(report(5))
    assert text.startswith(
        "warning: the first 5 rollouts all failed alike (bad_return; the run ends at 128"
    )
    assert text.endswith("    line 18\n    line 19")
    assert "line 13" not in text


TRACEBACK = """\
Traceback (most recent call last):
  File "/x/invrl/rollout/runner.py", line 9, in _call
    return await function(*arguments)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/home/u/my_agent.py", line 9, in rollout
    return float(task.payload["awnser"])
                 ~~~~~~~~~~~~^^^^^^^^^^
KeyError: 'awnser'
at my_agent.py:9, in rollout: return float(task.payload["awnser"])"""


def test_first_failure_of_each_reason_is_printed_at_once_with_its_line_of_user_code() -> (
    None
):
    reporter = FailureReporter(limits(128, at_start=32))
    single_report = FailureReport(
        failed={}, finished=0, alike=1, firsts={"exception": TRACEBACK}
    )
    assert reporter.texts(single_report) == [
        "warning: the first rollout that failed (exception):\n    KeyError: 'awnser'\n"
        '    at my_agent.py:9, in rollout: return float(task.payload["awnser"])'
    ]
    assert reporter.texts(single_report) == [], "once"
    two = replace(
        single_report,
        firsts={"exception": TRACEBACK, "timeout": "no result within 300 s"},
    )
    (text,) = reporter.texts(two)
    assert (
        text
        == "warning: the first rollout that failed (timeout):\n    no result within 300 s"
    )


def test_the_first_failure_names_the_command_that_shows_the_others() -> None:
    """Six rollouts may have raised six different exceptions, and the console shows
    one."""
    folder = RunFolder(path=Path("/runs/my run"))
    reporter = FailureReporter(limits(128), show_all=command_for_failures(folder))
    failures = {"exception": TRACEBACK, GROUP_FILTER: "KeyError: 'x'"}
    rollout, group_filter = reporter.texts(
        FailureReport(failed={}, finished=0, alike=1, firsts=failures)
    )
    assert rollout.endswith(": invrl samples '/runs/my run' --failed")
    assert "invrl samples" not in group_filter, "it is no rollout"
    assert command_for_failures(folder, held_out=True).endswith("--failed --eval")


def at_start(buffer: GroupBuffer) -> None:
    FailureLimits(identical=0, at_start=6).check(buffer.failure_report())


def broken(
    group: str, index: int, attempt: int = 0, reason: str = "exception"
) -> FailedRollout:
    failed_rollout = failure(group, index, attempt)
    return replace(failed_rollout, reason=FailureReason(reason), detail=TRACEBACK)


def leased(buffer: GroupBuffer) -> None:
    while buffer.lease() is not None:
        pass


def test_a_run_in_which_every_attempt_fails_for_one_reason_ends() -> None:
    """Two groups of two, three attempts each."""
    buffer = make(batch=2, group=2, attempts=3)
    places = [("g0", 0), ("g0", 1), ("g1", 0), ("g1", 1)]
    leased(buffer)
    for group, index in places:
        buffer.record(broken(group, index))
    leased(buffer)
    buffer.record(broken("g0", 0, 1))
    at_start(buffer)  # five so far
    buffer.record(broken("g1", 1, 1))
    with pytest.raises(IdenticalFailuresError) as caught:
        at_start(buffer)
    assert str(caught.value).startswith(
        "all 6 rollouts so far failed (exception). The first one: KeyError:"
    )
    assert 'at my_agent.py:9, in rollout: return float(task.payload["awnser"])' in str(
        caught.value
    )
    assert "--failures.max-at-start" in str(caught.value)


def test_run_does_not_end_before_its_slow_first_rollouts_have_ended() -> None:
    """Tasks with a broken label fail at once, again and again, while the others still
    run."""
    buffer = make(batch=2, group=1, attempts=100)
    leased(buffer)
    for attempt in range(20):
        buffer.record(broken("g0", 0, attempt))
        leased(buffer)
        at_start(buffer)
    buffer.record(broken("g1", 0))
    with pytest.raises(IdenticalFailuresError, match="all 21 rollouts"):
        at_start(buffer)


def test_run_ends_with_the_common_reason_although_a_worker_died_last() -> None:
    buffer = make(batch=4, group=2, attempts=3)
    leased(buffer)
    for group in range(3):
        for index in range(2):
            buffer.record(broken(f"g{group}", index))
    buffer.record(broken("g3", 0, reason="worker_died"))
    buffer.record(broken("g3", 1, reason="worker_died"))
    with pytest.raises(
        IdenticalFailuresError, match=r"^all 6 rollouts so far failed \(exception\)"
    ):
        at_start(buffer)


@pytest.mark.parametrize(
    "but",
    ["one finished", "another reason", "a worker died", "they count", "one counts"],
)
def test_run_continues_at_its_start_unless_every_rollout_fails_for_one_reason(
    but: str,
) -> None:
    buffer = GroupBuffer(
        BufferConfig(
            failures=FailuresConfig(reward=("timeout=0",)), group_filter="none"
        ),
        RolloutConfig(
            rollout_batch_size=8, n_samples_per_prompt=2, rollout_max_attempts=3
        ),
        tasks=tasks(),
        group_filter=lambda group: None,
    )
    leased(buffer)
    if but == "one finished":
        buffer.record(summary("g7", 0))
    elif but == "one counts":
        buffer.record(failing("g7", 0, reason=FailureReason.TIMEOUT))
    elif but == "another reason":
        buffer.record(broken("g7", 0, reason="bad_return"))
    for group in range(8):
        for index in range(2):
            if but == "they count":
                buffer.record(failing(f"g{group}", index, reason=FailureReason.TIMEOUT))
            elif but == "a worker died":
                buffer.record(broken(f"g{group}", index, reason="worker_died"))
            else:
                buffer.record(broken(f"g{group}", index))
    at_start(buffer)


def test_console_line_counts_failures_by_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = PlainProgress(3)
    progress.failures({"timeout": 2, "bad_return": 5})
    progress.step(1, {"rollout/reward_mean": 0.5})
    assert (
        "step 1/3: reward 0.5, failed 7 (bad_return 5 timeout 2)"
        in capsys.readouterr().out
    )


def test_an_evaluation_line_counts_the_rollouts_that_failed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = {
        "eval/easy/greedy/accuracy": 0.0,
        "eval/easy/greedy/failed": 16.0,
        "eval/easy/greedy/samples": 16.0,
    }
    PlainProgress(3).step(2, values)
    assert (
        "eval/easy/greedy/accuracy 0 (16 of 16 rollouts failed)"
        in capsys.readouterr().out
    )
    PlainProgress(3).step(2, values | {"eval/easy/greedy/failed": 0.0})
    assert "failed" not in capsys.readouterr().out


def test_restored_buffer_keeps_failures_that_count() -> None:
    buffer = buffer_with("timeout=-1")
    buffer.lease()
    buffer.record(failing("g0", 1, reason=FailureReason.TIMEOUT))
    again = make(group=2, batch=1)
    again.restore(through_bytes(buffer, 0), [])
    assert again._in_flight["g0"].finished[1].failure is FailureReason.TIMEOUT
    assert again._in_flight["g0"].finished[1].reward == -1.0
