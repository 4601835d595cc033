"""A rollout's right to sample: its terms, its limits, its identity and its rewards."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from invrl.types.leases import Place

Purpose = Literal["train", "eval", "serve"]


MAX_REWARD = 1e9
"""Largest absolute reward. Group statistics square rewards: above it float32 advantages
would overflow."""


MAX_REWARD_COMPONENTS = 256
"""Maximum number of named parts of a reward."""


MAX_NAME_LENGTH = 512
"""Maximum length of a name in the session API: ids, components of a reward."""


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
