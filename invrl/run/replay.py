"""`invrl replay RUN --step N`: one training step again, from its checkpoint and its saved batch, with every
token's numbers written out. Nothing of the run is changed."""

import json
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from invrl.errors import ConfigError
from invrl.run.checkpoints import Checkpoints
from invrl.run.cluster import start_trainer
from invrl.run.config import Config
from invrl.run.loop import train_values
from invrl.store.batch_file import batch_path, load_batch
from invrl.store.metrics_file import read_metrics
from invrl.store.run_folder import RunFolder
from invrl.types import TrainBatch

_NOT_COMPARED = ("train/time/", "train/tokens_per_s")


async def replay(config: Config, folder: RunFolder, step: int) -> str:
    """Writes RUN/replay/step-N/: tokens.jsonl, one line per training row; result.json, the step's metrics
    beside the recorded ones. What to tell the user. Raises ConfigError if checkpoint or batch are missing,
    DamagedFileError if the checkpoint is not what was written."""
    checkpoints = {one.step: one for one in Checkpoints(folder.checkpoints_path).all()}
    checkpoint = checkpoints.get(step - 1)
    if step > 1 and checkpoint is None:
        reason = f"it begins from the checkpoint of step {step - 1}, and the run has {[*checkpoints]}"
        fix = "choose a step after one of these, or train with --save-interval 1 --keep-checkpoints 0"
        raise ConfigError("--step", step, reason, fix)
    if checkpoint is not None:
        checkpoint.check()
    batch = load_batch(batch_path(folder.rollout_data_path, step))
    async with start_trainer(config, folder) as trainer:
        if checkpoint is not None:
            await trainer.load_checkpoint(str(checkpoint.megatron))
        before = await trainer.token_logprobs(batch)
        metrics = train_values(await trainer.train(batch))
        after = await trainer.token_logprobs(batch)
    out = folder.path / "replay" / f"step-{step:06d}"
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(config.model.folder / "tokenizer.json"))
    with (out / "tokens.jsonl").open("w") as file:
        for row in _rows(batch, before, after, tokenizer):
            file.write(json.dumps(row) + "\n")
    rows = read_metrics(folder.metrics_path)
    row = next((row for row in rows if row["step"] == step and "train/loss" in row), {})
    recorded = {name: value for name, value in row.items() if name.startswith("train/")}
    compared = [name for name in recorded if name in metrics and not name.startswith(_NOT_COMPARED)]
    differ = [name for name in compared if metrics[name] != recorded[name]]
    result = {"step": step, "metrics": metrics, "recorded": recorded, "differ": differ}
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    pairs = zip(before, batch.samples, strict=True)
    gaps = np.concatenate([np.abs(b - s.rollout_logprobs_T)[s.loss_mask_T] for b, s in pairs])
    return (
        f"step {step}: {len(batch.samples)} rows, {len(gaps)} trained tokens; |trainer - engine| log-prob "
        f"{gaps.mean():.2e} on average, {gaps.max():.2e} at most\n"
        f"{len(compared) - len(differ)} of {len(compared)} recorded metrics are equal bit for bit"
        + (f"; not: {', '.join(differ)}" if differ else "")
        + f"\n{out}"
    )


def _rows(
    batch: TrainBatch,
    before: Sequence[NDArray[np.float32]],
    after: Sequence[NDArray[np.float32]],
    tokenizer: Tokenizer,
) -> list[Mapping[str, object]]:
    """Lists have one entry per token of the row; log-probs of tokens that are not trained are 0."""
    return [
        {
            "rollout": sample.rollout_id,
            "group": sample.group_id,
            "attempt": sample.attempt,
            "turns": sample.turn_ids,
            "reward": sample.reward,
            "ids": sample.tokens_T.tolist(),
            "text": [tokenizer.decode([id], skip_special_tokens=False) for id in sample.tokens_T.tolist()],
            "trained": sample.loss_mask_T.tolist(),
            "version": sample.versions_T.tolist(),
            "engine_logprob": sample.rollout_logprobs_T.tolist(),
            "logprob_before": before[at].tolist(),
            "logprob_after": after[at].tolist(),
            "advantage": batch.advantages[at].tolist(),
        }
        for at, sample in enumerate(batch.samples)
    ]
