"""Who may sample, until when; what a finished session hands over; whose sampling
counts."""

from __future__ import annotations

import secrets
import string
from dataclasses import replace

import numpy as np
import pytest
from stored_rollouts import turn

from invrl.errors import SessionError
from invrl.gateway.keys import is_signed
from invrl.gateway.registry import Opening, SessionRegistry
from invrl.gateway.session_record import SessionRecord
from invrl.gateway.sessions.conversation_roots import auxiliary_roots
from invrl.gateway.sessions.rollout_summary import failed, summarise
from invrl.gateway.turns.sampling import resolve
from invrl.gateway.types import ClientSampling
from invrl.types.leases import GroupMember
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import FailedRollout, RolloutSummary
from invrl.types.sessions import Purpose, Reward, Sampling, SessionTerms
from invrl.types.turns import Turn

MEMBERS = [
    GroupMember(index=0, attempt=0),
    GroupMember(index=1, attempt=2),
]


def registry(max_open: int = 8) -> SessionRegistry:
    return SessionRegistry(max_open=max_open, ttl_s=10.0, public_url="http://host:1/")


def opened(
    book: SessionRegistry, now: float = 0.0, purpose: Purpose = "train"
) -> list[SessionRecord]:
    terms = SessionTerms(
        task_id="t", group_id="g", purpose=purpose, sampling=Sampling()
    )
    group = Opening(terms=terms, members=MEMBERS)
    return book.open(group, now=now, opened_at=now)


def test_a_key_opens_its_own_session_only():
    book = registry()
    first, second = opened(book)
    assert first.session.key != second.session.key
    assert len(first.session.key) >= 4 + 32
    assert first.session.base_url == f"http://host:1/s/{first.session.key}/v1"
    assert [record.session.attempt for record in (first, second)] == [0, 2]
    assert book.by_key([first.session.key]) is first
    assert book.by_key([first.session.key] * 2) is first
    for keys in (
        [],
        ["isk-guess"],
        [first.session.key, second.session.key],
        [first.session.id],
    ):
        with pytest.raises(SessionError) as caught:
            book.by_key(keys)
        assert caught.value.status == 401


def test_ten_thousand_guessed_keys_open_nothing():
    """Random ones, and every key one character away from a real one."""
    book = registry()
    [key, other] = [record.session.key for record in opened(book)]
    letters = string.ascii_letters + string.digits + "-_"
    near = {
        key[:at] + letter + key[at + 1 :]
        for at in range(len(key))
        for letter in letters
    } - {key}
    guesses = [
        *near,
        key[:-1],
        key + "=",
        key.upper(),
        key + "\0",
        "",
        other[:18] + key[18:],
    ]
    guesses += [
        "isk-" + secrets.token_urlsafe(24) for _ in range(10_000 - len(guesses))
    ]
    for guess in guesses:
        with pytest.raises(SessionError) as caught:
            book.by_key([guess])
        assert caught.value.status == 401
        assert caught.value.code == "invalid_api_key"
    assert book.by_key([key]).session.key == key


def test_session_key_is_signed_with_the_gateways_secret():
    [key, other] = [record.session.key for record in opened(registry())]
    assert is_signed(key, b"")
    assert not is_signed(key, b"another secret")
    letters = string.ascii_letters + string.digits + "-_"
    near = {
        key[:at] + letter + key[at + 1 :]
        for at in range(len(key))
        for letter in letters
    } - {key}
    for guess in (
        *near,
        key[:32] + other[32:],
        key[:-1],
        key + "A",
        "",
        "isk-00",
        "ünïcödé" * 8,
    ):
        assert not is_signed(guess, b"")


def test_request_id_opens_new_sessions_in_another_incarnation():
    """A place that is leased again in a later incarnation is asked for under the id
    that its lease gives it."""
    group = Opening(
        terms=SessionTerms(
            task_id="t", group_id="g", purpose="train", sampling=Sampling()
        ),
        members=MEMBERS,
        request_id="derived from the lease",
    )
    incarnations = {}
    for incarnation in ("first", "second"):
        book = SessionRegistry(
            max_open=8,
            ttl_s=10.0,
            public_url="http://h",
            secret=b"key",
            incarnation=incarnation,
        )
        again = SessionRegistry(
            max_open=8,
            ttl_s=10.0,
            public_url="http://h",
            secret=b"key",
            incarnation=incarnation,
        )
        incarnations[incarnation] = [
            record.session for record in book.open(group, now=0.0, opened_at=0.0)
        ]
        assert [
            record.session for record in again.open(group, now=0.0, opened_at=0.0)
        ] == incarnations[incarnation], "one incarnation, two workers"
        assert [record.session for record in book.reopened(group)] == incarnations[
            incarnation
        ]
    for first, second in zip(
        incarnations["first"], incarnations["second"], strict=True
    ):
        assert first.id != second.id
        assert first.key != second.key


