"""Opens, rewards and closes sessions: keeps the registry, the live conversations and
the store consistent.

Invariants: a session is closed once, and a second close returns the same outcome. A
close first freezes the session, then takes a snapshot, then builds the outcome: once a
close has begun, no call, delivery or reward changes the session's outcome. The children
of a session end with it at the latest, and are part of its outcome. The session API
calls this class, and `expire_forever` ends sessions whose time is up.
"""

import asyncio
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from invrl.errors import DiskFullError, SessionError
from invrl.gateway.config import LateConfig, SessionPolicy
from invrl.gateway.registry import Opening, SessionRegistry
from invrl.gateway.session_record import SessionRecord
from invrl.gateway.sessions.number_checks import by_turn_id, check_numbers
from invrl.gateway.sessions.response_ids import turn_id_from_response
from invrl.gateway.sessions.rollout_summary import (
    failed,
    summarise,
    token_counts,
    with_partial,
)
from invrl.gateway.turns.turns import Turns
from invrl.store.lease_store import LeaseStore
from invrl.store.rows import RewardDeadline, SessionState
from invrl.store.run_store_writer import RunStoreWriter
from invrl.types.extra_columns import ExtraNumbers
from invrl.types.fields import field_values
from invrl.types.leases import GroupMember
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import FailedRollout, Outcome
from invrl.types.sessions import Reward, Sampling, SessionLimits, SessionTerms
from invrl.types.turns import Turn

