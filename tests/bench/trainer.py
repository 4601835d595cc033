"""`python -m bench.trainer RUN_CONFIG BATCH REPETITIONS OUT`: our training step beside a plain Hugging Face
one, on the same rows, in one process of one thread.

Hugging Face as someone who knows it would: rows sorted by length and padded, as many in a micro-batch as ours
holds tokens, SDPA, logits only where a row has something to train, autocast over float32 weights where ours
computes in bfloat16 over float32 master weights, fused AdamW. The loss is ours. Speeds are row tokens per
CPU-second, padding not counted. Both have the malloc settings of `device.prepare`, without which Hugging
Face's step is slower.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bench.ratios import Speeds
from invrl.algorithms.losses import LossInputs, policy_loss
from invrl.errors import TrainError
from invrl.host.process import random_key
from invrl.metrics import resolve
from invrl.run.config import Config, load_resolved
from invrl.store.batch_file import load_batch
from invrl.train.config import TrainConfig
from invrl.train.parallel.layout import ParallelLayout
from invrl.train.rank import TrainRank
from invrl.train.rank_settings import RankSettings
from invrl.train.rendezvous import listen
from invrl.train.sharding import shard_batch
from invrl.types import TrainBatch

_NORM_GAP = 0.1


class HuggingFaceStep:
    """Padded micro-batches, prepared once; `run` is one step."""

    def __init__(self, config: Config, batch: TrainBatch) -> None:
        from transformers import AutoModelForCausalLM

        self._config = config
        self._model = AutoModelForCausalLM.from_pretrained(
            config.model.model_path, dtype=torch.float32, attn_implementation="sdpa"
        ).train()
        train = config.train
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=train.lr,
            betas=(train.adam_beta1, train.adam_beta2),
            weight_decay=train.weight_decay,
            fused=True,
        )
        self._tokens = batch.total_tokens
        self._batches = self._padded(batch)

    def run(self) -> float:
        """The gradient's norm."""
        self._optimizer.zero_grad(set_to_none=True)
        for ids_BT, mask_BT, trained_BT, rollout_N, advantages_N, temperature in self._batches:
            first = int(trained_BT.any(0).nonzero()[0])
            keep = torch.arange(first - 1, ids_BT.shape[1] - 1)
            with self._autocast():
                out = self._model(input_ids=ids_BT, attention_mask=mask_BT, logits_to_keep=keep)
            logprobs = (out.logits.float() / temperature).log_softmax(-1)
            picked_BT = logprobs.gather(-1, ids_BT[:, first:, None])[..., 0]
            current_N = picked_BT[trained_BT[:, first:]]
            inputs = LossInputs(
                current_N=current_N,
                old_N=current_N.detach(),
                rollout_N=rollout_N,
                advantages_N=advantages_N,
                reference_N=None,
                entropy_N=None,
                denominator=float(self._tokens),
            )
            policy_loss(inputs, self._config.algorithm).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.train.clip_grad or 1e9)
        self._optimizer.step()
        return float(norm)

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast("cpu", torch.bfloat16, enabled=self._config.train.train_dtype == "bfloat16")

    def _padded(self, batch: TrainBatch) -> list[tuple[torch.Tensor, ...]]:
        rows = sorted(zip(batch.samples, batch.advantages, strict=True), key=lambda row: len(row[0].tokens_T))
        groups, most = [[rows[0]]], self._config.train.max_tokens_per_microbatch
        for row in rows[1:]:
            if (len(groups[-1]) + 1) * len(row[0].tokens_T) > most:
                groups.append([])
            groups[-1].append(row)
        made = []
        for group in groups:
            longest = len(group[-1][0].tokens_T)
            ids, mask = (np.zeros((len(group), longest), np.int64) for _ in range(2))
            trained = np.zeros((len(group), longest), bool)
            for at, (sample, _) in enumerate(group):
                length = len(sample.tokens_T)
                ids[at, :length], mask[at, :length] = sample.tokens_T, 1
                trained[at, :length] = sample.loss_mask_T
            flat = [(sample, sample.rollout_logprobs_T, advantages) for sample, advantages in group]
            values = [np.concatenate([row[which][row[0].loss_mask_T] for row in flat]) for which in (1, 2)]
            temperature = np.array([[[sample.temperature]] for sample, _ in group], np.float32)
            made.append(tuple(torch.from_numpy(a) for a in (ids, mask, trained, *values, temperature)))
        return made


def measure_trainer(config: Config, batch: TrainBatch, repetitions: int) -> dict[str, Speeds]:
    """`trainer`: as configured. `trainer_unshared`: every row computed whole, as Hugging Face does. Raises
    TrainError unless the gradients of the three have the same norm at the same weights."""
    # One advantage for all: whatever the rewards were, there is a gradient to compare.
    ones = [sample.loss_mask_T.astype(np.float32) for sample in batch.samples]
    batch = replace(batch, advantages=tuple(ones))
    settings = _settings(config)
    listener = listen(settings.master_addr)
    rank = TrainRank(settings, listener.getsockname()[1], listener)
    [shard] = shard_batch(batch, ranks=1, steps=1)
    shared = config.train
    unshared = shared.model_copy(update={"share_prefixes": False})
    plain = HuggingFaceStep(config, batch)

    def ours(train: TrainConfig) -> Callable[[], float]:
        def step() -> float:
            rank._step.train = train
            return resolve(rank.train(shard).metrics, "")["grad_norm"]

        return step

    steps = {"trainer": ours(shared), "hugging_face": plain.run, "trainer_unshared": ours(unshared)}
    tokens = sum(len(sample.tokens_T) for sample in batch.samples)
    speeds: dict[str, list[float]] = {name: [] for name in steps}
    for nth in range(repetitions + 1):
        norms = {}
        for name, step in steps.items():
            started = time.process_time()
            norms[name] = step()
            if nth:  # the first step of each is slower
                speeds[name].append(tokens / (time.process_time() - started))
        if not nth and abs(norms["trainer"] / norms["hugging_face"] - 1) > _NORM_GAP:
            raise TrainError(f"these are not the same step: gradient norms {norms}")
    plain_speeds = speeds.pop("hugging_face")
    return {name: Speeds(ours=values, reference=plain_speeds) for name, values in speeds.items()}


def _settings(config: Config) -> RankSettings:
    return RankSettings(
        rank=0,
        layout=ParallelLayout(),
        master_addr="127.0.0.1",
        store_key=random_key(),
        model_path=config.model.model_path,
        train=config.train,
        algorithm=config.algorithm,
        weight_dtype=config.engine.engine_dtype,
        megatron=dict(config.megatron),
        seed=config.run.seed,
    )


if __name__ == "__main__":
    run_config, batch_file, count, out = sys.argv[1:]
    torch.set_num_threads(1)
    measured = measure_trainer(load_resolved(Path(run_config)), load_batch(Path(batch_file)), int(count))
    speeds = {name: {"ours": one.ours, "reference": one.reference} for name, one in measured.items()}
    Path(out).write_text(json.dumps(speeds))
