"""`/v1/completions`: only the wire, in both directions. Pure.

The prompt is what the model reads: no template wraps it. One that begins with the whole text of an earlier
prompt and its reply (special tokens and stop string included) goes on with that turn's exact ids.
- honoured: `prompt` (one: text, or token ids), `model` (must be ours), `max_tokens` (16 where not given;
  bounded by the session's max_new_tokens), `n` (to 16), `stop`, `stream`, `stream_options.include_usage`,
  `logprobs` (to 20: of the sampled tokens and of so many likeliest ones, the likelier of two with the same
  text; offsets from the reply's beginning).
- the run's: the sampling parameters of `chat.py`, under the same names and rules.
- ignored, for they change no token: `user`, all of `stream_options` but `include_usage`.
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

_MAX_TOKENS = 16


class _Body(ChoicesFields, kw_only=True):
    prompt: str | list[int | str | list[int]]
    max_tokens: wire.Count | None = None
    logprobs: wire.Top | None = None


_DECODER = msgspec.json.Decoder(_Body)
_TABLE = FieldTable(body=_Body, refused={"suffix": (), "messages": (), "tools": ()}, unsaid=("user",))


class CompletionsDialect(ChoicesDialect):
    path, ids = "/completions", "cmpl-"
    objects = ("text_completion", "text_completion")
    last: ClassVar = {"text": ""}

    def parse(self, raw: bytes, *, retry: bool, find: FindTurn = no_turn) -> ChoicesRequest:
        body, ignored = wire.decode(_DECODER, raw, self.model, _TABLE)
        limit = _MAX_TOKENS if body.max_tokens is None else body.max_tokens
        turn = TurnRequest(
            messages=(),
            text=self._prompt(body.prompt),
            top_logprobs=body.logprobs or 0,
            sampling=self.sampling(body, limit),
            stop=wire.stop_strings(body.stop),
            stream=bool(body.stream),
            digest=wire.digest(b"completions", raw),
            ignored=ignored,
            retry=retry,
        )
        return self.asked(body, turn, logprobs=body.logprobs is not None)

    def whole(self, message: Message) -> dict[str, Any]:
        return {"text": message.content}

    def added(self, delta: Delta) -> dict[str, Any]:
        return {"text": delta.content}

    def logprobs(self, request: ChoicesRequest, pieces: Sequence[Piece], offset: int) -> dict[str, Any]:
        told = list(wire.sampled(pieces))
        tokens = [self.token_text(token_id) for token_id, *_ in told]
        return {
            "tokens": tokens,
            "token_logprobs": [wire.finite(logprob) for _, logprob, _ in told],
            "text_offset": [*accumulate(map(len, tokens), initial=offset)][:-1],
            "top_logprobs": [self._by_text(*each) for each in told] if request.turn.top_logprobs else None,
        }

    def _by_text(self, token_id: int, logprob: float, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        found: dict[str, float] = {}
        for each_id, each in (*top, (token_id, logprob)):
            found.setdefault(self.token_text(each_id), wire.finite(each))
        return found

    def _prompt(self, prompt: str | Sequence[int | str | list[int]]) -> str | tuple[int, ...]:
        if not isinstance(prompt, str) and len(prompt) == 1 and isinstance(only := prompt[0], str | list):
            prompt = only
        if not prompt:
            raise wire.bad("`prompt` must not be empty", param="prompt")
        if isinstance(prompt, str):
            return prompt
        ids = tuple(each for each in prompt if isinstance(each, int))
        if len(ids) < len(prompt):
            raise wire.bad("`prompt` takes one prompt at a time; ask for each by itself", param="prompt")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            raise wire.bad(f"`prompt`: token ids must be below {self.vocab_size}", param="prompt")
        return ids
