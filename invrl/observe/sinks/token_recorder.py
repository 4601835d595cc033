"""Writes what each step did with its tokens into the run folder, turn by turn.

Invariant: a folder that cannot be written is reported once, and training continues. If
the disk is full, a later step writes the rest.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from invrl.host.files.disk import is_full
from invrl.host.files.disk_waits import DiskWait
from invrl.interfaces import TokenRecord
from invrl.store.trained_tokens import TrainedTurn, forget_steps, write_trained_tokens
from invrl.types.batches import TrainBatch, TrainSample

logger = logging.getLogger(__name__)
_MOST_WAITING = 8
"""Most waiting steps. Beyond that the oldest is lost: its tokens fill memory."""


class TokenRecorder:
    """Writes into `folder`, for a run that continues after step `done`: later steps in
    it are lost."""

    def __init__(self, folder: Path, *, done: int) -> None:
        self._folder = folder
        self._failed = False
        self._waiting: dict[int, list[TrainedTurn]] = {}
        """Steps that are not written yet, because the disk was full."""
        self._wait = DiskWait(folder.parent, "advantages and log-probs of tokens")
        try:
            forget_steps(folder, after_step=done)
        except OSError:
            logger.exception(
                "the tokens of lost steps cannot be removed from %s", folder
            )

    def record(
        self, step: int, batch: TrainBatch, records: Sequence[TokenRecord | None]
    ) -> str:
        """Write the file of a step. `records`: one for each sample of the batch, or
        none. Returns a warning for the console, or ""."""
        if not records or self._failed:
            return ""
        self._waiting[step] = trained_turns(batch, records)
        while len(self._waiting) > _MOST_WAITING:
            del self._waiting[min(self._waiting)]
        try:
            for waiting in sorted(self._waiting):
                write_trained_tokens(self._folder, waiting, self._waiting[waiting])
                del self._waiting[waiting]
            self._wait.ends()
        except OSError as error:
            if is_full(error):
                self._wait.goes_on()
                return ""
            self._failed = True
            logger.exception("%s cannot be written", self._folder)
            return f"warning: advantages and log-probs are not recorded from now on: {error}"
        return ""


def trained_turns(
    batch: TrainBatch, records: Sequence[TokenRecord | None]
) -> list[TrainedTurn]:
    """Return the turns of the batch that have a trained token, in the batch's order."""
    turns: list[TrainedTurn] = []
    for sample, record in zip(batch.samples, records, strict=True):
        if record is not None:
            turns += _sample_turns(sample, record)
    return turns


def _sample_turns(sample: TrainSample, record: TokenRecord) -> list[TrainedTurn]:
    mask_T = sample.loss_mask_T
    advantages_T = np.zeros(len(mask_T), np.float32)
    advantages_T[mask_T] = record.advantages_N
    logprobs_T = np.full(len(mask_T), np.nan, np.float32)
    logprobs_T[mask_T] = record.logprobs_N
    turns: list[TrainedTurn] = []
    for turn_id, (start, end) in zip(
        sample.turn_ids, sample.turn_spans, strict=bool(sample.turn_spans)
    ):
        if mask_T[start:end].any():
            turns.append(
                TrainedTurn(
                    turn_id=turn_id,
                    trained_N=mask_T[start:end],
                    advantages_N=advantages_T[start:end],
                    logprobs_N=logprobs_T[start:end],
                )
            )
    return turns
