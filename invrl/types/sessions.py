"""A rollout's right to sample: its terms, its limits, its identity and its rewards."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from invrl.types.leases import Place

Purpose = Literal["train", "eval", "serve"]
"""What a session is for."""


MAX_REWARD = 1e9
"""Largest absolute reward. Group statistics square rewards: above it float32 advantages
would overflow."""


MAX_REWARD_COMPONENTS = 256
"""Most named parts that one reward may have."""


MAX_NAME_LENGTH = 512
"""Most characters of a name that crosses the session API: ids, components of a
reward."""


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
