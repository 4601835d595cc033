"""`/v1/completions`: the wire format, in both directions. Pure.

The prompt is exactly what the model reads: no template wraps it. A prompt that begins with the whole text
of an earlier prompt and its reply (special tokens and stop string included) continues that turn's exact ids.
- honoured: `prompt` (one prompt: text, or token ids), `model` (must be the served one), `max_tokens` (16 by
  default; bounded by the session's max_new_tokens), `n` (to 16), `stop`, `stream`,
  `stream_options.include_usage`, `logprobs` (to 20: those of the sampled tokens and of that many of the
  likeliest ones; of two tokens with the same text, the likelier one is shown; offsets count from the reply's
  beginning).
- set by the run: the sampling parameters of `chat.py`, under the same names and rules.
- ignored, because they change no token: `user`, all of `stream_options` except `include_usage`.
- refused with 400: see `_TABLE` and `body_fields.py`; several prompts. Any other field is ignored and
  counted."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, ClassVar

import msgspec

from invrl.gateway.dialects import wire
from invrl.gateway.dialects.body_fields import FieldTable
from invrl.gateway.dialects.choices import ChoicesDialect, ChoicesFields, ChoicesRequest
from invrl.gateway.dialects.dialect import FindTurn, no_turn
from invrl.gateway.types import Delta, Message, Piece, TurnRequest

_DEFAULT_MAX_TOKENS = 16


class _Body(ChoicesFields, kw_only=True):
    prompt: str | list[int | str | list[int]]
    max_tokens: wire.Count | None = None
    logprobs: wire.TopLogprobs | None = None


_DECODER = msgspec.json.Decoder(_Body)
_TABLE = FieldTable(body=_Body, refused={"suffix": (), "messages": (), "tools": ()}, unreported=("user",))


class CompletionsDialect(ChoicesDialect):
    path = "/completions"
    id_prefix = "cmpl-"
    answer_object = "text_completion"
    event_object = "text_completion"
    last_fields: ClassVar = {"text": ""}

    def parse(self, raw: bytes, *, retry: bool, find: FindTurn = no_turn) -> ChoicesRequest:
        body, ignored = wire.decode(_DECODER, raw, self.model, _TABLE)
        max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        turn = TurnRequest(
            messages=(),
            text=self._prompt(body.prompt),
            top_logprobs=body.logprobs or 0,
            sampling=self.sampling(body, max_tokens),
            stop=wire.stop_strings(body.stop),
            stream=bool(body.stream),
            digest=wire.digest(b"completions", raw),
            ignored=ignored,
            retry=retry,
        )
        return self.parsed(body, turn, logprobs=body.logprobs is not None)

    def message_fields(self, message: Message) -> dict[str, Any]:
        return {"text": message.content}

    def delta_fields(self, delta: Delta) -> dict[str, Any]:
        return {"text": delta.content}

    def logprobs(self, request: ChoicesRequest, pieces: Sequence[Piece], offset: int) -> dict[str, Any]:
        tokens = list(wire.sampled_tokens(pieces))
        texts = [self.token_text(token.id) for token in tokens]
        ends = accumulate((len(text) for text in texts), initial=offset)
        top_logprobs = None
        if request.turn.top_logprobs:
            top_logprobs = [self._by_text(token) for token in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [wire.finite(token.logprob) for token in tokens],
            "text_offset": list(ends)[:-1],
            "top_logprobs": top_logprobs,
        }

    def _by_text(self, token: wire.SampledToken) -> dict[str, float]:
        """The log-probs of the likeliest tokens and of the sampled one by their texts. The likeliest tokens
        come first, so the likelier one of two tokens with the same text is kept."""
        by_text: dict[str, float] = {}
        for token_id, logprob in (*token.top, (token.id, token.logprob)):
            by_text.setdefault(self.token_text(token_id), wire.finite(logprob))
        return by_text

    def _prompt(self, prompt: str | Sequence[int | str | list[int]]) -> str | tuple[int, ...]:
        """The one prompt, as text or as token ids."""
        if not isinstance(prompt, str) and len(prompt) == 1:
            [only] = prompt
            if isinstance(only, str | list):
                prompt = only
        if not prompt:
            raise wire.bad("`prompt` must not be empty", param="prompt")
        if isinstance(prompt, str):
            return prompt
        ids = tuple(token_id for token_id in prompt if isinstance(token_id, int))
        if len(ids) < len(prompt):
            raise wire.bad("`prompt` takes one prompt at a time; ask for each by itself", param="prompt")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            raise wire.bad(f"`prompt`: token ids must be below {self.vocab_size}", param="prompt")
        return ids
