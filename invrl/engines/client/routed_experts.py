"""The experts of a model that computed each token of a turn, from SGLang's report.

SGLang keeps them with the keys and values of a token and returns them when a reply
ends. A turn's record has one row per token: the experts of the pass that predicted the
token, which is the pass at the previous position. The records of a trajectory's turns
therefore follow each other without gap or overlap, whichever engines replied. Pure.
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from invrl.families.hf_config import read_hf_config
from invrl.types.routed_experts import RoutedExperts, experts_dtype, unknown_expert
from invrl.types.turns import VersionSpan

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsShape:
    """Shape of a model's expert choices for a token."""

    layers: int
    """All layers. SGLang reports zeros for those without experts."""
    chosen: int
    """Experts that compute a token in one layer."""
    count: int
    """Experts of a layer."""

    @classmethod
    def of(cls, model_path: Path | str) -> ExpertsShape:
        """Read the shape from a model folder. Raises ValueError for a model without
        experts, ConfigError for one that the trainer refuses."""
        config = read_hf_config(model_path)
        if config.experts is None:
            raise ValueError(f"{model_path}: the model has no experts")
        return cls(
            layers=config.num_hidden_layers,
            chosen=config.experts.chosen,
            count=config.experts.count,
        )


def first_row(path_tokens: int) -> int:
    """Return the first position whose experts a turn records. `path_tokens`: tokens of
    the turns before it."""
    return max(0, path_tokens - 1)


def turn_experts(
    encoded: str | None,
    shape: ExpertsShape,
    *,
    path_tokens: int,
    prompt_tokens: int,
    spans: Sequence[VersionSpan],
) -> RoutedExperts | None:
    """Return the record of a turn, or None if the engine's report is missing or does
    not fit this turn.

    `encoded`: base64 of int32 [positions, layers, chosen], of all positions but the
    last one from `first_row` on. `path_tokens`: prompt tokens that belong to earlier
    turns. `spans`: versions of the sampled tokens.

    Before weights change, engines drop the keys and values of running requests, and
    compute them again under the new weights, experts included. The experts of the
    tokens before the change are lost then, and so recorded as unknown, as are those of
    a trajectory's first token, which nothing predicted.
    """
    if encoded is None:
        _log.warning(
            "an engine answered without the experts of its tokens: the turn has no record of them"
        )
        return None
    num_sampled = spans[-1].end if spans else 0
    num_rows = prompt_tokens + num_sampled - 1 - first_row(path_tokens)
    try:
        flat = np.frombuffer(base64.b64decode(encoded, validate=True), np.int32)
        reported_PLK = flat.reshape(num_rows, shape.layers, shape.chosen)
    except (binascii.Error, ValueError) as error:
        _log.warning(
            "an engine's report of experts is not one of %d tokens: %s", num_rows, error
        )
        return None
    if (
        num_rows
        and not 0 <= int(reported_PLK.min()) <= int(reported_PLK.max()) < shape.count
    ):
        _log.warning("an engine reports experts that the model does not have")
        return None
    dtype = experts_dtype(shape.count)
    experts_TLK = reported_PLK.astype(dtype)
    if path_tokens == 0:
        experts_TLK = np.concatenate([_unknown(1, shape), experts_TLK])
    num_context = prompt_tokens - path_tokens
    num_lost = spans[-1].start if spans else 0
    experts_TLK[num_context : num_context + num_lost] = unknown_expert(dtype)
    return experts_TLK


def _unknown(num_tokens: int, shape: ExpertsShape) -> NDArray[np.unsignedinteger]:
    dtype = experts_dtype(shape.count)
    return np.full(
        (num_tokens, shape.layers, shape.chosen), unknown_expert(dtype), dtype
    )
