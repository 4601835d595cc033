"""Packed sequences in Megatron's schedule over the chunks of a model, for every layout
of ranks.

Every rank of a replica has the same micro-batches; only the last pipeline stage has the
model's outputs. Imported after `device.prepare()`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray

from invrl.train.batches.micro_batch import EMPTY_MICRO_BATCH, MicroBatch, TokenSequence
from invrl.train.batches.packing import pack
from invrl.train.config import TrainConfig
from invrl.train.cost.model_size import ComputeCost
from invrl.train.model.step_progress import StepProgress
from invrl.train.parallel.process_group import max_over_expert_ranks
from invrl.train.parallel_layout import ParallelLayout

SampleNumbers = list[NDArray[np.float32]]
"""One array [T] per sample of a mini-batch: a number for each of its trained tokens, 0
elsewhere."""

Work = tuple[MicroBatch, Callable[..., Any]]
"""A micro-batch, and the function of the model's outputs for it: with a gradient it
returns LossOutputs."""


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Sequences, and the micro-batches that they became."""

    sequences: Sequence[TokenSequence]
    micro_batches: list[MicroBatch]


def concatenate_micro_batches(packed: Sequence[Packed]) -> list[MicroBatch]:
    """Concatenate the micro-batches of all parts."""
    return [micro_batch for part in packed for micro_batch in part.micro_batches]


def pack_sequences(
    sequences: Sequence[TokenSequence],
    *,
    train: TrainConfig,
    layout: ParallelLayout,
    cost: ComputeCost,
) -> Packed:
    """Make micro-batches of the sequences, as many as the ranks of the layout need to
    meet in each of them."""
    micro_batches = pack(
        sequences,
        max_tokens=train.micro_batch_tokens,
        share_prefixes=train.share_prefixes,
        cost=cost,
    )
    number = len(micro_batches)
    if layout.expert > 1:
        # In each layer the ranks that divide its experts wait for each other's tokens.
        number = int(max_over_expert_ranks(number))
    if layout.virtual_pipeline > 1:
        # The interleaved schedule takes as many micro-batches at a time as there are
        # stages.
        number += -number % layout.pipeline
    micro_batches += [EMPTY_MICRO_BATCH] * (number - len(micro_batches))
    return Packed(sequences, micro_batches)


def run_schedule(
    chunks: Sequence[DistributedDataParallel],
    work: Sequence[Work],
    *,
    forward_only: bool,
    progress: StepProgress | None = None,
) -> list[Any]:
    """Run Megatron's schedule. Returns the metrics of each micro-batch's loss, or with
    `forward_only` what its function returns; nothing on a pipeline stage that is not
    the last. `progress` counts the micro-batches that this rank's first chunk has
    begun."""

    def forward_step(
        remaining: Iterator[Work], model: torch.nn.Module
    ) -> tuple[Any, Any]:
        micro_batch, compute = next(remaining)
        output = model(micro_batch)
        if isinstance(output, torch.Tensor):
            return output, None  # hidden states for the next chunk
        first_N, *others = output

        def compute_loss(output_N: torch.Tensor, **_: bool) -> Any:
            """Return (loss to sum, Megatron's unused token count, metrics)."""
            outputs = compute(output_N, *others)
            if forward_only:
                return outputs
            return outputs.loss, torch.tensor(1, dtype=torch.int), outputs.metrics

        return first_N, compute_loss

    iterators = [iter(work) for _ in chunks]
    if progress is not None:
        iterators[0] = progress.counted(work, len(work))
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators,
        model=list(chunks),
        num_microbatches=len(work),
        seq_length=0,  # the stages tell each other the shapes
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def forward_pass(
    chunks: Sequence[DistributedDataParallel],
    packed: Sequence[Packed],
    progress: StepProgress | None = None,
) -> list[SampleNumbers]:
    """Make one forward pass over all these sequences, without gradient, and return the
    first of the model's outputs, for each part. All 0 on a pipeline stage that is not
    the last."""
    with torch.no_grad():
        outputs: list[torch.Tensor] = run_schedule(
            chunks,
            [
                (micro_batch, _first_output)
                for micro_batch in concatenate_micro_batches(packed)
            ],
            forward_only=True,
            progress=progress,
        )
    outputs_by_micro_batch = iter(outputs)
    by_part: list[SampleNumbers] = []
    for part in packed:
        arrays = [
            np.zeros(len(sequence.tokens_T), np.float32) for sequence in part.sequences
        ]
        if outputs:  # the last pipeline stage has them
            for micro_batch in part.micro_batches:
                micro_batch.place(next(outputs_by_micro_batch).cpu().numpy(), arrays)
        by_part.append(arrays)
    return by_part


def _first_output(output_N: torch.Tensor, *_: torch.Tensor | None) -> torch.Tensor:
    return output_N
