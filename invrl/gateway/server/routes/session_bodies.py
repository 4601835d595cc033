"""Bodies of the session API, requests and answers. They validate requests; OpenAPI
shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from invrl.gateway.session_record import SessionRecord
from invrl.gateway.turns.placement import CONTROL_TOKENS_AS_TEXT
from invrl.store.rows import SessionState
from invrl.types.extra_columns import MAX_COLUMNS, ExtraNumbers
from invrl.types.fields import field_values
from invrl.types.leases import GroupMember
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import Outcome
from invrl.types.sessions import (
    MAX_NAME_LENGTH,
    MAX_REWARD,
    MAX_REWARD_COMPONENTS,
    Purpose,
    Reward,
    Session,
    SessionTerms,
)
from invrl.types.turns import Segment

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_RewardValue = Annotated[Number, Field(ge=-MAX_REWARD, le=MAX_REWARD)]
_Name = Annotated[str, Field(max_length=MAX_NAME_LENGTH)]
_Place = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
_AnyNumber = Annotated[float, Field(strict=True)]
"""Checked later, so that a refusal can say what to do instead."""
_Count = Annotated[int, Field(strict=True, ge=1, lt=2**31)]


class _Request(BaseModel):
    """A body without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class MemberBody(_Request):
    index: _Place
    attempt: _Place = 0


class SamplingBody(_Request):
    temperature: Number = Field(1.0, ge=0, le=2)
    top_p: Number = Field(1.0, gt=0, le=1)
    max_new_tokens: _Count | None = None
    """None: the gateway's own setting."""


class LimitsBody(_Request):
    """None: as much as the gateway grants at most."""

    max_turns: _Count | None = None
    max_sampled_tokens: _Count | None = None
    timeout_s: Annotated[Number, Field(gt=0)] | None = None
    max_concurrent_calls: _Count | None = None


class ChildBody(_Request):
    limits: LimitsBody = LimitsBody()
    request_id: _Name = ""
    """Makes a request safe to repeat: the same id gets the same sessions."""


class OpenBody(ChildBody):
    task_id: _Name
    group_id: _Name
    members: list[MemberBody] = Field(min_length=1, max_length=4096)
    purpose: Purpose = "train"
    sampling: SamplingBody | None = None


class RewardBody(_Request):
    """The reward of the session, of one of its turns, or of the trajectories through a
    turn. A turn is named by its id or by the id of its reply."""

    reward: _RewardValue
    components: dict[_Name, _RewardValue] = Field(
        default_factory=dict, max_length=MAX_REWARD_COMPONENTS
    )
    turn: _Name = ""
    branch: _Name = ""

    def value(self) -> Reward:
        return Reward(
            value=self.reward,
            components=self.components,
            turn=self.turn,
            branch=self.branch,
        )


class NumbersBody(_Request):
    """Numbers of the extra columns that the run declares, by the names of the columns.
    A turn is named by its id or by the id of its reply."""

    numbers: dict[_Name, _AnyNumber] = Field(
        default_factory=dict, max_length=MAX_COLUMNS
    )
    turn_numbers: dict[_Name, dict[_Name, _AnyNumber]] = Field(default_factory=dict)
    """Numbers by turn, then by name."""
    token_numbers: dict[_Name, dict[_Name, list[_AnyNumber]]] = Field(
        default_factory=dict
    )
    """Numbers by turn, then by name: one for each token that the turn sampled."""

    def extra(self) -> ExtraNumbers:
        return ExtraNumbers(
            numbers=self.numbers,
            turn_numbers=self.turn_numbers,
            token_numbers=self.token_numbers,
        )


class FinishBody(NumbersBody):
    reward: _RewardValue | None = None
    components: dict[_Name, _RewardValue] = Field(
        default_factory=dict, max_length=MAX_REWARD_COMPONENTS
    )

    def value(self) -> Reward | None:
        if self.reward is None:
            return None
        return Reward(value=self.reward, components=self.components)


class AbortBody(_Request):
    reason: FailureReason = FailureReason.ABORTED
    detail: str = Field("", max_length=20_000)


