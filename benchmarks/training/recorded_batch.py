"""`python -m benchmarks.training.recorded_batch RUN_CONFIG BATCH REPETITIONS OUT`: our
training step beside a plain Hugging Face one, on the rows of a real batch, in one
process of one thread (`benchmarks/training/step_program.py` measures made-up rows)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.ratios import Speeds
from benchmarks.training.hugging_face_step import HuggingFaceStep, pad_batch
from benchmarks.training.step_program import measure_steps, start_rank
from invrl.run.settings.config import Config
from invrl.run.settings.resolved_config import load_resolved
from invrl.store.batch_file import load_batch
from invrl.train.batches.sharding import shard_batch
from invrl.train.config import TrainConfig
from invrl.types.batches import TrainBatch


def measure_trainer(
    config: Config, batch: TrainBatch, repetitions: int
) -> dict[str, Speeds]:
    """`trainer`: as configured. `trainer_unshared`: every row computed whole, as
    Hugging Face does."""
    # One advantage for all: whatever the rewards were, every row has a gradient.
    ones = [sample.loss_mask_T.astype(np.float32) for sample in batch.samples]
    batch = replace(batch, advantages=tuple(ones))
    model_path = str(config.model.folder)
    rank = start_rank(model_path, config.train, config.algorithm)
    [shard] = shard_batch(batch, ranks=1, steps=1)
    unshared = config.train.model_copy(update={"share_prefixes": False})
    plain = HuggingFaceStep(model_path, config.train, config.algorithm)
    padded = pad_batch(
        batch, tokens=config.train.micro_batch_tokens, sorted_by_length=True
    )

    def ours(train: TrainConfig) -> Callable[[], None]:
        def step() -> None:
            rank._step.logprob_passes.train = train
            rank.train(shard)

        return step

    steps = {
        "trainer": ours(config.train),
        "plain": partial(plain.run, padded),
        "trainer_unshared": ours(unshared),
    }
    speeds = measure_steps(steps, batch, repetitions)
    reference = speeds.pop("plain")
    return {
        name: Speeds(ours=values, reference=reference)
        for name, values in speeds.items()
    }


if __name__ == "__main__":
    run_config, batch_file, count, out = sys.argv[1:]
    torch.set_num_threads(1)
    measured = measure_trainer(
        load_resolved(Path(run_config)), load_batch(Path(batch_file)), int(count)
    )
    speeds = {
        name: {"ours": one.ours, "reference": one.reference}
        for name, one in measured.items()
    }
    Path(out).write_text(json.dumps(speeds))
