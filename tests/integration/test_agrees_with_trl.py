"""Our losses beside those of TRL's trainers on the same tensors: values and gradients,
in float64.

TRL runs in an environment and a process of its own (`tests/oracles/call_trl.py`). Where
the two are meant to differ, the docstring of our function says how, and the case here
says which settings make them equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import client_programs
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_agrees_with_verl import BOUND, ORACLES, Calls, Drawn, answers_of

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.objectives.mismatched_samples import MISMATCHED
from invrl.algorithms.objectives.preferences import (
    CHOSEN,
    DESIRABLE,
    KtoObjective,
    PairObjective,
)
from invrl.algorithms.objectives.sample_table import SampleTable

pytestmark = pytest.mark.slow

SEEDS = range(3)
NUM_PAIRS = 5
LONGEST = 9
DPO_BETA = 0.3


@pytest.fixture(scope="module")
def trl() -> Path:
    return client_programs.python_beside_ours(ORACLES / "requirements-trl.txt")


def answers_of_trl(
    trl: Path, calls: Calls, folder: Path
) -> list[dict[str, torch.Tensor]]:
    return answers_of(trl, calls, folder, program="call_trl.py")


@dataclass(frozen=True, kw_only=True, eq=False)
class DrawnRows:
    """Rows of a mini-batch: [M, T], with unequal numbers of tokens."""

    logprobs_MT: torch.Tensor
    reference_MT: torch.Tensor
    mask_MT: torch.Tensor

    @staticmethod
    def of(seed: int, num_rows: int) -> DrawnRows:
        generator = torch.Generator().manual_seed(seed)
        shape = (num_rows, LONGEST)
        logprobs_MT = (
            -torch.rand(shape, generator=generator, dtype=torch.float64) - 0.05
        )
        change_MT = 0.4 * torch.randn(shape, generator=generator, dtype=torch.float64)
        lengths_M = torch.randint(1, LONGEST + 1, (num_rows,), generator=generator)
        return DrawnRows(
            logprobs_MT=logprobs_MT,
            reference_MT=logprobs_MT + change_MT,
            mask_MT=(torch.arange(LONGEST) < lengths_M[:, None]).double(),
        )

    @property
    def tokens_M(self) -> torch.Tensor:
        return self.mask_MT.sum(1)

    def sums(self, logprobs_MT: torch.Tensor) -> torch.Tensor:
        return (logprobs_MT * self.mask_MT).sum(1)

    @property
    def means_M(self) -> torch.Tensor:
        return self.sums(self.logprobs_MT) / self.tokens_M

    def table(
        self, numbers: dict[str, NDArray[np.float64]], group_ids: list[str]
    ) -> SampleTable:
        return SampleTable(
            group_ids=tuple(group_ids),
            tokens_M=self.tokens_M.numpy(),
            current_M=self.sums(self.logprobs_MT).numpy(),
            reference_M=self.sums(self.reference_MT).numpy(),
            numbers=numbers,
        )

    def pairs(self) -> SampleTable:
        """The first half of the rows is chosen."""
        half = len(self.mask_MT) // 2
        chosen_M = np.arange(2 * half) < half
        return self.table(
            {CHOSEN: chosen_M.astype(np.float64)},
            [f"g{row % half}" for row in range(2 * half)],
        )

    def gradient(self, slope_M: NDArray[np.float64]) -> torch.Tensor:
        """Of the log-probs, from that of each row's sum."""
        return torch.from_numpy(slope_M)[:, None] * self.mask_MT


def loss_and_slopes(
    objective: PairObjective | KtoObjective, table: SampleTable
) -> tuple[float, NDArray[np.float64]]:
    coupled = objective.couple(table)
    return float((coupled["loss"] * coupled["share"]).sum()), coupled["slope"]


def check(
    name: str, loss: float, gradient: torch.Tensor, answer: dict[str, torch.Tensor]
) -> None:
    assert loss == pytest.approx(answer["loss"].item(), abs=BOUND), name
    torch.testing.assert_close(
        gradient, answer["gradient"], rtol=0, atol=BOUND, msg=name
    )
    assert answer["gradient"].abs().max() > 1e-3, f"{name}: nothing would be compared"


