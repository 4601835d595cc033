"""How a rollout ended: finished with a reward and its tokens, or failed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from invrl.types.leases import Place
from invrl.types.reasons import FailureReason
from invrl.types.routed_experts import RoutedExperts
from invrl.types.sessions import RolloutIdentity
from invrl.types.top_logprobs import TopLogprobs
from invrl.types.turns import Trajectory
from invrl.types.weights import WeightVersion


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSoFar:
    """A running rollout, and the oldest version among the tokens that would be trained
    if it finished now."""

    place: Place
    oldest_version: WeightVersion
