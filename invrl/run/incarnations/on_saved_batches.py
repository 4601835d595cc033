"""`invrl train --debug-train-only`: trains alone, on batches that another run has
saved."""

import asyncio
from pathlib import Path

from invrl.errors import ConfigError
from invrl.run.checkpoints.checkpoint_saves import CheckpointSaves
from invrl.run.checkpoints.unsaved_weights import no_buffer
from invrl.run.incarnations.run_parts import RunParts
from invrl.run.loop.loop import step_notes, train_values
from invrl.run.processes.cluster import start_trainer
from invrl.run.settings.config import Config
from invrl.store.batch_file import batch_path, load_batch, saved_steps
from invrl.types.batches import TrainBatch


async def train_on_saved_batches(run: RunParts) -> None:
    """Make one step per saved batch after the step of the start, up to the last one,
    and save a checkpoint. SGLang need not be installed. Given the checkpoint of a run
    and the batches that it trained next, losses and weights are those of that run, bit
    for bit in float32."""
    config = run.config
    folder = Path(config.run.load_rollout_data or "").expanduser().absolute()
    steps = saved_steps(folder, after_step=run.start.step)
    run.observer.phase("starting", 0)
    last_step = run.start.step
    async with start_trainer(config, run.folder) as trainer:
        await run.load_checkpoint(trainer)
        try:
            for step in steps:
                if step > run.num_steps:
                    break
                run.observer.phase("train", step)
                batch = load_batch(batch_path(folder, step))
                _refuse_long_rows(batch, config)
                _refuse_missing_columns(batch, config)
                result = await trainer.train(batch)
                for note in step_notes(step, result):
                    run.observer.note(note)
                run.observer.step(step, train_values(result))
                last_step = step
        except asyncio.CancelledError as interrupt:
            await run.save_at_end(trainer, interrupt, no_buffer)
            raise
        run.observer.phase("checkpoint", last_step)
        saves = CheckpointSaves(
            run.checkpoints, trainer, beside_training=False, note=run.observer.note
        )
        await saves.save(last_step)
        await saves.finish()
    run.show_model(last_step)


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
