"""The buffer: a pure state machine from tasks to training batches. No Ray, no clock, no IO.

    lease ──► in flight ──► finished ──► grouped ──► taken ──► trained
                 │             │            │          │
                 └─────────────┴────────────┴──────────┴─────► dropped(reason)

Invariants: every place (group, index, attempt) that is leased ends in exactly one state; a rollout is in at
most one batch; no token in a batch is more than `max_staleness` versions older than the trainer; as long
as tasks come, a batch comes together. The code does not care what number the staleness bound is.

The loop's order is take → trained → advance. Call `advance` once the engines sample under the new version
and its canary has passed: what is leased after it must not begin under the old one, or bound 0 could never be
met. `advance` with the version unchanged ends the batch too: without a trainer, it is dropped. `snapshot`
between trained and advance is what a later incarnation of the run restores.

A group that is dropped takes the members that are still in flight with it: their places end at once, and
`unwanted` names the group, so that whoever runs them can cancel them. Whatever such a rollout still sends is
late and changes nothing.

A running rollout has no outcome that says how old its tokens are, but none is older than the version at its
lease: `suspects` names the groups in which a running member may hold tokens that are too old. Whoever holds
the buffer looks up what those have sampled and passes it to `note_sampled`, which drops a group as soon as
one of its running members holds such a token."""

import copy
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Unpack

from invrl.buffer.config import BufferConfig
from invrl.buffer.failures import GROUP_FILTER, FailureReport, FailureStreak, with_failure_reward
from invrl.buffer.group_filters import ZERO_VARIANCE, admission_limit
from invrl.buffer.ledger import EntryFacts, Ledger, LedgerEntry
from invrl.buffer.open_group import OpenGroup, Place, RolloutState
from invrl.buffer.snapshot import BufferSnapshot
from invrl.buffer.wait_report import FilteredRow, WaitingGroup, WaitReport, shown_rewards
from invrl.errors import BufferStateError
from invrl.interfaces import GroupFilter
from invrl.metrics import Mean, Metric, Sum, merge
from invrl.rollout.config import RolloutConfig
from invrl.types import (
    MAX_REWARD,
    DroppedGroup,
    DropReason,
    FailedRollout,
    FailureReason,
    Group,
    GroupLease,
    GroupMember,
    Outcome,
    RolloutSummary,
    SampledSoFar,
    TakenBatch,
    Task,
    WeightVersion,
)
from invrl.user_frame import USER_FRAME_PREFIX, describe_exception, raised_at

_NO_TOKENS = "no_trained_tokens"
"""The reason to drop a group that is never the filter's."""
_WORD_CHARS = 64
"""The longest reason that a group filter may give."""


