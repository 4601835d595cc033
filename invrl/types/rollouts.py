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


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSoFar:
    """A running rollout, and the oldest version among the tokens that would be trained
    if it finished now."""

    place: Place
    oldest_version: WeightVersion
