"""`--debug-train-only`: the trainer alone, on batches that another run saved. No engine, no router, no
gateway; sglang need not be installed. Given the checkpoint of a live run and the batches it trained next,
losses and weights are that run's, bit for bit in float32. Called by `training.py`.
"""

from __future__ import annotations

from pathlib import Path

from invrl.batch_file import batch_path, load_batch, saved_steps
from invrl.checkpoints import Checkpoints, first_checkpoint
from invrl.cluster import start_trainer
from invrl.config import Config
from invrl.loop import train_values
from invrl.metric_sinks import RunObserver


async def run_train_only(config: Config, checkpoints: Checkpoints, observer: RunObserver) -> None:
    """One step per saved batch after the checkpoint's, `num_steps` in all at most; then a checkpoint."""
    begin = first_checkpoint(config.run.load_checkpoint)
    done = begin.step if begin else 0
    data = Path(config.run.load_rollout_data).expanduser().absolute()
    steps = [step for step in saved_steps(data, after_step=done) if step <= config.run.num_steps]
    observer.phase("starting", 0)
    async with start_trainer(config) as trainer:
        if begin:
            await trainer.load_checkpoint(str(begin.megatron))
        for step in steps:
            observer.phase("train", step)
            observer.step(step, train_values(await trainer.train(load_batch(batch_path(data, step)))))
        end = steps[-1] if steps else done
        observer.phase("checkpoint", end)
        last = await checkpoints.save(trainer, end)
    observer.note(f"model: {last.hugging_face}")
