"""The vocabulary, in pipeline order: one frozen type per stage of a sample's life.

Axes in names: `_G` members of a group, `_T` tokens, `_B` packed rows. Token ids and versions are
int32, log-probs and advantages float32. Lengths are checked on construction, so a value that exists
is consistent. Everybody imports this module; it imports nothing of ours."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NewType

import numpy as np
from numpy.typing import NDArray

Json = None | bool | int | float | str | list["Json"] | Mapping[str, "Json"]
WeightVersion = NewType("WeightVersion", int)
"""Weight updates the fleet has committed; 0 is the initial model."""

Purpose = Literal["train", "eval", "serve"]
MAX_REWARD = 1e9
"""Group statistics square rewards: beyond this float32 advantages would overflow."""
MAX_REWARD_COMPONENTS = 256
"""Named parts that one reward may have."""
MAX_NAME_LENGTH = 512
"""Characters of a name that crosses the session API: ids, components of a reward."""
FinishReason = Literal["stop", "length", "abort"]


def _same_length(**arrays: NDArray[np.generic]) -> int:
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"lengths differ: {lengths}")
    return next(iter(lengths.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One item of a dataset: what a rollout is asked to do."""

    id: str
    payload: Mapping[str, Json]
    label: Json = None
    split: str = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn. Log-probs that the engine returns are after `temperature`, before `top_p`."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """The place of one rollout: its index in the group, and which try at that index it is."""

    index: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLease:
    """Work handed out by the buffer: run these members of this group. A later lease of the same
    group holds the replacements of members that failed."""

    group_id: str
    task: Task
    members: tuple[GroupMember, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """What a session may use up: turns, sampled tokens, seconds since it was opened, calls at a time."""

    max_turns: int = 10_000
    max_sampled_tokens: int = 1_000_000
    timeout_s: float = 3600.0
    max_concurrent_calls: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A reward and its named parts, for the session or for one of its turns or branches (by turn id)."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)
    turn: str = ""
    branch: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One rollout's capability: whoever has `key` may sample in this session and in no other."""

    id: str
    key: str
    base_url: str
    task_id: str
    group_id: str
    index: int
    attempt: int
    purpose: Purpose
    sampling: Sampling
    limits: SessionLimits = field(default_factory=SessionLimits)
    parent_id: str = ""
    """The session that opened this one for a sub-agent; it has the same place, and one outcome is both's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Sampled tokens [start, end) of a turn were drawn under `version`."""

    version: WeightVersion
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One generation. The engine consumed the path's ids, then `context_ids_T`, and emitted
    `sampled_ids_T`: a path of turns concatenated is exactly what the engine saw."""

    id: str
    session_id: str
    parent_id: str | None
    context_ids_T: NDArray[np.int32]
    sampled_ids_T: NDArray[np.int32]
    logprobs_T: NDArray[np.float32]
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    request_digest: str
    delivered: bool
    temperature: float
    prompt_tokens: int
    cached_tokens: int
    fork_reason: str
    """Why this turn departs from what was recorded (a root of its own, or a branch past a reply that the
    client replaced); "" for a first turn and for one that continues."""
    started_at: float
    finished_at: float
    constrained: bool = False
    """A grammar chose among the tokens (forced tool call, JSON schema): `logprobs_T` are those of the model's
    distribution over the tokens that the grammar kept."""
    grammar: str = ""
    """The grammar of a constrained turn that is trained, as JSON of SGLang's sampling parameter."""

    @property
    def trainable(self) -> bool:
        """Its tokens may be trained, once it is known to be `delivered`."""
        return self.finish_reason != "abort" and (not self.constrained or bool(self.grammar))

    def __post_init__(self) -> None:
        sampled = _same_length(sampled_ids_T=self.sampled_ids_T, logprobs_T=self.logprobs_T)
        at = 0
        for span in self.spans:
            if span.start != at or span.end < span.start:
                raise ValueError(f"turn {self.id}: version spans do not tile the output: {self.spans}")
            at = span.end
        if at != sampled:
            raise ValueError(f"turn {self.id}: spans end at {at}, {sampled} tokens were sampled")

    @property
    def versions_T(self) -> NDArray[np.int32]:
        versions = np.empty(len(self.sampled_ids_T), np.int32)
        for span in self.spans:
            versions[span.start : span.end] = span.version
        return versions


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """One root-to-leaf branch of a session's turns."""

    turns: tuple[Turn, ...]

    def __post_init__(self) -> None:
        parents = [turn.parent_id for turn in self.turns]
        if parents != [None, *(turn.id for turn in self.turns[:-1])]:
            raise ValueError("the turns of a trajectory are not one root-to-leaf path")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedSession:
    """Which session ended, and its place: what every outcome begins with."""

    session_id: str
    task_id: str
    group_id: str
    index: int
    attempt: int


