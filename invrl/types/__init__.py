"""The vocabulary of the package, in pipeline order: one frozen type per stage of a
sample's life.

    WeightVersion -> Task -> GroupLease -> Session -> Turn -> Trajectory -> Rollout | FailedRollout
        -> Group -> TakenBatch -> TrainSample -> TrainBatch -> WeightUpdate

Axes in names: `_G` members of a group, `_T` tokens of a sequence, `_B` packed rows.
Token ids and versions are int32, log-probs and advantages float32. Constructors check
lengths, so a value that exists is consistent. Every package imports this module; it
imports only the reasons of failures (`reasons.py`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NewType

import numpy as np
from numpy.typing import NDArray

from invrl.types.reasons import DropReason, FailureReason
from invrl.types.routed_experts import RoutedExperts
from invrl.types.top_logprobs import TopLogprobs

Json = None | bool | int | float | str | list["Json"] | Mapping[str, "Json"]

WeightVersion = NewType("WeightVersion", int)
"""The number of batches that these weights were trained on, which is the step; 0 is the
initial model."""

Purpose = Literal["train", "eval", "serve"]
"""What a session is for."""

FinishReason = Literal["stop", "length", "abort"]
"""Why a generation ended: by itself, at its token limit, or because it was
cancelled."""

MAX_REWARD = 1e9
"""Largest absolute reward. Group statistics square rewards: above it float32 advantages
would overflow."""
MAX_REWARD_COMPONENTS = 256
"""Most named parts that one reward may have."""
MAX_NAME_LENGTH = 512
"""Most characters of a name that crosses the session API: ids, components of a
reward."""


def _same_length(**arrays: NDArray[np.generic]) -> int:
    """The common length of the arrays. Raises ValueError where lengths differ."""
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"lengths differ: {lengths}")
    return next(iter(lengths.values()))


def field_values(instance: Any, of: type | None = None) -> dict[str, Any]:
    """The fields of a dataclass by name, for the constructor of another one that has
    them too. `of`: only the fields of this base class. Unlike `dataclasses.asdict`,
    fields that are dataclasses stay what they are."""
    return {
        member.name: getattr(instance, member.name) for member in fields(of or instance)
    }


# ----------------------------------------------------------------- tasks and leases


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One item of a dataset: what a rollout is asked to do."""

    id: str
    payload: Mapping[str, Json]
    label: Json = None
    split: str = "train"


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one rollout in the run: its group, its index in the group, and the
    number of the attempt at that index. No two rollouts have the same place."""

    group_id: str
    index: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """A place within a group that is known from the context, such as a lease."""

    index: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLease:
    """Work that the buffer hands out: run these members of this group. A later lease of
    the same group holds the replacements of members that failed."""

    group_id: str
    task: Task
    members: tuple[GroupMember, ...]

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(
            Place(self.group_id, member.index, member.attempt)
            for member in self.members
        )


# ----------------------------------------------------------------- sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn. The log-probs that the engine returns are computed after
    `temperature` and before `top_p`."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """How much a session may use: turns, sampled tokens, seconds since it was opened,
    concurrent calls."""

    max_turns: int = 10_000
    max_sampled_tokens: int = 1_000_000
    timeout_s: float = 3600.0
    max_concurrent_calls: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutIdentity:
    """Which rollout something belongs to, and the session in which it runs."""

    session_id: str
    task_id: str
    group_id: str
    index: int
    attempt: int

    @property
    def place(self) -> Place:
        return Place(self.group_id, self.index, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTerms:
    """What a session is opened for, and what it may use. Sessions that are opened
    together have the same terms."""

    task_id: str
    group_id: str
    purpose: Purpose
    sampling: Sampling
    limits: SessionLimits = field(default_factory=SessionLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session(SessionTerms):
    """One rollout's right to sample: whoever has `key` may sample in this session and
    in no other."""

    id: str
    key: str
    base_url: str
    index: int
    attempt: int
    parent_id: str = ""
    """The session that opened this one for a sub-agent. Both have the same index and
    attempt in the group, and one outcome ends both."""

    @property
    def place(self) -> Place:
        return Place(self.group_id, self.index, self.attempt)

    @property
    def identity(self) -> RolloutIdentity:
        return RolloutIdentity(
            session_id=self.id,
            task_id=self.task_id,
            group_id=self.group_id,
            index=self.index,
            attempt=self.attempt,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A reward and its named parts: for the session, or for one of its turns or
    branches (by turn id)."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)
    turn: str = ""
    branch: str = ""


# ----------------------------------------------------------------- turns


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Sampled tokens [start, end) of a turn were drawn under the weights of
    `version`."""

    version: WeightVersion
    start: int
    end: int


