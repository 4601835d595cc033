"""Settings of the engines and of the router in front of them."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from invrl.types.section import COMMA_SEPARATED, Section, Text


class EngineConfig(Section):
    """The fleet of SGLang servers, and the router in front of it."""

    plain_flags = ("num_engines", "external_engines", "router")
    num_engines: NonNegativeInt = Field(
        1,
        description="SGLang servers that the run starts (0: only with external_engines)",
    )
    external_engines: Annotated[tuple[str, ...], COMMA_SEPARATED] = Field(
        (),
        description="URLs of engines that `invrl engine` has started; they have the key INVRL_ENGINE_KEY",
    )
    tp_size: PositiveInt = Field(
        1,
        description="processes of an engine, each with a slice of every weight matrix",
    )
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="type of weights and compute"
    )
    seeded_sampling: bool = Field(
        False,
        description="sample each generation with its own seed, derived from the run's seed",
    )
    max_total_tokens: PositiveInt | None = Field(
        None,
        description="KV-cache tokens per engine (left out: 16384 on CPU, what SGLang finds room for on a GPU)",
    )
    start_timeout_s: PositiveFloat = Field(
        300.0, description="deadline for an engine to be healthy"
    )
    health_interval_s: PositiveFloat = Field(
        5.0, description="seconds between our own health checks"
    )
    max_restarts: NonNegativeInt = Field(
        3,
        description="restarts of one engine that left the fleet, in any hour of one incarnation of a run",
    )
    router: Literal["sglang-router", "smg"] = Field(
        "sglang-router", description="program that spreads requests over the engines"
    )
    smg_environment: Text | None = Field(
        None,
        description="virtual environment with smg (left out: that of `invrl install --router smg`)",
    )
    router_start_timeout_s: PositiveFloat = Field(
        120.0, description="deadline for the router to answer"
    )

    @property
    def total_engines(self) -> int:
        """Number of engines, with the external ones."""
        return self.num_engines + len(self.external_engines)

    @property
    def described(self) -> str:
        """Describe the number of engines for a message."""
        text = f"{self.num_engines} engine(s)"
        if self.external_engines:
            text += f" beside {len(self.external_engines)} external"
        return text
