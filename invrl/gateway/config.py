"""Settings of the gateway, the one public port."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from invrl.section import Section


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
    generate_timeout_s: PositiveFloat = Field(600.0, description="deadline of one generation")