_log = logging.getLogger(__name__)
_SETTLE_S = 5.0
"""Time that a close waits for answers that are on their way to the client."""
_EXPIRY_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """Reason that a session is closed as failed."""

    reason: FailureReason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lifecycle:
    registry: SessionRegistry
    turns: Turns
    store: RunStoreWriter
    sampling: Sampling
    """Default sampling parameters of sessions."""
    policy: SessionPolicy
    late: LateConfig | None = None
    """None: a session that finishes without a reward has failed."""
    leases: LeaseStore | None = None
    """None unless environments lease the tasks of the run. If they do, training
    sessions need a lease."""
    run_ended: Callable[[], bool] = lambda: False
    """Whether the run needs no more rollouts of environments that lease tasks."""
    tokens: Counter[str] = field(default_factory=Counter, init=False)
    """Sampled, delivered and trained tokens of closed sessions."""

    @property
    def limits(self) -> SessionLimits:
        """Upper limits of a session."""
        policy = self.policy
        return SessionLimits(
            max_turns=policy.max_turns,
            max_sampled_tokens=policy.max_tokens,
            timeout_s=policy.ttl_s,
            max_concurrent_calls=policy.max_calls,
        )

    async def open(self, opening: Opening) -> list[SessionRecord]:
        """Open all sessions or none. A repeated request gets the same sessions. Raises
        SessionError 429 if too many sessions are open, 400 for sampling parameters that
        training excludes, 409 for members that are not leased, 410 once the run has
        ended."""
        if opening.terms.purpose == "train":
            self._check_training(opening)
        earlier = self.registry.reopened(opening)
        if earlier:
            return await self._open_again(earlier)
        now = self.registry.awake_time.now()
        records = self.registry.open(opening, now=now, opened_at=time.time())
        # Before the commit: after it, other processes see the sessions in the store and
        # may end them.
        for record in records:
            self.turns.open(record)
        try:
            await self._store_opened(records, opening)
        except (sqlite3.Error, DiskFullError) as error:
            self.registry.forget(records)
            for record in records:
                self.turns.close(record)
            if isinstance(error, sqlite3.IntegrityError):
                raise _opening_refused(opening, error) from None
            raise
        return records

    async def _store_opened(
        self, records: list[SessionRecord], opening: Opening
    ) -> None:
        """Store opened sessions and return after the commit. Raises
        sqlite3.IntegrityError if the store's constraints exclude a session."""
        needs_lease = (
            self.leases is not None
            and opening.terms.purpose == "train"
            and opening.parent is None
        )
        committed = self.store.open_sessions(records, leased=needs_lease)
        await asyncio.wrap_future(committed)

    def _check_training(self, opening: Opening) -> None:
        """Raise SessionError if the run has ended, or if the policy could not be
        trained on the samples."""
        if self.run_ended():
            raise SessionError("the run has ended", status=410, code="run_ended")
        sampling = opening.terms.sampling
        if sampling.temperature <= 0 or sampling.top_p != 1:
            reason = (
                "training needs temperature > 0 and top_p = 1: with other values, the log-probs of the "
                "sampled tokens are not those of the policy"
            )
            raise SessionError(
                reason, status=400, code="untrainable_sampling", param="sampling"
            )

    async def _open_again(self, records: list[SessionRecord]) -> list[SessionRecord]:
        """Answer a repeated request after the commit of the first one. Raises
        SessionError 404 if the first one failed."""
        for record in records:
            record.last_heard.update()
        # Commits happen in order: after this empty one, the commit of the first request
        # has ended.
        await asyncio.wrap_future(self.store.open_sessions([]))
        return [self.registry.by_id(record.session.id) for record in records]

    async def open_child(
        self, parent: SessionRecord, limits: SessionLimits, request_id: str
    ) -> SessionRecord:
        """Open a session for a sub-agent, with the parent's place in the group. Raises
        SessionError like `open`."""
        session = parent.session
        qualified_id = ""
        if request_id:
            qualified_id = f"{session.id}/{request_id}"
        parent_terms = SessionTerms(**field_values(session, SessionTerms))
        opening = Opening(
            terms=replace(parent_terms, limits=limits),
            members=[GroupMember(index=session.index, attempt=session.attempt)],
            parent=parent,
            request_id=qualified_id,
        )
        [record] = await self.open(opening)
        return record

    async def reward(self, record: SessionRecord, reward: Reward) -> None:
        """Set the final reward, or the reward of a turn or trajectory of this session;
        a turn may be named by the id of its reply. If the session waits for its final
        reward, the final reward closes it. Raises SessionError 404 if there is no such
        turn, 409 once the session is closed."""
        reward = replace(
            reward,
            turn=turn_id_from_response(reward.turn),
            branch=turn_id_from_response(reward.branch),
        )
        turn_id = reward.turn or reward.branch
        if turn_id and not self._has_turn(record, turn_id):
            reason = (
                f"session {record.session.id} has no turn {turn_id!r}; use the id of one of its answers "
                "(turns of a child session belong to that session)"
            )
            raise SessionError(reason, status=404, code="turn_not_found", param="turn")
        self.registry.reward(record, reward)
        await asyncio.wrap_future(self.store.set_reward(record.session.id, reward))
        if record.reward_deadline is not None and not turn_id:
            await self._close(record, "finished")

    def _has_turn(self, record: SessionRecord, turn_id: str) -> bool:
        conversation = self.turns.find(record)
        if conversation is None:
            return False
        return any(turn.id == turn_id for turn in conversation.turns)

    async def attach(self, record: SessionRecord, extra: ExtraNumbers) -> None:
        """Store numbers of extra columns. A later number under the same turn and name
        replaces an earlier one. Raises SessionError 400 for numbers that are not as
        declared, 404 if there is no such turn, 409 once the session is closed. Nothing
        is stored if any of them is refused."""
        self.registry.check_unsettled(record)
        sampled_tokens: dict[str, int] = {}
        conversation = self.turns.find(record)
        if conversation is not None:
            sampled_tokens = {
                turn.id: len(turn.sampled_ids_T) for turn in conversation.turns
            }
        check_numbers(extra, self.policy.declared_columns, record, sampled_tokens)
        extra = by_turn_id(extra)
        self.registry.attach(record, extra)
        await asyncio.wrap_future(self.store.add_numbers(record.session.id, extra))

    async def finish(
        self,
        record: SessionRecord,
        reward: Reward | None = None,
        extra: ExtraNumbers | None = None,
    ) -> Outcome | None:
        """Close the session, after setting the numbers and the reward if given. Returns
        None if the session now waits for its reward."""
        if extra and _takes_reward(record):
            await self.attach(record, extra)
        if reward is not None and _takes_reward(record):
            await self.reward(record, reward)
        return await self._close(record, "finished")

    async def abort(
        self,
        record: SessionRecord,
        reason: FailureReason,
        detail: str,
        *,
        state: SessionState = "aborted",
    ) -> Outcome:
        """Close the session as failed. The outcome of a session that is closed already
        does not change."""
        failure = _Failure(reason=reason, detail=detail)
        outcome = await self._close(record, state, failure)
        assert outcome is not None, "an aborted session does not wait for a reward"
        return outcome

    async def expire_forever(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_INTERVAL_S)
            await self.expire(self.registry.awake_time.now())

    async def expire(self, now: float) -> None:
        """End the sessions whose time is up at `now` (lived seconds). They end
        concurrently, because closing a session whose client does not read its answer
        takes `_SETTLE_S`."""
        overdue = self.registry.expired(now)
        endings = [self._expire(record) for record in overdue]
        for record in self._abandoned(now):
            if record not in overdue:
                endings.append(self._abort_abandoned(record))
        for record in self._left_after_run():
            endings.append(self._abort_after_run(record))
        results = await asyncio.gather(*endings, return_exceptions=True)
        for error in results:
            if isinstance(error, Exception):  # the next round tries again
                _log.error("cannot expire a session", exc_info=error)

    async def _expire(self, record: SessionRecord) -> None:
        """End a session that is past its time to live, or past the deadline of its
        reward."""
        if record.state == "unrewarded" and record.reward is None:
            assert self.late is not None, "only with late rewards is one awaited"
            detail = f"no reward came within late.deadline_s = {self.late.deadline_s:g}"
            await self.abort(record, FailureReason.BAD_REWARD, detail, state="expired")
        elif record.state == "unrewarded" or (
            self.late is not None
            and self.late.expired == "accept"
            and record.parent is None
        ):
            await self._close(record, "finished")
        else:
            detail = "the session was open for longer than its timeout_s"
            await self.abort(record, FailureReason.TIMEOUT, detail, state="expired")

    def _abandoned(self, now: float) -> list[SessionRecord]:
        """Training sessions whose environment leased their places and has not been
        heard from for `session.idle_timeout_s`. An environment is heard from while one
        of its calls is being answered."""
        idle_s = self.policy.idle_timeout_s
        if self.leases is None or not idle_s:
            return []
        training = [
            record
            for record in self.registry.open_records()
            if record.session.purpose == "train"
        ]
        for record in training:
            if self.turns.is_called(record):
                record.last_heard.at = now
        # The children of an abandoned session end with it.
        parents = [record for record in training if record.parent is None]
        return [record for record in parents if now - record.last_heard.at > idle_s]

    async def _abort_abandoned(self, record: SessionRecord) -> None:
        detail = (
            "no call of its group came within session.idle_timeout_s = "
            f"{self.policy.idle_timeout_s:g}: its environment has ended or hangs (one that computes "
            f"for longer between two calls sends POST /sessions/{record.session.id}/heartbeat)"
        )
        await self.abort(
            record, FailureReason.ENVIRONMENT_GONE, detail, state="expired"
        )

    def _left_after_run(self) -> list[SessionRecord]:
        """Return training sessions that are open although the run has ended. Their
        children end with them."""
        if not self.run_ended():
            return []
        parents = [
            record for record in self.registry.open_records() if record.parent is None
        ]
        return [record for record in parents if record.session.purpose == "train"]

    async def _abort_after_run(self, record: SessionRecord) -> None:
        await self.abort(record, FailureReason.RUN_ENDED, "the run has ended")

    async def _close(
        self,
        record: SessionRecord,
        state: SessionState,
        failure: _Failure | None = None,
    ) -> Outcome | None:
        """Close a session and its children. Without a `failure`, the turns and the
        reward determine the outcome. Returns None if the session now waits for its
        reward."""
        if record.outcome is not None:
            return record.outcome
        conversation = self.turns.conversation_to_close(record)
        async with conversation.closed:
            if not conversation.frozen:
                record.frozen = True
                children = [
                    self._close(child, state, failure) for child in record.children
                ]
                await asyncio.gather(conversation.settle(_SETTLE_S), *children)
                conversation.freeze()
            if record.outcome is None:
                await self._conclude(record, state, failure)
            return record.outcome

    async def _conclude(
        self, record: SessionRecord, state: SessionState, failure: _Failure | None
    ) -> None:
        """Determine the outcome of a frozen session and hand it over, or let the
        session wait for its reward."""
        turns: list[Turn] = []
        delivered: set[str] = set()
        for member in record.family(finished=True):
            conversation = self.turns.conversation_to_close(member)
            turns += conversation.turns
            delivered.update(conversation.delivered)
        now = self.registry.awake_time.now()
        train_auxiliary = self.policy.train_auxiliary_roots
        if failure is not None:
            outcome: Outcome = failed(record, failure.reason, failure.detail)
        else:
            outcome = summarise(
                record, turns, delivered, now, train_auxiliary=train_auxiliary
            )
            unrewarded = (
                isinstance(outcome, FailedRollout)
                and outcome.reason is FailureReason.BAD_REWARD
            )
            if unrewarded and self.late is not None:
                await self._await_reward(record, now, self.late.deadline_s)
                return
        is_top = record.parent is None
        if is_top and isinstance(outcome, FailedRollout):
            outcome = with_partial(
                outcome, record, turns, delivered, now, train_auxiliary=train_auxiliary
            )
        record.reward_deadline = None
        hand_over = is_top and record.session.purpose == "train"
        committed = self.store.close_session(
            record.session.id, state, outcome, hand_over=hand_over
        )
        await asyncio.wrap_future(committed)
        self.registry.close(record, state, outcome)
        if is_top:
            self.tokens.update(token_counts(turns, delivered, outcome))
            for member in record.family():
                self.turns.close(member)

    async def _await_reward(
        self, record: SessionRecord, now: float, deadline_s: float
    ) -> None:
        """Let a finished session wait for its reward. One that waits already keeps its
        deadline, which is stored again: the disk may have been full before."""
        if record.reward_deadline is None:
            deadline = RewardDeadline(
                awake_s=now + deadline_s,
                unix_s=time.time() + deadline_s,
            )
            self.registry.wait(record, deadline)
        else:
            deadline = record.reward_deadline
        await asyncio.wrap_future(self.store.await_reward(record.session.id, deadline))


def _takes_reward(record: SessionRecord) -> bool:
    """Whether a finish may still set the reward and numbers. Another one may have
    closed the session."""
    return not record.frozen or record.reward_deadline is not None


def _opening_refused(opening: Opening, error: sqlite3.IntegrityError) -> SessionError:
    """Return the error for sessions that the store's constraints exclude."""
    if "NOT NULL" in str(error):
        reason = (
            f"not all of these members of group {opening.terms.group_id!r} are leased"
        )
        return SessionError(reason, status=409, code="not_leased", param="members")
    reason = f"request_id {opening.request_id!r} has opened sessions that are lost"
    return SessionError(
        reason, status=409, code="request_id_reused", param="request_id"
    )
