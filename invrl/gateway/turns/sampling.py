"""Sampling parameters of a turn: the run's in training and evaluation, the client's in
serving. Pure."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from invrl.errors import SessionError
from invrl.gateway.types import ClientSampling
from invrl.types.sessions import Purpose, Sampling, Session
from invrl.types.tasks import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSampling:
    """The sampling parameters of one turn."""

    sampling: Sampling
    extra: Mapping[str, Json]
    """Further parameters of SGLang; empty in training and evaluation."""
    overridden: tuple[str, ...]
    """SGLang's names of the client's parameters that the run does not grant."""


_NEUTRAL: Mapping[str, Json] = {
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "sampling_seed": None,
}
"""Values that do not change the model's distribution."""


def resolve(purpose: Purpose, pinned: Sampling, client: ClientSampling) -> TurnSampling:
    """Resolve the parameters. `pinned` are the session's own. Its `max_new_tokens`
    bounds every session: a client can ask for fewer tokens, not for more. Raises
    SessionError 400 for a logit bias in serving, because the router (sglang-router
    0.3.2) drops it silently."""
    if purpose == "serve" and client.logit_bias:
        reason = "`logit_bias` is not supported yet"
        raise SessionError(
            reason, status=400, code="unsupported_parameter", param="logit_bias"
        )
    asked: dict[str, Json] = {}
    for name in ("temperature", "top_p", *_NEUTRAL):
        value = getattr(client, name)
        if value is not None:
            asked[name] = value
    sampling = pinned
    extra: dict[str, Json] = {}
    overridden: list[str] = []
    if purpose == "serve":
        extra = {name: value for name, value in asked.items() if name in _NEUTRAL}
        sampling = _with_client_values(pinned, client)
    else:
        granted: dict[str, Json] = {
            "temperature": pinned.temperature,
            "top_p": pinned.top_p,
            **_NEUTRAL,
        }
        overridden = [name for name, value in asked.items() if value != granted[name]]
    if client.max_new_tokens is not None:
        if client.max_new_tokens > pinned.max_new_tokens:
            overridden.append("max_new_tokens")
        else:
            sampling = replace(sampling, max_new_tokens=client.max_new_tokens)
    return TurnSampling(sampling=sampling, extra=extra, overridden=tuple(overridden))


def _with_client_values(pinned: Sampling, client: ClientSampling) -> Sampling:
    sampling = pinned
    if client.temperature is not None:
        sampling = replace(sampling, temperature=client.temperature)
    if client.top_p is not None:
        sampling = replace(sampling, top_p=client.top_p)
    return sampling


def sampling_seed(run_seed: int, session: Session, prompt: bytes, number: int) -> int:
    """Return the seed of one generation, in [0, 2^31). It depends only on the
    generation's place in the run, so a repeated run draws the same tokens there.
    `prompt` is a digest of the token ids. `number` counts this session's generations on
    that prompt from 1: concurrent requests of a rollout get the same seeds in whatever
    order they arrive."""
    place = [
        run_seed,
        session.purpose,
        session.group_id,
        session.index,
        session.attempt,
        prompt.hex(),
        number,
    ]
    digest = hashlib.blake2b(json.dumps(place).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF
