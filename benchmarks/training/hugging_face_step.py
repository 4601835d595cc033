"""A training step with a plain Hugging Face model, as someone who knows it would write
it.

Samples are padded to the longest of their micro-batch, which has as many as fit into
the tokens of ours, in the order of the batch or sorted by length; SDPA; logits only
where a row has something to train; autocast over float32 weights where ours computes in
bfloat16 over float32 master weights; fused AdamW. The loss is ours."""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.loss_inputs import Denominators, LossInputs, Samples
from invrl.algorithms.policy_loss.losses import policy_loss
from invrl.train.config import TrainConfig
from invrl.train.runtime import device
from invrl.types.batches import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedRows:
    """A micro-batch of B rows, and its N trained tokens."""

    ids_BT: torch.Tensor
    mask_BT: torch.Tensor
    trained_BT: torch.Tensor
    rollout_N: torch.Tensor
    advantages_N: torch.Tensor
    temperature_B11: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedBatch:
    micro_batches: tuple[PaddedRows, ...]
    denominators: Denominators
    """Of the whole batch."""


class HuggingFaceStep:
    """The model and its optimizer."""

    def __init__(
        self, model_path: str, train: TrainConfig, algorithm: AlgorithmConfig
    ) -> None:
        self._train = train
        self._algorithm = algorithm
        model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.float32, attn_implementation="sdpa"
        )
        self._model = model.to(device.device()).train()  # pyright: ignore[reportArgumentType]
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=train.lr,
            betas=(train.adam_beta1, train.adam_beta2),
            weight_decay=train.weight_decay,
            fused=True,
        )

    def run(self, batch: PaddedBatch) -> float:
        """One step. Returns the gradient's norm."""
        self._optimizer.zero_grad(set_to_none=True)
        for rows in batch.micro_batches:
            self._backward(rows, batch.denominators)
        bound = self._train.clip_grad or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), bound)
        self._optimizer.step()
        return float(norm)

    def _backward(self, rows: PaddedRows, denominators: Denominators) -> None:
        first = int(rows.trained_BT.any(0).nonzero()[0])
        keep = torch.arange(first - 1, rows.ids_BT.shape[1] - 1, device=device.device())
        with self._autocast():
            output = self._model(
                input_ids=rows.ids_BT, attention_mask=rows.mask_BT, logits_to_keep=keep
            )
        logprobs = (output.logits.float() / rows.temperature_B11).log_softmax(-1)
        picked_BT = logprobs.gather(-1, rows.ids_BT[:, first:, None])[..., 0]
        current_N = picked_BT[rows.trained_BT[:, first:]]
        inputs = LossInputs(
            current_N=current_N,
            old_N=current_N.detach(),
            rollout_N=rows.rollout_N,
            advantages_N=rows.advantages_N,
            reference_N=None,
            entropy_N=None,
            samples=Samples.each_a_rollout(rows.trained_BT.nonzero()[:, 0]),
            denominators=denominators,
        )
        policy_loss(inputs, self._algorithm).loss.backward()

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(
            device.device().type,
            torch.bfloat16,
            enabled=self._train.train_dtype == "bfloat16",
        )


def pad_batch(batch: TrainBatch, *, tokens: int, sorted_by_length: bool) -> PaddedBatch:
    """Micro-batches of at most `tokens` tokens, padding included; a longer row is
    alone."""
    lengths = [len(sample.tokens_T) for sample in batch.samples]
    rows = list(range(len(lengths)))
    if sorted_by_length:
        rows.sort(key=lengths.__getitem__)
    micro_batches: list[list[int]] = []
    longest = 0
    for row in rows:
        longest = max(longest, lengths[row])
        if not micro_batches or (len(micro_batches[-1]) + 1) * longest > tokens:
            micro_batches.append([])
            longest = lengths[row]
        micro_batches[-1].append(row)
    return PaddedBatch(
        micro_batches=tuple(_pad(batch, micro_batch) for micro_batch in micro_batches),
        denominators=Denominators.of(batch.trained),
    )


def _pad(batch: TrainBatch, rows: list[int]) -> PaddedRows:
    samples = [batch.samples[row] for row in rows]
    shape = (len(rows), max(len(sample.tokens_T) for sample in samples))
    ids_BT = np.zeros(shape, np.int64)
    mask_BT = np.zeros(shape, np.int64)
    trained_BT = np.zeros(shape, np.bool_)
    for place, sample in enumerate(samples):
        length = len(sample.tokens_T)
        ids_BT[place, :length] = sample.tokens_T
        mask_BT[place, :length] = 1
        trained_BT[place, :length] = sample.loss_mask_T
    rollout = [sample.rollout_logprobs_T[sample.loss_mask_T] for sample in samples]
    advantages = [batch.advantages[row][batch.samples[row].loss_mask_T] for row in rows]
    temperatures = np.array([sample.temperature for sample in samples], np.float32)
    target = device.device()
    return PaddedRows(
        ids_BT=torch.from_numpy(ids_BT).to(target),
        mask_BT=torch.from_numpy(mask_BT).to(target),
        trained_BT=torch.from_numpy(trained_BT).to(target),
        rollout_N=torch.from_numpy(np.concatenate(rollout)).to(target),
        advantages_N=torch.from_numpy(np.concatenate(advantages)).to(target),
        temperature_B11=torch.from_numpy(temperatures[:, None, None]).to(target),
    )
