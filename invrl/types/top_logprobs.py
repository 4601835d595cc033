"""The likeliest tokens in the place of each sampled one, as the engine that sampled it
reports them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NO_TOKEN = -1
"""The id where there is no such token: nothing was sampled here, it was not recorded,
or a grammar allowed fewer tokens. The log-prob beside it is minus infinity."""
MAX_TOP_LOGPROBS = 1000
"""Most tokens that a run records in the place of each sampled one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopLogprobs:
    """The K likeliest tokens of each of T places, the likeliest first. Log-probs are in
    nats, at the sampling temperature and among the tokens that a grammar allowed, as
    the sampled token's."""

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
        """T."""
        return len(self.ids_TK)

    @staticmethod
    def reported(
        ids_TK: NDArray[np.int32], logprobs_TK: NDArray[np.float32]
    ) -> TopLogprobs:
        """As an engine reports them. What has no probability is no token that could
        have been sampled."""
        is_possible_TK = np.isfinite(logprobs_TK)
        return TopLogprobs(
            ids_TK=np.where(is_possible_TK, ids_TK, np.int32(NO_TOKEN)),
            logprobs_TK=np.where(is_possible_TK, logprobs_TK, np.float32(-np.inf)),
        )

    @staticmethod
    def none(num_tokens: int, width: int) -> TopLogprobs:
        """So many places [T, K] without a token."""
        shape = (num_tokens, width)
        return TopLogprobs(
            ids_TK=np.full(shape, NO_TOKEN, np.int32),
            logprobs_TK=np.full(shape, -np.inf, np.float32),
        )

    @staticmethod
    def joined(parts: Sequence[TopLogprobs]) -> TopLogprobs:
        """One after the other, as wide as the widest. Raises ValueError without a
        part."""
        width = max(part.ids_TK.shape[1] for part in parts)
        widened = [part.widened(width) for part in parts]
        return TopLogprobs(
            ids_TK=np.concatenate([part.ids_TK for part in widened]),
            logprobs_TK=np.concatenate([part.logprobs_TK for part in widened]),
        )

    def widened(self, width: int) -> TopLogprobs:
        """With so many columns, no fewer than it has."""
        missing = ((0, 0), (0, width - self.ids_TK.shape[1]))
        return TopLogprobs(
            ids_TK=np.pad(self.ids_TK, missing, constant_values=NO_TOKEN),
            logprobs_TK=np.pad(self.logprobs_TK, missing, constant_values=-np.inf),
        )

    def at(self, places_N: NDArray[np.int64]) -> TopLogprobs:
        """Those of these places."""
        return TopLogprobs(
            ids_TK=self.ids_TK[places_N], logprobs_TK=self.logprobs_TK[places_N]
        )

    def where(self, mask_T: NDArray[np.bool_]) -> TopLogprobs:
        """Without a token where the mask is False."""
        return TopLogprobs(
            ids_TK=np.where(mask_T[:, None], self.ids_TK, np.int32(NO_TOKEN)),
            logprobs_TK=np.where(
                mask_T[:, None], self.logprobs_TK, np.float32(-np.inf)
            ),
        )
