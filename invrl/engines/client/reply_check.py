"""Checks of an engine's replies before their tokens count: an engine is another
program, and may be wrong.

Invariant: tokens that pass are ids of the vocabulary, each with a log-prob that a
softmax can have, as many as were counted and no more than were requested, sampled after
the prompt that was sent, by weights that exist.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from invrl.engines.client.sglang_responses import GenerateEvent, MetaInfo, TopLogprob
from invrl.errors import WrongReplyError
from invrl.types.turns import VersionSpan
from invrl.types.weights import WeightVersion

_LOGPROB_ROUNDING = 1e-2
"""Largest log-prob above 0 that passes: engines compute some in bfloat16."""
_LOWEST_LOGPROB = -1e6
"""Below any log-prob of a model, at the lowest temperature that a request can have."""

NewestVersion = Callable[[], WeightVersion]
"""Returns the newest version of the weights that an engine can hold by now."""


class ReplyCheck:
    """Checks one generation, event by event. Every method raises WrongReplyError."""

    def __init__(
        self,
        *,
        rid: str,
        prompt_tokens: int,
        vocab_size: int,
        max_new_tokens: int,
        top_logprobs: int,
        newest_version: NewestVersion | None,
    ) -> None:
        """`top_logprobs`: number of likeliest tokens that each sampled one must have.
        `newest_version`: None if it is unknown."""
        self._rid = rid
        self._prompt_tokens = prompt_tokens
        self._vocab_size = vocab_size
        self._max_new_tokens = max_new_tokens
        self._top_logprobs = top_logprobs
        self._newest_version = newest_version
        self._num_tokens = 0
        self._ended = False

    def check_event(self, event: GenerateEvent, meta: MetaInfo) -> None:
        """Check an event and its `meta`. Call this before its tokens are converted."""
        if (
            meta.id != self._rid
        ):  # whatever went wrong on the way: no tokens of another session
            raise WrongReplyError(
                f"generation {self._rid} was answered with generation {meta.id}"
            )
        if self._ended:
            raise WrongReplyError("more came after the end")
        self._ended = meta.finish_reason is not None
        tokens = meta.output_token_logprobs
        self._num_tokens += len(tokens)
        self._check_counts(event.output_ids, [token for _, token, _ in tokens], meta)
        if self._num_tokens > self._max_new_tokens:
            raise WrongReplyError(
                f"{self._num_tokens} tokens came, {self._max_new_tokens} were asked for"
            )
        for logprob, token, _ in tokens:
            self._check_id(token)
            if not _LOWEST_LOGPROB <= logprob <= _LOGPROB_ROUNDING:
                raise WrongReplyError(f"token {token} has the log-prob {logprob}")
        self._check_top(meta.output_top_logprobs or (), len(tokens))
        if not 0 <= meta.cached_tokens <= meta.prompt_tokens:
            raise WrongReplyError(
                f"{meta.cached_tokens} of the {meta.prompt_tokens} prompt tokens are said to be cached"
            )

    def check_spans(self, spans: Sequence[VersionSpan]) -> None:
        """Check that no token is of a version that does not exist yet."""
        if self._newest_version is None or not spans:
            return
        newest = self._newest_version()
        claimed = max(span.version for span in spans)
        if claimed > newest:
            raise WrongReplyError(
                f"weight version {claimed} is from the future: the newest is {newest}"
            )

    def check_end(self, meta: MetaInfo) -> None:
        """Check the end of a reply. `meta`: of its last event."""
        if self._num_tokens == 0:
            raise WrongReplyError("an answer without any token")
        if meta.completion_tokens != self._num_tokens:
            raise WrongReplyError(
                f"{meta.completion_tokens} tokens are said to have been sampled, {self._num_tokens} came"
            )
        matched = meta.finish_reason.matched if meta.finish_reason is not None else None
        if isinstance(matched, int):
            self._check_id(matched)

    def _check_counts(
        self, output_ids: Sequence[int], logprob_ids: Sequence[int], meta: MetaInfo
    ) -> None:
        if meta.prompt_tokens != self._prompt_tokens:
            raise WrongReplyError(
                f"the engine consumed {meta.prompt_tokens} prompt tokens, {self._prompt_tokens} were sent"
            )
        if len(output_ids) != len(logprob_ids):
            raise WrongReplyError(
                f"{len(output_ids)} token ids came with {len(logprob_ids)} log-probs"
            )
        if list(output_ids) != list(logprob_ids):
            raise WrongReplyError(
                "the log-probs are of other tokens than the token ids"
            )
        if meta.completion_tokens < self._num_tokens:
            raise WrongReplyError(
                f"{meta.completion_tokens} tokens are said to have been sampled, {self._num_tokens} came"
            )

    def _check_id(self, token: int) -> None:
        if not 0 <= token < self._vocab_size:
            raise WrongReplyError(
                f"token id {token} is outside the vocabulary of {self._vocab_size}"
            )

    def _check_top(
        self, rows: Sequence[Sequence[TopLogprob] | None], num_tokens: int
    ) -> None:
        """Check that each sampled token has its likeliest tokens, if they were
        requested."""
        if not self._top_logprobs:
            return
        if len(rows) != num_tokens or any(
            len(row or ()) != self._top_logprobs for row in rows
        ):
            raise WrongReplyError(
                "the likeliest tokens are not reported for every sampled token"
            )
        for row in rows:
            for logprob, token, _ in row or ():
                self._check_id(token)
                # None is minus infinity: a grammar forbids the token.
                if logprob is not None and not logprob <= _LOGPROB_ROUNDING:
                    raise WrongReplyError(f"token {token} has the log-prob {logprob}")


def check_prompt_logprobs(logprobs_T: NDArray[np.float32]) -> None:
    """Raise WrongReplyError for a number that is not a log-prob. Log-probs of a prompt
    have no lower bound: its tokens were not sampled."""
    wrong = logprobs_T[~(np.isfinite(logprobs_T) & (logprobs_T <= _LOGPROB_ROUNDING))]
    if wrong.size:
        raise WrongReplyError(f"a token of a prompt has the log-prob {wrong[0]}")