@pytest.mark.parametrize(
    ("objective", "loss_type"), [("dpo", "sigmoid"), ("ipo", "ipo")]
)
def test_pair_losses_with_a_reference_equal_trls(
    trl: Path, tmp_path: Path, objective: str, loss_type: str
) -> None:
    draws = [DrawnRows.of(seed, 2 * NUM_PAIRS) for seed in SEEDS]
    calls: Calls = []
    for drawn in draws:
        tensors = {
            "logprobs": drawn.logprobs_MT,
            "reference": drawn.reference_MT,
            "mask": drawn.mask_MT,
        }
        calls.append(("dpo", {"loss_type": loss_type, "beta": DPO_BETA, **tensors}))
    config = AlgorithmConfig(objective=objective, **{objective: {"beta": DPO_BETA}})
    for drawn, answer in zip(draws, answers_of_trl(trl, calls, tmp_path), strict=True):
        loss, slope_M = loss_and_slopes(PairObjective(config), drawn.pairs())
        check(objective, loss, drawn.gradient(slope_M), answer)


def test_simpo_without_the_nll_term_equals_trls(trl: Path, tmp_path: Path) -> None:
    """TRL's trainer adds the NLL with `cpo_alpha`; its function `cpo_loss` is
    without."""
    draws = [DrawnRows.of(seed, 2 * NUM_PAIRS) for seed in SEEDS]
    settings = {"beta": 2.0, "simpo_gamma": 0.7, "label_smoothing": 0.1}
    calls: Calls = []
    for drawn in draws:
        chosen_P, rejected_P = drawn.means_M.chunk(2)
        calls.append(
            (
                "simpo",
                {"settings": settings, "chosen": chosen_P, "rejected": rejected_P},
            )
        )
    config = AlgorithmConfig(
        objective="simpo",
        simpo={"beta": 2.0, "gamma": 0.7, "label_smoothing": 0.1},
    )
    for drawn, answer in zip(draws, answers_of_trl(trl, calls, tmp_path), strict=True):
        loss, slope_M = loss_and_slopes(PairObjective(config), drawn.pairs())
        check("simpo", loss, torch.from_numpy(slope_M) * drawn.tokens_M, answer)


def test_orpo_but_for_the_nll_equals_trls(trl: Path, tmp_path: Path) -> None:
    """TRL's NLL is over the prompt too. What is left without ours is TRL's odds-ratio
    loss, which it computes in float32."""
    draws = [DrawnRows.of(seed, 2 * NUM_PAIRS) for seed in SEEDS]
    calls: Calls = []
    for drawn in draws:
        chosen_P, rejected_P = drawn.means_M.chunk(2)
        calls.append(
            ("orpo_odds", {"weight": 0.5, "chosen": chosen_P, "rejected": rejected_P})
        )
    config = AlgorithmConfig(objective="orpo", orpo={"weight": 0.5})
    for drawn, answer in zip(draws, answers_of_trl(trl, calls, tmp_path), strict=True):
        loss, slope_M = loss_and_slopes(PairObjective(config), drawn.pairs())
        nll = -drawn.means_M[:NUM_PAIRS].mean().item()
        nll_gradient_M = torch.zeros(2 * NUM_PAIRS, dtype=torch.float64)
        nll_gradient_M[:NUM_PAIRS] = -1 / NUM_PAIRS
        gradient_M = torch.from_numpy(slope_M) * drawn.tokens_M - nll_gradient_M
        check("orpo", loss - nll, gradient_M, answer)


