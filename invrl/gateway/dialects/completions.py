"""`/v1/completions`: only the wire, in both directions. Pure.

The prompt is what the model reads: no template wraps it. One that begins with the whole text of an earlier
prompt and its reply (special tokens and stop string included) goes on with that turn's exact ids.
- honoured: `prompt` (one: text, or token ids), `model` (must be ours), `max_tokens` (16 where not given;
  bounded by the session's max_new_tokens), `n` (to 16), `stop`, `stream`, `stream_options.include_usage`,
  `logprobs` (to 20: of the sampled tokens and of so many likeliest ones, the likelier of two with the same
  text; offsets from the reply's beginning).
- the run's: the sampling parameters of `chat.py`, under the same names and rules.
- ignored, for it changes no token: `user`, `stream_options.include_obfuscation`.
- refused with 400: see `_REFUSED`; several prompts. Any other field is unknown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Any

import msgspec

from invrl.errors import SessionError
from invrl.gateway.dialects.dialect import AnswerStream, Asked, Begun
from invrl.gateway.dialects.wire import (
    MOST_CHOICES,
    Count,
    OpenAIDialect,
    SamplingFields,
    StreamOptions,
    Top,
    bad,
    check_model,
    check_refused,
    client_sampling,
    decode,
    digest,
    finite,
    sampled,
    sent,
    stop_strings,
    unread,
    usage,
)
from invrl.gateway.generation import Answer, Piece
from invrl.gateway.turns import TurnRequest

_REFUSED = {"suffix": (None, ""), "echo": (None, False), "best_of": (None, 1)}
_IGNORED = ("user",)
_MAX_TOKENS = 16

_UnreadOfBody = unread("_UnreadOfBody", *_REFUSED, *_IGNORED, base=SamplingFields)


class _Body(_UnreadOfBody, forbid_unknown_fields=True):
    model: str
    prompt: str | list[int | str | list[int]]
    max_tokens: Count | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MOST_CHOICES)] | None = None
    stop: str | list[str] | None = None
    logprobs: Top | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


_DECODER = msgspec.json.Decoder(_Body)


class CompletionsRequest(Asked, frozen=True, kw_only=True):
    """A parsed request, and how its answer is shown."""

    logprobs: bool
    include_usage: bool


class CompletionsDialect(OpenAIDialect):
    """The wire format of completions for one served model."""

    path = "/completions"

    def parse(self, raw: bytes, *, retry: bool | None) -> CompletionsRequest:
        """SessionError 400 (404 for another model) that names the field."""
        body = decode(_DECODER, raw)
        check_model(body.model, self.model)
        check_refused(body, _REFUSED)
        if body.stream_options is not None and not body.stream:
            raise bad("`stream_options` needs `stream`", param="stream_options")
        limit = _MAX_TOKENS if body.max_tokens is None else body.max_tokens
        turn = TurnRequest(
            messages=(),
            text=self._prompt(body.prompt),
            top_logprobs=body.logprobs or 0,
            sampling=client_sampling(body, max_new_tokens=limit, vocab_size=self.vocab_size),
            stop=stop_strings(body.stop),
            stream=bool(body.stream),
            digest=digest(b"completions", raw),
            retry=retry,
        )
        shown = bool(body.stream_options and body.stream_options.include_usage)
        logprobs = body.logprobs is not None
        return CompletionsRequest(turn=turn, n=body.n or 1, logprobs=logprobs, include_usage=shown)

    def answer(self, request: CompletionsRequest, answers: Sequence[Answer]) -> bytes:
        """The body of a whole answer."""
        choices = [
            self.choice(request, n, each.message.content, each.pieces, 0, each.turn.finish_reason)
            for n, each in enumerate(answers)
        ]
        first = answers[0].turn
        head = self.head(first.id, first.started_at)
        return msgspec.json.encode({**head, "choices": choices, "usage": usage([a.turn for a in answers])})

    def stream(self, request: CompletionsRequest, begun: Sequence[Begun]) -> AnswerStream:
        return _CompletionsStream(self, request, begun)

    def head(self, turn_id: str, created: float) -> dict[str, Any]:
        made = {"object": "text_completion", "created": int(created)}
        return {"id": f"cmpl-{turn_id}", **made, "model": self.model}

    def choice(
        self,
        request: CompletionsRequest,
        index: int,
        text: str,
        pieces: Sequence[Piece],
        offset: int,
        finish: str | None,
    ) -> dict[str, Any]:
        """A choice, or a piece of one whose tokens begin `offset` characters into the reply."""
        logprobs = None
        if request.logprobs:
            told = list(sampled(pieces))
            tokens = [self.token_text(token_id) for token_id, *_ in told]
            logprobs = {
                "tokens": tokens,
                "token_logprobs": [finite(logprob) for _, logprob, _ in told],
                "text_offset": [*accumulate(map(len, tokens), initial=offset)][:-1],
                "top_logprobs": [self._by_text(*each) for each in told]
                if request.turn.top_logprobs
                else None,
            }
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _by_text(self, token_id: int, logprob: float, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        found: dict[str, float] = {}
        for each_id, each in (*top, (token_id, logprob)):
            found.setdefault(self.token_text(each_id), finite(each))
        return found

    def _prompt(self, prompt: str | Sequence[int | str | list[int]]) -> str | tuple[int, ...]:
        if not isinstance(prompt, str) and len(prompt) == 1 and isinstance(only := prompt[0], str | list):
            prompt = only
        if not prompt:
            raise bad("`prompt` must not be empty", param="prompt")
        if isinstance(prompt, str):
            return prompt
        ids = tuple(each for each in prompt if isinstance(each, int))
        if len(ids) < len(prompt):
            raise bad("`prompt` takes one prompt at a time; ask for each by itself", param="prompt")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            raise bad(f"`prompt`: token ids must be below {self.vocab_size}", param="prompt")
        return ids


class _CompletionsStream:
    """One streamed answer."""

    keep_alive = b": waiting\n\n"

    def __init__(
        self, dialect: CompletionsDialect, request: CompletionsRequest, begun: Sequence[Begun]
    ) -> None:
        self._dialect, self._request = dialect, request
        self._head = dialect.head(begun[0].turn_id, begun[0].created)
        self._offsets = [0] * len(begun)

    def head(self) -> bytes:
        return b""

    def piece(self, choice: int, piece: Piece) -> bytes:
        text, shows_logprobs = piece.delta.content, self._request.logprobs and len(piece.ids_T)
        if not text and not shows_logprobs:
            return b""
        offset = self._offsets[choice]
        self._offsets[choice] += sum(len(self._dialect.token_text(each)) for each in piece.ids_T.tolist())
        return self._event([self._dialect.choice(self._request, choice, text, (piece,), offset, None)])

    def tail(self, answers: Sequence[Answer]) -> bytes:
        ends = [
            self._event([self._dialect.choice(self._request, n, "", (), 0, each.turn.finish_reason)])
            for n, each in enumerate(answers)
        ]
        if self._request.include_usage:
            ends.append(self._event([], usage([answer.turn for answer in answers])))
        return b"".join(ends) + b"data: [DONE]\n\n"

    def error(self, error: SessionError) -> bytes:
        return b"data: " + self._dialect.error(error) + b"\n\n"

    def _event(self, choices: Sequence[dict[str, Any]], used: dict[str, Any] | None = None) -> bytes:
        shown = {"usage": used} if self._request.include_usage else {}
        return sent({**self._head, "choices": choices, **shown})
