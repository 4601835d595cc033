"""PPO with a critic, in every layout of ranks, against float64 on the Hugging Face
model and loops over tokens that are written out here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from family_models import make_family_model
from numpy.typing import NDArray
from rank_pool import Arrays, RankPool, Step, Trainer
from slow_cases import first_quick, named_quick
from tiny_model import make_tiny_model
from train_reference import (
    Reference,
    Tensors,
    check_same_bits,
    float64_everywhere,
    relative,
    rewarded_batch,
    worst,
)

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.tables import CriticConfig, KlConfig
from invrl.errors import TrainError
from invrl.train.batches.sharding import mini_batches
from invrl.train.config import TrainConfig
from invrl.train.parallel_layout import ParallelLayout
from invrl.types.batches import TrainBatch, TrainSample
from invrl.types.metrics import resolve

BOUND = 1e-5  # norm-relative, per tensor
EXACT = TrainConfig(train_dtype="float32", lr=3e-3, max_tokens_per_micro_batch=25)
PPO = AlgorithmConfig(
    advantage="gae",
    discount=0.97,
    critic=CriticConfig(lr=3e-3, gae_lambda=0.9, returns_lambda=0.8, value_clip=0.1),
    kl=KlConfig(coefficient=0.1, added_to="reward", estimator="k1"),
)
PPO_CRITIC = PPO.critic or CriticConfig()
LAYOUTS = {
    "one process": ParallelLayout(),
    "DP": ParallelLayout(data=2),
    "TP": ParallelLayout(tensor=2),
    "CP": ParallelLayout(context=2),
    "PP": ParallelLayout(pipeline=2),
}
Floats = NDArray[np.float64]


def with_critic(**settings: object) -> AlgorithmConfig:
    """PPO with these settings of its critic."""
    return PPO.model_copy(update={"critic": PPO_CRITIC.model_copy(update=settings)})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "qwen3")


BATCHES = tuple(rewarded_batch(seed) for seed in range(3))


# ------------------------------------------------------------ the same by other means


class ExactCritic(Reference):
    """The Hugging Face model in float64 with a linear head on its last hidden
    states."""

    def __init__(self, path: Path, weights: Arrays) -> None:
        body = {
            name: weight for name, weight in weights.items() if name != "value_head"
        }
        super().__init__(path, body)
        self.head = torch.from_numpy(weights["value_head"]).double().requires_grad_()

    def values(self, sample: TrainSample) -> torch.Tensor:
        """Of the trained tokens [N], each from the token before it; with gradient."""
        tokens_T = torch.from_numpy(sample.tokens_T.astype(np.int64))
        with float64_everywhere():
            hidden_TH = self.model.model(tokens_T[None]).last_hidden_state[0]
        return (hidden_TH @ self.head[0])[:-1][torch.from_numpy(sample.loss_mask_T[1:])]

    def value_gradients(
        self,
        batch: TrainBatch,
        old: Sequence[Floats],
        returns: Sequence[Floats],
        clip: float,
    ) -> Tensors:
        tokens = sum(int(sample.loss_mask_T.sum()) for sample in batch.samples)
        loss = torch.zeros((), dtype=torch.float64)
        self.head.grad = None
        for sample, old_N, returns_N in zip(batch.samples, old, returns, strict=True):
            if not sample.loss_mask_T.any():
                continue
            before_N = torch.from_numpy(old_N)
            value_N = self.values(sample)
            clipped_N = torch.min(torch.max(value_N, before_N - clip), before_N + clip)
            target_N = torch.from_numpy(returns_N)
            plain_N = (value_N - target_N) ** 2
            bounded_N = (clipped_N - target_N) ** 2
            loss = (
                loss
                + 0.5
                * torch.where(bounded_N > plain_N, bounded_N, plain_N).sum()
                / tokens
            )
        gradients = self.gradients_of(loss)
        assert self.head.grad is not None
        return {**gradients, "value_head": self.head.grad}


def exact_values(critic: ExactCritic, batch: TrainBatch) -> list[Floats]:
    """One array [N] per sample."""
    values: list[Floats] = []
    with torch.no_grad():
        for sample in batch.samples:
            has_tokens = sample.loss_mask_T.any()
            values.append(critic.values(sample).numpy() if has_tokens else np.empty(0))
    return values


def estimates(
    rewards_N: Floats, values_N: Floats, discount: float, lam: float
) -> Floats:
    """GAE as a sum of weighted errors, token by token."""
    number = len(rewards_N)
    following_N = [*values_N[1:], 0.0]
    advantages_N = np.zeros(number)
    for t in range(number):
        for k in range(t, number):
            error = rewards_N[k] + discount * following_N[k] - values_N[k]
            advantages_N[t] += (discount * lam) ** (k - t) * error
    return advantages_N


def exact_advantages(
    batch: TrainBatch,
    values: Sequence[Floats],
    policy: Reference,
    initial: Reference,
    algorithm: AlgorithmConfig,
) -> tuple[TrainBatch, list[Floats]]:
    """The batch with whitened advantages, and the returns [N] of each sample."""
    critic = algorithm.critic or CriticConfig()
    raw: list[Floats] = []
    returns: list[Floats] = []
    for sample, values_N in zip(batch.samples, values, strict=True):
        mask_T = sample.loss_mask_T
        rewards_N = sample.columns["rewards"][mask_T].astype(np.float64)
        if algorithm.kl is not None and mask_T.any():
            [old_N], [frozen_N] = (
                policy.frozen_logprobs([sample]),
                initial.frozen_logprobs([sample]),
            )
            rewards_N = (
                rewards_N - algorithm.kl.coefficient * (old_N - frozen_N).numpy()
            )
        raw.append(
            estimates(rewards_N, values_N, algorithm.discount, critic.gae_lambda)
        )
        critic_N = estimates(
            rewards_N, values_N, algorithm.discount, critic.returns_lambda
        )
        returns.append(critic_N + values_N)
    everything = np.concatenate(raw)
    advantages: list[NDArray[np.float32]] = []
    for sample, raw_N in zip(batch.samples, raw, strict=True):
        advantages_T = np.zeros(len(sample.tokens_T))
        advantages_T[sample.loss_mask_T] = (raw_N - everything.mean()) / np.sqrt(
            everything.var(ddof=1) + 1e-8
        )
        advantages.append(advantages_T.astype(np.float32))
    return replace(batch, advantages=tuple(advantages)), returns


def part_of(
    batch: TrainBatch, whole: TrainBatch, arrays: Sequence[Floats]
) -> list[Floats]:
    """The arrays of the samples of a mini-batch."""
    place = {id(sample): index for index, sample in enumerate(whole.samples)}
    return [arrays[place[id(sample)]] for sample in batch.samples]


# ----------------------------------------------------------------- tests


@pytest.mark.parametrize("layout", named_quick(LAYOUTS, "one process", "PP"))
def test_two_steps_of_critic_and_policy_equal_float64(
    pool: RankPool, model: Path, layout: ParallelLayout
) -> None:
    takes_two_exact_steps(pool, model, layout)


@pytest.mark.parametrize(
    ("family", "layout"),
    first_quick(
        [
            ("qwen3_moe", ParallelLayout(data=2, expert=2)),
            ("qwen3_moe", ParallelLayout(pipeline=2)),
            ("qwen3", ParallelLayout(pipeline=2, virtual_pipeline=2)),
        ]
    ),
    ids=["experts, EP", "experts, PP", "interleaved stages"],
)
def test_critic_with_experts_and_interleaved_stages_equals_float64(
    pool: RankPool, tmp_path: Path, family: str, layout: ParallelLayout
) -> None:
    deep = make_family_model(tmp_path / "model", family, num_hidden_layers=4)
    takes_two_exact_steps(pool, deep, layout)


def test_only_reward_of_a_sample_is_that_of_its_last_trained_token(
    pool: RankPool, model: Path
) -> None:
    alone = replace(BATCHES[0], samples=tuple(map(rewarded_once, BATCHES[0].samples)))
    by_token = replace(alone, samples=tuple(map(with_reward_by_token, alone.samples)))
    critics: list[Arrays] = []
    for batch in (alone, by_token):
        trainer = pool.build(model, train=EXACT, algorithm=PPO)
        trainer.train(batch, steps=1)
        critics.append(trainer.critic_steps()[-1].gradients)
    first, second = critics
    check_same_bits(first, second)


def rewarded_once(sample: TrainSample) -> TrainSample:
    return replace(
        sample, columns={}, reward=len(sample.tokens_T) / 8
    )  # exact in float32


def with_reward_by_token(sample: TrainSample) -> TrainSample:
    rewards_T = np.zeros(len(sample.tokens_T), np.float32)
    rewards_T[np.flatnonzero(sample.loss_mask_T)[-1:]] = sample.reward
    return replace(sample, columns={"rewards": rewards_T})


def takes_two_exact_steps(pool: RankPool, model: Path, layout: ParallelLayout) -> None:
    """Of the second batch: the head is 0 before the first step ever. Both networks
    begin the batch with other weights than the model's, and its second step with others
    than its first."""
    trainer = pool.build(model, layout=layout, train=EXACT, algorithm=PPO)
    first = BATCHES[0]
    batch = BATCHES[1]
    trainer.train(first, steps=2)
    policy_start = trainer.steps()[-1].weights
    critic_start = trainer.critic_steps()[-1].weights
    assert np.abs(critic_start["value_head"]).max() > 0
    metrics = resolve(trainer.train(batch, steps=2))
    assert (metrics["optimizer_steps"], metrics["critic_steps"]) == (2, 2)

    critic = ExactCritic(model, critic_start)
    policy = Reference(model, policy_start)
    initial = Reference(model)
    values = exact_values(critic, batch)
    credited, returns = exact_advantages(batch, values, policy, initial, PPO)
    everything = np.concatenate(returns)
    errors = everything - np.concatenate(values)
    expected = 1 - errors.var() / everything.var()
    assert metrics["value_explained_variance"] == pytest.approx(expected, rel=1e-5)
    assert metrics["return_mean"] == pytest.approx(everything.mean(), rel=1e-5)

    policy_steps = trainer.steps()
    critic_steps = trainer.critic_steps()
    assert (len(policy_steps), len(critic_steps)) == (2, 2)
    for at, mini in enumerate(mini_batches(credited, 2)):
        if at:
            critic = ExactCritic(model, critic_steps[0].weights)
            policy_now = Reference(model, policy_steps[0].weights)
            old = policy.frozen_logprobs(mini.samples)
        else:
            policy_now = policy
            old = None
        old_values = part_of(mini, batch, values)
        own_returns = part_of(mini, batch, returns)
        expected_gradients = critic.value_gradients(
            mini, old_values, own_returns, PPO_CRITIC.value_clip
        )
        gap, name = worst(critic_steps[at].gradients, without_head(expected_gradients))
        assert gap < BOUND, f"critic, step {at}: {name}"
        without_kl = PPO.model_copy(update={"kl": None})  # it is in the rewards
        gradients = policy_now.gradients(mini, without_kl, old=old, reference=None)
        gap, name = worst(policy_steps[at].gradients, gradients)
        assert gap < BOUND, f"policy, step {at}: {name}"


REINFORCE = AlgorithmConfig(
    advantage="reinforce_pp",
    correction="none",
    dual_clip=None,
    kl=KlConfig(coefficient=0.05, estimator="k1", added_to="reward", clamp=None),
    discount=0.9,
)


@pytest.mark.parametrize(
    "layout",
    first_quick([LAYOUTS["DP"], LAYOUTS["one process"]]),
    ids=["DP", "one process"],
)
def test_reinforce_pp_whitens_returns_with_the_kl_in_their_rewards(
    pool: RankPool, model: Path, layout: ParallelLayout
) -> None:
    """No critic: discounted returns of the tokens' rewards less the KL, whitened over
    the batch (arXiv 2501.03262, eq. 4 and 5). Of a second batch, where the policy is no
    longer the reference."""
    trainer = pool.build(model, layout=layout, train=EXACT, algorithm=REINFORCE)
    first = BATCHES[0]
    batch = BATCHES[1]
    trainer.train(first, steps=2)
    policy_start = trainer.steps()[-1].weights
    metrics = resolve(trainer.train(batch, steps=2))
    assert metrics["kl_in_reward"] != 0
    policy = Reference(model, policy_start)
    initial = Reference(model)
    no_values = [np.zeros(int(sample.loss_mask_T.sum())) for sample in batch.samples]
    returns_alone = REINFORCE.model_copy(
        update={"critic": CriticConfig(gae_lambda=1.0)}
    )
    credited, _ = exact_advantages(batch, no_values, policy, initial, returns_alone)
    steps = trainer.steps()
    assert len(steps) == 2
    without_kl = REINFORCE.model_copy(update={"kl": None})
    for at, mini in enumerate(mini_batches(credited, 2)):
        policy_now = Reference(model, steps[0].weights) if at else policy
        old = policy.frozen_logprobs(mini.samples) if at else None
        gap, name = worst(
            steps[at].gradients,
            policy_now.gradients(mini, without_kl, old=old, reference=None),
        )
        assert gap < BOUND, f"step {at}: {name}"


def without_head(gradients: Tensors) -> Tensors:
    """Of the critic, which has no projection to the vocabulary."""
    return {
        name: gradient
        for name, gradient in gradients.items()
        if name != "lm_head.weight"
    }


@pytest.mark.parametrize("layout", named_quick(LAYOUTS, "TP"))
@pytest.mark.parametrize("tied", first_quick([False, True]), ids=["untied", "tied"])
def test_critic_values_are_a_projection_of_the_last_hidden_states(
    pool: RankPool, tmp_path: Path, layout: ParallelLayout, tied: bool
) -> None:
    model = make_tiny_model(tmp_path / "model", tie_embeddings=tied)
    trainer = pool.build(model, layout=layout, train=EXACT, algorithm=PPO)
    assert all(not values_T.any() for values_T in trainer.values(BATCHES[0]))
    trainer.train(BATCHES[0], steps=2)
    weights = trainer.critic_weights()
    measured = trainer.values(replace(BATCHES[2], counts=None))
    critic = ExactCritic(model, weights)
    samples = BATCHES[2].samples
    if layout.data > 1:  # in the order of the replicas
        lengths = sorted(len(values_T) for values_T in measured)
        assert lengths == sorted(len(sample.tokens_T) for sample in samples)
        total = sum(float(values_T.sum()) for values_T in measured)
        expected = sum(
            float(values_N.sum()) for values_N in exact_values(critic, BATCHES[2])
        )
        assert total == pytest.approx(expected, rel=BOUND)
        return
    for sample, values_T, exact_N in zip(
        samples, measured, exact_values(critic, BATCHES[2]), strict=True
    ):
        assert not values_T[~sample.loss_mask_T].any()
        assert (
            relative(values_T[sample.loss_mask_T], exact_N.astype(np.float32)) < BOUND
        )


def test_sharing_prefixes_changes_no_critic_value(pool: RankPool, model: Path) -> None:
    values: list[list[NDArray[np.float32]]] = []
    for shared in (True, False):
        train = EXACT.model_copy(update={"share_prefixes": shared})
        trainer = pool.build(model, train=train, algorithm=PPO)
        trainer.train(BATCHES[0])
        values.append(trainer.values(BATCHES[2]))
    for with_sharing_T, alone_T in zip(*values, strict=True):
        assert with_sharing_T == pytest.approx(alone_T, rel=1e-4, abs=1e-6)


def test_critic_begins_with_the_weights_of_its_model_folder(
    pool: RankPool, model: Path, tmp_path: Path
) -> None:
    other = make_tiny_model(tmp_path / "other", seed=1)
    trainer = pool.build(
        model, train=EXACT, algorithm=PPO, weights={"critic_path": str(other)}
    )
    body = trainer.critic_weights()
    head = body.pop("value_head")
    assert not head.any()
    exact = {
        name: part
        for name, part in Reference(other).model.named_parameters()
        if name in body
    }
    assert body.keys() == exact.keys()
    assert all(
        np.array_equal(body[name], exact[name].detach().float().numpy())
        for name in body
    )
    name = "model.embed_tokens.weight"
    assert not np.array_equal(body[name], trainer.weights()[name])


def test_critic_warm_up_does_not_change_the_policy(pool: RankPool, model: Path) -> None:
    algorithm = with_critic(warmup_steps=2)
    trainer = pool.build(model, train=EXACT, algorithm=algorithm)
    policy = trainer.weights()
    critic = trainer.critic_weights()
    for batch in BATCHES[:2]:
        numbers = resolve(trainer.train(batch, steps=2))
        assert numbers["optimizer_steps"] == 0
        assert numbers["critic_steps"] == 2
        assert numbers["skipped_steps"] == 0
        assert "loss" not in numbers
        assert numbers["value_loss"] > 0
    assert trainer.steps() == []
    assert same(trainer.weights(), policy)
    assert not any(
        np.array_equal(weight, critic[name])
        for name, weight in trainer.critic_weights().items()
    )
    numbers = resolve(trainer.train(BATCHES[2], steps=2))
    assert (numbers["optimizer_steps"], numbers["critic_steps"]) == (2, 2)
    assert not same(trainer.weights(), policy)


def same(weights: Arrays, others: Arrays) -> bool:
    return all(np.array_equal(weight, others[name]) for name, weight in weights.items())


@pytest.mark.parametrize(
    ("ranks", "dtype", "sharded"),
    first_quick(
        [
            (2, "float32", True),
            (1, "float32", True),
            (1, "float32", False),
            (1, "bfloat16", True),
        ]
    ),
)
def test_a_checkpoint_resumes_critic_and_warm_up_bit_for_bit(
    pool: RankPool, model: Path, tmp_path: Path, ranks: int, dtype: str, sharded: bool
) -> None:
    """Saved within the warm-up, which ends one batch later."""
    train = EXACT.model_copy(
        update={
            "train_dtype": dtype,
            "use_distributed_optimizer": sharded,
        }
    )
    algorithm = with_critic(warmup_steps=2, lr_warmup_steps=5)
    trainer = pool.build(model, ranks=ranks, train=train, algorithm=algorithm)
    trainer.train(BATCHES[0], steps=2)
    trainer.each("save", str(tmp_path / "saved"))
    copies = [
        (str(tmp_path / f"model-{rank}"), str(tmp_path / "beside"))
        for rank in range(ranks)
    ]
    trainer.call("copy", copies)
    expected_numbers = [resolve(trainer.train(batch, steps=2)) for batch in BATCHES[1:]]
    trainer.each("finish_copy")
    policy = trainer.weights()
    critic = trainer.critic_weights()
    resumed = pool.build(model, ranks=ranks, train=train, algorithm=algorithm)
    for folder in ("saved", "beside"):  # the second into a trainer that has trained on
        resumed.each("load", str(tmp_path / folder))
        numbers = [resolve(resumed.train(batch, steps=2)) for batch in BATCHES[1:]]
        assert [number["optimizer_steps"] for number in numbers] == [0, 2]
        for measured, uninterrupted in zip(numbers, expected_numbers, strict=True):
            for key in (
                "critic_lr",
                "value_loss",
                "value_explained_variance",
                "critic_grad_norm",
            ):
                assert measured[key] == uninterrupted[key], key
        assert same(resumed.weights(), policy)
        assert same(resumed.critic_weights(), critic)


@pytest.mark.slow
def test_critic_checkpoint_is_loaded_by_another_layout(
    pool: RankPool, model: Path, tmp_path: Path
) -> None:
    trainer = pool.build(
        model, layout=ParallelLayout(tensor=2), train=EXACT, algorithm=PPO
    )
    trainer.train(BATCHES[0], steps=2)
    trainer.each("save", str(tmp_path / "saved"))
    trainer.train(BATCHES[1], steps=2)
    policy = trainer.weights()
    critic = trainer.critic_weights()
    resumed = pool.build(
        model, layout=ParallelLayout(pipeline=2), train=EXACT, algorithm=PPO
    )
    resumed.each("load", str(tmp_path / "saved"))
    resumed.train(BATCHES[1], steps=2)
    for measured, expected in (
        (resumed.weights(), policy),
        (resumed.critic_weights(), critic),
    ):
        gap, name = worst(measured, expected)
        assert gap < BOUND, name


def test_checkpoint_without_a_critic_is_refused(
    pool: RankPool, model: Path, tmp_path: Path
) -> None:
    pool.build(model, train=EXACT).each("save", str(tmp_path / "saved"))
    trainer = pool.build(model, train=EXACT, algorithm=PPO)
    with pytest.raises(TrainError, match="holds no critic"):
        trainer.each("load", str(tmp_path / "saved"))


@pytest.mark.parametrize("ranks", first_quick([2, 1]))
def test_reward_that_is_not_finite_changes_neither_critic_nor_policy(
    pool: RankPool, model: Path, ranks: int
) -> None:
    """Of two ranks one has the bad token."""
    trainer = pool.build(model, ranks=ranks, train=EXACT, algorithm=PPO)
    trainer.train(BATCHES[0])
    policy = trainer.weights()
    critic = trainer.critic_weights()
    bad = BATCHES[1].samples[2]
    rewards_T = bad.columns["rewards"].copy()
    rewards_T[np.flatnonzero(bad.loss_mask_T)[-1]] = np.nan
    samples = list(BATCHES[1].samples)
    samples[2] = replace(bad, columns={"rewards": rewards_T})
    numbers = resolve(trainer.train(replace(BATCHES[1], samples=tuple(samples))))
    assert numbers["optimizer_steps"] == 0
    assert numbers["critic_steps"] == 0
    assert numbers["nonfinite_steps"] == 1
    assert all(np.isfinite(value) for value in numbers.values()), numbers
    assert same(trainer.weights(), policy)
    assert same(trainer.critic_weights(), critic)
    numbers = resolve(
        trainer.train(replace(BATCHES[1], samples=tuple(samples)), steps=2)
    )
    assert numbers["optimizer_steps"] == 1
    assert numbers["critic_steps"] == 1
    assert numbers["nonfinite_steps"] == 1


def last_step(trainer: Trainer) -> tuple[Step, Step]:
    return trainer.steps()[-1], trainer.critic_steps()[-1]


def test_v_trace_corrects_for_the_policy_that_sampled(
    pool: RankPool, model: Path
) -> None:
    """By the recursion of the paper, from the end of each row."""
    algorithm = AlgorithmConfig(
        advantage="gae",
        critic=CriticConfig(
            lr=3e-3,
            targets="vtrace",
            gae_lambda=0.9,
            vtrace_rho_cap=1.5,
            vtrace_c_cap=1.2,
            value_clip=None,
        ),
        discount=0.95,
        correction="none",
    )
    trainer = pool.build(model, train=EXACT, algorithm=algorithm)
    trainer.train(BATCHES[0])
    policy_start, critic_start = (step.weights for step in last_step(trainer))
    trainer.train(BATCHES[1])
    policy_step, critic_step = last_step(trainer)
    policy = Reference(model, policy_start)
    critic = ExactCritic(model, critic_start)
    values = exact_values(critic, BATCHES[1])
    raw: list[Floats] = []
    targets: list[Floats] = []
    for sample, values_N in zip(BATCHES[1].samples, values, strict=True):
        mask_T = sample.loss_mask_T
        number = int(mask_T.sum())
        rewards_N = sample.columns["rewards"][mask_T].astype(np.float64)
        ratio_N = np.ones(0)
        if number:
            [logprobs_N] = policy.frozen_logprobs([sample])
            ratio_N = np.exp(logprobs_N.numpy() - sample.rollout_logprobs_T[mask_T])
        targets_N = np.zeros(number)
        advantages_N = np.zeros(number)
        next_value = next_target = 0.0
        for t in reversed(range(number)):
            rho = min(1.5, ratio_N[t])
            c = 0.9 * min(1.2, ratio_N[t])
            error = rho * (rewards_N[t] + 0.95 * next_value - values_N[t])
            targets_N[t] = values_N[t] + error + 0.95 * c * (next_target - next_value)
            advantages_N[t] = rho * (rewards_N[t] + 0.95 * next_target - values_N[t])
            next_value = values_N[t]
            next_target = targets_N[t]
        raw.append(advantages_N)
        targets.append(targets_N)
    everything = np.concatenate(raw)
    advantages: list[NDArray[np.float32]] = []
    for sample, raw_N in zip(BATCHES[1].samples, raw, strict=True):
        advantages_T = np.zeros(len(sample.tokens_T), np.float32)
        advantages_T[sample.loss_mask_T] = (raw_N - everything.mean()) / everything.std(
            ddof=1
        )
        advantages.append(advantages_T)
    batch = replace(BATCHES[1], advantages=tuple(advantages))
    gap, name = worst(
        policy_step.gradients,
        policy.gradients(batch, algorithm, old=None, reference=None),
    )
    assert gap < BOUND, name
    expected = critic.value_gradients(batch, values, targets, clip=1e9)
    gap, name = worst(critic_step.gradients, without_head(expected))
    assert gap < BOUND, name
