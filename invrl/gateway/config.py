"""Settings of the gateway, the one public port."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from invrl.section import Section

MatchName = Literal["exact", "canonical", "without_reasoning"]
"""The names of `message.MatchLevel`."""


class GatewayConfig(Section):
    """Where agents reach us, and how many at a time."""

    gateway_host: str = Field("127.0.0.1", description="address the gateway listens on; the only public one")
    gateway_port: NonNegativeInt = Field(0, description="the gateway's port; 0: a free one")
    gateway_workers: PositiveInt = Field(
        1, le=256, description="processes that share the gateway's port; each session stays with one"
    )
    gateway_public_url: str = Field("", description="URL that agents reach it at, if not http://host:port")
    max_open_sessions: PositiveInt = Field(1024, description="open sessions before new ones get 429")
    session_ttl_s: PositiveFloat = Field(3600.0, description="an open session older than this is aborted")
    chat_template_path: str = Field("", description="Jinja file to use instead of the model's chat template")
    tool_call_parser: str = Field(
        "auto", description="SGLang's parser of tool calls; auto: by the chat template; none: no tools"
    )
    reasoning_parser: str = Field(
        "auto", description="SGLang's parser of reasoning; auto: by the chat template; none: it stays content"
    )
    keep_thinking: bool = Field(
        True, description="a conversation goes on with earlier thinking even where the template drops it"
    )
    match_level: MatchName = Field(
        "without_reasoning", description="the most that a returned message may differ from what was sampled"
    )
    generate_timeout_s: PositiveFloat = Field(600.0, description="deadline of one generation")
