"""Our losses beside verl's own functions on the same tensors: values and gradients, in
float64.

verl runs in an environment and a process of its own (`tests/oracles/`). Where the two
are meant to differ, the docstring of our function says how, and the case here says
which settings make them equal.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import client_programs
import pytest
import torch

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.loss_inputs import Denominators, LossInputs, Samples
from invrl.algorithms.policy_loss.losses import policy_loss

pytestmark = pytest.mark.slow

ORACLES = Path(__file__).parents[1] / "oracles"
BOUND = 1e-6
CALL_S = 300.0
LENGTHS = (7, 3, 12, 1, 5, 9)
"""Trained tokens of each row."""
Calls = list[tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def verl() -> Path:
    return client_programs.python_beside_ours(ORACLES / "requirements.txt")


def answers_of(
    python: Path, calls: Calls, folder: Path, program: str = "call_verl.py"
) -> list[Any]:
    torch.save(calls, folder / "calls.pt")
    command = [
        str(python),
        str(ORACLES / program),
        str(folder / "calls.pt"),
        str(folder / "answers.pt"),
    ]
    process = subprocess.run(command, capture_output=True, text=True, timeout=CALL_S)
    assert process.returncode == 0, process.stderr[-3000:]
    return torch.load(folder / "answers.pt", weights_only=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class Drawn:
    """Log-probs and advantages of rows, flat [N], and as verl has them, padded [rows,
    longest]."""

    sample_N: torch.Tensor
    columns: dict[str, torch.Tensor] = field(default_factory=dict)

    @staticmethod
    def with_seed(seed: int) -> Drawn:
        """Far enough apart that every bound cuts some tokens. Advantages are one number
        for each row."""
        generator = torch.Generator().manual_seed(seed)
        sample_N = torch.repeat_interleave(
            torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)
        )

        def normal(scale: float, size: int = len(sample_N)) -> torch.Tensor:
            return scale * torch.randn(size, generator=generator, dtype=torch.float64)

        old_N = -normal(1.5).abs()
        columns = {
            "old": old_N,
            "current": (
                old_N + normal(0.3) + normal(0.2, len(LENGTHS))[sample_N]
            ).clamp(max=-1e-3),
            "rollout": (old_N + normal(0.5)).clamp(max=-1e-3),
            "advantages": normal(1.0, len(LENGTHS))[sample_N],
            "reference": (old_N + normal(0.3)).clamp(max=-1e-3),
            "entropy": normal(1.0).abs(),
        }
        return Drawn(sample_N=sample_N, columns=columns)

    @property
    def mask(self) -> torch.Tensor:
        longest = max(LENGTHS)
        return torch.stack(
            [torch.arange(longest) < length for length in LENGTHS]
        ).double()

    def padded(self, values_N: torch.Tensor) -> torch.Tensor:
        padded = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=values_N.dtype)
        padded[self.mask.bool()] = values_N
        return padded

    def ours(self, config: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and gradient [N]."""
        current_N = self.columns["current"].clone().requires_grad_()
        num_rows = float(len(LENGTHS))
        inputs = LossInputs(
            current_N=current_N,
            entropy_N=self.columns["entropy"],
            samples=Samples.each_a_rollout(self.sample_N),
            denominators=Denominators(
                tokens=float(len(self.sample_N)),
                samples=num_rows,
                rollouts=num_rows,
                groups=num_rows,
            ),
            old_N=self.columns["old"],
            rollout_N=self.columns["rollout"],
            advantages_N=self.columns["advantages"],
            reference_N=self.columns["reference"],
        )
        outputs = policy_loss(inputs, config)
        outputs.loss.backward()
        assert current_N.grad is not None
        return outputs.loss.detach(), current_N.grad

    def for_verl(
        self, name: str, aggregation: str, **more: Any
    ) -> tuple[str, dict[str, Any]]:
        """The call of a policy loss."""
        arguments = {
            "old_log_prob": self.padded(self.columns["old"]),
            "log_prob": self.padded(self.columns["current"]),
            "advantages": self.padded(self.columns["advantages"]),
            "response_mask": self.mask,
            "loss_agg_mode": aggregation,
            "config": {},
        }
        return f"policy_loss:{name}", arguments | more


@dataclass(frozen=True, kw_only=True)
class Case:
    ours: dict[str, Any]
    """Settings of `AlgorithmConfig`."""
    name: str
    """verl's."""
    aggregation: str = "token-mean"
    verl: dict[str, Any] = field(default_factory=dict)
    """Settings of verl's `ActorConfig`."""
    truncated_at: float | None = None
    """verl is given the importance weights exp(old - rollout), at most this."""
    old: str = "old"
    """The column that is verl's old policy."""
    same_loss: bool = True
    """False: only the gradients are meant to be equal (r A log p for r A, with r
    stopped)."""


