"""One generation of SGLang: its request, its JSON, and its result as it arrives."""

from __future__ import annotations

from collections.abc import (
    Mapping,
)

import msgspec
import numpy as np
from numpy.typing import NDArray

from invrl.engines.client.reply_check import (
    ReplyCheck,
)
from invrl.engines.client.routed_experts import ExpertsShape, first_row, turn_experts
from invrl.engines.client.sglang_responses import (
    GenerateEvent,
    MetaInfo,
)
from invrl.engines.client.version_spans import version_spans
from invrl.engines.inside_sglang.request_labels import (
    EXPERTS_LABEL,
    INTERVAL_LABEL,
)
from invrl.errors import (
    ServerError,
)
from invrl.types.routed_experts import RoutedExperts
from invrl.types.sessions import Sampling
from invrl.types.tasks import Json
from invrl.types.turns import FinishReason, VersionSpan

NEUTRAL_SAMPLING: Mapping[str, Json] = {
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "n": 1,
    "stop": [],
    "stop_token_ids": [],
    "ignore_eos": False,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "stop_regex": None,
    "logit_bias": None,
    "custom_params": None,
    "beam_width": None,
}
"""Every SGLang parameter that changes sampling, at its neutral value. Each request has
all of them, because the server may choose values for missing ones."""


TOP = np.dtype([("id", np.int32), ("logprob", np.float32)])
"""A candidate token of a position."""


NO_TOP: NDArray[np.void] = np.empty(0, TOP)


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One generation. `input_ids_T` is the whole prompt; `routing_key` keeps a session
    on one engine."""

    rid: str
    input_ids_T: NDArray[np.int32]
    sampling: Sampling
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    extra_sampling: Mapping[str, Json] = msgspec.field(default_factory=dict)
    """Further SGLang sampling parameters by their own names (`top_k`, `json_schema`,
    ...)."""
    routing_key: str = ""
    top_logprobs: int = 0
    """Number of likeliest tokens to return for each sampled token."""
    path_tokens: int = 0
    """Prompt tokens that belong to earlier turns, which recorded their experts."""
    adapter: str | None = None
    """Name of the adapter that samples. None: the model without one, or the version of
    a run's adapter that the engine chooses."""
    priority: int | None = None
    """Larger is sampled first. For engines with priority scheduling only."""
    stream_interval: int | None = None
    """Number of tokens in each event but the first, which has one token. None: the
    engine's setting, which is 1 unless the user changes it."""