def is_trainable(finish_reason: str, constrained: bool, has_grammar: bool) -> bool:
    """Whether the tokens of a turn may be trained if its answer was delivered: it was
    not aborted, and if a grammar constrained it, the grammar is known, so that the
    trainer can apply it too."""
    if finish_reason == "abort":
        return False
    return not constrained or has_grammar


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One generation. The engine consumed the ids of the path up to this turn, then
    `context_ids_T`, and emitted `sampled_ids_T`: the turns of a path, concatenated, are
    exactly the ids that the engine saw."""

    id: str
    session_id: str
    parent_id: str | None
    context_ids_T: NDArray[np.int32]
    sampled_ids_T: NDArray[np.int32]
    logprobs_T: NDArray[np.float32]
    """Of the sampled ids, in nats."""
    spans: tuple[VersionSpan, ...]
    """Tile the sampled ids, without gaps."""
    finish_reason: FinishReason
    request_digest: str
    delivered: bool
    """The answer reached its client whole."""
    temperature: float
    prompt_tokens: int
    cached_tokens: int
    """Those of the prompt tokens whose keys and values the engine had cached."""
    fork_reason: str
    """Why this turn departs from what was recorded: it is a further root, or it
    branches off before a reply that the client replaced. "" for a first turn and for a
    turn that continues its parent."""
    started_at: float
    finished_at: float
    constrained: bool = False
    """A grammar restricted the tokens (forced tool call, JSON schema): `logprobs_T` are
    those of the model's distribution over the tokens that the grammar allowed."""
    grammar: str = ""
    """For a constrained turn that may be trained: the grammar, as JSON of SGLang's
    sampling parameter."""

    @property
    def trainable(self) -> bool:
        """Whether its tokens may be trained, once it is known to be `delivered`."""
        return is_trainable(self.finish_reason, self.constrained, bool(self.grammar))

    def __post_init__(self) -> None:
        num_sampled = _same_length(
            sampled_ids_T=self.sampled_ids_T, logprobs_T=self.logprobs_T
        )
        end = 0
        for span in self.spans:
            if span.start != end or span.end < span.start:
                raise ValueError(
                    f"turn {self.id}: version spans do not tile the output: {self.spans}"
                )
            end = span.end
        if end != num_sampled:
            raise ValueError(
                f"turn {self.id}: spans end at {end}, {num_sampled} tokens were sampled"
            )

    @property
    def versions_T(self) -> NDArray[np.int32]:
        """The weight version of each sampled token."""
        versions_T = np.empty(len(self.sampled_ids_T), np.int32)
        for span in self.spans:
            versions_T[span.start : span.end] = span.version
        return versions_T


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """One root-to-leaf branch of a session's turns."""

    turns: tuple[Turn, ...]

    def __post_init__(self) -> None:
        parent_ids = [turn.parent_id for turn in self.turns]
        expected_ids = [None, *(turn.id for turn in self.turns[:-1])]
        if parent_ids != expected_ids:
            raise ValueError("the turns of a trajectory are not one root-to-leaf path")


