"""Common parts of OpenAI's dialects: sampling parameters, log-probs and errors."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from invrl.errors import SessionError
from invrl.gateway.dialects import wire
from invrl.gateway.dialects.wire import Fields, SamplingFields
from invrl.gateway.types import ClientSampling, Piece

_ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class OpenAIDialect:
    """Base of OpenAI's dialects. `model` is the name of the served model; `token_text`
    returns the text of one of its tokens."""

    def __init__(
        self,
        *,
        model: str,
        vocab_size: int,
        token_text: Callable[[int], str],
    ) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.token_text = token_text

    def sampling(
        self, body: SamplingFields, max_new_tokens: int | None
    ) -> ClientSampling:
        """Return the sampling parameters of a body. Raises SessionError 400 for invalid
        values that the types of its fields do not exclude."""
        # Takes over the fields that both structures have.
        sampling = msgspec.convert(body, ClientSampling, from_attributes=True)
        if sampling.top_k == 0:
            raise wire.bad_request(
                "`top_k` must be -1 (off) or at least 1", param="top_k"
            )
        for token in sampling.logit_bias or ():
            if not token.isdecimal() or int(token) >= self.vocab_size:
                reason = f"`logit_bias` names no token: {token!r}"
                raise wire.bad_request(reason, param="logit_bias")
        return replace(sampling, max_new_tokens=max_new_tokens)

    def token_logprobs(self, pieces: Sequence[Piece]) -> list[Fields]:
        """Return the log-probs of the sampled tokens, as chat completions and responses
        show them."""
        logprobs = []
        for token in wire.sampled_tokens(pieces):
            top = [self._logprob(token_id, logprob) for token_id, logprob in token.top]
            fields = self._logprob(token.id, token.logprob)
            fields["top_logprobs"] = top
            logprobs.append(fields)
        return logprobs

    def _logprob(self, token_id: int, logprob: float) -> Fields:
        text = self.token_text(token_id)
        return {
            "token": text,
            "logprob": wire.finite(logprob),
            "bytes": list(text.encode()),
        }

    def error(self, error: SessionError) -> bytes:
        """Return the body of an error."""
        fields = self.error_fields(error)
        return msgspec.json.encode({"error": fields})

    def error_fields(self, error: SessionError) -> dict[str, str | None]:
        """Return the value of `error` in the body of an error."""
        default_type = "invalid_request_error"
        if error.status >= 500:
            default_type = "server_error"
        return {
            "message": error.message,
            "type": _ERROR_TYPES.get(error.status, default_type),
            "param": error.param,
            "code": error.code,
        }
