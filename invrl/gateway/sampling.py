"""Whose sampling parameters count: the run's in training and evaluation, the client's in serving. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from invrl.types import Purpose, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSampling:
    """What a client asked for; None where it said nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[str, float] | None = None
    seed: int | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSampling:
    """How one turn is sampled; the neutral values change nothing of the model's distribution."""

    temperature: float
    top_p: float
    max_new_tokens: int
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[str, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()


_CHANGES_DISTRIBUTION = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
)


def resolve(
    purpose: Purpose, pinned: Sampling, client: ClientSampling, stop: tuple[str, ...]
) -> tuple[TurnSampling, tuple[str, ...]]:
    """The turn's sampling, and the names that the client set to no effect. `pinned.max_new_tokens`
    bounds every session: a client may ask for fewer tokens."""
    run = TurnSampling(
        temperature=pinned.temperature, top_p=pinned.top_p, max_new_tokens=pinned.max_new_tokens, stop=stop
    )
    asked = {name: value for name in _CHANGES_DISTRIBUTION if (value := getattr(client, name)) is not None}
    overridden = []
    if purpose == "serve":
        run = replace(run, **asked)
    else:
        overridden = [name for name, value in asked.items() if value != getattr(run, name)]
    wanted = client.max_new_tokens
    if wanted is not None and wanted > pinned.max_new_tokens:
        overridden.append("max_tokens")
    elif wanted is not None:
        run = replace(run, max_new_tokens=wanted)
    return run, tuple(overridden)