# --------------------------------------------------------------- outcomes of rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary(RolloutIdentity):
    """A finished session as the buffer holds it: ids, lengths and the reward, no token
    arrays."""

    outcome: Literal["finished"] = "finished"
    reward: float
    reward_components: Mapping[str, float] = field(default_factory=dict)
    num_turns: int
    prompt_tokens: int
    """Prompt tokens over all turns, as the engine counted them (cached tokens
    included)."""
    cached_tokens: int
    later_prompt_tokens: int
    """Prompt tokens of all turns but the first of each branch."""
    later_cached_tokens: int
    sampled_tokens: int
    delivered_tokens: int = 0
    """Sampled tokens of turns whose answer reached its client whole."""
    auxiliary_tokens: int = 0
    """Sampled tokens of conversations beside the main one (titles, summaries)."""
    trained_tokens: int
    """Sampled tokens that may be trained: of delivered turns that were not aborted and
    are not below an untrained root."""
    truncated: bool
    """Some turn ended because it reached its token limit."""
    oldest_version: WeightVersion
    newest_version: WeightVersion
    forks: int
    counts: Mapping[str, int] = field(default_factory=dict)
    """Forks by reason, continued turns by match level, ids of kept thinking and of
    forked prompts."""
    started_at: float
    finished_at: float
    turn_rewards: Mapping[str, float] = field(default_factory=dict)
    """Turn id -> reward of that single turn, for its tokens."""
    branch_rewards: Mapping[str, float] = field(default_factory=dict)
    """Turn id -> reward of the branches through that turn. Of two on one branch the
    later one counts."""
    turn_levels: Mapping[str, str] = field(default_factory=dict)
    """Turn id -> level, for the turns in the two mappings above: "main/N" for a turn of
    the session itself, "child/N" for a turn of a child session, where N turns come
    before it on its branch."""
    child_rewards: Mapping[str, float] = field(default_factory=dict)
    """Session id -> reward, of every child session whose turns belong to this rollout;
    its own reward or an inherited one."""
    child_reward_from: Mapping[str, str] = field(default_factory=dict)
    """Child session id -> the session that was given this reward: the child itself, or
    the ancestor from which it inherits."""
    untrained_roots: tuple[str, ...] = ()
    """Root turns of conversations that are not trained."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Of extra columns that have one number per rollout, by name, as far as they were
    given."""
    turn_numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Turn id -> name -> number, of extra columns that have one number per turn."""
    failure: FailureReason | None = None
    """Set where the rollout failed but counts, with the reward that the run gives to
    such failures."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """A finished session with its tokens, and those of its children."""

    summary: RolloutSummary
    trajectories: tuple[Trajectory, ...]
    routed_experts: Mapping[str, RoutedExperts] = field(default_factory=dict)
    """By turn id, where the run records them: one row for each of the turn's tokens,
    the experts of the pass that predicted it."""
    token_numbers: Mapping[str, Mapping[str, NDArray[np.float32]]] = field(
        default_factory=dict
    )
    """Turn id -> name -> one number for each sampled token, of extra columns that have
    one per token."""
    top_logprobs: Mapping[str, TopLogprobs] = field(default_factory=dict)
    """By turn id, where the run records them: the likeliest tokens in the place of each
    sampled one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRollout(RolloutIdentity):
    """A session that ended without a usable reward, and why."""

    outcome: Literal["failed"] = "failed"
    reason: FailureReason
    detail: str
    partial: RolloutSummary | None = None
    """The summary that counts if the run gives such failures a reward; its own reward
    is 0 until then. None if there is no token to train."""


Outcome = RolloutSummary | FailedRollout
"""How a rollout ended, as the buffer records it."""


