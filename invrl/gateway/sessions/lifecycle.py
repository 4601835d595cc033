"""Opening, rewarding and closing sessions: the registry, the live conversations and the store, kept in step.
Invariants: a session is closed once; who closes it again gets the same outcome. Freeze, snapshot, build: once
a close has begun, no call, delivery or reward changes what the session hands over. A session's children end
with it at the latest and are part of its outcome. Called by the session API, and by itself when a session's
time is up."""

import asyncio
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from invrl.errors import SessionError
from invrl.gateway.config import SessionPolicy
from invrl.gateway.registry import Opening, SessionRecord, SessionRegistry, SessionState
from invrl.gateway.sessions.closing import failed, summarise, token_counts, with_partial
from invrl.gateway.turns.turns import Turns
from invrl.store.lease_store import LeaseStore
from invrl.store.run_store_writer import RunStoreWriter
from invrl.types import FailedRollout, FailureReason, GroupMember, Outcome, Reward, Sampling, SessionLimits

Failure = tuple[FailureReason, str]
_log = logging.getLogger(__name__)
_SETTLE_S = 5.0
_EXPIRY_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lifecycle:
    registry: SessionRegistry
    turns: Turns
    store: RunStoreWriter
    sampling: Sampling
    """For sessions that are opened without one."""
    policy: SessionPolicy
    leases: LeaseStore | None = None
    """Where training sessions need a lease: in runs whose environments lease tasks."""
    run_ended: Callable[[], bool] = lambda: False
    """Whether nobody waits for the rollouts of such environments any more."""
    tokens: Counter[str] = field(default_factory=Counter, init=False)
    """Sampled, delivered and trained ones, over closed sessions."""

    @property
    def limits(self) -> SessionLimits:
        """The most that a session may be granted."""
        policy = self.policy
        return SessionLimits(
            max_turns=policy.session_max_turns,
            max_sampled_tokens=policy.session_max_tokens,
            timeout_s=policy.session_ttl_s,
            max_concurrent_calls=policy.session_max_calls,
        )

    async def open(self, group: Opening) -> list[SessionRecord]:
        """All members or none; the same request again gets the same sessions. SessionError 429 when they do
        not fit, 400 where tokens sampled so could not be trained, 409 for places that are not leased, 410
        once the run has ended."""
        training = group.purpose == "train"
        if training and self.run_ended():
            raise SessionError("the run has ended", status=410, code="run_ended")
        if training and (group.sampling.temperature <= 0 or group.sampling.top_p != 1):
            reason = (
                "training needs temperature > 0 and top_p = 1: the log-probs of other samplings are not "
                "those of the policy"
            )
            raise SessionError(reason, status=400, code="untrainable_sampling", param="sampling")
        now, leased = time.time(), self.leases is not None and training and group.parent is None
        if earlier := self.registry.reopened(group):
            for record in earlier:
                record.life.see()
            await asyncio.wrap_future(self.store.open_sessions([], [], now))  # after the one that holds them
            return [self.registry.by_id(record.session.id) for record in earlier]  # unless that one failed
        records = self.registry.open(group, now)
        for record in records:  # before the commit, after which others see the sessions, and may end them
            self.turns.open(record)
        sessions, hashes = [one.session for one in records], [one.key_hash for one in records]
        try:
            await asyncio.wrap_future(self.store.open_sessions(sessions, hashes, now, leased=leased))
        except sqlite3.Error as error:
            self.registry.forget(records)
            for record in records:
                self.turns.close(record)
            if not isinstance(error, sqlite3.IntegrityError):
                raise
            if "NOT NULL" in str(error):
                reason = f"not all of these members of group {group.group_id!r} are leased"
                raise SessionError(reason, status=409, code="not_leased", param="members") from None
            reason = f"request_id {group.request_id!r} has opened sessions that are lost"
            raise SessionError(reason, status=409, code="request_id_reused", param="request_id") from None
        return records

    async def open_child(
        self, parent: SessionRecord, limits: SessionLimits, request_id: str
    ) -> SessionRecord:
        """A session for a sub-agent, in its parent's place. SessionError as `open`."""
        of = parent.session
        child = Opening(
            task_id=of.task_id,
            group_id=of.group_id,
            members=[GroupMember(index=of.index, attempt=of.attempt)],
            purpose=of.purpose,
            sampling=of.sampling,
            limits=limits,
            parent=parent,
            request_id=request_id and f"{of.id}/{request_id}",
        )
        return (await self.open(child))[0]

    async def reward(self, record: SessionRecord, reward: Reward) -> None:
        """The final reward, or that of a turn or branch of this session. SessionError 404 if it has no such
        turn, 409 once the session is closed. An unrewarded session ends with its final reward."""
        named, conversation = reward.turn or reward.branch, self.turns.find(record)
        if named and (conversation is None or named not in {turn.id for turn in conversation.turns}):
            reason = f"session {record.session.id} has no turn {named!r}"
            raise SessionError(reason, status=404, code="turn_not_found", param="turn")
        self.registry.reward(record, reward)
        await asyncio.wrap_future(self.store.set_reward(record.session.id, reward))
        if record.reward_deadline is not None and not named:
            await self._close(record, "finished")

    async def finish(self, record: SessionRecord, reward: Reward | None = None) -> Outcome | None:
        """None while the session waits for its reward."""
        if reward is not None and (not record.frozen or record.reward_deadline is not None):
            await self.reward(record, reward)
        return await self._close(record, "finished")

    async def abort(
        self, record: SessionRecord, reason: FailureReason, detail: str, *, state: SessionState = "aborted"
    ) -> Outcome:
        outcome = await self._close(record, state, (reason, detail))
        assert outcome is not None, "an aborted session waits for nothing"
        return outcome

    async def expire_forever(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_INTERVAL_S)
            await self.expire(time.time())

    async def expire(self, now: float) -> None:
        """Ends the sessions whose time is up at `now` (Unix seconds), side by side: one whose client does not
        read its answer takes `_SETTLE_S`."""
        overdue = self.registry.expired(now)
        ending = [self._expire(record) for record in overdue]
        ending += [self._give_up(record) for record in self._forsaken(now) if record not in overdue]
        ending += [self._cut_off(record) for record in self._left_over()]
        for error in await asyncio.gather(*ending, return_exceptions=True):
            if isinstance(error, Exception):  # the next round tries again
                _log.error("cannot expire a session", exc_info=error)

    def _forsaken(self, now: float) -> list[SessionRecord]:
        """Training sessions whose environment, which leased their places, has not been heard of for
        `session_idle_timeout_s`. A call that is being answered is a sign of life."""
        idle_s = self.policy.session_idle_timeout_s
        if self.leases is None or not idle_s:
            return []
        records = [one for one in self.registry.open_records() if one.session.purpose == "train"]
        for record in records:
            if self.turns.is_called(record):
                record.life.seen_at = now
        return [one for one in records if one.parent is None and now - one.life.seen_at > idle_s]

    async def _give_up(self, record: SessionRecord) -> None:
        detail = (
            "no call of its group came within session_idle_timeout_s = "
            f"{self.policy.session_idle_timeout_s:g}: its environment has ended or hangs (one that computes "
            f"for longer between two calls sends POST /sessions/{record.session.id}/heartbeat)"
        )
        await self.abort(record, FailureReason.ENVIRONMENT_GONE, detail, state="expired")

    def _left_over(self) -> list[SessionRecord]:
        """Training sessions that outlived the run, without those that end with their parents."""
        if not self.run_ended():
            return []
        records = self.registry.open_records()
        return [one for one in records if one.session.purpose == "train" and one.parent is None]

    async def _cut_off(self, record: SessionRecord) -> None:
        await self.abort(record, FailureReason.RUN_ENDED, "the run has ended")

    async def _expire(self, record: SessionRecord) -> None:
        if record.state == "unrewarded" and record.reward is None:
            detail = f"no reward came within reward_deadline_s = {self.policy.reward_deadline_s:g}"
            await self.abort(record, FailureReason.BAD_REWARD, detail, state="expired")
        elif record.state == "unrewarded" or (self.policy.late_reward == "accept" and record.parent is None):
            await self._close(record, "finished")
        else:
            detail = "the session was open for longer than its timeout_s"
            await self.abort(record, FailureReason.TIMEOUT, detail, state="expired")

    async def _close(
        self, record: SessionRecord, state: SessionState, failure: Failure | None = None
    ) -> Outcome | None:
        """Without a `failure` the outcome is what the session's turns and reward say."""
        if record.outcome is not None:
            return record.outcome
        conversation = self.turns.conversation_to_close(record)
        async with conversation.closed:
            if not conversation.frozen:
                record.frozen = True
                children = [self._close(child, state, failure) for child in record.children]
                await asyncio.gather(conversation.settle(_SETTLE_S), *children)
                conversation.freeze()
            if record.outcome is None:
                await self._conclude(record, state, failure)
            return record.outcome

    async def _conclude(self, record: SessionRecord, state: SessionState, failure: Failure | None) -> None:
        family = [self.turns.conversation_to_close(one) for one in record.family(finished=True)]
        turns = [turn for one in family for turn in one.turns]
        delivered = {turn_id for one in family for turn_id in one.delivered}
        now, auxiliary = time.time(), self.policy.train_auxiliary_roots
        outcome = summarise(record, turns, delivered, now, train_auxiliary=auxiliary)
        unrewarded = isinstance(outcome, FailedRollout) and outcome.reason is FailureReason.BAD_REWARD
        if failure is not None:
            outcome = failed(record, *failure)
        elif unrewarded and self.policy.reward_deadline_s:
            if record.state == "open":
                deadline = now + self.policy.reward_deadline_s
                self.registry.wait(record, deadline)
                await asyncio.wrap_future(self.store.await_reward(record.session.id, deadline))
            return
        top = record.parent is None
        if top and isinstance(outcome, FailedRollout):
            outcome = with_partial(outcome, record, turns, delivered, now, train_auxiliary=auxiliary)
        record.reward_deadline, hand_over = None, top and record.session.purpose == "train"
        stored = self.store.close_session(record.session.id, state, outcome, hand_over=hand_over)
        await asyncio.wrap_future(stored)
        self.registry.close(record, state, outcome)
        if top:
            self.tokens.update(token_counts(turns, delivered, outcome))
            for one in record.family():
                self.turns.close(one)
