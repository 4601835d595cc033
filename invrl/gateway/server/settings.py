"""Settings of a gateway process, read from a JSON file. Imports no tokenizer."""

import json

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
)

from invrl.gateway.config import GatewayConfig
from invrl.host.output.log_lines import LogSettings


class GatewaySettings(GatewayConfig):
    """The gateway's section of the configuration, and values of other sections that the
    gateway needs."""

    run_id: str = ""
    log: LogSettings = LogSettings()
    otel_endpoint: str = ""
    incarnation: str = Field(
        "",
        description="this incarnation of the run; a gateway that is started again keeps it",
    )
    port: PositiveInt  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]
    """Port of the gateway: the configured one, or a free one."""
    router_url: str
    router_api_key: SecretStr | None = None
    eval_router_url: str | None = Field(
        None,
        description="router of evaluation sessions; None: that of all others",
    )
    eval_router_api_key: SecretStr | None = None
    env_key: SecretStr = Field(min_length=16, description="the key that opens sessions")
    model_path: str
    model_name: str
    model_aliases: tuple[str, ...] = Field(
        (), description="other names under which clients call the model"
    )
    adapters: tuple[str, ...] = Field(
        (), description="names of adapters of the model, by which clients choose them"
    )
    store_path: str
    temperature: NonNegativeFloat = 1.0
    top_p: float = Field(1.0, gt=0, le=1)
    max_new_tokens: PositiveInt = 512
    sampling_seed: NonNegativeInt | None = Field(
        None,
        description="the seed from which that of each generation is derived; None: engines draw freely",
    )
    context_length: PositiveInt
    vocab_size: PositiveInt
    record_top_logprobs: NonNegativeInt = Field(
        0,
        description="likeliest tokens that are recorded in the place of each sampled one, in training",
    )
    record_experts: bool = Field(
        False, description="record which experts computed the tokens of a turn"
    )
    leases: bool = Field(
        False, description="training sessions are opened on leased tasks only"
    )
    max_body_bytes: PositiveInt = 16 * 2**20
    body_timeout_s: PositiveFloat = 30.0
    head_timeout_s: PositiveFloat = Field(
        30.0, description="seconds to send a whole head in"
    )
    write_timeout_s: PositiveFloat = Field(
        30.0,
        description="seconds after which a client that does not read its answer is disconnected",
    )
    heartbeat_timeout_s: PositiveFloat = Field(
        30.0,
        description="seconds without a heartbeat until a process of the gateway is replaced",
    )
    engine_return_s: PositiveFloat = Field(
        600.0,
        description="seconds that a generation waits for an engine, if there is none",
    )
    space_wait_s: NonNegativeFloat = Field(
        240.0,
        description="seconds that a turn waits to be recorded, if the disk is full",
    )
    priority_scheduling: bool = Field(
        False, description="engines sample requests with a larger priority first"
    )
    keep_alive_s: PositiveFloat = Field(
        10.0,
        description="seconds without a token after which a stream sends a keep-alive",
    )

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names under which clients call the model and its adapters."""
        return (self.model_name, *self.model_aliases, *self.adapters)

    @property
    def url(self) -> str:
        """Address for agents."""
        if self.public_url:
            return self.public_url.rstrip("/")
        return f"http://{self.host}:{self.port}"

    def to_json(self) -> str:
        """Return JSON with the secrets in clear text, for a file that only its owner
        can read."""
        values = self.model_dump()
        for name, value in values.items():
            if isinstance(value, SecretStr):
                values[name] = value.get_secret_value()
        return json.dumps(values)
