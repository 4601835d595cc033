"""The buffer: a pure state machine from tasks to training batches. No Ray, no clock, no
IO.

    lease ──► in flight ──► finished ──► grouped ──► taken ──► trained
                 │             │            │          │
                 └─────────────┴────────────┴──────────┴─────► dropped(reason)

Invariants: every place (group, index, attempt) that is leased ends in exactly one
state; a rollout is in at most one batch; as long as tasks come, a batch completes. With
`when_stale` "train" and "mask" no group is dropped for its age, so what is trained has
the lengths and rewards of what was asked for; with "wait" and "drop" no token in a
batch is more than `max_staleness` versions older than the trainer. The code is the same
for every staleness bound.

The loop calls take, then trained, then advance. Call `advance` once the engines sample
under the new version and its canary has passed: later leases must not begin under the
old version, or bound 0 could never be met. `advance` with an unchanged version also
ends the batch: there is no trainer, and the batch is dropped. A later incarnation of
the run restores a `snapshot` taken between trained and advance.

When a group is dropped, the places of its members in flight end immediately, and
`unwanted` names the group, so that the process that runs them can cancel them. Late
outcomes of such rollouts change nothing.

The age of a running rollout's tokens is unknown before its outcome, but none is older
than the version at its lease. With `when_stale` "wait" a batch is not taken if the
groups that it leaves behind, taken oldest first with each of the next versions, would
not all be young enough for their batch; a part of the new groups is then held back
until it is taken (`reserve.py`). With "drop", `suspects` names the groups in which a
running member may hold tokens that are too old. The owner of the buffer looks up what
those rollouts have sampled and passes it to `note_sampled`, which drops a group as soon
as a running member holds a token that is too old.
"""

import copy
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Unpack

from invrl.buffer.admission import configured_admission
from invrl.buffer.config import BufferConfig
from invrl.buffer.failures import FailureReport, FailureStreak, with_failure_reward
from invrl.buffer.groups.event_counts import (
    BufferCounts,
    EventCounts,
    dropped_group_name,
)
from invrl.buffer.groups.filter_verdicts import FilterVerdicts
from invrl.buffer.groups.group_filters import ZERO_VARIANCE
from invrl.buffer.groups.reserve import Reserve
from invrl.buffer.groups.snapshot import BufferSnapshot
from invrl.buffer.groups.task_feed import TaskFeed
from invrl.buffer.groups.wait_report import (
    WaitReport,
    counts_by_reason,
    early_groups,
    waiting_group,
)
from invrl.buffer.ledger.ledger import EntryFacts, Ledger, LedgerEntry
from invrl.buffer.ledger.open_group import OpenGroup, RolloutState
from invrl.buffer.reward_history import RewardHistory
from invrl.buffer.selection import Selection
from invrl.errors import BufferStateError
from invrl.interfaces import GroupFilter, HistoryGroupFilter
from invrl.rollout.config import RolloutConfig
from invrl.types.batches import TakenBatch
from invrl.types.groups import DroppedGroup, Group
from invrl.types.leases import GroupLease, GroupMember, Place
from invrl.types.metrics import Mean, Metric, Sum
from invrl.types.reasons import DropReason, FailureReason
from invrl.types.rollouts import FailedRollout, Outcome, RolloutSummary, SampledSoFar
from invrl.types.sessions import MAX_REWARD
from invrl.types.tasks import Task
from invrl.types.weights import WeightVersion

_LOSSES = {DropReason.STALE, DropReason.INCOMPLETE, DropReason.TOKENS_LOST}
"""Reasons for which a group is not trained although it was wanted."""


