"""What the session API takes and answers, as types: requests are checked by them, OpenAPI shows them."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from invrl.gateway.registry import SessionState
from invrl.section import Section
from invrl.types import (
    MAX_NAME_LENGTH,
    MAX_REWARD,
    MAX_REWARD_COMPONENTS,
    FailureReason,
    GroupMember,
    Outcome,
    Purpose,
    Reward,
    Sampling,
    Session,
    SessionLimits,
)

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_RewardValue = Annotated[Number, Field(ge=-MAX_REWARD, le=MAX_REWARD)]
_Name = Annotated[str, Field(max_length=MAX_NAME_LENGTH)]
_Place = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
_Count = Annotated[int, Field(strict=True, ge=1, lt=2**31)]


class MemberBody(Section):
    index: _Place
    attempt: _Place = 0


class SamplingBody(Section):
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    max_new_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """None: as the gateway has it."""


class LimitsBody(Section):
    """None: as much as the gateway grants."""

    max_turns: _Count | None = None
    max_sampled_tokens: _Count | None = None
    timeout_s: Annotated[Number, Field(gt=0)] | None = None
    max_concurrent_calls: _Count | None = None


class ChildBody(Section):
    limits: LimitsBody = LimitsBody()
    request_id: _Name = ""
    """Makes opening safe to try again: the same id, the same sessions."""


class OpenBody(ChildBody):
    task_id: _Name
    group_id: _Name
    members: list[MemberBody] = Field(min_length=1, max_length=4096)
    purpose: Purpose = "train"
    sampling: SamplingBody | None = None


class RewardBody(Section):
    """Of the session, or of one of its turns, or of the branches through a turn."""

    reward: _RewardValue
    components: dict[_Name, _RewardValue] = Field(default_factory=dict, max_length=MAX_REWARD_COMPONENTS)
    turn: _Name = ""
    branch: _Name = ""

    def value(self) -> Reward:
        return Reward(value=self.reward, components=self.components, turn=self.turn, branch=self.branch)


class FinishBody(Section):
    reward: _RewardValue | None = None
    components: dict[_Name, _RewardValue] = Field(default_factory=dict, max_length=MAX_REWARD_COMPONENTS)

    def value(self) -> Reward | None:
        return None if self.reward is None else Reward(value=self.reward, components=self.components)


class AbortBody(Section):
    reason: FailureReason = FailureReason.ABORTED
    detail: str = Field("", max_length=20_000)


class LeaseBody(Section):
    wait_s: Annotated[Number, Field(ge=0, le=60)] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSession(Session):
    """All that a client needs is here: `base_url`, `key` and `model`."""

    model: str
    """What clients name in their requests."""

    @classmethod
    def of(cls, session: Session, model: str) -> "OpenedSession":
        return cls(**{one.name: getattr(session, one.name) for one in fields(session)}, model=model)


class Opened(BaseModel):
    """The sessions, in the order of the members that they were opened for; a child is the only one."""

    sessions: list[OpenedSession]


class Rewarded(BaseModel):
    session_id: str
    reward: float
    state: SessionState


class Heartbeat(BaseModel):
    """What an environment learns when it says that it is there."""

    session_id: str
    state: SessionState
    session_idle_timeout_s: float
    """The next call of a session of this group is due within so many seconds; 0: no limit."""


class Unrewarded(BaseModel):
    """Finished, but for the reward, which must come by `deadline` (Unix seconds)."""

    outcome: Literal["unrewarded"] = "unrewarded"
    session_id: str
    deadline: float


class Lease(BaseModel):
    """Open sessions for these members within `lease_timeout_s`."""

    group_id: str
    task: dict[str, Any]
    """`id`, `payload`, `label`, `split`, as the task source gave them."""
    members: list[GroupMember]
    model: str
    """What clients name in their requests; each session says it too."""
    lease_timeout_s: float


class Leased(BaseModel):
    lease: Lease | None = Field(description="null: there is no task now; ask again, unless the run has ended")
    ended: bool = Field(description="the run has ended: there will be no task any more")


class ChangeLine(BaseModel):
    """The first place in which a request differs from what was recorded."""

    message: int
    """Its place in the request."""
    role: str
    part: str
    recorded: str
    sent: str


class TurnLine(BaseModel):
    id: str
    parent_id: str | None
    fork_reason: str
    advice: str = ""
    changed: ChangeLine | None = None
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    delivered: bool
    sampled_tokens: int
    constrained: bool
    started_at: float
    """Unix time, as `finished_at`: of the request, and of its last token."""
    finished_at: float


class SessionView(BaseModel):
    """A session to who asks for it: not its key."""

    id: str
    task_id: str
    group_id: str
    index: int
    attempt: int
    purpose: Purpose
    sampling: Sampling
    limits: SessionLimits
    parent_id: str
    model: str
    state: SessionState
    reward: float | None
    components: dict[str, float]
    turn_rewards: dict[str, Reward]
    branch_rewards: dict[str, Reward]
    children: list[str]
    outcome: Outcome | None
    overridden: list[str]
    ignored: dict[str, int]
    turns: list[TurnLine]
    forks: dict[str, int]
    auxiliary_roots: list[str]


class ErrorBody(BaseModel):
    """Every refusal: its `message`, `type`, `param` and `code`."""

    error: dict[Literal["message", "type", "param", "code"], str | None]