# ----------------------------------------------------------------- groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All rollouts of one task, one per index."""

    id: str
    task_id: str
    rollouts_G: tuple[RolloutSummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """How a group ended, as its task source is told it and as the history of its task
    keeps it.

    A group that is kept ends, in this sense, when it is complete: it is trained later,
    unless its tokens are too old or lost by then."""

    task_id: str
    """As the task source gave it, without the "@n" of a task that comes back."""
    group_id: str
    version: WeightVersion
    """The trainer's version at that time, which is the number of batches trained."""
    rewards_G: tuple[float, ...]
    """Of the rollouts that finished, in the order of their indices. Fewer than the
    group's size if it is not complete."""
    num_solved: int
    """How many of these rewards are at least --success-reward."""
    complete: bool
    """Whether all rollouts of the group finished."""
    dropped: str = ""
    """Why the group is not trained: "zero_variance", "filtered/<the filter's word>",
    "stale", "incomplete" and so on (`DropReason`). "" if it is kept."""

    @property
    def success_rate(self) -> float | None:
        """The share of these rewards that are at least --success-reward. None without a
        reward."""
        if not self.rewards_G:
            return None
        return self.num_solved / len(self.rewards_G)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskHistory:
    """The complete groups that a task has had so far in the run, whether they were kept
    or dropped."""

    task_id: str
    """As in `GroupOutcome`."""
    num_groups: int = 0
    num_kept: int = 0
    """Groups that no filter dropped."""
    num_rollouts: int = 0
    num_solved: int = 0
    """Rollouts with a reward of at least --success-reward."""
    reward_sum: float = 0.0
    recent: tuple[GroupOutcome, ...] = ()
    """The last groups, oldest first; at most 16."""

    @property
    def success_rate(self) -> float | None:
        """The share of solved rollouts over all groups. None before the first group."""
        if not self.num_rollouts:
            return None
        return self.num_solved / self.num_rollouts

    @property
    def mean_reward(self) -> float | None:
        """Over all rollouts. None before the first group."""
        if not self.num_rollouts:
            return None
        return self.reward_sum / self.num_rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedGroup:
    """A group that was dropped while rollouts of it ran. Those rollouts are to be
    cancelled."""

    group_id: str
    reason: DropReason

    @property
    def detail(self) -> str:
        """The message with which its rollouts are cancelled."""
        return f"group {self.group_id} was dropped ({self.reason}): this rollout is no longer needed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSoFar:
    """A running rollout, and the oldest version among the tokens that would be trained
    if it finished now."""

    place: Place
    oldest_version: WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenBatch:
    """What the buffer hands to the loop: whole groups, by id. Their tokens are read
    from the store."""

    batch_id: int
    version: WeightVersion
    """Version that the trainer holds when the batch is taken. Staleness is counted
    against it."""
    groups: tuple[Group, ...]


# ----------------------------------------------------------------- training


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpan:
    """Tokens [start, end) of a sample were sampled under `grammar` (as in `Turn`), from
    the grammar's beginning."""

    start: int
    end: int
    grammar: str


SOLVED_NUMBER = "solved"
"""The number of a row that is 1 if its rollout solved its task, else 0, where the
objective reads it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainSample:
    """One flat row of training data: a branch of a rollout."""

    tokens_T: NDArray[np.int32]
    loss_mask_T: NDArray[np.bool_]
    """Whether token t was sampled and is trained in this row."""
    rollout_logprobs_T: NDArray[np.float32]
    """The engine's log-prob of token t in nats; 0 where the loss mask is False."""
    versions_T: NDArray[np.int32]
    """The weight version that sampled token t; -1 where the loss mask is False."""
    reward: float
    temperature: float
    group_id: str
    rollout_id: str
    attempt: int
    turn_ids: tuple[str, ...]
    turn_spans: tuple[tuple[int, int], ...] = ()
    """Tokens [start, end) that each of these turns sampled. Empty: the row was not made
    of turns."""
    grammars: tuple[GrammarSpan, ...] = ()
    experts_TLK: RoutedExperts | None = None
    """The experts that computed token t in the engine; None: they were not recorded."""
    top_logprobs: TopLogprobs | None = None
    """The tokens that the engine's policy held likeliest in the place of token t; none
    where the loss mask is False. None: they were not recorded."""
    columns: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """More numbers of token t, by name: log-probs of a teacher, process rewards, the
    user's own."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """More numbers of the whole row, by name."""

    def __post_init__(self) -> None:
        if self.experts_TLK is not None:
            _same_length(tokens_T=self.tokens_T, experts_TLK=self.experts_TLK)
        if self.top_logprobs is not None:
            _same_length(tokens_T=self.tokens_T, top_ids_TK=self.top_logprobs.ids_TK)
        _same_length(tokens_T=self.tokens_T, **self.columns)
        length = _same_length(
            tokens_T=self.tokens_T,
            loss_mask_T=self.loss_mask_T,
            rollout_logprobs_T=self.rollout_logprobs_T,
            versions_T=self.versions_T,
        )
        if length > 0 and self.loss_mask_T[0]:
            raise ValueError(
                f"rollout {self.rollout_id}: the first token has no log-prob to train"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedCounts:
    """How much a mini-batch trains, over all ranks: the denominators of its loss. What
    has no trained token is not counted."""

    tokens_of_rollout: Mapping[str, int]
    """By rollout id. A rollout may have several rows, also on several ranks."""
    tokens_of_group: Mapping[str, int]
    """By group id."""
    group_of_rollout: Mapping[str, str]
    """Rollout id -> group id."""
    rows: int
    solved_tokens: int = 0
    """Of rows whose number `solved` is 1."""

    @property
    def tokens(self) -> int:
        return sum(self.tokens_of_rollout.values())

    @property
    def rollouts(self) -> int:
        return len(self.tokens_of_rollout)

    @property
    def groups(self) -> int:
        return len(self.tokens_of_group)

    @staticmethod
    def of(samples: Iterable[TrainSample]) -> "TrainedCounts":
        tokens_of_rollout: dict[str, int] = {}
        tokens_of_group: dict[str, int] = {}
        group_of_rollout: dict[str, str] = {}
        rows = 0
        solved_tokens = 0
        for sample in samples:
            num_trained = int(sample.loss_mask_T.sum())
            if num_trained == 0:
                continue
            rows += 1
            solved_tokens += (
                num_trained if sample.numbers.get(SOLVED_NUMBER) == 1.0 else 0
            )
            tokens_of_rollout[sample.rollout_id] = (
                tokens_of_rollout.get(sample.rollout_id, 0) + num_trained
            )
            tokens_of_group[sample.group_id] = (
                tokens_of_group.get(sample.group_id, 0) + num_trained
            )
            group_of_rollout[sample.rollout_id] = sample.group_id
        return TrainedCounts(
            tokens_of_rollout=tokens_of_rollout,
            tokens_of_group=tokens_of_group,
            group_of_rollout=group_of_rollout,
            rows=rows,
            solved_tokens=solved_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainBatch:
    """Samples with one advantage per token: the whole batch, a mini-batch of it, or one
    data-parallel rank's share of a mini-batch."""

    batch_id: int
    version: WeightVersion
    samples: tuple[TrainSample, ...]
    advantages: tuple[NDArray[np.float32], ...]
    """One array [T] per sample; 0 where its loss mask is False."""
    counts: TrainedCounts | None = None
    """Of the whole mini-batch that these samples are a share of. None: the samples are
    all of it."""

    def __post_init__(self) -> None:
        if len(self.samples) != len(self.advantages):
            raise ValueError(
                f"{len(self.samples)} samples, {len(self.advantages)} advantages"
            )
        for sample, advantages_T in zip(self.samples, self.advantages, strict=True):
            _same_length(tokens_T=sample.tokens_T, advantages_T=advantages_T)

    @property
    def trained(self) -> TrainedCounts:
        """Of the whole mini-batch, for a share as well."""
        return self.counts or TrainedCounts.of(self.samples)


# ----------------------------------------------------------------- weights


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One exported weight: its Hugging Face name, its shape, and its dtype by torch's
    name ("bfloat16")."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """What one committed weight update did. Gaps are in nats."""

    version: WeightVersion
    num_bytes: int
    seconds: Mapping[str, float]
    """Seconds per phase: stage, prepare, pause, load, commit, resume, canary; summed
    over the engines in a rolling update. `newcomers` is the wait for engines that come
    back, `trainer_canary` the trainer's part of the canary, which it computes beside the
    engines' part, `paused` the longest time during which an engine did not generate."""
    canary_max_gap: float
    canary_mean_gap: float
    lost_engines: Mapping[str, str] = field(default_factory=dict)
    """Name -> reason, of the engines that failed while others did not. They must leave
    the fleet."""
