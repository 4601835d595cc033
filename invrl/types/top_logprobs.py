"""The likeliest tokens at each sampled one, as reported by the engine that sampled
it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NO_TOKEN = -1
"""Id where there is no token: nothing was sampled here, it was not recorded, or a
grammar allowed fewer tokens. Its log-prob is minus infinity."""
MAX_TOP_LOGPROBS = 1000
"""Maximum number of tokens recorded at each sampled one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopLogprobs:
    """The K likeliest tokens at each of T positions, the likeliest first. Log-probs are
    in nats, at the sampling temperature and among the tokens that a grammar allowed,
    like the sampled token's."""

    ids_TK: NDArray[np.int32]
    """`NO_TOKEN` where there is none."""
    logprobs_TK: NDArray[np.float32]

    def __post_init__(self) -> None:
        if self.ids_TK.ndim != 2 or self.ids_TK.shape != self.logprobs_TK.shape:
            shapes = f"ids {self.ids_TK.shape}, log-probs {self.logprobs_TK.shape}"
            raise ValueError(
                f"the likeliest tokens are not all of one shape [T, K]: {shapes}"
            )

    def __len__(self) -> int:
        return len(self.ids_TK)

    @staticmethod
    def reported(
        ids_TK: NDArray[np.int32], logprobs_TK: NDArray[np.float32]
    ) -> TopLogprobs:
        """Convert an engine's report. A token without probability could not have been
        sampled, so it is none."""
        is_possible_TK = np.isfinite(logprobs_TK)
        return TopLogprobs(
            ids_TK=np.where(is_possible_TK, ids_TK, np.int32(NO_TOKEN)),
            logprobs_TK=np.where(is_possible_TK, logprobs_TK, np.float32(-np.inf)),
        )

    @staticmethod
    def none(num_tokens: int, width: int) -> TopLogprobs:
        """Return T = `num_tokens` positions without a token."""
        shape = (num_tokens, width)
        return TopLogprobs(
            ids_TK=np.full(shape, NO_TOKEN, np.int32),
            logprobs_TK=np.full(shape, -np.inf, np.float32),
        )

    @staticmethod
    def joined(parts: Sequence[TopLogprobs]) -> TopLogprobs:
        """Concatenate, as wide as the widest. Raises ValueError without a part."""
        width = max(part.ids_TK.shape[1] for part in parts)
        widened = [part.widened(width) for part in parts]
        return TopLogprobs(
            ids_TK=np.concatenate([part.ids_TK for part in widened]),
            logprobs_TK=np.concatenate([part.logprobs_TK for part in widened]),
        )

    def widened(self, width: int) -> TopLogprobs:
        """Pad to this width, which is at least the current one."""
        missing = ((0, 0), (0, width - self.ids_TK.shape[1]))
        return TopLogprobs(
            ids_TK=np.pad(self.ids_TK, missing, constant_values=NO_TOKEN),
            logprobs_TK=np.pad(self.logprobs_TK, missing, constant_values=-np.inf),
        )

    def at(self, places_N: NDArray[np.int64]) -> TopLogprobs:
        """Select these positions."""
        return TopLogprobs(
            ids_TK=self.ids_TK[places_N], logprobs_TK=self.logprobs_TK[places_N]
        )

    def where(self, mask_T: NDArray[np.bool_]) -> TopLogprobs:
        """Remove the tokens where the mask is False."""
        return TopLogprobs(
            ids_TK=np.where(mask_T[:, None], self.ids_TK, np.int32(NO_TOKEN)),
            logprobs_TK=np.where(
                mask_T[:, None], self.logprobs_TK, np.float32(-np.inf)
            ),
        )