class FailureReason(StrEnum):
    """Why a rollout ended without a reward. Data, counted in the metrics."""

    EXCEPTION = "exception"
    TIMEOUT = "timeout"
    WORKER_DIED = "worker_died"
    BAD_RETURN = "bad_return"
    BAD_REWARD = "bad_reward"
    EMPTY = "empty"
    CONSTRAINED = "constrained"
    """A grammar forced every turn that reached the client, and such turns are not trained."""
    ABORTED = "aborted"
    ENGINE = "engine"
    MEMORY = "memory"
    ENVIRONMENT_GONE = "environment_gone"
    GROUP_DROPPED = "group_dropped"
    """Nobody waits for it any more: its group was dropped while it ran, and it was cancelled."""
    RUN_ENDED = "run_ended"
    """The run ended while it ran."""
    CONTEXT = "context"
    """A prompt did not fit the model's context, and the agent went on no further."""
    LIMIT = "limit"
    """It used up the turns or the sampled tokens of its session, and the agent went on no further."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary(EndedSession):
    """A finished session as the buffer holds it: ids, lengths and the reward, no token arrays."""

    outcome: Literal["finished"] = "finished"
    reward: float
    reward_components: Mapping[str, float] = field(default_factory=dict)
    num_turns: int
    prompt_tokens: int
    """Prompt tokens over all turns, as the engine counted them (a cached token counts)."""
    cached_tokens: int
    later_prompt_tokens: int
    """Prompt tokens of the turns after the first of each branch."""
    later_cached_tokens: int
    sampled_tokens: int
    delivered_tokens: int = 0
    """Sampled tokens of turns whose answer reached its client whole."""
    auxiliary_tokens: int = 0
    """Sampled tokens of conversations beside the main one (titles, summaries)."""
    trained_tokens: int
    """Sampled tokens that may be trained: of delivered turns, not aborted nor under an untrained root."""
    truncated: bool
    """Some turn ended because it ran out of tokens."""
    oldest_version: WeightVersion
    newest_version: WeightVersion
    forks: int
    counts: Mapping[str, int] = field(default_factory=dict)
    """Forks by reason, continued turns by match level, ids of kept thinking and of forked prompts."""
    started_at: float
    finished_at: float
    turn_rewards: Mapping[str, float] = field(default_factory=dict)
    """By turn id: rewards of single turns, for the tokens of that turn."""
    branch_rewards: Mapping[str, float] = field(default_factory=dict)
    """By turn id: rewards of the branches through that turn; of two on a branch the later counts."""
    turn_levels: Mapping[str, str] = field(default_factory=dict)
    """By turn id, for the turns named in the two above: "main/N" in the session itself or "child/N" in a
    child's, with N turns before it on its branch."""
    child_rewards: Mapping[str, float] = field(default_factory=dict)
    """Of every child session whose turns belong to this rollout, by session id; its own or inherited."""
    child_reward_from: Mapping[str, str] = field(default_factory=dict)
    """By child session id: the session that was given this reward, itself or an ancestor that it inherits
    from."""
    untrained_roots: tuple[str, ...] = ()
    """Root turns of conversations that are not trained."""
    failure: FailureReason | None = None
    """Why it failed, where it counts all the same, with the reward that the run gives to such failures."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """A finished session with its tokens, and those of its children."""

    summary: RolloutSummary
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRollout(EndedSession):
    """A session that ended without a usable reward, and why."""

    outcome: Literal["failed"] = "failed"
    reason: FailureReason
    detail: str
    partial: RolloutSummary | None = None
    """What it would count as if the run gives such failures a reward, with 0 in that reward's place. None
    without a token to train."""


Outcome = RolloutSummary | FailedRollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All rollouts of one task, one per index."""

    id: str
    task_id: str
    rollouts_G: tuple[RolloutSummary, ...]


