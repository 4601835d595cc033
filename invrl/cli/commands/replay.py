"""`invrl replay RUN --step N`: repeats one training step, from its checkpoint and its
saved batch, and writes every token's numbers to files. Nothing of the run is changed.

With the inner command that its supervisor starts as the driver."""

import json
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from invrl.cli.arguments import read_options, read_run_folder, read_whole
from invrl.cli.checks.model_checks import check_model
from invrl.cli.command import CommandFailed
from invrl.cli.run_process import driver_context, log_to_folder
from invrl.errors import ConfigError
from invrl.host.processes import interrupts
from invrl.run.checkpoints.checkpoint import Checkpoint
from invrl.run.checkpoints.checkpoints import Checkpoints
from invrl.run.loop.loop import train_values
from invrl.run.processes import supervisor
from invrl.run.processes.driver_commands import REPLAY_COMMAND
from invrl.run.settings.config import Config
from invrl.run.settings.initial_model import without_initial_adapter
from invrl.run.settings.resolved_config import load_resolved
from invrl.store.batch_file import batch_path, load_batch
from invrl.store.metrics_file import read_metrics
from invrl.store.run_folder import RunFolder
from invrl.types.batches import TrainBatch

MEASURED = (
    "train/time/",
    "train/tokens_per_s",
    "train/peak_memory_gb",  # since the process started
    "train/estimated_memory_gb",
)
"""Prefixes of metrics that are measured. All other metrics of `train/` are equal if a
step is repeated."""
LogProbs = Sequence[NDArray[np.float32]]
"""One array per training sample, with an entry per token."""


def replay(arguments: Sequence[str]) -> None:
    """usage: invrl replay RUN_FOLDER --step N

    Needs the batch of step N (train with --save-rollout-data) and the checkpoint of
    step N - 1. Writes RUN_FOLDER/replay/step-N: tokens.jsonl (ids, text, versions,
    log-probs of engine and trainer before and after the step, advantages) and
    result.json (the step's metrics beside the recorded ones)."""
    folder = read_run_folder(arguments)
    options = read_options(arguments[1:], ["--step"])
    step = read_whole(
        "--step",
        options.get("--step", ""),
        reason="not a step",
        fix="give --step N, from 1 on",
        least=1,
    )
    config = load_resolved(folder.config_path)
    check_model(config)
    with folder.held("replay"):
        log_to_folder(folder, config, process="supervisor")
        exit_code = supervisor.supervise_once(config, folder, REPLAY_COMMAND, str(step))
        if exit_code:
            raise CommandFailed(exit_code)


def replay_step_in_folder(arguments: Sequence[str]) -> None:
    """usage: _replay RUN_FOLDER STEP

    Repeats one step of the run in this folder: the driver of `invrl replay`."""
    folder = read_run_folder(arguments)
    step = int(arguments[1])
    with driver_context(folder) as config:
        summary = interrupts.run(replay_step(config, folder, step))
        print(summary)


