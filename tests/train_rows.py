"""Training rows that a test writes turn by turn."""

from __future__ import annotations

import numpy as np

from invrl.types import TrainSample


def row_of_turns(*turns: tuple[str, int, int, bool]) -> TrainSample:
    """A row of turns, each (id, tokens of context, sampled tokens, whether they are
    trained)."""
    mask: list[bool] = []
    spans: list[tuple[int, int]] = []
    for _, num_context, num_sampled, is_trained in turns:
        mask += [False] * num_context
        spans.append((len(mask), len(mask) + num_sampled))
        mask += [is_trained and bool(mask)] + [is_trained] * (num_sampled - 1)
    mask_T = np.array(mask)
    return TrainSample(
        tokens_T=np.arange(len(mask), dtype=np.int32),
        loss_mask_T=mask_T,
        rollout_logprobs_T=np.where(mask_T, -0.5, 0).astype(np.float32),
        versions_T=np.where(mask_T, 1, -1).astype(np.int32),
        reward=1.0,
        temperature=1.0,
        group_id="group",
        rollout_id=turns[0][0],
        attempt=0,
        turn_ids=tuple(turn[0] for turn in turns),
        turn_spans=tuple(spans),
    )