def test_admission_accepts_a_whole_group_or_refuses_it():
    book = registry(max_open=3)
    first = opened(book)
    with pytest.raises(SessionError) as caught:
        opened(book)
    assert caught.value.status == 429
    assert caught.value.retry_after_s == 1.0
    assert book.counts() == {"open": 2}
    book.close(first[0], "finished", failed(first[0], FailureReason.EMPTY, ""))
    opened(book)
    assert book.counts() == {"open": 3, "finished": 1}


def test_closed_session_refuses_requests_and_keeps_its_outcome():
    book = registry()
    record = opened(book)[0]
    outcome = failed(record, FailureReason.EMPTY, "")
    book.close(record, "aborted", outcome)
    with pytest.raises(SessionError, match="aborted") as caught:
        book.by_key([record.session.key])
    assert caught.value.status == 401
    assert caught.value.code == "session_closed"
    with pytest.raises(SessionError) as late:
        book.reward(record, Reward(value=1.0))
    assert late.value.status == 409
    assert book.by_id(record.session.id).outcome == outcome


def test_sessions_expire_after_their_time():
    book = registry()
    old = opened(book, now=0.0)
    young = opened(book, now=5.0)
    assert book.expired(10.0) == []
    assert book.expired(10.1) == old
    book.close(old[0], "expired", failed(old[0], FailureReason.TIMEOUT, ""))
    assert book.expired(100.0) == [old[1], *young]


def test_time_in_which_turns_were_held_does_not_expire_a_session():
    book = registry()
    held, other = opened(book, now=0.0)
    held.held_s = 5.0
    assert book.expired(10.1) == [other]
    assert book.expired(15.1) == [held, other]


def test_a_summary_counts_only_what_was_delivered_as_trained():
    record = opened(registry())[0]
    record.reward = 0.25
    turns = [
        turn("1"),
        replace(turn("2", parent="1"), finish_reason="length", fork_reason=""),
        replace(turn("3"), finish_reason="abort", fork_reason="history_edited"),
        turn("4"),
    ]
    outcome = summarise(record, turns, {"1", "2", "3"}, 9.0)
    assert isinstance(outcome, RolloutSummary)
    assert outcome.reward == 0.25
    assert outcome.num_turns == 4
    assert outcome.forks == 1
    assert outcome.truncated is True
    assert outcome.prompt_tokens == 20
    assert outcome.later_prompt_tokens == 5
    assert outcome.cached_tokens == 8
    assert outcome.later_cached_tokens == 2
    assert outcome.sampled_tokens == 12
    assert outcome.trained_tokens == 6
    assert outcome.oldest_version == 3
    assert outcome.newest_version == 4
    assert outcome.started_at == 0.0
    assert outcome.finished_at == 9.0


def test_sessions_without_tokens_or_reward_have_failed():
    record = opened(registry())[0]
    no_reward = summarise(record, [turn("1")], {"1"}, 0.0)
    record.reward = 1.0
    undelivered = summarise(record, [turn("1")], set(), 0.0)
    nothing = summarise(record, [], set(), 0.0)
    for outcome, reason in (
        (no_reward, FailureReason.BAD_REWARD),
        (undelivered, FailureReason.EMPTY),
        (nothing, FailureReason.EMPTY),
    ):
        assert isinstance(outcome, FailedRollout)
        assert outcome.reason is reason
    assert "the model was never asked in this session" in nothing.detail
    assert "endpoint.openai()" in nothing.detail
    evaluation = opened(registry(), purpose="eval")[0]
    assert isinstance(summarise(evaluation, [turn("1")], {"1"}, 0.0), RolloutSummary)


def test_session_without_trained_tokens_reports_why():
    """9 tokens reach nobody, 8 are of a forced call, 7 aborted; the auxiliary root has
    the last 5."""
    record = opened(registry())[0]
    record.reward = 1.0
    turns = [
        turn("lost", sampled=9),
        replace(turn("forced", parent="lost", sampled=8), constrained=True),
        replace(turn("aborted", parent="lost", sampled=7), finish_reason="abort"),
        rooted("title", [9], sampled=5, fork="new_conversation"),
    ]
    outcome = summarise(
        record, turns, {"forced", "aborted", "title"}, 0.0, train_auxiliary=False
    )
    assert isinstance(outcome, FailedRollout)
    assert outcome.reason == FailureReason.EMPTY
    assert outcome.detail == (
        "no token to train: of 29 sampled in 4 turns 9 did not reach the client, "
        "15 were constrained or aborted, 5 are of auxiliary conversations"
    )