class LeaseBody(_Request):
    wait_s: Annotated[Number, Field(ge=0, le=60)] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSession(Session):
    """A session with everything that a client needs: `base_url`, `key` and `model`."""

    model: str
    """Name under which clients call the model."""

    @classmethod
    def of(cls, session: Session, model: str) -> OpenedSession:
        return cls(**field_values(session), model=model)


class Opened(BaseModel):
    """The sessions in the order of the members that they were opened for; for a child,
    this one alone."""

    sessions: list[OpenedSession]


class Rewarded(BaseModel):
    session_id: str
    reward: float
    state: SessionState


class Attached(BaseModel):
    session_id: str
    state: SessionState


class Heartbeat(BaseModel):
    """The answer to an environment's heartbeat."""

    session_id: str
    state: SessionState
    session_idle_timeout_s: float
    """Seconds within which the next call of a session of this group is due; 0: no
    limit."""
    held_s: float
    """Seconds for which the gate has held turns of the session or its children."""


class Unrewarded(BaseModel):
    """A finished session that waits for its reward until `deadline` (Unix seconds)."""

    outcome: Literal["unrewarded"] = "unrewarded"
    session_id: str
    deadline: float


class Lease(BaseModel):
    """A leased task. Sessions for its members must be opened within
    `lease_timeout_s`."""

    group_id: str
    task: dict[str, Any]
    """`id`, `payload`, `label` and `split`, as the task source returned them."""
    members: list[GroupMember]
    model: str
    """Name under which clients call the model; each session has it too."""
    lease_timeout_s: float


class Leased(BaseModel):
    lease: Lease | None = Field(
        description="null: there is no task now; ask again, unless the run has ended"
    )
    ended: bool = Field(description="the run has ended: there will be no task any more")


class ChangeLine(BaseModel):
    """The first difference between a request and the recorded conversation."""

    message: int
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
    keeps_interrupted_reply: str = ""
    """Turn that it continues, if that one was out of tokens."""
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    delivered: bool
    sampled_tokens: int
    segments: list[Segment]
    """Engines of a moved turn, with the tokens of each; empty if it was not moved."""
    constrained: bool
    started_at: float
    """Arrival of the request in Unix seconds."""
    finished_at: float
    """Sampling of its last token in Unix seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionView(SessionTerms):
    """A session's state, without its key."""

    id: str
    index: int
    attempt: int
    parent_id: str
    model: str
    state: SessionState
    reward: float | None
    components: Mapping[str, float]
    turn_rewards: Mapping[str, Reward]
    branch_rewards: Mapping[str, Reward]
    numbers: Mapping[str, float]
    turn_numbers: Mapping[str, Mapping[str, float]]
    children: list[str]
    outcome: Outcome | None
    overridden: list[str]
    ignored: Mapping[str, int]
    refused: list[str]
    control_tokens_as_text: int
    """Texts of control tokens in the messages, which were rendered as text."""
    turns: list[TurnLine]
    forks: Mapping[str, int]
    auxiliary_roots: list[str]

    @classmethod
    def of(
        cls,
        record: SessionRecord,
        *,
        model: str,
        turns: Sequence[TurnLine],
        forks: Mapping[str, int],
        auxiliary_roots: Sequence[str],
    ) -> SessionView:
        session = record.session
        return cls(
            **field_values(session, SessionTerms),
            id=session.id,
            index=session.index,
            attempt=session.attempt,
            parent_id=session.parent_id,
            model=model,
            state=record.state,
            reward=record.reward,
            components=record.components,
            turn_rewards=record.turn_rewards,
            branch_rewards=record.branch_rewards,
            numbers=record.numbers,
            turn_numbers=record.turn_numbers,
            children=[child.session.id for child in record.children],
            outcome=record.outcome,
            overridden=sorted(record.overridden),
            ignored=dict(
                record.ignored
            ),  # FastAPI copies this object, which a Counter would not survive
            refused=list(record.refusals),
            control_tokens_as_text=record.counts[CONTROL_TOKENS_AS_TEXT],
            turns=list(turns),
            forks=dict(forks),
            auxiliary_roots=list(auxiliary_roots),
        )


class ErrorBody(BaseModel):
    """A refusal: its `message`, `type`, `param` and `code`."""

    error: dict[Literal["message", "type", "param", "code"], str | None]
