"""Opening, rewarding and closing sessions: the registry, the live conversations and the store, kept
in step. Invariant: a session is closed once; who closes it again gets the same outcome. Called by the
session API, and by itself when a session's time is up."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from invrl.errors import SessionError
from invrl.gateway.outcome import failed, summarise
from invrl.gateway.sessions import Opening, SessionRecord, SessionRegistry, SessionState
from invrl.gateway.turns import Turns
from invrl.run_store import RunStoreWriter
from invrl.types import FailureReason, Outcome, Sampling

_log = logging.getLogger(__name__)
_SETTLE_S = 5.0
_EXPIRY_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lifecycle:
    """The life of sessions, from the first to the last write."""

    registry: SessionRegistry
    turns: Turns
    store: RunStoreWriter
    sampling: Sampling
    """For sessions that are opened without one."""

    async def open(self, group: Opening) -> list[SessionRecord]:
        """All members or none. SessionError 429 when they do not fit, 400 where tokens sampled so could
        not be trained."""
        if group.purpose == "train" and (group.sampling.temperature <= 0 or group.sampling.top_p != 1):
            reason = (
                "training needs temperature > 0 and top_p = 1: the log-probs of other samplings are not "
                "those of the policy"
            )
            raise SessionError(reason, status=400, code="untrainable_sampling", param="sampling")
        now = time.time()
        if earlier := self.registry.reopened(group):
            await asyncio.wrap_future(
                self.store.open_sessions([], [], now)
            )  # after the commit that holds them
            return earlier
        records = self.registry.open(group, now)
        for record in records:
            self.turns.open(record)
        hashes = [record.key_hash for record in records]
        stored = self.store.open_sessions([record.session for record in records], hashes, now)
        await asyncio.wrap_future(stored)
        return records

    async def reward(self, record: SessionRecord, reward: float, components: Mapping[str, float]) -> None:
        self.registry.reward(record, reward, components)
        await asyncio.wrap_future(self.store.set_reward(record.session.id, reward, components))

    async def finish(self, record: SessionRecord) -> Outcome:
        return await self._close(record, "finished", None)

    async def abort(
        self, record: SessionRecord, reason: FailureReason, detail: str, *, state: SessionState = "aborted"
    ) -> Outcome:
        return await self._close(record, state, failed(record, reason, detail))

    async def expire_forever(self) -> None:
        """Aborts sessions whose time is up."""
        while True:
            await asyncio.sleep(_EXPIRY_INTERVAL_S)
            for record in self.registry.expired(time.time()):
                detail = "the session was open for longer than session_ttl_s"
                try:
                    await self.abort(record, FailureReason.TIMEOUT, detail, state="expired")
                except Exception:  # the next round tries again; other sessions must not wait for it
                    _log.exception("cannot expire session %s", record.session.id)

    async def _close(self, record: SessionRecord, state: SessionState, outcome: Outcome | None) -> Outcome:
        """`outcome` None: what the session's turns and reward say."""
        if record.outcome is not None:
            return record.outcome
        conversation = self.turns.conversation_to_close(record)
        async with conversation.closed:
            if record.outcome is not None:
                return record.outcome
            await conversation.settle(_SETTLE_S)
            if outcome is None:
                outcome = summarise(record, conversation.turns, conversation.delivered, time.time())
            hand_over = record.session.purpose == "train"
            stored = self.store.close_session(record.session.id, state, outcome, hand_over=hand_over)
            await asyncio.wrap_future(stored)
            self.registry.close(record, state, outcome)
            self.turns.close(record)
            return outcome