async def replay_step(config: Config, folder: RunFolder, step: int) -> str:
    """Write into RUN/replay/step-N: tokens.jsonl, one line per training sample;
    result.json, the step's metrics next to the recorded ones. Returns a summary for the
    console. Raises ConfigError if checkpoint or batch are missing, DamagedFileError if
    the checkpoint differs from what was written."""
    from invrl.run.processes.cluster import start_trainer

    checkpoint = _checkpoint_before(step, Checkpoints(folder.checkpoints_path))
    if checkpoint is not None:
        checkpoint.check(config.model.folder)
        config = without_initial_adapter(config)
    batch = load_batch(batch_path(folder.rollout_data_path, step))
    async with start_trainer(config, folder) as trainer:
        if checkpoint is not None:
            await trainer.load_checkpoint(str(checkpoint.megatron))
        before = await trainer.token_logprobs(batch)
        metrics = train_values(await trainer.train(batch))
        after = await trainer.token_logprobs(batch)

    output = folder.path / "replay" / f"step-{step:06d}"
    output.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(config.model.folder / "tokenizer.json"))
    with (output / "tokens.jsonl").open("w", encoding="utf-8") as file:
        for row in _token_rows(batch, before, after, tokenizer):
            file.write(json.dumps(row) + "\n")
    recorded = _recorded_metrics(folder, step)
    compared = [
        name for name in recorded if name in metrics and not name.startswith(MEASURED)
    ]
    different = [name for name in compared if metrics[name] != recorded[name]]
    result = {
        "step": step,
        "metrics": metrics,
        "recorded": recorded,
        "differ": different,
    }
    (output / "result.json").write_text(
        json.dumps(result, indent=2) + "\n", encoding="utf-8"
    )

    gaps = _logprob_gaps(batch, before)
    equal = f"{len(compared) - len(different)} of {len(compared)} recorded metrics are equal bit for bit"
    if different:
        equal += f"; not: {', '.join(different)}"
    return (
        f"step {step}: {len(batch.samples)} rows, {len(gaps)} trained tokens; |trainer - engine| log-prob "
        f"{gaps.mean():.2e} on average, {gaps.max():.2e} at most\n"
        f"{equal}\n"
        f"{output}"
    )


def _checkpoint_before(step: int, checkpoints: Checkpoints) -> Checkpoint | None:
    """Return the checkpoint that a step starts from; None for step 1 of a run without a
    checkpoint of step 0."""
    by_step = {checkpoint.step: checkpoint for checkpoint in checkpoints.all()}
    checkpoint = by_step.get(step - 1)
    if step > 1 and checkpoint is None:
        reason = f"it begins from the checkpoint of step {step - 1}, and the run has {list(by_step)}"
        fix = "choose a step after one of these, or train with --save-interval 1 --no-checkpoints.keep"
        raise ConfigError("--step", step, reason, fix)
    return checkpoint


def _recorded_metrics(folder: RunFolder, step: int) -> dict[str, float | None]:
    """Return the trainer's metrics of a step; empty if the run has recorded none."""
    for row in read_metrics(folder.metrics_path):
        if row["step"] == step and "train/loss" in row:
            return {
                name: value for name, value in row.items() if name.startswith("train/")
            }
    return {}


def _logprob_gaps(batch: TrainBatch, logprobs: LogProbs) -> NDArray[np.float32]:
    """Return the |trainer - engine| log-prob of every trained token."""
    gaps: list[NDArray[np.float32]] = []
    for logprobs_T, sample in zip(logprobs, batch.samples, strict=True):
        gaps_T = np.abs(logprobs_T - sample.rollout_logprobs_T)
        gaps.append(gaps_T[sample.loss_mask_T])
    return np.concatenate(gaps)


def _token_rows(
    batch: TrainBatch, before: LogProbs, after: LogProbs, tokenizer: Tokenizer
) -> list[Mapping[str, object]]:
    """Return a line per sample. Lists have one entry per token; log-probs of tokens
    that are not trained are 0."""
    rows: list[Mapping[str, object]] = []
    for index, sample in enumerate(batch.samples):
        ids = sample.tokens_T.tolist()
        rows.append(
            {
                "rollout": sample.rollout_id,
                "group": sample.group_id,
                "attempt": sample.attempt,
                "turns": sample.turn_ids,
                "reward": sample.reward,
                "ids": ids,
                "text": [
                    tokenizer.decode([id], skip_special_tokens=False) for id in ids
                ],
                "trained": sample.loss_mask_T.tolist(),
                "version": sample.versions_T.tolist(),
                "engine_logprob": sample.rollout_logprobs_T.tolist(),
                "logprob_before": before[index].tolist(),
                "logprob_after": after[index].tolist(),
                "advantage": batch.advantages[index].tolist(),
            }
        )
    return rows
