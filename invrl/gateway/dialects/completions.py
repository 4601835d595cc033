"""`/v1/completions`: the wire format, in both directions. Pure.

The prompt is exactly what the model reads: no template wraps it. A prompt that begins
with the whole text of an earlier prompt and its reply (special tokens and stop string
included) continues that turn's exact ids.
- honoured: `prompt` (one prompt: text, or token ids), `model` (as in chat),
  `max_tokens` (16 by default; bounded by the session's max_new_tokens), `n` (to 16),
  `stop`, `stream`, `stream_options.include_usage`, `logprobs` (to 20: those of the
  sampled tokens and of that many of the likeliest ones; of two tokens with the same
  text, the likelier one is shown; offsets count from the reply's beginning).
- set by the run: the sampling parameters of `chat.py`, under the same names and rules.
- ignored, because they change no token: `user`, all of `stream_options` except
  `include_usage`.
- refused with 400: see `_TABLE` and `body_fields.py`; several prompts. Any other field
  is ignored and counted."""

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from invrl.gateway.dialects import wire
from invrl.gateway.dialects.body_fields import FieldTable
from invrl.gateway.dialects.choices import ChoicesDialect, ChoicesFields, ChoicesRequest
from invrl.gateway.dialects.dialect import FindTurn, no_turn
from invrl.gateway.dialects.wire import Fields
from invrl.gateway.types import Delta, Message, Piece, TurnRequest

_DEFAULT_MAX_TOKENS = 16


class _Body(ChoicesFields, kw_only=True):
    prompt: str | list[int | str | list[int]]
    max_tokens: wire.Count | None = None
    logprobs: wire.TopLogprobs | None = None


_DECODER = msgspec.json.Decoder(_Body)
_TABLE = FieldTable(
    body=_Body,
    refused={"suffix": (), "messages": (), "tools": ()},
    unreported=("user",),
)


class CompletionsDialect(ChoicesDialect):
    path = "/completions"
    id_prefix = "cmpl-"
    answer_object = "text_completion"
    event_object = "text_completion"
    last_fields: ClassVar = {"text": ""}

    def parse(
        self, raw: bytes, *, retry: bool, find: FindTurn = no_turn
    ) -> ChoicesRequest:
        body, ignored = wire.decode(_DECODER, raw, _TABLE)
        max_tokens = body.max_tokens
        if max_tokens is None:
            max_tokens = _DEFAULT_MAX_TOKENS
        turn = TurnRequest(
            messages=(),
            text=self._prompt(body.prompt),
            top_logprobs=body.logprobs or 0,
            sampling=self.sampling(body, max_tokens),
            stop=wire.stop_strings(body.stop),
            stream=bool(body.stream),
            model=body.model,
            digest=wire.digest(b"completions", raw),
            ignored=ignored,
            retry=retry,
        )
        shows_logprobs = body.logprobs is not None
        return self.make_request(body, turn, logprobs=shows_logprobs)

    def message_fields(self, request: ChoicesRequest, message: Message) -> Fields:
        return {"text": message.content}

    def delta_fields(self, request: ChoicesRequest, delta: Delta) -> Fields:
        return {"text": delta.content}

    def logprobs(
        self,
        request: ChoicesRequest,
        pieces: Sequence[Piece],
        offset: int,
    ) -> Fields:
        shows_top_logprobs = request.turn.top_logprobs > 0
        texts = []
        logprobs = []
        offsets = []
        top_logprobs = []
        for token in wire.sampled_tokens(pieces):
            text = self.token_text(token.id)
            texts.append(text)
            logprobs.append(wire.finite(token.logprob))
            offsets.append(offset)
            offset += len(text)
            if shows_top_logprobs:
                top_logprobs.append(self._logprobs_by_text(token))
        return {
            "tokens": texts,
            "token_logprobs": logprobs,
            "text_offset": offsets,
            "top_logprobs": top_logprobs if shows_top_logprobs else None,
        }

    def _logprobs_by_text(self, token: wire.SampledToken) -> dict[str, float]:
        """Return the log-probs of the likeliest tokens and of the sampled one by their
        texts. The likeliest come first, so the likelier of two tokens with the same
        text is kept."""
        sampled = (token.id, token.logprob)
        by_text: dict[str, float] = {}
        for token_id, logprob in (*token.top, sampled):
            text = self.token_text(token_id)
            by_text.setdefault(text, wire.finite(logprob))
        return by_text

    def _prompt(
        self,
        prompt: str | Sequence[int | str | list[int]],
    ) -> str | tuple[int, ...]:
        """Return the one prompt, as text or as token ids. Raises SessionError 400 for a
        list of several prompts."""
        if not isinstance(prompt, str) and len(prompt) == 1:
            [only] = prompt
            if isinstance(only, str | list):
                prompt = only
        if not prompt:
            raise wire.bad_request("`prompt` must not be empty", param="prompt")
        if isinstance(prompt, str):
            return prompt
        ids = tuple(token_id for token_id in prompt if isinstance(token_id, int))
        if len(ids) < len(prompt):
            reason = "`prompt` takes one prompt at a time; ask for each by itself"
            raise wire.bad_request(reason, param="prompt")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            reason = f"`prompt`: token ids must be below {self.vocab_size}"
            raise wire.bad_request(reason, param="prompt")
        return ids