def test_sampling_parameters_come_from_the_run_in_training_and_from_the_client_in_serving():
    asked = ClientSampling(
        temperature=0.2,
        top_p=1.0,
        sampling_seed=3,
        max_new_tokens=9,
        logit_bias={"5": 1.0},
    )
    pinned = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=20)
    purposes: tuple[Purpose, ...] = ("train", "eval")
    for purpose in purposes:
        chosen = resolve(purpose, pinned, asked)
        assert chosen.sampling == replace(pinned, max_new_tokens=9)
        assert chosen.extra == {}
        assert chosen.overridden == ("temperature", "logit_bias", "sampling_seed")
    with pytest.raises(SessionError, match="logit_bias"):
        resolve("serve", pinned, asked)
    served = resolve("serve", pinned, replace(asked, logit_bias=None))
    assert served.sampling == Sampling(temperature=0.2, top_p=1.0, max_new_tokens=9)
    assert served.extra == {"sampling_seed": 3}
    assert served.overridden == ()
    bounded = resolve("serve", pinned, ClientSampling(max_new_tokens=21))
    assert bounded.sampling.max_new_tokens == 20
    assert bounded.overridden == ("max_new_tokens",)
    neutral = ClientSampling(
        temperature=1.0, top_k=-1, frequency_penalty=0.0, logit_bias={}
    )
    assert resolve("train", pinned, neutral).overridden == ()


def rooted(
    name: str, context: list[int], *, sampled: int, fork: str = "", session: str = "a"
) -> Turn:
    ids_T = np.array(context, np.int32)
    return replace(
        turn(name, session, sampled=sampled), context_ids_T=ids_T, fork_reason=fork
    )


def test_the_main_conversation_has_the_most_tokens_its_forks_included():
    """The main conversation is re-rooted by a client that strips thinking: alone each
    root is small."""
    new = "new_conversation"
    title = rooted("title", [1, 2, 9, 9], sampled=5)
    turns = [
        title,
        rooted("main", [1, 2, 3, 4], sampled=3, fork=new),
        rooted("again", [1, 2, 3, 4, 5, 6], sampled=3, fork="thinking_stripped"),
        rooted("summary", [7, 7], sampled=2, fork=new),
        rooted("retitled", [1, 2, 9, 9, 9], sampled=2, fork="history_edited"),
        rooted("more", [1, 2, 3, 4, 5, 7], sampled=3, fork="history_edited"),
        rooted("child", [1, 2], sampled=1, session="b"),
    ]
    delivered = {turn.id for turn in turns}
    assert auxiliary_roots(turns, delivered) == ("title", "summary", "retitled")
    assert auxiliary_roots([], set()) == ()
    record = opened(registry())[0]
    record.reward = 1.0
    trained = [
        summarise(record, turns, delivered, 0.0, train_auxiliary=train)
        for train in (True, False)
    ]
    assert [
        (one.trained_tokens, one.auxiliary_tokens, one.untrained_roots)
        for one in trained
        if isinstance(one, RolloutSummary)
    ] == [
        (19, 9, ()),
        (10, 9, ("title", "summary", "retitled")),
    ]


def test_abandoned_and_aborted_turns_do_not_count_for_the_main_conversation():
    """A long first answer that its client left, one that broke off, and then the
    conversation that counts."""
    new = "new_conversation"
    turns = [
        rooted("left", [1, 2], sampled=500),
        replace(
            rooted("aborted", [3, 4], sampled=400, fork=new), finish_reason="abort"
        ),
        rooted("real", [5, 6], sampled=30, fork=new),
        rooted("title", [7, 8], sampled=20, fork=new),
    ]
    delivered = {"aborted", "real", "title"}
    assert auxiliary_roots(turns, delivered) == ("left", "aborted", "title")
    record = opened(registry())[0]
    record.reward = 1.0
    outcome = summarise(record, turns, delivered, 0.0, train_auxiliary=False)
    assert isinstance(outcome, RolloutSummary)
    assert outcome.trained_tokens == 30


def test_samples_of_one_prompt_are_one_conversation():
    """None of three answers to the first prompt is as long as the title, but together
    they are."""
    turns = [
        rooted("one", [1, 2], sampled=8),
        rooted("title", [7, 8], sampled=10, fork="new_conversation"),
        rooted("two", [1, 2], sampled=1),
        rooted("three", [1, 2], sampled=3),
    ]
    assert auxiliary_roots(turns, {turn.id for turn in turns}) == ("title",)