def test_kto_equals_trls_where_a_micro_batch_is_the_mini_batch(
    trl: Path, tmp_path: Path
) -> None:
    """The last draw's mismatched rows have a negative mean log-ratio, so that the
    reference point is 0."""
    settings = {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.7}
    config = AlgorithmConfig(
        objective="kto",
        kto={"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.7},
    )
    num_rows = 6
    desirable_M = np.array([1.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    calls: Calls = []
    tables: list[SampleTable] = []
    draws: list[DrawnRows] = []
    for seed in SEEDS:
        both = DrawnRows.of(seed, 2 * num_rows)
        shift = 0.3 if seed == SEEDS[-1] else -0.3
        reference_MT = both.reference_MT + shift
        mismatched_M = (np.arange(2 * num_rows) >= num_rows).astype(np.float64)
        rows = DrawnRows(
            logprobs_MT=both.logprobs_MT,
            reference_MT=reference_MT,
            mask_MT=both.mask_MT,
        )
        numbers = {DESIRABLE: np.tile(desirable_M, 2), MISMATCHED: mismatched_M}
        tables.append(rows.table(numbers, [f"g{row}" for row in range(2 * num_rows)]))
        draws.append(rows)
        arguments = {
            "settings": settings,
            "labels": torch.from_numpy(desirable_M) > 0.5,
        }
        for name, tensor in (
            ("logprobs", rows.logprobs_MT),
            ("reference", reference_MT),
            ("mask", rows.mask_MT),
        ):
            arguments[name] = tensor[:num_rows].clone()
            arguments[f"mismatched_{name}"] = tensor[num_rows:].clone()
        calls.append(("kto", arguments))
    baselines: list[float] = []
    for rows, table, answer in zip(
        draws, tables, answers_of_trl(trl, calls, tmp_path), strict=True
    ):
        loss, slope_M = loss_and_slopes(KtoObjective(config), table)
        gradient_MT = rows.gradient(slope_M)
        assert not gradient_MT[num_rows:].any()
        check("kto", loss, gradient_MT[:num_rows], answer)
        baselines.append(KtoObjective(config).couple(table)["baseline"][0])
    assert baselines[0] > 0.0
    assert baselines[-1] == 0.0


@dataclass(frozen=True, kw_only=True)
class Case:
    ours: dict[str, Any]
    """Settings of `AlgorithmConfig`."""
    settings: dict[str, Any]
    """Attributes of TRL's trainer."""
    args: dict[str, Any] = field(default_factory=dict)
    """Its arguments that the loss reads."""
    old: str = "old"
    """The column that is TRL's old policy."""


CLIP = {
    "eps_clip_low": 0.2,
    "eps_clip_high": 0.28,
    "dual_clip": None,
    "correction": "none",
}
TRL_CLIP = {"epsilon_low": 0.2, "epsilon_high": 0.28}
VESPO_ARGS = {
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
}
KL = {"kl": {"coefficient": 0.3, "clamp": None}}
CASES = {
    "grpo": Case(
        ours={**CLIP, "aggregation": "sequence_mean"},
        settings={**TRL_CLIP, "loss_type": "grpo"},
    ),
    "grpo, dual clip": Case(
        ours={**CLIP, "dual_clip": 1.4, "aggregation": "sequence_mean"},
        settings={**TRL_CLIP, "loss_type": "grpo"},
        args={"delta": 1.4},
    ),
    "grpo with k3": Case(
        ours={**CLIP, **KL, "aggregation": "sequence_mean"},
        settings={**TRL_CLIP, "loss_type": "grpo", "beta": 0.3},
    ),
    "dapo": Case(ours=CLIP, settings={**TRL_CLIP, "loss_type": "dapo"}),
    "dr_grpo": Case(
        ours={**CLIP, "aggregation": "constant", "aggregation_constant": 12.0},
        settings={**TRL_CLIP, "loss_type": "dr_grpo", "max_completion_length": 12},
    ),
    "gspo": Case(
        ours={**CLIP, "ratio_level": "sequence", "aggregation": "sequence_mean"},
        settings={
            **TRL_CLIP,
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
        },
    ),
    "cispo": Case(
        ours={**CLIP, "policy_loss": "cispo", "eps_clip_low": 1.0},
        settings={"loss_type": "cispo", "epsilon_high": 1.28},
    ),
    "sapo": Case(
        ours={
            "correction": "none",
            "policy_loss": "sapo",
            "aggregation": "sequence_mean",
        },
        settings={"loss_type": "sapo"},
        args={"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
    ),
    "vespo": Case(
        ours={"correction": "none", "policy_loss": "vespo"},
        settings={"loss_type": "vespo"},
        args=VESPO_ARGS,
        old="rollout",
    ),
    "entropy bonus": Case(
        ours={**CLIP, "entropy": {"coefficient": 0.02}},
        settings={
            **TRL_CLIP,
            "loss_type": "dapo",
            "_entropy_bonus_enabled": True,
            "use_adaptive_entropy": False,
            "entropy_coef": 0.02,
        },
    ),
}


def test_policy_losses_and_gradients_equal_trls(trl: Path, tmp_path: Path) -> None:
    draws = [Drawn.with_seed(seed) for seed in SEEDS]
    calls: Calls = []
    for case in CASES.values():
        for drawn in draws:
            columns = drawn.columns
            # every row has a first token
            row_advantages = drawn.padded(columns["advantages"])[:, 0]
            arguments = {
                "settings": case.settings,
                "args": case.args,
                "mask": drawn.mask,
                "logprobs": drawn.padded(columns["current"]),
                "entropies": drawn.padded(columns["entropy"]),
                "old_per_token_logps": drawn.padded(columns[case.old]),
                "ref_per_token_logps": drawn.padded(columns["reference"]),
                "advantages": row_advantages,
            }
            calls.append(("grpo", arguments))
    answers = iter(answers_of_trl(trl, calls, tmp_path))
    for name, case in CASES.items():
        for drawn in draws:
            answer = next(answers)
            loss, gradient_N = drawn.ours(AlgorithmConfig.model_validate(case.ours))
            check(name, loss.item(), drawn.padded(gradient_N), answer)