class GenerateChunk(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Tokens that arrived since the previous chunk."""

    ids_T: NDArray[np.int32]
    logprobs_T: NDArray[np.float32]
    spans: tuple[VersionSpan, ...]
    """Spans of all tokens of this request so far: a caller that cancels, or whose
    engine dies, keeps the sampled tokens."""
    cached_tokens: int = 0
    """Prompt tokens that the engine had in its cache."""
    top: NDArray[np.void] = msgspec.field(default_factory=lambda: NO_TOP)
    """[T * top_logprobs]: likeliest tokens at each position in turn, the likeliest
    first."""
    engine: str | None = None
    """Name that the engine gives itself (`EngineLoad.instance`)."""


class GenerateEnd(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A finished generation without its tokens."""

    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    matched_stop: int | str | None
    """Token id or string that ended it."""
    cached_tokens: int
    experts_TLK: RoutedExperts | None = None
    """Experts of the turn's tokens: those of the prompt that no earlier turn has, then
    the sampled ones. None if they are not recorded, or missing."""
    engine: str | None = None
    """Name that the engine gives itself (`EngineLoad.instance`)."""


def generate_json(
    request: GenerateRequest, *, with_experts: bool = False
) -> dict[str, Json]:
    """Return the body of `POST /generate`. `with_experts`: the response includes the
    experts that computed the tokens."""
    sampling_params: dict[str, Json] = {
        **NEUTRAL_SAMPLING,
        **request.extra_sampling,
        "temperature": request.sampling.temperature,
        "top_p": request.sampling.top_p,
        "max_new_tokens": request.sampling.max_new_tokens,
        "skip_special_tokens": False,
    }
    if request.stop:
        sampling_params["stop"] = list(request.stop)
    if request.stop_token_ids:
        sampling_params["stop_token_ids"] = list(request.stop_token_ids)
    if request.ignore_eos:
        sampling_params["ignore_eos"] = True
    body: dict[str, Json] = {
        "rid": request.rid,
        "input_ids": request.input_ids_T.tolist(),
        "sampling_params": sampling_params,
        "return_logprob": True,
        "stream": True,
    }
    if request.adapter is not None:
        body["lora_path"] = request.adapter
    if request.priority is not None:
        body["priority"] = request.priority
    if request.top_logprobs:
        body["top_logprobs_num"] = request.top_logprobs
    labels: dict[str, Json] = {}
    if request.stream_interval is not None:
        labels[INTERVAL_LABEL] = str(request.stream_interval)
    if with_experts:
        labels[EXPERTS_LABEL] = str(first_row(request.path_tokens))
    if labels:
        body["custom_labels"] = labels
    return body


class GenerationReader:
    """Reads the disjoint events (`--incremental-streaming-output`) of one
    generation."""

    def __init__(
        self, request: GenerateRequest, experts: ExpertsShape | None, check: ReplyCheck
    ) -> None:
        self.engine: str | None = None
        """Name that the engine gives itself, once its response has begun."""
        self._check = check
        self._path_tokens = request.path_tokens
        self._experts = experts
        self._top_logprobs = request.top_logprobs
        self._meta: MetaInfo | None = None
        self._num_tokens = 0
        self._spans: tuple[VersionSpan, ...] = ()

    @property
    def has_ended(self) -> bool:
        """Whether the event that ends the reply has been added."""
        return self._meta is not None and self._meta.finish_reason is not None

    def add(self, event: GenerateEvent) -> GenerateChunk:
        """Return the tokens of an event. Raises ServerError if the engine has failed or
        aborted the generation; the tokens of that event, if it has any, do not
        count."""
        meta = event.meta_info
        if meta is None:
            detail = bytes(event.error)[:500].decode(errors="replace")
            raise ServerError(f"the engine failed a generation: {detail}")
        finish = meta.finish_reason
        if finish is not None and finish.type == "abort":
            raise ServerError(
                f"the engine aborted a generation: {finish.message[:500]}"
            )
        self._check.check_event(event, meta)
        self._meta = meta
        sampled = meta.output_token_logprobs
        self._num_tokens += len(sampled)
        self._spans = version_spans(meta.weight_versions, self._num_tokens)
        self._check.check_spans(self._spans)
        return GenerateChunk(
            spans=self._spans,
            ids_T=np.array([token for _, token, _ in sampled], np.int32),
            logprobs_T=np.array([logprob for logprob, _, _ in sampled], np.float32),
            top=self._likeliest_tokens(meta),
            cached_tokens=meta.cached_tokens,
            engine=self.engine,
        )

    def _likeliest_tokens(self, meta: MetaInfo) -> NDArray[np.void]:
        if not self._top_logprobs:
            return NO_TOP
        entries: list[tuple[int, float]] = []
        for row in meta.output_top_logprobs or ():
            for logprob, token, _ in row or ():
                entries.append((token, -np.inf if logprob is None else logprob))
        return np.array(entries, TOP)

    def end(self) -> GenerateEnd:
        meta = self._meta
        if meta is None or meta.finish_reason is None:
            raise ServerError("the engine's reply breaks off")
        finish = meta.finish_reason
        self._check.check_end(meta)
        matched_stop = finish.matched
        if isinstance(matched_stop, list):
            matched_stop = matched_stop[-1]
        return GenerateEnd(
            spans=self._spans,
            finish_reason=finish.type,
            matched_stop=matched_stop,
            cached_tokens=meta.cached_tokens,
            experts_TLK=self._turn_experts(meta),
            engine=self.engine,
        )

    def _turn_experts(self, meta: MetaInfo) -> RoutedExperts | None:
        if self._experts is None:
            return None
        return turn_experts(
            meta.routed_experts,
            self._experts,
            path_tokens=self._path_tokens,
            prompt_tokens=meta.prompt_tokens,
            spans=self._spans,
        )
