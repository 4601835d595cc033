"""Losses that read the likeliest tokens, in layouts of ranks, against float64 on the
Hugging Face model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_pool import RankPool
from slow_cases import named_quick
from tiny_model import make_tiny_model
from train_reference import Reference, Tensors, check_same_bits, random_batch, worst

from invrl.algorithms.config import AlgorithmConfig
from invrl.errors import TrainError
from invrl.train.batches.sharding import mini_batches
from invrl.train.config import TrainConfig
from invrl.train.parallel_layout import ParallelLayout
from invrl.types.batches import TrainBatch, TrainSample
from invrl.types.metrics import resolve
from invrl.types.top_logprobs import NO_TOKEN, TopLogprobs
from invrl.user_code.plugins import plugin_name

BOUND = 1e-5  # norm-relative, per tensor
EXACT = TrainConfig(train_dtype="float32", lr=3e-3, max_tokens_per_micro_batch=25)
LAYOUTS = {
    "one process": ParallelLayout(),
    "DP": ParallelLayout(data=2),
    "TP": ParallelLayout(tensor=2),
    "CP": ParallelLayout(context=2),
    "PP": ParallelLayout(pipeline=2),
}
K = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "qwen3")


def batch_with_top(seed: int) -> TrainBatch:
    """Every third row has one candidate for each token only, one row has none, and
    every other token is its own first candidate."""
    batch = random_batch(seed)
    rng = np.random.default_rng(seed)
    samples: list[TrainSample] = []
    for number, sample in enumerate(batch.samples):
        width = 1 if number % 3 == 1 else K
        num_tokens = len(sample.tokens_T)
        ids_TK = np.array(
            [rng.permutation(512)[:width] for _ in range(num_tokens)], np.int32
        )
        logprobs_TK = rng.normal(-np.log(512), 1.0, ids_TK.shape).astype(np.float32)
        for place in range(0, num_tokens, 2):
            if sample.tokens_T[place] not in ids_TK[place]:
                ids_TK[place, 0] = sample.tokens_T[place]
        # an engine reports one log-prob of a token
        is_sampled_TK = ids_TK == sample.tokens_T[:, None]
        logprobs_TK = np.where(
            is_sampled_TK, sample.rollout_logprobs_T[:, None], logprobs_TK
        )
        top = TopLogprobs(ids_TK=ids_TK, logprobs_TK=logprobs_TK).where(
            sample.loss_mask_T
        )
        samples.append(replace(sample, top_logprobs=None if number == 2 else top))
    return replace(batch, samples=tuple(samples))


SIMKO = "invrl.contrib.simko:SimKO"
TOTAL_VARIATION = "invrl.contrib.dppo_topk:DPPOTotalVariation"


def table_of(algorithm: AlgorithmConfig) -> Mapping[str, float]:
    return algorithm.plugin.by_name[plugin_name(algorithm.policy_loss)]


class ExactTopTokens(Reference):
    """The losses over a whole mini-batch, from the whole distributions."""

    def gradients_over_top(
        self, batch: TrainBatch, algorithm: AlgorithmConfig, initial: Reference
    ) -> Tensors:
        tokens = sum(int(sample.loss_mask_T.sum()) for sample in batch.samples)
        loss = torch.zeros((), dtype=torch.float64)
        for sample, advantages_T in zip(batch.samples, batch.advantages, strict=True):
            if not sample.loss_mask_T.any():
                continue
            ids_T = torch.from_numpy(sample.tokens_T.astype(np.int64))
            logprobs_TV = self.distributions(ids_T, sample.temperature)
            [old_N] = initial.frozen_logprobs([sample])
            positions = np.flatnonzero(sample.loss_mask_T)
            rows = [logprobs_TV[position - 1] for position in positions]
            entropy_N = torch.stack([-(row.exp() * row).sum().detach() for row in rows])
            bound = np.inf
            if algorithm.policy_loss == SIMKO:
                quantile = table_of(algorithm)["entropy_quantile"]
                bound = float(np.quantile(entropy_N.numpy(), quantile))
            for n, position in enumerate(positions):
                candidates = (
                    []
                    if sample.top_logprobs is None
                    else sample.top_logprobs.ids_TK[position]
                )
                candidates = [int(token) for token in candidates if token != NO_TOKEN]
                advantage = float(advantages_T[position])
                sampled = int(sample.tokens_T[position])
                if algorithm.policy_loss == SIMKO:
                    term = self.simko(
                        rows[n],
                        sampled,
                        candidates,
                        advantage,
                        float(old_N[n]),
                        algorithm,
                        entropy_N[n] > bound,
                    )
                else:
                    rollout = {sampled: float(sample.rollout_logprobs_T[position])}
                    for k, candidate in enumerate(candidates):
                        assert sample.top_logprobs is not None
                        rollout[candidate] = float(
                            sample.top_logprobs.logprobs_TK[position, k]
                        )
                    term = self.dppo(rows[n], sampled, rollout, advantage, algorithm)
                loss = loss + term / tokens
        return self.gradients_of(loss)

    def simko(
        self,
        row_V: torch.Tensor,
        sampled: int,
        candidates: list[int],
        advantage: float,
        old: float,
        algorithm: AlgorithmConfig,
        undecided: torch.Tensor,
    ) -> torch.Tensor:
        ratio = torch.exp(row_V[sampled] - old)
        if undecided and advantage > 0 and candidates:
            shared = torch.stack(
                [
                    torch.exp(row_V[token] - row_V[token].detach())
                    for token in candidates
                ]
            )
            alpha = table_of(algorithm)["alpha"]
            ratio = (1 - alpha) * ratio + alpha * ratio.detach() * shared.mean()
        if undecided and advantage < 0 and candidates[:1] == [sampled]:
            ratio = ratio * table_of(algorithm)["top1_weight"]
        clipped = ratio.clamp(1 - algorithm.eps_clip_low, 1 + algorithm.eps_clip_high)
        return -torch.minimum(ratio * advantage, clipped * advantage)

    def dppo(
        self,
        row_V: torch.Tensor,
        sampled: int,
        rollout: dict[int, float],
        advantage: float,
        algorithm: AlgorithmConfig,
    ) -> torch.Tensor:
        named = list(rollout)
        p = [*row_V[named].detach().exp().tolist()]
        q = np.exp(list(rollout.values())).tolist()
        p.append(1 - sum(p))
        q.append(1 - sum(q))
        if algorithm.policy_loss == TOTAL_VARIATION:
            distance = sum(abs(b - a) for a, b in zip(p, q, strict=True)) / 2
        else:
            distance = sum(b * np.log(b / a) for a, b in zip(p, q, strict=True))
        further = float(row_V[sampled].detach()) - rollout[sampled]
        if distance > table_of(algorithm)["threshold"] and further * advantage > 0:
            return row_V.sum() * 0.0
        return -torch.exp(row_V[sampled] - rollout[sampled]) * advantage


DPPO = {"old_logprobs": "engine", "correction": "none", "num_mini_batches": 2}
LOSSES = {
    "dppo_tv_topk": AlgorithmConfig.model_validate(
        {
            **DPPO,
            "policy_loss": TOTAL_VARIATION,
            "plugin": {"DPPOTotalVariation": {"threshold": 0.01}},
        }
    ),
    "dppo_kl_topk": AlgorithmConfig.model_validate(
        {
            **DPPO,
            "policy_loss": "invrl.contrib.dppo_topk:DPPODivergence",
            "plugin": {"DPPODivergence": {"threshold": 0.005}},
        }
    ),
    "simko": AlgorithmConfig(
        policy_loss=SIMKO,
        plugin={"SimKO": {"alpha": 0.4, "top1_weight": 1.5, "entropy_quantile": 0.3}},
        eps_clip_low=0.4,
        eps_clip_high=0.4,
        dual_clip=None,
        correction="none",
        num_mini_batches=2,
    ),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("layout", named_quick(LAYOUTS.keys(), "TP"))
def test_top_token_losses_equal_float64_in_every_layout(
    pool: RankPool, model: Path, layout: str, loss: str
) -> None:
    """Two optimizer steps. Rows share prefixes, and some have fewer candidates, or
    none."""
    algorithm = LOSSES[loss]
    trainer = pool.build(
        model, layout=LAYOUTS[layout], train=EXACT, algorithm=algorithm
    )
    batch = batch_with_top(5)
    metrics = resolve(trainer.train(batch, steps=2))
    assert metrics["optimizer_steps"] == 2
    if loss == "simko":
        assert 0.0 < metrics["simko_mixed_fraction"] < 1.0
        assert 0.0 < metrics["simko_raised_fraction"] < 1.0
    else:
        assert 0.0 < metrics["clip_fraction"] < 1.0
    initial = ExactTopTokens(model)
    first, second = trainer.steps()
    for at, (mini, step) in enumerate(
        zip(mini_batches(batch, 2), (first, second), strict=True)
    ):
        policy = ExactTopTokens(model, first.weights) if at else initial
        gap, tensor = worst(
            step.gradients, policy.gradients_over_top(mini, algorithm, initial)
        )
        assert gap < BOUND, f"step {at}: {tensor}"


def test_batch_without_top_tokens_is_refused(pool: RankPool, model: Path) -> None:
    trainer = pool.build(model, train=EXACT, algorithm=LOSSES["simko"])
    start = trainer.weights()
    with pytest.raises(
        TrainError,
        match="no sample of the batch has them: sample it with --rollout-top-logprobs",
    ):
        trainer.train(random_batch(5))
    check_same_bits(trainer.weights(), start)


def test_loss_that_does_not_need_top_tokens_ignores_them(
    pool: RankPool, model: Path
) -> None:
    """Bit for bit the step of the same rows without any."""
    results = []
    for batch in (batch_with_top(5), random_batch(5)):
        trainer = pool.build(model, train=EXACT, algorithm=AlgorithmConfig())
        trainer.train(batch, steps=1)
        [step] = trainer.steps()
        results.append(step.weights)
    with_top, plain = results
    check_same_bits(with_top, plain)
