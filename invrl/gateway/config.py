"""Settings of the gateway, the one public port."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from invrl.types.extra_columns import ExtraColumn, parse_extra_columns
from invrl.types.section import COMMA_SEPARATED, Section, Text

MatchName = Literal["exact", "canonical", "without_reasoning", "rewritten"]
Constrained = Literal["free", "skip", "masked"]
"""Handling of a reply whose form the client wants forced. `free`: the form is not
forced, and the reply is trained. `skip`: the form is forced, and the reply is not
trained. `masked`: the form is forced, and the reply is trained as a choice among the
tokens that the grammar allowed."""

ContentTokens = Literal["plain", "control"]
"""Handling of a control token's text in a message. `plain`: the ids of its characters,
like any other text; `control`: the id of the token."""


class SessionPolicy(Section):
    """Limits of a session, and the handling of its reward and its other numbers. A
    caller may ask for lower limits."""

    max_open: PositiveInt = Field(
        1024, description="open sessions before new ones get 429"
    )
    ttl_s: PositiveFloat = Field(
        3600.0, description="seconds until an open session is ended"
    )
    idle_timeout_s: PositiveFloat | None = Field(
        900.0,
        description="seconds without a call of an environment's group until its sessions fail",
    )
    max_turns: PositiveInt = Field(10_000, description="turns of one session")
    max_tokens: PositiveInt = Field(
        1_000_000, description="tokens one session may sample"
    )
    max_calls: PositiveInt = Field(256, description="requests of one session at a time")
    extra_columns: Annotated[tuple[str, ...], COMMA_SEPARATED] = Field(
        (),
        description="numbers that rollouts are given beside their rewards, each NAME:LEVEL, or "
        "NAME:LEVEL=DEFAULT for those that are not given (0); LEVEL is token, turn or rollout",
    )
    train_auxiliary_roots: bool = Field(
        True,
        description="train conversations beside a session's main one (titles, summaries, parallel ones)",
    )
    end_grace_s: NonNegativeFloat = Field(
        5.0,
        description="seconds for which external environments are told that the run has ended",
    )
    lease_timeout_s: PositiveFloat = Field(
        60.0, description="until a lease without a session is void"
    )
    generate_timeout_s: PositiveFloat = Field(
        600.0, description="deadline of one generation"
    )

    @field_validator("extra_columns")
    @classmethod
    def _check_extra_columns(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        parse_extra_columns(entries)
        return entries

    @property
    def declared_columns(self) -> Mapping[str, ExtraColumn]:
        """The extra columns by name."""
        return parse_extra_columns(self.extra_columns)


class LateConfig(Section):
    """Rewards that come after their session has finished, which waits for them."""

    deadline_s: PositiveFloat = Field(
        description="a session finished without a reward waits for it so long"
    )
    expired: Literal["drop", "accept"] = Field(
        "drop",
        description="a session past its time: drop: failed; accept: awaits its reward as if finished",
    )


class GateConfig(Section):
    """Holds the next turns of some sessions back, while the sessions of an engine need
    more KV cache than it has."""

    policy: Text = Field(
        "program",
        description="what decides which turns are held: program: the oldest groups keep their cache; or "
        "module:name of a function (fleet, sessions) -> plans",
    )
    max_hold_s: PositiveFloat = Field(
        1200.0, description="seconds after which a held turn is sampled all the same"
    )


class GatewayConfig(Section):
    """Address and processes of the gateway, and its handling of conversations."""

    plain_flags = (
        "chat_template_path",
        "tool_call_parser",
        "reasoning_parser",
        "keep_thinking",
    )
    session: SessionPolicy = SessionPolicy.model_validate({})
    late: LateConfig | None = Field(
        None, description="rewards may come late; left out: without one it has failed"
    )
    gate: GateConfig | None = Field(
        None,
        description="hold turns back while sessions need more KV cache than an engine has",
    )
    host: str = Field(
        "127.0.0.1", description="address the gateway listens on; the only public one"
    )
    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        None, description="the gateway's port; left out: a free one"
    )
    workers: PositiveInt = Field(
        1,
        le=256,
        description="processes that share the gateway's port; each session stays with one",
    )
    cors_origins: Annotated[tuple[str, ...], COMMA_SEPARATED] = Field(
        (),
        description="origins whose pages in a browser may call the gateway (CORS), or *; empty: none",
    )
    public_url: Text | None = Field(
        None, description="URL that agents reach it at, if not http://host:port"
    )
    chat_template_path: Text | None = Field(
        None,
        description="Jinja file to use instead of the model's chat template; chatml-tools: the shipped one",
    )
    special_tokens_in_content: ContentTokens = Field(
        "plain",
        description="what a control token's text in messages and tools becomes: plain: text; control: the"
        " token, so that a tool's output can forge a turn",
    )
    tool_call_parser: str = Field(
        "auto",
        description="SGLang's parser of tool calls; auto: by the chat template; none: no tools",
    )
    reasoning_parser: str = Field(
        "auto",
        description="SGLang's parser of reasoning; auto: by the chat template; none: it stays content",
    )
    constrained: Constrained = Field(
        "free",
        description="replies that clients want forced (response_format, tool_choice required), except when"
        " serving: free: not forced, and trained; skip: forced by a grammar, and not trained; masked: forced,"
        " and trained among the tokens that the grammar kept",
    )
    keep_thinking: bool = Field(
        True,
        description="a conversation goes on with earlier thinking even where the template drops it",
    )
    match_level: MatchName = Field(
        "rewritten",
        description="the most that a returned message may differ from what was sampled",
    )