class GroupBuffer:
    """The state machine. `tasks` is read as groups are leased; `emit` gets every ledger
    entry."""

    def __init__(
        self,
        config: BufferConfig,
        rollout: RolloutConfig,
        *,
        tasks: Iterator[Task],
        group_filter: GroupFilter | HistoryGroupFilter,
        emit: Callable[[LedgerEntry], None] = lambda entry: None,
    ) -> None:
        self.version = WeightVersion(0)
        self._max_staleness = config.max_staleness
        self._max_attempts = rollout.rollout_max_attempts
        self._batch_size = rollout.rollout_batch_size
        self._group_size = rollout.n_samples_per_prompt
        self._when_stale = config.when_stale
        self._admission = configured_admission(config, self._batch_size)
        self._reserve = Reserve(
            batch_size=self._batch_size, num_versions=config.max_staleness + 1
        )
        self.failures = FailureStreak()
        self._feed = TaskFeed(tasks, self._note_source_fault)
        self._history = RewardHistory()
        self._success_reward = config.success_reward
        self._verdicts = FilterVerdicts(
            group_filter, config, batch_size=self._batch_size, failures=self.failures
        )
        self._ledger = Ledger(emit)
        self._tasks: dict[str, Task] = {}
        """Tasks of the groups that are not taken, by group id."""
        self._in_flight: dict[str, OpenGroup] = {}
        self._ready: dict[str, OpenGroup] = {}
        self._replacements: deque[str] = deque()
        self._unwanted: list[DroppedGroup] = []
        """Groups dropped while members of them were in flight, not yet returned by
        `unwanted`."""
        self._batch: TakenBatch | None = None
        self._taken: list[OpenGroup] = []
        """Groups of the batch, until it is trained or dropped."""
        self._groups_leased = 0
        self._batches_taken = 0
        self.events = EventCounts()
        self._selection = Selection()
        self._first_places: set[Place] = set()
        """Places leased in this incarnation before the first rollout failed or
        finished."""
        self._failure_rules = config.failures.rules()
        self._closed = False

    # ----------------------------------------------------------- work out, outcomes in

    def lease(self) -> GroupLease | None:
        """Lease replacements of failed members first, then a new group if the bound
        admits one."""
        if self._closed:
            return None
        if self._replacements:
            return self._hand_out(self._in_flight[self._replacements.popleft()])
        if not self._admission.admits(
            in_flight=len(self._in_flight),
            ready=len(self._ready),
            taken=self._groups_taken(),
            reserve=self._groups_held_back(),
        ):
            return None
        fed = self._feed.next()
        if fed is None:
            return None
        group = OpenGroup(
            number=self._groups_leased,
            task_id=fed.task.id,
            source_id=fed.source_id,
            attempts_G=[0] * self._group_size,
            states_G=[None] * self._group_size,
        )
        self._groups_leased += 1
        self._in_flight[group.id] = group
        self._tasks[group.id] = fed.task
        self.events.count("groups_leased")
        return self._hand_out(group)

    def record(self, outcome: Outcome) -> None:
        """Record an outcome, in any order and any number of times. An unexpected
        outcome (its place already has one, its group has ended, or it was never leased)
        is counted and changes nothing."""
        group = self._awaiting(outcome.place)
        if group is None:
            self.events.count("outcomes_late")
            self._note_cancelled(outcome)
            return
        self.events.count("rollouts_ended")
        self._reserve.note_ended(in_training=self._batch is not None)
        if isinstance(outcome, FailedRollout):
            self._fail(group, outcome, outcome.reason, outcome.detail)
        elif not abs(outcome.reward) <= MAX_REWARD:  # true for NaN too
            self._fail(
                group, outcome, FailureReason.BAD_REWARD, f"reward {outcome.reward}"
            )
        else:
            self.failures.finished()
            self._finish(group, outcome, session_id=outcome.session_id)

    def _finish(
        self, group: OpenGroup, summary: RolloutSummary, **facts: Unpack[EntryFacts]
    ) -> None:
        self._ledger.move(group, summary.index, RolloutState.FINISHED, **facts)
        group.finished[summary.index] = summary
        self.events.note(
            {"rollouts_finished": Sum(1), "finished_reward_mean": Mean(summary.reward)}
        )
        if self._is_dropped_as_stale(group):
            self._drop(group, DropReason.STALE)
        elif len(group.finished) == self._group_size:
            self._complete(group)

    def unwanted(self) -> tuple[DroppedGroup, ...]:
        """Return the groups that were dropped since the last call while members of them
        were in flight. A returned group is never leased again."""
        groups = tuple(self._unwanted)
        self._unwanted.clear()
        return groups

    def suspects(self) -> list[str]:
        """Return ids of groups in flight that may have to be dropped as stale: a
        running member was leased under a version that is now too old. None unless stale
        groups are dropped."""
        if self._when_stale != "drop":
            return []
        return [
            group.id
            for group in self._in_flight.values()
            if self._runs_since(group, self._oldest_allowed)
        ]

    def note_sampled(self, sampled: Iterable[SampledSoFar]) -> None:
        """Drop the groups in which a running rollout holds a token that is too old.
        Places no longer in flight are ignored."""
        for rollout in sampled:
            group = self._awaiting(rollout.place)
            if group is not None and rollout.oldest_version < self._oldest_allowed:
                self._drop(group, DropReason.STALE)

    # ----------------------------------------------------------------- batches

    def take(self) -> TakenBatch | None:
        """Return the next batch of whole groups, oldest first; None if it is not
        complete yet, or waits for groups that would become too old. Raises
        BufferStateError while the previous batch is out."""
        if self._batch is not None:
            raise BufferStateError(
                f"batch {self._batch.batch_id} is out: call trained and advance first"
            )
        oldest = self._oldest_eligible()
        if len(oldest) < self._batch_size or self._leaves_too_old(oldest):
            return None
        self._taken = oldest
        batch = TakenBatch(
            batch_id=self._batches_taken,
            version=self.version,
            groups=tuple(group.group() for group in self._taken),
        )
        for group in self._taken:
            del self._ready[group.id]
            del self._tasks[group.id]
            self._move_all(group, RolloutState.TAKEN, batch_id=batch.batch_id)
        self._batch = batch
        self._batches_taken += 1
        self.events.start_batch()
        return batch

    def takeable(self) -> list[Group]:
        """Return the complete groups that the next batch is made from."""
        return [group.group() for group in self._eligible()]

    def drop_lost(self, group_id: str) -> None:
        """Drop a ready group whose tokens the store does not have."""
        if group_id in self._ready:
            self._drop(self._ready[group_id], DropReason.TOKENS_LOST)

    def trained(self, batch_id: int) -> None:
        """Mark the batch as trained once the optimizer has made its steps with it.
        Raises BufferStateError unless it was taken last."""
        if self._batch is None or not self._taken or self._batch.batch_id != batch_id:
            raise BufferStateError(f"batch {batch_id} is not out for training")
        self.events.count("groups_trained", len(self._taken))
        for group in self._taken:
            for rollout in group.rollouts():
                self._selection.note_trained(rollout)
        self._end_batch(RolloutState.TRAINED, batch_id=batch_id)

    def advance(self, version: WeightVersion) -> None:
        """Advance once the trainer holds `version`, the engines sample under it, and
        its canary has passed: groups with its tokens may be taken. With `when_stale`
        "drop", groups that are now too old are dropped."""
        if version < self.version:
            raise BufferStateError(f"version {version} after {self.version}")
        if version == self.version and self._taken:
            self._drop_batch(DropReason.NOT_TRAINED)
        self._check_trained()
        self.version = version
        self._batch = None
        self._reserve.advance()
        for group in [*self._in_flight.values(), *self._ready.values()]:
            if self._is_dropped_as_stale(group):
                self._drop(group, DropReason.STALE)

    def close(self) -> None:
        """Drop everything that is not trained, because the run ends. Nothing is leased
        afterwards."""
        self._closed = True
        for group in [*self._in_flight.values(), *self._ready.values()]:
            self._drop(group, DropReason.RUN_ENDED)
        if self._taken:
            self._drop_batch(DropReason.RUN_ENDED)
        self._batch = None

    # ----------------------------------------------------------------- incarnations

    def settle(self, trained: WeightVersion) -> None:
        """Settle a run that ends early, while the trainer holds `trained`. A batch that
        is out counts as trained if it made that version, even without a call of
        `trained`; else it is dropped."""
        if self._batch is None or not self._taken:
            return
        if trained > self.version:
            self.trained(self._batch.batch_id)
        else:
            self._drop_batch(DropReason.RUN_ENDED)

    def snapshot(self, trained: WeightVersion) -> BufferSnapshot:
        """Return the current state; `trained` is the version that the trainer holds.
        Raises BufferStateError while a batch is taken and not yet trained."""
        self._check_trained()
        return BufferSnapshot(
            version=self.version,
            trained=trained,
            groups_leased=self._groups_leased,
            batches_taken=self._batches_taken,
            in_flight=tuple(copy.deepcopy(list(self._in_flight.values()))),
            ready=tuple(copy.deepcopy(list(self._ready.values()))),
            counts=dict(self._ledger.counts),
            dropped=dict(self.events.dropped),
            failed=dict(self.events.failed),
            sequence=self._ledger.sequence,
            feed=self._feed.snapshot(self._tasks),
            histories=self._history.snapshot(),
        )

    def restore(self, snapshot: BufferSnapshot, since: Iterable[Outcome]) -> None:
        """Put a new buffer into the state of `snapshot`. `since` are the later
        outcomes. Those sampled under the trained version or an older one count; the
        others were sampled under weights that are lost. What is then still in flight is
        interrupted: it is leased again. Raises BufferStateError if the task source
        yields other tasks, or refuses its state."""
        self.version = snapshot.version
        self._groups_leased = snapshot.groups_leased
        self._batches_taken = snapshot.batches_taken
        self.events.restore(dropped=snapshot.dropped, failed=snapshot.failed)
        self._ledger.counts = Counter(snapshot.counts)
        self._ledger.sequence = snapshot.sequence
        self._in_flight = {
            group.id: copy.deepcopy(group) for group in snapshot.in_flight
        }
        self._ready = {group.id: copy.deepcopy(group) for group in snapshot.ready}
        open_groups = [*self._in_flight.values(), *self._ready.values()]
        self._tasks = self._feed.restore(
            snapshot.feed, self._groups_leased, open_groups
        )
        self._history.restore(snapshot.histories)
        for outcome in since:
            if (
                isinstance(outcome, RolloutSummary)
                and outcome.newest_version <= snapshot.trained
            ):
                self.record(outcome)
        self._reserve.forget()
        for group in self._in_flight.values():
            for index in group.members(RolloutState.IN_FLIGHT):
                self._ledger.move(group, index, RolloutState.INTERRUPTED)
            if group.to_lease() and group.id not in self._replacements:
                self._replacements.append(group.id)

    # ----------------------------------------------------------- what there is to know

    @property
    def can_fill(self) -> bool:
        """Whether a batch can still complete."""
        return (
            not self._feed.end
            or len(self._ready) + len(self._in_flight) >= self._batch_size
        )

    @property
    def filtered_out(self) -> str:
        """See `FilterVerdicts.filtered_out`."""
        return self._verdicts.filtered_out

    def wait_report(self) -> WaitReport:
        """Report what the next batch waits for, without how long it has waited."""
        return WaitReport(
            wanted=self._batch_size,
            ready=len(self._ready),
            in_flight=tuple(waiting_group(group) for group in self._in_flight.values()),
            complete=self.events.complete_since_take,
            dropped=self.events.dropped_since_take,
            failed=self.events.failed_since_take,
            filter_name=self._verdicts.filter_name,
            filtered_rewards=dict(self._verdicts.streak.by_rewards),
            filtered_limit=self._verdicts.limit,
            source_end=self._feed.end,
        )

    def __str__(self) -> str:
        """Return what a batch waits for, as the message of a DeadlineError."""
        num_early = sum(not self._may_be_taken(group) for group in self._ready.values())
        ready = f"{len(self._ready)} ready" + early_groups(num_early)
        in_flight = f"{len(self._in_flight)} in flight ({self._admission})"
        old = ""
        if self._leaves_too_old(self._oldest_eligible()):
            old = "groups in flight would become too old (--when-stale wait)"
        parts = [
            f"{self._batch_size} groups",
            f"{ready}, {in_flight}",
            old,
            counts_by_reason("groups dropped", self.events.dropped),
            counts_by_reason("rollouts failed", self.events.failed),
            self._feed.end,
        ]
        return "; ".join(part for part in parts if part)

    def failure_report(self) -> FailureReport:
        """Report what has failed so far, and how many of the last failures were
        identical."""
        self._first_places = {
            place for place in self._first_places if self._awaiting(place)
        }
        return self.failures.report(
            self.events.failed, first_ended=not self._first_places
        )

    def metrics(self) -> dict[str, Metric]:
        """Return events since the last call, and the number of groups and rollouts in
        each state. `finished_reward_mean` is over all finished rollouts, including
        those of dropped groups: a filter that drops solved tasks does not bias it.
        `rollouts_counted/<reason>` are failures that count with a reward,
        `tokens_not_trained/<reason>` sampled tokens of rollouts that were dropped. See
        `Selection.metrics` for how trained rollouts differ from those asked for."""
        metrics = self.events.take_metrics() | self._selection.metrics()
        return metrics | {
            name: Mean(count) for name, count in self.counts().states.items()
        }

    def counts(self) -> BufferCounts:
        """Count groups and rollouts in each state, and what has failed or was dropped
        so far."""
        states = {
            "groups_in_flight": len(self._in_flight),
            "groups_ready": len(self._ready),
            "groups_taken": self._groups_taken(),
        }
        states |= {
            f"rollouts_{state}": self._ledger.counts[state] for state in RolloutState
        }
        return BufferCounts(
            states=states, failed=self.events.failed, dropped=self.events.dropped
        )

    # ----------------------------------------------------------------- inside

    def _awaiting(self, place: Place) -> OpenGroup | None:
        """Return the group of this place if the rollout there is in flight."""
        group = self._in_flight.get(place.group_id)
        if group is None or not group.awaits(place):
            return None
        return group

    def _eligible(self) -> list[OpenGroup]:
        return [group for group in self._ready.values() if self._may_be_taken(group)]

    def _oldest_eligible(self) -> list[OpenGroup]:
        """Return the groups of the next batch, fewer if it is not complete."""
        eligible = sorted(self._eligible(), key=lambda group: group.age)
        return eligible[: self._batch_size]

    def _check_trained(self) -> None:
        if self._batch is not None and self._taken:
            raise BufferStateError(f"batch {self._batch.batch_id} is not trained")

    def _groups_taken(self) -> int:
        if self._batch is None:
            return 0
        return len(self._batch.groups)

    def _groups_held_back(self) -> int:
        """Return the number of groups that are not leased before the next batch is
        taken: 0 unless that batch is complete and waits for old rollouts."""
        if self._batch is not None or not self._reserve.num_groups:
            return 0
        oldest = self._oldest_eligible()
        if len(oldest) < self._batch_size or not self._leaves_too_old(oldest):
            return 0
        return self._reserve.num_groups

    def _hand_out(self, group: OpenGroup) -> GroupLease:
        """Lease the group's places that are due."""
        indices = group.to_lease()
        none_ended = self.failures.none_ended
        for index in indices:
            self._ledger.move(group, index, RolloutState.IN_FLIGHT)
            group.leased_under[index] = self.version
            if none_ended:
                self._first_places.add(group.place(index))
        members = tuple(
            GroupMember(index=index, attempt=group.attempts_G[index])
            for index in indices
        )
        return GroupLease(
            group_id=group.id, task=self._tasks[group.id], members=members
        )

    def _fail(
        self, group: OpenGroup, outcome: Outcome, failure: FailureReason, detail: str
    ) -> None:
        """Count a failed rollout with the run's reward for such failures, drop its
        group, or retry it."""
        self.events.note_failure(failure)
        rule = self._failure_rules.get(failure, "retry")
        partial = None
        if isinstance(outcome, FailedRollout):
            partial = outcome.partial
        if isinstance(rule, float) and partial is not None:
            self.failures.failed(failure, detail, counts=True)
            self.events.count(f"rollouts_counted/{failure}")
            counted = with_failure_reward(partial, failure, rule)
            self._finish(
                group,
                counted,
                failure=failure,
                detail=detail,
                session_id=outcome.session_id,
            )
            return
        self.failures.failed(failure, detail)
        is_last = rule == "drop" or outcome.attempt + 1 >= self._max_attempts
        reason = DropReason.INCOMPLETE if is_last else DropReason.REPLACED
        facts = EntryFacts(
            reason=reason, failure=failure, detail=detail, session_id=outcome.session_id
        )
        self._ledger.move(group, outcome.index, RolloutState.DROPPED, **facts)
        self.events.count(f"rollouts_dropped/{reason}")
        if partial is not None:
            self._count_not_trained(reason, partial)
        if is_last:
            self._drop(group, DropReason.INCOMPLETE)
            return
        group.attempts_G[outcome.index] += 1
        group.states_G[outcome.index] = None
        if group.id not in self._replacements:
            self._replacements.append(group.id)

    def _complete(self, group: OpenGroup) -> None:
        """Complete a group whose rollouts have all finished: it becomes ready, or the
        group filter drops it."""
        self.events.complete_since_take += 1
        history = self._history.of(group.source_id)
        reason = self._verdicts.verdict(group, history)
        if reason is not None and self._verdicts.is_overruled(reason):
            self.events.count("groups_unfiltered")
            reason = None
        if reason is None:
            del self._in_flight[group.id]
            self._ready[group.id] = group
            self._move_all(group, RolloutState.GROUPED)
            self._tell(group)
        elif reason == ZERO_VARIANCE:
            self._drop(group, DropReason.ZERO_VARIANCE)
        else:
            self._drop(group, DropReason.FILTERED, reason)

    @property
    def _oldest_allowed(self) -> WeightVersion:
        return WeightVersion(self.version - self._max_staleness)

    def _is_dropped_as_stale(self, group: OpenGroup) -> bool:
        if self._when_stale != "drop":
            return False
        versions = group.versions()
        return versions is not None and versions[0] < self._oldest_allowed

    def _leaves_too_old(self, batch: Sequence[OpenGroup]) -> bool:
        """Whether some of the groups that this batch leaves behind would be too old
        when they are taken, oldest first, a batch with each of the next versions."""
        if self._when_stale != "wait":
            return False
        taken = {group.id for group in batch}
        left_behind: list[WeightVersion] = []
        for group in [*self._in_flight.values(), *self._ready.values()]:
            oldest = group.oldest_version
            if group.id not in taken and oldest is not None:
                left_behind.append(oldest)
        for place, oldest in enumerate(sorted(left_behind)):
            taken_under = self.version + 1 + place // self._batch_size
            if taken_under - oldest > self._max_staleness:
                return True
        return False

    def _runs_since(self, group: OpenGroup, version: WeightVersion) -> bool:
        """Whether a running member of the group was leased before `version`."""
        running = group.members(RolloutState.IN_FLIGHT)
        return any(group.leased_under[index] < version for index in running)

    def _may_be_taken(self, group: OpenGroup) -> bool:
        versions = group.versions()
        return versions is None or versions[1] <= self.version

    def _drop(
        self, group: OpenGroup, reason: DropReason, filter_reason: str = ""
    ) -> None:
        """End a group that was not taken, and all its places that have not ended."""
        was_in_flight = self._in_flight.pop(group.id, None) is not None
        self._ready.pop(group.id, None)
        del self._tasks[group.id]
        if group.id in self._replacements:
            self._replacements.remove(group.id)
        if group.members(RolloutState.IN_FLIGHT):
            self._unwanted.append(DroppedGroup(group_id=group.id, reason=reason))
        for index, state in enumerate(group.states_G):
            if state not in (None, RolloutState.DROPPED):
                self._ledger.move(
                    group,
                    index,
                    RolloutState.DROPPED,
                    reason=reason,
                    detail=filter_reason,
                )
                self.events.count(f"rollouts_dropped/{reason}")
        for rollout in group.rollouts():
            self._count_not_trained(reason, rollout)
            if reason in _LOSSES:
                self._selection.note_lost(rollout)
        self.events.note_drop(reason, 1, filter_reason)
        if was_in_flight and reason is not DropReason.RUN_ENDED:
            self._tell(group, dropped_group_name(reason, filter_reason))

    def _count_not_trained(self, reason: DropReason, rollout: RolloutSummary) -> None:
        self.events.count(f"tokens_not_trained/{reason}", rollout.sampled_tokens)

    def _note_cancelled(self, outcome: Outcome) -> None:
        """Note the tokens of a rollout whose group was dropped while it ran."""
        if (
            isinstance(outcome, FailedRollout)
            and outcome.reason is FailureReason.GROUP_DROPPED
            and outcome.partial is not None
        ):
            self._selection.note_cancelled(outcome.partial)
            self.events.count(
                f"tokens_not_trained/{outcome.reason}", outcome.partial.sampled_tokens
            )

    def _tell(self, group: OpenGroup, dropped: str = "") -> None:
        """Report how the group ended to the history of the task and the task source:
        once for each group, when it is complete or dropped before. `dropped` is the
        reason; "" if it is kept."""
        outcome = group.outcome(
            version=self.version, success_reward=self._success_reward, dropped=dropped
        )
        if self._verdicts.takes_history:
            self._history.note(outcome)
        self._feed.record(outcome)

    def _note_source_fault(self, key: str, detail: str) -> None:
        """Note an error of the task source's `record` or `state`: the first of each is
        shown, all are counted."""
        self.failures.note_user_code(key, detail)
        self.events.count(f"{key}_failed")

    def _end_batch(self, state: RolloutState, **facts: Unpack[EntryFacts]) -> None:
        for group in self._taken:
            self._move_all(group, state, **facts)
        self._taken = []

    def _drop_batch(self, reason: DropReason) -> None:
        self.events.count(
            f"rollouts_dropped/{reason}", len(self._taken) * self._group_size
        )
        self.events.note_drop(reason, len(self._taken))
        self._end_batch(RolloutState.DROPPED, reason=reason)

    def _move_all(
        self, group: OpenGroup, state: RolloutState, **facts: Unpack[EntryFacts]
    ) -> None:
        for index in range(self._group_size):
            self._ledger.move(group, index, state, **facts)
