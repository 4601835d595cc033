"""`invrl train --debug-train-only`: trains alone, on batches that another run has
saved."""

import asyncio
from pathlib import Path

from invrl.algorithms.objectives.objectives import objective_needs
from invrl.errors import ConfigError
from invrl.host.processes import interrupts
from invrl.observe.sinks.sinks import RunObserver
from invrl.run.checkpoints.checkpoint import Checkpoint, keep_model
from invrl.run.checkpoints.checkpoint_saves import CheckpointSaves
from invrl.run.checkpoints.checkpoints import Checkpoints
from invrl.run.checkpoints.unsaved_weights import (
    SAVE_AFTER_INTERRUPT_S,
    no_buffer,
    save_unsaved_weights,
)
from invrl.run.loop.loop import step_notes, train_values
from invrl.run.processes.cluster import start_trainer
from invrl.run.settings.config import Config
from invrl.store.batch_file import batch_path, load_batch, saved_steps
from invrl.store.run_folder import RunFolder
from invrl.types.batches import TrainBatch


async def train_on_saved_batches(
    config: Config,
    folder: RunFolder,
    checkpoints: Checkpoints,
    observer: RunObserver,
    checkpoint: Checkpoint | None,
) -> None:
    """Make one step per saved batch after the step of `checkpoint`, up to step
    `num_steps`, and save a checkpoint. SGLang need not be installed. Given the
    checkpoint of a run and the batches that it trained next, losses and weights are
    those of that run, bit for bit in float32."""
    first_step = 0
    if checkpoint is not None:
        first_step = checkpoint.step
    data = Path(config.run.load_rollout_data or "").expanduser().absolute()
    steps = [
        step
        for step in saved_steps(data, after_step=first_step)
        if step <= config.run.num_steps
    ]
    observer.phase("starting", 0)
    async with start_trainer(config, folder) as trainer:
        if checkpoint is not None:
            await trainer.load_checkpoint(str(checkpoint.megatron))
        try:
            for step in steps:
                observer.phase("train", step)
                batch = load_batch(batch_path(data, step))
                _refuse_long_rows(batch, config)
                _refuse_missing_columns(batch, config)
                _refuse_missing_top_logprobs(batch, config)
                result = await trainer.train(batch)
                for note in step_notes(step, result):
                    observer.note(note)
                observer.step(step, train_values(result))
        except asyncio.CancelledError:
            interrupts.allow_more(SAVE_AFTER_INTERRUPT_S)
            await save_unsaved_weights(
                trainer,
                checkpoints,
                first_step=first_step,
                timeout_s=SAVE_AFTER_INTERRUPT_S,
                note=observer.note,
                take_snapshot=no_buffer,
            )
            raise
        last_step = steps[-1] if steps else first_step
        observer.phase("checkpoint", last_step)
        saves = CheckpointSaves(
            checkpoints, trainer, beside_training=False, note=observer.note
        )
        await saves.save(last_step)
        await saves.finish()
    model = checkpoints.saved_model_folder(last_step)
    keep_model(model)
    observer.note(f"model: {model}")


def _refuse_long_rows(batch: TrainBatch, config: Config) -> None:
    """Raise ConfigError for a sample of more than `max_sample_tokens`. A run that
    samples refuses it earlier, at the gateway."""
    limit = config.train.max_sample_tokens
    longest = max((len(sample.tokens_T) for sample in batch.samples), default=0)
    if limit and longest > limit:
        reason = (
            f"a row of batch {batch.batch_id} in the saved batches has {longest} tokens"
        )
        fix = f"set --max-sample-tokens to {longest} or more, or leave it out"
        raise ConfigError("train.max_sample_tokens", limit, reason, fix)


def _refuse_missing_columns(batch: TrainBatch, config: Config) -> None:
    """Raise ConfigError for a sample that lacks an extra column of this run. The
    batches of a run that declared it have it in every sample."""
    for name in config.gateway.session.declared_columns:
        for sample in batch.samples:
            if name in sample.columns or name in sample.numbers:
                continue
            present = ", ".join([*sample.columns, *sample.numbers]) or "none"
            reason = f"rows of batch {batch.batch_id} in the saved batches have no column {name!r} ({present})"
            fix = "declare the columns of the run that saved them, or give batches of a run with this column"
            raise ConfigError(
                "session.extra_columns",
                list(config.gateway.session.extra_columns),
                reason,
                fix,
            )


def _refuse_missing_top_logprobs(batch: TrainBatch, config: Config) -> None:
    """Raise ConfigError if the objective reads the likeliest tokens and the batch has
    none."""
    if not batch.samples or not objective_needs(config.algorithm).top_logprobs:
        return
    if all(sample.top_logprobs is None for sample in batch.samples):
        reason = (
            f"it reads the likeliest tokens in the place of each trained one, and batch {batch.batch_id} of "
            "the saved batches has none"
        )
        fix = "give batches of a run with --rollout-top-logprobs, or use another loss"
        raise ConfigError(
            "algorithm.policy_loss", config.algorithm.policy_loss, reason, fix
        )