class Buffer:
    """The state machine. `tasks` is read as groups are leased; `emit` gets every ledger entry."""

    def __init__(
        self,
        config: BufferConfig,
        rollout: RolloutConfig,
        *,
        tasks: Iterator[Task],
        group_filter: GroupFilter,
        emit: Callable[[LedgerEntry], None] = lambda entry: None,
    ) -> None:
        self.version = WeightVersion(0)
        self._max_staleness, self._max_attempts = config.max_staleness, rollout.rollout_max_attempts
        self._batch_size, self._group_size = rollout.rollout_batch_size, rollout.n_samples_per_prompt
        self._limit = admission_limit(config, self._batch_size)
        self._tasks = tasks
        self._source_end = ""
        self._filter = group_filter
        self._filter_name = config.group_filter
        self._filtered_limit = config.max_filtered_batches * self._batch_size
        self._trains_filtered = config.filtered_out == "train"
        self._filtered = FilteredRow()
        self._ledger = Ledger(emit)
        self._tasks_of: dict[str, Task] = {}
        """Of the groups that are not taken, by their ids."""
        self._in_flight: dict[str, OpenGroup] = {}
        self._ready: dict[str, OpenGroup] = {}
        self._replacements: deque[str] = deque()
        self._unwanted: list[DroppedGroup] = []
        """Groups dropped while members of theirs were in flight, and not yet named by `unwanted`."""
        self._batch: TakenBatch | None = None
        self._taken: list[OpenGroup] = []
        """The groups of the batch, until it is trained or dropped."""
        self._groups_leased = self._batches_taken = 0
        self.dropped: Counter[str] = Counter()
        """Groups dropped since the start, by reason."""
        self.failed: Counter[str] = Counter()
        """Rollouts failed since the start, by reason; those that count with a reward are among them."""
        self.failures = FailureStreak()
        self._first_places: set[Place] = set()
        """Leased in this incarnation before the first rollout failed or finished."""
        self._failure_rules = config.failure_rules()
        self._since: dict[str, Metric] = {}
        self._complete_since_take = 0
        self._dropped_before_take: Counter[str] = Counter()
        self._failed_before_take: Counter[str] = Counter()
        self._closed = False

    # ------------------------------------------------------------------ work out, outcomes in

    def lease(self) -> GroupLease | None:
        """Replacements of failed members first, then a new group if the bound admits one."""
        if self._closed:
            return None
        if self._replacements:
            return self._hand_out(self._in_flight[self._replacements.popleft()])
        under_way = len(self._in_flight) + len(self._ready) + self._groups_taken()
        if under_way >= self._limit or (task := self._next_task()) is None:
            return None
        size = self._group_size
        group = OpenGroup(self._groups_leased, task.id, attempts_G=[0] * size, states_G=[None] * size)
        self._groups_leased += 1
        self._in_flight[group.id], self._tasks_of[group.id] = group, task
        self._count("groups_leased")
        return self._hand_out(group)

    def record(self, outcome: Outcome) -> None:
        """Takes outcomes in any order, and each as often as it comes. One that is not awaited (its place has
        an outcome already, its group has ended, or it was never leased) is counted and changes nothing."""
        group, index = self._in_flight.get(outcome.group_id), outcome.index
        if group is None or not group.awaits(index, outcome.attempt):
            self._count("outcomes_late")
            return
        self._count("rollouts_ended")
        if isinstance(outcome, FailedRollout):
            self._fail(group, outcome, outcome.reason, outcome.detail)
        elif not abs(outcome.reward) <= MAX_REWARD:  # NaN is not either
            self._fail(group, outcome, FailureReason.BAD_REWARD, f"reward {outcome.reward}")
        else:
            self.failures.finished()
            self._finish(group, outcome, session_id=outcome.session_id)

    def _finish(self, group: OpenGroup, summary: RolloutSummary, **facts: Unpack[EntryFacts]) -> None:
        self._ledger.move(group, summary.index, RolloutState.FINISHED, **facts)
        group.finished[summary.index] = summary
        self._note({"rollouts_finished": Sum(1), "finished_reward_mean": Mean(summary.reward)})
        if self._stale(group):
            self._drop(group, DropReason.STALE)
        elif len(group.finished) == self._group_size:
            self._complete(group)

    def unwanted(self) -> tuple[DroppedGroup, ...]:
        """The groups that were dropped since the last call while members of them were in flight. A group that
        was named here is never leased again."""
        groups = tuple(self._unwanted)
        self._unwanted.clear()
        return groups

    def suspects(self) -> list[str]:
        """Ids of the groups in flight that may be stale already: a running member was leased under a version
        that is too old by now."""
        return [
            group.id
            for group in self._in_flight.values()
            if any(self._too_old(group.leased_under[i]) for i in group.members(RolloutState.IN_FLIGHT))
        ]

    def note_sampled(self, sampled: Iterable[SampledSoFar]) -> None:
        """What running rollouts have sampled. A group in which one holds a token that is too old is dropped.
        Places that do not run any more are passed over."""
        for one in sampled:
            group = self._in_flight.get(one.group_id)
            if (
                group is not None
                and group.awaits(one.index, one.attempt)
                and self._too_old(one.oldest_version)
            ):
                self._drop(group, DropReason.STALE)

    # ------------------------------------------------------------------ batches

    def take(self) -> TakenBatch | None:
        """The next batch of whole groups, oldest first; None while it is not there. Raises
        BufferStateError while the batch before is out."""
        if self._batch is not None:
            raise BufferStateError(f"batch {self._batch.batch_id} is out: call trained and advance first")
        eligible = self._eligible()
        if len(eligible) < self._batch_size:
            return None
        eligible.sort(key=lambda group: ((group.versions() or [0])[0], group.number))
        self._taken = eligible[: self._batch_size]
        groups = tuple(group.group() for group in self._taken)
        batch = TakenBatch(batch_id=self._batches_taken, version=self.version, groups=groups)
        for group in self._taken:
            del self._ready[group.id], self._tasks_of[group.id]
            self._move_all(group, RolloutState.TAKEN, batch_id=batch.batch_id)
        for group in eligible[self._batch_size :]:
            group.passed_over = True
        self._batch = batch
        self._batches_taken += 1
        self._complete_since_take = 0
        self._dropped_before_take = Counter(self.dropped)
        self._failed_before_take = Counter(self.failed)
        return batch

    def takeable(self) -> list[Group]:
        """The complete groups that the next batch is made from."""
        return [group.group() for group in self._eligible()]

    def drop_lost(self, group_id: str) -> None:
        """Drops a group that is ready, because the store has no tokens of it."""
        if group_id in self._ready:
            self._drop(self._ready[group_id], DropReason.TOKENS_LOST)

    def trained(self, batch_id: int) -> None:
        """The optimizer has made its steps with this batch. Raises BufferStateError unless this is the batch
        that was taken last."""
        if self._batch is None or not self._taken or self._batch.batch_id != batch_id:
            raise BufferStateError(f"batch {batch_id} is not out for training")
        self._count("groups_trained", len(self._taken))
        self._end_batch(RolloutState.TRAINED, batch_id=batch_id)

    def advance(self, version: WeightVersion) -> None:
        """The trainer holds `version`, the engines sample under it, and its canary has passed: groups with
        tokens of it may be taken. Groups that are too old now are dropped."""
        if version < self.version:
            raise BufferStateError(f"version {version} after {self.version}")
        if version == self.version and self._taken:
            self._drop_batch(DropReason.NOT_TRAINED)
        self._check_trained()
        self.version = version
        self._batch = None
        for group in [*self._in_flight.values(), *self._ready.values()]:
            if self._stale(group):
                self._drop(group, DropReason.OVER_SAMPLED if group.passed_over else DropReason.STALE)

    def close(self) -> None:
        """The run ends: everything that is not trained is dropped, and nothing is leased any more."""
        self._closed = True
        for group in [*self._in_flight.values(), *self._ready.values()]:
            self._drop(group, DropReason.RUN_ENDED)
        if self._taken:
            self._drop_batch(DropReason.RUN_ENDED)
        self._batch = None

    # ------------------------------------------------------------------ incarnations

    def snapshot(self, trained: WeightVersion) -> BufferSnapshot:
        """The state now; `trained` is the version that the trainer holds. Raises BufferStateError while a
        batch is taken and not yet trained."""
        self._check_trained()
        return BufferSnapshot(
            version=self.version,
            trained=trained,
            groups_leased=self._groups_leased,
            batches_taken=self._batches_taken,
            in_flight=tuple(copy.deepcopy(list(self._in_flight.values()))),
            ready=tuple(copy.deepcopy(list(self._ready.values()))),
            counts=dict(self._ledger.counts),
            dropped=dict(self.dropped),
            failed=dict(self.failed),
            sequence=self._ledger.sequence,
        )

    def restore(self, snapshot: BufferSnapshot, since: Iterable[Outcome]) -> None:
        """Puts a new buffer into the state of `snapshot`. `since`: outcomes that came after it. Those sampled
        under the trained version or an older one count; the others were sampled under weights that are lost.
        What is still in flight then is leased again. Raises BufferStateError if the task source gives other
        tasks."""
        self.version = snapshot.version
        self._groups_leased, self._batches_taken = snapshot.groups_leased, snapshot.batches_taken
        self.dropped, self.failed = Counter(snapshot.dropped), Counter(snapshot.failed)
        self._dropped_before_take = Counter(snapshot.dropped)
        self._failed_before_take = Counter(snapshot.failed)
        self._ledger.counts, self._ledger.sequence = Counter(snapshot.counts), snapshot.sequence
        in_flight, ready = copy.deepcopy((snapshot.in_flight, snapshot.ready))
        self._in_flight, self._ready = {g.id: g for g in in_flight}, {g.id: g for g in ready}
        groups = {group.number: group for group in (*in_flight, *ready)}
        for number in range(snapshot.groups_leased):
            task = self._next_task()
            if task is None:
                raise BufferStateError(f"group g{number} had a task, but {self._source_end}")
            if group := groups.get(number):
                if task.id != group.task_id:
                    raise BufferStateError(
                        f"group {group.id} had task {group.task_id}, the task source now gives {task.id}: "
                        "a run resumes only on the tasks that it began with"
                    )
                self._tasks_of[group.id] = task
        for outcome in since:
            if isinstance(outcome, RolloutSummary) and outcome.newest_version <= snapshot.trained:
                self.record(outcome)
        for group in self._in_flight.values():
            for index in group.members(RolloutState.IN_FLIGHT):
                self._ledger.unlease(group, index)
            if group.members(None) and group.id not in self._replacements:
                self._replacements.append(group.id)

    # ------------------------------------------------------------------ what there is to know

    @property
    def can_fill(self) -> bool:
        """Whether a batch can still come together."""
        return not self._source_end or len(self._ready) + len(self._in_flight) >= self._batch_size

    @property
    def filtered_out(self) -> str:
        """Why the run is to end: the filter has dropped as many groups in a row as it may. "" until then."""
        if self._trains_filtered or not self._past_filtered_limit():
            return ""
        return (
            f"the group filter {self._filter_name} has dropped {self._filtered.length} groups in a row "
            f"({shown_rewards(self._filtered.by_rewards)}), so there is nothing to train on"
        )

    def _past_filtered_limit(self) -> bool:
        return bool(self._filtered_limit) and self._filtered.length >= self._filtered_limit

    def wait_report(self) -> WaitReport:
        """What the next batch waits for. Nothing in it says how long."""
        in_flight = (
            WaitingGroup(
                group_id=group.id,
                task_id=group.task_id,
                missing=self._group_size - len(group.finished),
                size=self._group_size,
            )
            for group in self._in_flight.values()
        )
        return WaitReport(
            wanted=self._batch_size,
            ready=len(self._ready),
            in_flight=tuple(in_flight),
            complete=self._complete_since_take,
            dropped=dict(self.dropped - self._dropped_before_take),
            failed=dict(self.failed - self._failed_before_take),
            filter_name=self._filter_name,
            filtered_rewards=dict(self._filtered.by_rewards),
            filtered_limit=self._filtered_limit,
            source_end=self._source_end,
        )

    def __str__(self) -> str:
        """What a batch waits for, as the message of a deadline says it."""
        text = f"{self._batch_size} groups; {len(self._ready)} ready"
        if waiting := sum(not self._may_be_taken(group) for group in self._ready.values()):
            text += f" ({waiting} of them wait for the canary of their weight version)"
        text += f", {len(self._in_flight)} in flight (at most {self._limit} under way)"
        for name, counts in (("groups dropped", self.dropped), ("rollouts failed", self.failed)):
            if counts:
                text += f"; {name}: " + ", ".join(f"{n} {reason}" for reason, n in sorted(counts.items()))
        return text + (f"; {self._source_end}" if self._source_end else "")

    def failure_report(self) -> FailureReport:
        """What has failed so far, and how many of the last failures were the same."""
        self._first_places = {place for place in self._first_places if self._runs(place)}
        return self.failures.report(self.failed, first_ended=not self._first_places)

    def _runs(self, place: Place) -> bool:
        group = self._in_flight.get(place.group_id)
        return group is not None and group.awaits(place.index, place.attempt)

    def metrics(self) -> dict[str, Metric]:
        """Events since the last call, and how many groups and rollouts are in each state now.
        `finished_reward_mean` is over all finished rollouts, also those whose groups were dropped: a
        filter that leaves out solved tasks does not bias it. `failed_share/<reason>` is of the rollouts that
        ended; `rollouts_counted/<reason>` are those failures that count with a reward."""
        metrics, self._since = self._since, {}
        ended = metrics.get("rollouts_ended", Sum(0)).value()
        for reason in FailureReason:
            failed = metrics.get(f"rollouts_failed/{reason}")
            if failed is not None:
                metrics[f"failed_share/{reason}"] = Mean(failed.value(), ended)
        now = {"in_flight": len(self._in_flight), "ready": len(self._ready), "taken": self._groups_taken()}
        metrics |= {f"groups_{name}": Mean(number) for name, number in now.items()}
        return metrics | {f"rollouts_{state}": Mean(self._ledger.counts[state]) for state in RolloutState}

    # ------------------------------------------------------------------ inside

    def _eligible(self) -> list[OpenGroup]:
        return [group for group in self._ready.values() if self._may_be_taken(group)]

    def _check_trained(self) -> None:
        if self._batch is not None and self._taken:
            raise BufferStateError(f"batch {self._batch.batch_id} is not trained")

    def _groups_taken(self) -> int:
        return len(self._batch.groups) if self._batch is not None else 0

    def _next_task(self) -> Task | None:
        """The next task, or None. A source that raises, or yields something else, has ended; the error of
        whoever waits for a batch says why."""
        if self._source_end:
            return None
        try:
            task = next(self._tasks)
            if isinstance(task, Task):
                return task
            self._source_end = f"the task source yielded {type(task).__name__}, not invrl.types.Task"
        except StopIteration:
            self._source_end = "the task source has ended"
        except Exception as error:
            place = raised_at(error)
            where = f" ({USER_FRAME_PREFIX}{place})" if place else ""
            self._source_end = f"the task source raised {describe_exception(error)}{where}"
        return None

    def _hand_out(self, group: OpenGroup) -> GroupLease:
        indices = group.members(None)
        members = tuple(GroupMember(index=index, attempt=group.attempts_G[index]) for index in indices)
        none_ended = not (self.failures.firsts or self.failures.finished_in_all)
        for index in indices:
            self._ledger.move(group, index, RolloutState.IN_FLIGHT)
            group.leased_under[index] = self.version
            if none_ended:
                self._first_places.add(Place(group.id, index, group.attempts_G[index]))
        return GroupLease(group_id=group.id, task=self._tasks_of[group.id], members=members)

    def _fail(self, group: OpenGroup, outcome: Outcome, failure: FailureReason, detail: str) -> None:
        self.failed[failure] += 1
        self._count(f"rollouts_failed/{failure}")
        rule = self._failure_rules.get(failure, "retry")
        partial = outcome.partial if isinstance(outcome, FailedRollout) else None
        counts = isinstance(rule, float) and partial is not None
        self.failures.failed(failure, detail, counts=counts)
        if isinstance(rule, float) and partial is not None:
            self._count(f"rollouts_counted/{failure}")
            counted = with_failure_reward(partial, failure, rule)
            self._finish(group, counted, failure=failure, detail=detail, session_id=outcome.session_id)
            return
        last = rule == "drop" or outcome.attempt + 1 >= self._max_attempts
        reason = DropReason.INCOMPLETE if last else DropReason.REPLACED
        facts = EntryFacts(reason=reason, failure=failure, detail=detail, session_id=outcome.session_id)
        self._ledger.move(group, outcome.index, RolloutState.DROPPED, **facts)
        self._count(f"rollouts_dropped/{reason}")
        if last:
            self._drop(group, DropReason.INCOMPLETE)
            return
        group.attempts_G[outcome.index] += 1
        group.states_G[outcome.index] = None
        if group.id not in self._replacements:
            self._replacements.append(group.id)

    def _complete(self, group: OpenGroup) -> None:
        self._complete_since_take += 1
        word = self._verdict(group)
        if word is not None and word != _NO_TOKENS:
            self._filtered.dropped(group.group(), word)
            if self._trains_filtered and self._past_filtered_limit():
                self._count("groups_unfiltered")
                word = None
        elif word is None:
            self._filtered.kept()
        if word is None:
            del self._in_flight[group.id]
            self._ready[group.id] = group
            self._move_all(group, RolloutState.GROUPED)
        elif word == ZERO_VARIANCE:
            self._drop(group, DropReason.ZERO_VARIANCE)
        else:
            self._drop(group, DropReason.FILTERED, word)

    def _verdict(self, group: OpenGroup) -> str | None:
        """The filter's reason to drop the group, None to keep it. A filter that raises drops the group and is
        counted: that is bad data, not a crash."""
        if group.versions() is None:
            return _NO_TOKENS
        try:
            word = self._filter(group.group())
        except (Exception, SystemExit) as error:
            told = f"{describe_exception(error)}\n{USER_FRAME_PREFIX}{raised_at(error, self._filter)}"
            self.failures.firsts.setdefault(GROUP_FILTER, told)
            return f"filter_raised_{type(error).__name__}"
        if word is None:
            return None
        # The word becomes part of metric names and of the ledger, which take no text that is not Unicode.
        usable = isinstance(word, str) and len(word) <= _WORD_CHARS and word.isprintable()
        return word if usable else "filter_returned_no_word"

    def _stale(self, group: OpenGroup) -> bool:
        versions = group.versions()
        return versions is not None and self._too_old(versions[0])

    def _too_old(self, version: WeightVersion) -> bool:
        return version < self.version - self._max_staleness

    def _may_be_taken(self, group: OpenGroup) -> bool:
        versions = group.versions()
        return versions is None or versions[1] <= self.version

    def _drop(self, group: OpenGroup, reason: DropReason, word: str = "") -> None:
        """Ends a group that was not taken, and every place of it that has not ended."""
        self._in_flight.pop(group.id, None)
        self._ready.pop(group.id, None)
        del self._tasks_of[group.id]
        if group.id in self._replacements:
            self._replacements.remove(group.id)
        if group.members(RolloutState.IN_FLIGHT):
            self._unwanted.append(DroppedGroup(group_id=group.id, reason=reason))
        for index, state in enumerate(group.states_G):
            if state not in (None, RolloutState.DROPPED):
                self._ledger.move(group, index, RolloutState.DROPPED, reason=reason, detail=word)
                self._count(f"rollouts_dropped/{reason}")
        self._note_drop(reason, 1, word)

    def _note_drop(self, reason: DropReason, groups: int, word: str = "") -> None:
        name = f"{reason}/{word}" if word else str(reason)
        self.dropped[name] += groups
        self._count(f"groups_dropped/{name}", groups)

    def _end_batch(self, state: RolloutState, **facts: Unpack[EntryFacts]) -> None:
        for group in self._taken:
            self._move_all(group, state, **facts)
        self._taken = []

    def _drop_batch(self, reason: DropReason) -> None:
        self._count(f"rollouts_dropped/{reason}", len(self._taken) * self._group_size)
        self._note_drop(reason, len(self._taken))
        self._end_batch(RolloutState.DROPPED, reason=reason)

    def _move_all(self, group: OpenGroup, state: RolloutState, **facts: Unpack[EntryFacts]) -> None:
        for index in range(self._group_size):
            self._ledger.move(group, index, state, **facts)

    def _note(self, metrics: dict[str, Metric]) -> None:
        self._since = merge([self._since, metrics])

    def _count(self, name: str, n: int = 1) -> None:
        self._note({name: Sum(n)})
