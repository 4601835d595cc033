"""Whose sampling parameters count: the run's in training and evaluation, the client's in serving. Pure."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from invrl.errors import SessionError
from invrl.gateway.types import ClientSampling
from invrl.types import Json, Purpose, Sampling, Session


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSampling:
    sampling: Sampling
    extra: Mapping[str, Json]
    """Further parameters of SGLang; empty in training and evaluation."""
    overridden: tuple[str, ...]
    """Names that the client set to no effect, as SGLang calls them."""


_NEUTRAL: Mapping[str, Json] = {
    "top_k": -1,
    "min_p": 0.0,
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), 0.0),
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "sampling_seed": None,
}
"""Values that change nothing of the model's distribution."""


def resolve(purpose: Purpose, pinned: Sampling, client: ClientSampling) -> TurnSampling:
    """`pinned.max_new_tokens` bounds every session: a client may ask for fewer tokens, not for more.
    SessionError 400 for a logit bias in serving: the router (sglang-router 0.3.2) drops it unsaid."""
    if purpose == "serve" and client.logit_bias:
        reason = "`logit_bias` is not supported yet"
        raise SessionError(reason, status=400, code="unsupported_parameter", param="logit_bias")
    names, sampling, extra, overridden = ("temperature", "top_p", *_NEUTRAL), pinned, {}, []
    asked = {name: value for name in names if (value := getattr(client, name)) is not None}
    if purpose == "serve":
        extra = {name: asked.pop(name) for name in _NEUTRAL if name in asked}
        sampling = replace(pinned, **asked)
    else:
        run = {"temperature": pinned.temperature, "top_p": pinned.top_p, **_NEUTRAL}
        overridden = [name for name, value in asked.items() if value != run[name]]
    if client.max_new_tokens is not None:
        sampling = replace(sampling, max_new_tokens=min(client.max_new_tokens, pinned.max_new_tokens))
        if client.max_new_tokens > pinned.max_new_tokens:
            overridden.append("max_new_tokens")
    return TurnSampling(sampling=sampling, extra=extra, overridden=tuple(overridden))


def sampling_seed(run_seed: int, session: Session, prompt: bytes, nth: int) -> int:
    """The seed of one generation: of its place in the run alone, so a repeated run draws the same there.
    `prompt` is a digest of the token ids; `nth` counts the generations of this session on that prompt from
    1: requests that a rollout sends at once get their seeds whatever order they arrive in. In [0, 2^31)."""
    place = [run_seed, session.purpose, session.group_id, session.index, session.attempt, prompt.hex(), nth]
    digest = hashlib.blake2b(json.dumps(place).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF
