"""What a gateway process is told at its start, as one JSON file. Imports without tokenizers."""

import json

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, SecretStr

from invrl.gateway.config import GatewayConfig


class GatewaySettings(GatewayConfig):
    """All a gateway needs to know: its section of the configuration, and what belongs to others."""

    run_id: str = ""
    incarnation: str = Field(
        "", description="this incarnation of the run; a gateway that is started again keeps it"
    )
    gateway_port: PositiveInt
    router_url: str
    router_api_key: SecretStr | None = None
    env_key: SecretStr = Field(min_length=16, description="key of those who open sessions")
    model_path: str
    model_name: str
    store_path: str
    temperature: NonNegativeFloat = 1.0
    top_p: float = Field(1.0, gt=0, le=1)
    max_new_tokens: PositiveInt = 512
    sampling_seed: NonNegativeInt | None = Field(
        None, description="what each generation's own seed is made from; None: engines draw freely"
    )
    context_length: PositiveInt
    vocab_size: PositiveInt
    leases: bool = Field(False, description="training sessions are opened on leased tasks only")
    max_body_bytes: PositiveInt = 16 * 2**20
    body_timeout_s: PositiveFloat = 30.0
    head_timeout_s: PositiveFloat = Field(30.0, description="until a connection has sent a whole head")
    write_timeout_s: PositiveFloat = Field(
        30.0, description="until a client that reads none of its answer is given up"
    )
    heartbeat_timeout_s: PositiveFloat = Field(
        30.0, description="a process of the gateway that shows no sign of life for so long is replaced"
    )
    keep_alive_s: PositiveFloat = Field(10.0, description="seconds of silence before a stream's comment")

    @property
    def url(self) -> str:
        """Where agents are sent."""
        return (self.gateway_public_url or f"http://{self.gateway_host}:{self.gateway_port}").rstrip("/")

    def to_json(self) -> str:
        """With the secrets: for a file that only its owner reads."""
        values = self.model_dump().items()
        secret = {name: value.get_secret_value() for name, value in values if isinstance(value, SecretStr)}
        return json.dumps(dict(values) | secret)
