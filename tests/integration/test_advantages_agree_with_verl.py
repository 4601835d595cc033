"""Our advantages beside verl's own functions on the same rewards, in float64: groups of
unequal size in mixed order, and masks with holes. Where the two are meant to differ,
`docs/advantages.md` says how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_agrees_with_verl import BOUND, Calls, answers_of, verl

from invrl.algorithms.advantages.advantages import advantage_function
from invrl.algorithms.advantages.token_advantages import gae
from invrl.algorithms.advantages.whitening import whiten_samples
from invrl.algorithms.config import WhitenedOver

pytestmark = pytest.mark.slow

__all__ = ["verl"]
SIZES = (4, 2, 7, 3)
NUM_TOKENS = 24
EPS = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    group_R: NDArray[np.int64]
    rewards_R: NDArray[np.float64]
    """One for each row."""
    dense_RT: NDArray[np.float64]
    """One for each token."""
    values_RT: NDArray[np.float64]
    mask_RT: NDArray[np.bool_]

    @staticmethod
    def with_seed(seed: int) -> Batch:
        generator = np.random.default_rng(seed)
        group_R = generator.permutation(np.repeat(np.arange(len(SIZES)), SIZES))
        shape = (len(group_R), NUM_TOKENS)
        mask_RT = generator.random(shape) < 0.7
        mask_RT[:, 3] = True
        return Batch(
            group_R=group_R,
            rewards_R=generator.integers(0, 3, len(group_R)) / 2,
            dense_RT=generator.normal(size=shape),
            values_RT=generator.normal(size=shape),
            mask_RT=mask_RT,
        )

    def ours(self, name: str, whitened: WhitenedOver = "none") -> NDArray[np.float64]:
        advantages_R = np.zeros(len(self.group_R))
        for group in set(self.group_R.tolist()):
            is_member_R = self.group_R == group
            advantages_R[is_member_R] = advantage_function(name)(
                self.rewards_R[is_member_R], eps=EPS
            )
        return self.whitened(advantages_R[:, None] * self.mask_RT, whitened)

    def whitened(
        self, advantages_RT: NDArray[np.float64], over: WhitenedOver
    ) -> NDArray[np.float64]:
        names = [str(row) for row in range(len(self.group_R))]
        return np.stack(
            whiten_samples(list(advantages_RT), list(self.mask_RT), names, over=over)
        )

    @property
    def dense(self) -> dict[str, torch.Tensor]:
        return {"token_level_rewards": torch.from_numpy(self.dense_RT)}

    @property
    def values(self) -> dict[str, torch.Tensor]:
        return {"values": torch.from_numpy(self.values_RT)}

    def for_verl(self, name: str, **more: Any) -> tuple[str, dict[str, Any]]:
        """The reward is at the last trained token of its row."""
        rewards_RT = np.zeros(self.mask_RT.shape)
        for row, mask_T in enumerate(self.mask_RT):
            rewards_RT[row, np.flatnonzero(mask_T)[-1]] = self.rewards_R[row]
        arguments: dict[str, Any] = {
            "token_level_rewards": torch.from_numpy(rewards_RT),
            "response_mask": torch.from_numpy(self.mask_RT).double(),
        }
        return f"core_algos:{name}", arguments | more


GROUPED: dict[str, tuple[str, dict[str, Any], WhitenedOver]] = {
    "grpo": ("compute_grpo_outcome_advantage", {"epsilon": EPS}, "none"),
    "dr_grpo": (
        "compute_grpo_outcome_advantage",
        {"norm_adv_by_std_in_grpo": False},
        "none",
    ),
    "rloo": ("compute_rloo_outcome_advantage", {}, "none"),
    "reinforce_pp_baseline": (
        "compute_reinforce_plus_plus_baseline_outcome_advantage",
        {},
        "tokens",
    ),
}


DISCOUNTS = [(1.0, 0.95), (0.97, 0.9), (1.0, 1.0), (0.99, 0.0)]
"""With lambda."""
RETURN_DISCOUNT = 0.97
Answers = Mapping[str, Sequence[tuple[torch.Tensor, torch.Tensor]]]


def largest_gap(
    ours: NDArray[np.float64], answer: torch.Tensor, mask_RT: NDArray[np.bool_]
) -> float:
    return float(np.abs(ours - answer.numpy())[mask_RT].max())


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    return [Batch.with_seed(seed) for seed in range(6)]


@pytest.fixture(scope="module")
def answers(
    verl: Path, batches: list[Batch], tmp_path_factory: pytest.TempPathFactory
) -> Answers:
    """Advantages and returns of verl by name, for each batch. One process: its imports
    take longest."""
    calls: dict[str, Calls] = {}
    for name, (function, settings, _) in GROUPED.items():
        calls[name] = [
            batch.for_verl(function, index=batch.group_R, **settings)
            for batch in batches
        ]
    function = "compute_reinforce_plus_plus_outcome_advantage"
    plain = SimpleNamespace(gamma=1.0)
    calls["reinforce_pp"] = [
        batch.for_verl(function, config=plain) for batch in batches
    ]
    discounted = SimpleNamespace(gamma=RETURN_DISCOUNT)
    calls["returns"] = [
        batch.for_verl(function, config=discounted, **batch.dense) for batch in batches
    ]
    for discount, lam in DISCOUNTS:
        settings = {"gamma": discount, "lam": lam}
        calls[f"gae {discount} {lam}"] = [
            batch.for_verl(
                "compute_gae_advantage_return",
                **settings,
                **batch.dense,
                **batch.values,
            )
            for batch in batches
        ]
    every_call = [call for calls_of_name in calls.values() for call in calls_of_name]
    flat = iter(answers_of(verl, every_call, tmp_path_factory.mktemp("verl")))
    return {
        name: [next(flat) for _ in calls_of_name]
        for name, calls_of_name in calls.items()
    }


@pytest.mark.parametrize("name", GROUPED)
def test_group_advantages_equal_verls(
    name: str, answers: Answers, batches: list[Batch]
) -> None:
    over = GROUPED[name][2]
    for batch, (advantages, _) in zip(batches, answers[name], strict=True):
        assert largest_gap(batch.ours(name, over), advantages, batch.mask_RT) < BOUND


def test_reinforce_pp_equals_verls(answers: Answers, batches: list[Batch]) -> None:
    for batch, (advantages, _) in zip(batches, answers["reinforce_pp"], strict=True):
        assert (
            largest_gap(batch.ours("reinforce_pp", "tokens"), advantages, batch.mask_RT)
            < BOUND
        )


def test_discounted_returns_equal_verls(answers: Answers, batches: list[Batch]) -> None:
    for batch, (_, returns) in zip(batches, answers["returns"], strict=True):
        ours = []
        for rewards_T, mask_T in zip(batch.dense_RT, batch.mask_RT, strict=True):
            without_values_T = np.zeros(len(mask_T))
            token_advantages = gae(
                rewards_T,
                without_values_T,
                mask_T,
                discount=RETURN_DISCOUNT,
                policy_lambda=1.0,
            )
            ours.append(token_advantages.returns_T)
        assert largest_gap(np.stack(ours), returns, batch.mask_RT) < BOUND


@pytest.mark.parametrize(("discount", "lam"), DISCOUNTS)
def test_gae_equals_verls(
    discount: float, lam: float, answers: Answers, batches: list[Batch]
) -> None:
    for batch, (advantages, returns) in zip(
        batches, answers[f"gae {discount} {lam}"], strict=True
    ):
        rows = zip(batch.dense_RT, batch.values_RT, batch.mask_RT, strict=True)
        credits = [gae(*row, discount=discount, policy_lambda=lam) for row in rows]
        ours = batch.whitened(
            np.stack([credit.advantages_T for credit in credits]), "tokens"
        )
        assert largest_gap(ours, advantages, batch.mask_RT) < BOUND
        ours = np.stack([credit.returns_T for credit in credits])
        assert largest_gap(ours, returns, batch.mask_RT) < BOUND