CLIP = {
    "eps_clip_low": 0.2,
    "eps_clip_high": 0.28,
    "dual_clip": 3.0,
    "correction": "none",
}
VERL_CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}
CASES = {
    "clip, token mean": Case(ours=CLIP, name="vanilla", verl=VERL_CLIP),
    "clip, row mean": Case(
        ours={**CLIP, "aggregation": "sequence_mean"},
        name="vanilla",
        aggregation="seq-mean-token-mean",
        verl=VERL_CLIP,
    ),
    "clip, constant": Case(
        ours={**CLIP, "aggregation": "constant", "aggregation_constant": 12.0},
        name="vanilla",
        aggregation="seq-mean-token-sum-norm",
        verl=VERL_CLIP,
    ),
    "clip, low dual clip": Case(
        ours={**CLIP, "dual_clip": 1.3},
        name="vanilla",
        verl={**VERL_CLIP, "clip_ratio_c": 1.3},
    ),
    "truncated importance sampling": Case(
        ours={**CLIP, "correction": "truncated", "correction_cap": 1.2},
        name="vanilla",
        verl=VERL_CLIP,
        truncated_at=1.2,
    ),
    "gspo": Case(
        ours={
            **CLIP,
            "dual_clip": None,
            "ratio_level": "sequence",
            "aggregation": "sequence_mean",
        },
        name="gspo",
        aggregation="seq-mean-token-mean",
        verl=VERL_CLIP,
    ),
    "gspo token": Case(
        ours={
            **CLIP,
            "dual_clip": None,
            "ratio_level": "sequence_token",
            "aggregation": "sequence_mean",
        },
        name="gspo",
        aggregation="seq-mean-token-mean",
        verl=VERL_CLIP,
    ),
    "cispo": Case(ours={**CLIP, "policy_loss": "cispo"}, name="cispo", verl=VERL_CLIP),
    "sapo": Case(
        ours={
            "correction": "none",
            "policy_loss": "sapo",
            "aggregation": "sequence_mean",
        },
        name="sapo",
        verl={"tau_pos": 1.0, "tau_neg": 1.05},
    ),
    "gmpo": Case(
        ours={**CLIP, "policy_loss": "gmpo", "aggregation": "sequence_mean"},
        name="geo_mean",
        aggregation="seq-mean-token-mean",
        verl=VERL_CLIP,
    ),
    "dppo, total variation": Case(
        ours={
            "correction": "none",
            "old_logprobs": "engine",
            "policy_loss": "dppo_tv",
            "dppo": {"threshold": 0.1},
        },
        name="dppo_tv",
        verl={"clip_ratio_low": 0.1, "clip_ratio_high": 0.1, "clip_ratio_c": 1e4},
        old="rollout",
        same_loss=False,
    ),
    "dppo, KL": Case(
        ours={
            "correction": "none",
            "old_logprobs": "engine",
            "policy_loss": "dppo_kl",
            "dppo": {"threshold": 0.05},
        },
        name="dppo_kl",
        verl={"clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "clip_ratio_c": 1e4},
        old="rollout",
        same_loss=False,
    ),
    "plain policy gradient": Case(
        ours={"correction": "none", "policy_loss": "policy_gradient"},
        name="gpg",
        aggregation="token-mean",
    ),
}


def test_losses_and_gradients_equal_verls(verl: Path, tmp_path: Path) -> None:
    """Every case on three draws, in one process of verl."""
    draws = [Drawn.with_seed(seed) for seed in range(3)]
    calls: Calls = []
    for case in CASES.values():
        for drawn in draws:
            more: dict[str, Any] = {"config": dict(case.verl)}
            if case.truncated_at is not None:
                weights_N = (drawn.columns["old"] - drawn.columns["rollout"]).exp()
                more["rollout_is_weights"] = drawn.padded(
                    weights_N.clamp(max=case.truncated_at)
                )
            more["old_log_prob"] = drawn.padded(drawn.columns[case.old])
            calls.append(drawn.for_verl(case.name, case.aggregation, **more))
    answers = iter(answers_of(verl, calls, tmp_path))
    for name, case in CASES.items():
        for drawn in draws:
            expected = next(answers)
            loss, gradient_N = drawn.ours(AlgorithmConfig.model_validate(case.ours))
            expected_N = expected["gradient"][drawn.mask.bool()]
            if case.same_loss:
                assert loss.item() == pytest.approx(
                    expected["loss"].item(), abs=BOUND
                ), name
            torch.testing.assert_close(
                gradient_N, expected_N, rtol=0, atol=BOUND, msg=name
            )
            assert expected_N.abs().max() > 1e-3, f"{name}: nothing would be compared"
