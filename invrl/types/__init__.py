"""The vocabulary of the package, in pipeline order: one frozen type per stage of a
sample's life.

    WeightVersion -> Task -> GroupLease -> Session -> Turn -> Trajectory -> Rollout | FailedRollout
        -> Group -> TakenBatch -> TrainSample -> TrainBatch -> WeightUpdate

Axes in names: `_G` members of a group, `_T` tokens of a sequence, `_B` packed samples.
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
"""Number of batches that the weights were trained on, which is the step; 0 is the
initial model."""

Purpose = Literal["train", "eval", "serve"]

FinishReason = Literal["stop", "length", "abort"]
"""Reason that a generation ended: by itself, at its token limit, or cancelled."""

MAX_REWARD = 1e9
"""Largest absolute reward. Group statistics square rewards: above it float32 advantages
would overflow."""
MAX_REWARD_COMPONENTS = 256
"""Maximum number of named parts of a reward."""
MAX_NAME_LENGTH = 512
"""Maximum length of a name in the session API: ids, components of a reward."""


def _same_length(**arrays: NDArray[np.generic]) -> int:
    """Return the common length of the arrays. Raises ValueError if lengths differ."""
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"lengths differ: {lengths}")
    return next(iter(lengths.values()))


def field_values(instance: Any, of: type | None = None) -> dict[str, Any]:
    """Return the fields of a dataclass by name, for the constructor of another that has
    them too. `of` selects the fields of that base class. Unlike in
    `dataclasses.asdict`, dataclass fields are not converted."""
    return {
        member.name: getattr(instance, member.name) for member in fields(of or instance)
    }


# ----------------------------------------------------------------- tasks and leases


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One item of a dataset: the task of a rollout."""

    id: str
    payload: Mapping[str, Json]
    label: Json = None
    split: str = "train"


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a rollout in the run: its group, its index in the group, and the
    number of the attempt at that index. No two rollouts share a place."""

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
    """Work handed out by the buffer: run these members of this group. A later lease of
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
    """Sampling parameters. The engine's log-probs are computed after `temperature` and
    before `top_p`."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits of a session: turns, sampled tokens, seconds since it was opened,
    concurrent calls."""

    max_turns: int = 10_000
    max_sampled_tokens: int = 1_000_000
    timeout_s: float = 3600.0
    max_concurrent_calls: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutIdentity:
    """The rollout that something belongs to, and its session."""

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
    """Purpose and limits of a session. Sessions opened together have the same terms."""

    task_id: str
    group_id: str
    purpose: Purpose
    sampling: Sampling
    limits: SessionLimits = field(default_factory=SessionLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session(SessionTerms):
    """The right of one rollout to sample: the holder of `key` may sample in this
    session only."""

    id: str
    key: str
    base_url: str
    index: int
    attempt: int
    parent_id: str = ""
    """Session that opened this one for a sub-agent. Both have the same index and
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
    """A reward and its named parts: of the session, or of one of its turns or
    trajectories (by turn id)."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)
    turn: str = ""
    branch: str = ""


# ----------------------------------------------------------------- turns


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Sampled tokens [start, end) of a turn that were drawn under the weights of
    `version`."""

    version: WeightVersion
    start: int
    end: int


def is_trainable(finish_reason: str, constrained: bool, has_grammar: bool) -> bool:
    """Whether the tokens of a delivered turn may be trained: it was not aborted, and
    any grammar that constrained it is known, so that the trainer can apply it too."""
    if finish_reason == "abort":
        return False
    return not constrained or has_grammar


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One generation. The engine consumed the ids of the trajectory up to this turn,
    then `context_ids_T`, and emitted `sampled_ids_T`: the concatenated turns of a
    trajectory are exactly the ids that the engine saw."""

    id: str
    session_id: str
    parent_id: str | None
    context_ids_T: NDArray[np.int32]
    sampled_ids_T: NDArray[np.int32]
    logprobs_T: NDArray[np.float32]
    """Log-probs of the sampled ids, in nats."""
    spans: tuple[VersionSpan, ...]
    """Cover the sampled ids without gaps."""
    finish_reason: FinishReason
    request_digest: str
    delivered: bool
    """Whether the whole reply reached its client."""
    temperature: float
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose keys and values the engine had cached."""
    fork_reason: str
    """Reason that this turn departs from the recording: it is a further root, or it
    branches off before a reply that the client replaced. "" for a first turn and for a
    turn that continues its parent."""
    started_at: float
    finished_at: float
    constrained: bool = False
    """Whether a grammar restricted the tokens (forced tool call, JSON schema).
    `logprobs_T` are then of the model's distribution over the allowed tokens."""
    grammar: str = ""
    """Grammar of a constrained turn that may be trained, as JSON of SGLang's sampling
    parameter."""

    @property
    def trainable(self) -> bool:
        """Whether its tokens may be trained once it is `delivered`."""
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
        """Weight version of each sampled token."""
        versions_T = np.empty(len(self.sampled_ids_T), np.int32)
        for span in self.spans:
            versions_T[span.start : span.end] = span.version
        return versions_T


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """One root-to-leaf path of a session's turns."""

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
    """Prompt tokens over all turns, as the engine counted them (including cached
    ones)."""
    cached_tokens: int
    later_prompt_tokens: int
    """Prompt tokens of all turns but the first of each trajectory."""
    later_cached_tokens: int
    sampled_tokens: int
    delivered_tokens: int = 0
    """Sampled tokens of turns whose whole reply reached its client."""
    auxiliary_tokens: int = 0
    """Sampled tokens of conversations other than the main one (titles, summaries)."""
    trained_tokens: int
    """Sampled tokens that may be trained: of delivered turns that were not aborted and
    are not below an untrained root."""
    truncated: bool
    """Whether some turn ended at its token limit."""
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
    """Turn id -> reward of the trajectories through that turn. Of two on one trajectory
    the later counts."""
    turn_levels: Mapping[str, str] = field(default_factory=dict)
    """Turn id -> level, for the turns in the two mappings above: "main/N" for a turn of
    the session itself, "child/N" for a turn of a child session, with N turns before it
    on its trajectory."""
    child_rewards: Mapping[str, float] = field(default_factory=dict)
    """Session id -> reward of every child session whose turns belong to this rollout,
    its own or inherited."""
    child_reward_from: Mapping[str, str] = field(default_factory=dict)
    """Child session id -> the session that was given this reward: the child itself, or
    the ancestor it inherits from."""
    untrained_roots: tuple[str, ...] = ()
    """Root turns of conversations that are not trained."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Numbers of rollout-level extra columns by name, if given."""
    turn_numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Turn id -> name -> number of turn-level extra columns."""
    failure: FailureReason | None = None
    """Set if the rollout failed but counts, with the run's reward for such failures."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """A finished session with its tokens, and those of its children."""

    summary: RolloutSummary
    trajectories: tuple[Trajectory, ...]
    routed_experts: Mapping[str, RoutedExperts] = field(default_factory=dict)
    """Experts by turn id, if the run records them: one row for each of the turn's
    tokens, the experts of the pass that predicted it."""
    token_numbers: Mapping[str, Mapping[str, NDArray[np.float32]]] = field(
        default_factory=dict
    )
    """Turn id -> name -> one number for each sampled token, of token-level extra
    columns."""
    top_logprobs: Mapping[str, TopLogprobs] = field(default_factory=dict)
    """Likeliest tokens at each sampled one by turn id, if the run records them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRollout(RolloutIdentity):
    """A session that ended without a usable reward."""

    outcome: Literal["failed"] = "failed"
    reason: FailureReason
    detail: str
    partial: RolloutSummary | None = None
    """Summary that counts if the run gives such failures a reward; its own reward is 0
    until then. None if there is no token to train."""


Outcome = RolloutSummary | FailedRollout


# ----------------------------------------------------------------- groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All rollouts of one task, one per index."""

    id: str
    task_id: str
    rollouts_G: tuple[RolloutSummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """Outcome of a group, as its task source gets it and the history of its task keeps
    it.

    A kept group ends, in this sense, when it is complete: it is trained later, unless
    its tokens are too old or lost by then.
    """

    task_id: str
    """Id from the task source, without the "@n" of a repeated task."""
    group_id: str
    version: WeightVersion
    """The trainer's version at that time, which is the number of trained batches."""
    rewards_G: tuple[float, ...]
    """Rewards of finished rollouts in the order of their indices. Fewer than the
    group's size if it is not complete."""
    num_solved: int
    """Number of these rewards that are at least --success-reward."""
    complete: bool
    """Whether all rollouts of the group finished."""
    dropped: str = ""
    """Reason that the group is not trained: "zero_variance", "filtered/<the filter's
    word>", "stale", "incomplete" and so on (`DropReason`). "" if it is kept."""

    @property
    def success_rate(self) -> float | None:
        """Share of these rewards that are at least --success-reward. None without a
        reward."""
        if not self.rewards_G:
            return None
        return self.num_solved / len(self.rewards_G)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskHistory:
    """Complete groups of a task so far in the run, kept or dropped."""

    task_id: str
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
        """Share of solved rollouts over all groups. None before the first group."""
        if not self.num_rollouts:
            return None
        return self.num_solved / self.num_rollouts

    @property
    def mean_reward(self) -> float | None:
        """Mean over all rollouts. None before the first group."""
        if not self.num_rollouts:
            return None
        return self.reward_sum / self.num_rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedGroup:
    """A group that was dropped while its rollouts ran, which must now be cancelled."""

    group_id: str
    reason: DropReason

    @property
    def detail(self) -> str:
        """Message with which its rollouts are cancelled."""
        return f"group {self.group_id} was dropped ({self.reason}): this rollout is no longer needed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSoFar:
    """A running rollout, and the oldest version among the tokens that would be trained
    if it finished now."""

    place: Place
    oldest_version: WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenBatch:
    """Whole groups, by id, that the buffer hands to the loop. Their tokens are read
    from the store."""

    batch_id: int
    version: WeightVersion
    """Version that the trainer holds when the batch is taken. Staleness is counted
    against it."""
    groups: tuple[Group, ...]


# ----------------------------------------------------------------- training


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpan:
    """Tokens [start, end) of a sample that were sampled under `grammar` (as in `Turn`),
    from the grammar's beginning."""

    start: int
    end: int
    grammar: str


SOLVED_NUMBER = "solved"
"""Number of a sample: 1 if its rollout solved its task, else 0. Set if the objective
reads it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainSample:
    """One training sample, flat: a trajectory of a rollout."""

    tokens_T: NDArray[np.int32]
    loss_mask_T: NDArray[np.bool_]
    """Whether token t was sampled and is trained in this sample."""
    rollout_logprobs_T: NDArray[np.float32]
    """The engine's log-prob of token t in nats; 0 where the loss mask is False."""
    versions_T: NDArray[np.int32]
    """Weight version that sampled token t; -1 where the loss mask is False."""
    reward: float
    temperature: float
    group_id: str
    rollout_id: str
    attempt: int
    turn_ids: tuple[str, ...]
    turn_spans: tuple[tuple[int, int], ...] = ()
    """Tokens [start, end) that each of these turns sampled. Empty: the sample was not
    made of turns."""
    grammars: tuple[GrammarSpan, ...] = ()
    experts_TLK: RoutedExperts | None = None
    """Experts that computed token t in the engine; None: not recorded."""
    top_logprobs: TopLogprobs | None = None
    """Likeliest tokens under the engine's policy at token t; none where the loss mask
    is False. None: not recorded."""
    columns: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """Further numbers of token t by name: log-probs of a teacher, process rewards, the
    user's own."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Further numbers of the whole sample by name."""

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
    """Counts of a mini-batch's trained parts over all ranks: the denominators of its
    loss. Parts without a trained token do not count."""

    tokens_of_rollout: Mapping[str, int]
    """Trained tokens by rollout id. A rollout may have several samples, also on several
    ranks."""
    tokens_of_group: Mapping[str, int]
    """Trained tokens by group id."""
    group_of_rollout: Mapping[str, str]
    """Rollout id -> group id."""
    rows: int
    solved_tokens: int = 0
    """Tokens of samples whose number `solved` is 1."""

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
    """Counts of the whole mini-batch of which these samples are a share. None: they are
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
        """Counts of the whole mini-batch, for a share as well."""
        return self.counts or TrainedCounts.of(self.samples)


# ----------------------------------------------------------------- weights


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """An exported weight: its Hugging Face name, its shape, and torch's name of its
    dtype ("bfloat16")."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """Result of one committed weight update. Gaps are in nats."""

    version: WeightVersion
    num_bytes: int
    seconds: Mapping[str, float]
    """Seconds per phase: stage, prepare, pause, load, commit, resume, canary; summed
    over the engines in a rolling update. `newcomers` is the wait for engines that
    return, `trainer_canary` the trainer's part of the canary, computed while the
    engines load, `paused` the longest time during which an engine did not generate."""
    canary_max_gap: float
    canary_mean_gap: float
    lost_engines: Mapping[str, str] = field(default_factory=dict)
    """Name -> reason of engines that failed while others did not. They must leave the
    fleet."""