class DropReason(StrEnum):
    """Why a finished rollout or group is not trained."""

    STALE = "stale"
    ZERO_VARIANCE = "zero_variance"
    INCOMPLETE = "incomplete"
    FILTERED = "filtered"
    OVER_SAMPLED = "over_sampled"
    REPLACED = "replaced"
    TOKENS_LOST = "tokens_lost"
    """A checkpoint names it, and its turns are not in the store: a power loss, or a damaged file."""
    RUN_ENDED = "run_ended"
    NOT_TRAINED = "not_trained"
    """The run has no trainer (`--debug-rollout-only`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedGroup:
    """A group that was dropped while rollouts of it ran: those are to be cancelled."""

    group_id: str
    reason: DropReason

    @property
    def detail(self) -> str:
        """What its cancelled rollouts are told."""
        return f"group {self.group_id} was dropped ({self.reason}): nobody waits for this rollout any more"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSoFar:
    """The place of a rollout that runs, and the oldest version among the tokens that would be trained if it
    finished now."""

    group_id: str
    index: int
    attempt: int
    oldest_version: WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenBatch:
    """What the buffer hands to the loop: whole groups, by id; tokens follow from the store."""

    batch_id: int
    version: WeightVersion
    """Version the trainer holds when the batch is taken; staleness is counted against it."""
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpan:
    """Tokens [start, end) of a sample were sampled under `grammar` (as in `Turn`), from its beginning."""

    start: int
    end: int
    grammar: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainSample:
    """One flat row of training data: a branch of a rollout.

    `loss_mask_T[t]` says that token t was sampled and is trained in this row; where it is False,
    `rollout_logprobs_T[t]` is 0 and `versions_T[t]` is -1."""

    tokens_T: NDArray[np.int32]
    loss_mask_T: NDArray[np.bool_]
    rollout_logprobs_T: NDArray[np.float32]
    versions_T: NDArray[np.int32]
    reward: float
    temperature: float
    group_id: str
    rollout_id: str
    attempt: int
    turn_ids: tuple[str, ...]
    grammars: tuple[GrammarSpan, ...] = ()

    def __post_init__(self) -> None:
        names = ("tokens_T", "loss_mask_T", "rollout_logprobs_T", "versions_T")
        length = _same_length(**{name: getattr(self, name) for name in names})
        if length and self.loss_mask_T[0]:
            raise ValueError(f"rollout {self.rollout_id}: the first token has no log-prob to train")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainBatch:
    """Samples with one advantage per token (0 where the loss mask is False). The whole batch, or one
    data-parallel rank's shard of it."""

    batch_id: int
    version: WeightVersion
    samples: tuple[TrainSample, ...]
    advantages: tuple[NDArray[np.float32], ...]
    total_tokens: int
    """Trained tokens of the whole batch in either case: the loss's global denominator."""

    def __post_init__(self) -> None:
        if len(self.samples) != len(self.advantages):
            raise ValueError(f"{len(self.samples)} samples, {len(self.advantages)} advantages")
        for sample, advantages_T in zip(self.samples, self.advantages, strict=True):
            _same_length(tokens_T=sample.tokens_T, advantages_T=advantages_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name (Hugging Face's), shape and dtype (torch's name, "bfloat16") of one exported weight."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """What one committed weight update did. Seconds per phase; gaps in nats."""

    version: WeightVersion
    num_bytes: int
    seconds: Mapping[str, float]
    """Keys: prepare, stage, pause, load, commit, resume, canary; `paused`: while generation stood still."""
    canary_max_gap: float
    canary_mean_gap: float
    lost_engines: Mapping[str, str] = field(default_factory=dict)
    """Name -> reason of the engines that failed while others did not. They must leave the fleet."""
