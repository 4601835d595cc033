"""sft, dpo, ipo, orpo, simpo and kto against their papers: the loss of a whole
mini-batch in one float64 graph, written from the equations, and autograd's gradient.
Ours sees the rows in micro-batches, on two ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from invrl.algorithms.config import (
    AlgorithmConfig,
    DpoConfig,
    IpoConfig,
    KtoConfig,
    OrpoConfig,
    SimpoConfig,
)
from invrl.algorithms.loss_inputs import Denominators, LossInputs, Rows
from invrl.algorithms.mismatched_rows import with_mismatched_rows
from invrl.algorithms.objectives import (
    ON_PAIRS,
    Needs,
    coupling_of,
    needs_of,
    objective_of,
)
from invrl.algorithms.preference_losses import LARGEST_MEAN_LOGPROB, RowSums, orpo
from invrl.algorithms.row_table import RowTable
from invrl.errors import TrainError
from invrl.metrics import Metric, merge, resolve
from invrl.types import TrainBatch, TrainSample, WeightVersion

RELATIVE = 2e-6  # a slope is handed over in float32, as log-probs are
OBJECTIVES = (*ON_PAIRS, "kto")


@dataclass(frozen=True, eq=False)
class DrawnRow:
    """Log-probs are float32 numbers."""

    group: str
    current_T: np.ndarray
    reference_T: np.ndarray
    numbers: dict[str, float]


@st.composite
def drawn_rows(draw: st.DrawFn, kto: bool) -> list[DrawnRow]:
    """Pairs in a random order, or rows for kto, each with a mismatched one."""
    seed = draw(st.integers(0, 2**31))
    num_units = draw(st.integers(1, 6))
    largest = draw(st.sampled_from([0.01, 1.0, 10.0]))
    gap = draw(st.sampled_from([0.0, 0.1, 3.0]))
    rng = np.random.default_rng(seed)
    rows: list[DrawnRow] = []
    for unit in range(num_units):
        label = float(rng.integers(2))
        for first in (1.0, 0.0):
            length = int(rng.integers(1, 9))
            current_T = -rng.uniform(1e-4, largest, length).astype(np.float32)
            reference_T = (current_T + rng.normal(0, gap, length)).astype(np.float32)
            numbers = (
                {"desirable": label, "mismatched": 1 - first}
                if kto
                else {"chosen": first}
            )
            rows.append(DrawnRow(f"g{unit}", current_T, reference_T, numbers))
    return [rows[index] for index in rng.permutation(len(rows))]


# ----------------------------------------------------------------- from the papers


def exact_loss(
    rows: list[DrawnRow], sums: list[torch.Tensor], config: AlgorithmConfig
) -> torch.Tensor:
    """`sums`: of the rows' current log-probs, float64."""
    gaps = [
        total - float(row.reference_T.astype(np.float64).sum())
        for row, total in zip(rows, sums, strict=True)
    ]
    if config.objective == "kto":
        return exact_kto(rows, gaps, config)
    means = [total / len(row.current_T) for row, total in zip(rows, sums, strict=True)]
    losses = []
    for group in {row.group for row in rows}:
        [chosen] = [
            i
            for i, row in enumerate(rows)
            if row.group == group and row.numbers["chosen"] == 1
        ]
        [rejected] = [
            i
            for i, row in enumerate(rows)
            if row.group == group and row.numbers["chosen"] == 0
        ]
        if config.objective == "ipo":
            assert config.ipo is not None
            gap_c = gaps[chosen] / len(rows[chosen].current_T)
            gap_r = gaps[rejected] / len(rows[rejected].current_T)
            losses.append((gap_c - gap_r - 0.5 / config.ipo.beta) ** 2)
            continue
        if config.objective == "orpo":
            assert config.orpo is not None
            p_c = means[chosen].exp()
            p_r = means[rejected].exp()
            odds_ratio = (p_c / (1 - p_c)) / (p_r / (1 - p_r))
            losses.append(
                -means[chosen] - config.orpo.weight * F.logsigmoid(odds_ratio.log())
            )
            continue
        if config.objective == "dpo":
            assert config.dpo is not None
            smoothing = config.dpo.label_smoothing
            margin = config.dpo.beta * (gaps[chosen] - gaps[rejected])
        else:
            assert config.simpo is not None
            smoothing = config.simpo.label_smoothing
            margin = (
                config.simpo.beta * (means[chosen] - means[rejected])
                - config.simpo.gamma
            )
        losses.append(
            -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)
        )
    return torch.stack(losses).mean()


def exact_kto(
    rows: list[DrawnRow], gaps: list[torch.Tensor], config: AlgorithmConfig
) -> torch.Tensor:
    assert config.kto is not None
    others = [
        gap for row, gap in zip(rows, gaps, strict=True) if row.numbers["mismatched"]
    ]
    z = torch.stack(others).mean().detach().clamp(min=0)
    losses = []
    for row, gap in zip(rows, gaps, strict=True):
        if row.numbers["mismatched"]:
            continue
        if row.numbers["desirable"]:
            weight = config.kto.desirable_weight
            losses.append(weight - weight * torch.sigmoid(config.kto.beta * (gap - z)))
        else:
            weight = config.kto.undesirable_weight
            losses.append(weight - weight * torch.sigmoid(config.kto.beta * (z - gap)))
    return torch.stack(losses).mean()


# ----------------------------------------------------------------- ours


def table_of(rows: list[DrawnRow], reference: bool) -> RowTable:
    return RowTable(
        group_ids=tuple(row.group for row in rows),
        tokens_M=np.array([float(len(row.current_T)) for row in rows]),
        current_M=np.array([row.current_T.sum(dtype=np.float64) for row in rows]),
        reference_M=np.array([row.reference_T.sum(dtype=np.float64) for row in rows])
        if reference
        else None,
        numbers={
            name: np.array([row.numbers[name] for row in rows])
            for name in rows[0].numbers
        }
        if rows
        else {},
    )


def inputs_of(
    rows: list[DrawnRow], numbers: list[dict[str, float]], denominators: Denominators
) -> LossInputs:
    """Of a micro-batch with these rows; without rows also without numbers, as in a
    training step."""
    flat = np.concatenate([row.current_T for row in rows] or [np.zeros(0, np.float32)])
    lengths = torch.tensor([len(row.current_T) for row in rows], dtype=torch.int64)
    current_N = torch.from_numpy(flat).requires_grad_()
    names = numbers[0] if numbers else {}
    return LossInputs(
        current_N=current_N,
        entropy_N=None,
        rows=Rows.each_a_rollout(torch.arange(len(rows)).repeat_interleave(lengths)),
        denominators=denominators,
        old_N=None,
        rollout_N=torch.zeros_like(current_N.detach()),
        advantages_N=torch.zeros_like(current_N.detach()),
        reference_N=None,
        numbers={
            name: torch.tensor([of_row[name] for of_row in numbers]) for name in names
        },
    )


def ours(
    rows: list[DrawnRow], config: AlgorithmConfig, cuts: tuple[int, int]
) -> tuple[float, list[np.ndarray], dict[str, float]]:
    """Loss, gradient of each row, metrics. `cuts`: where the second rank and its second
    micro-batch begin."""
    objective = objective_of(config)
    reference = needs_of(config).reference
    first, second = sorted(cut % (len(rows) + 1) for cut in cuts)
    table = RowTable.joined(
        [table_of(rows[:first], reference), table_of(rows[first:], reference)]
    )
    coupled = coupling_of(config.objective, objective)(table)
    numbers = [
        {
            **row.numbers,
            **{name: float(values_M[at]) for name, values_M in coupled.items()},
        }
        for at, row in enumerate(rows)
    ]
    denominators = Denominators(
        tokens=sum(len(row.current_T) for row in rows),
        rows=len(rows),
        rollouts=len(rows),
        groups=1,
    )
    loss = 0.0
    gradients: list[np.ndarray] = []
    metrics: list[dict[str, Metric]] = []
    for part in (slice(0, first), slice(first, second), slice(second, None)):
        inputs = inputs_of(rows[part], numbers[part], denominators)
        outputs = objective(inputs)
        outputs.loss.backward()
        loss += float(outputs.loss.detach())
        metrics.append(dict(outputs.metrics))
        ends = np.cumsum([len(row.current_T) for row in rows[part]])[:-1]
        if rows[part]:
            gradients += np.split(inputs.current_N.grad.numpy(), ends)
    return loss, gradients, resolve(merge(metrics))


betas = st.sampled_from([0.01, 0.1, 1.0])
smoothings = st.sampled_from([0.0, 0.2])
configs = st.builds(
    AlgorithmConfig,
    dpo=st.builds(DpoConfig, beta=betas, label_smoothing=smoothings),
    ipo=st.builds(IpoConfig, beta=betas),
    simpo=st.builds(
        SimpoConfig,
        beta=st.sampled_from([0.5, 2.0]),
        gamma=st.sampled_from([0.0, 0.5]),
        label_smoothing=smoothings,
    ),
    orpo=st.builds(OrpoConfig, weight=st.sampled_from([0.1, 2.0])),
    kto=st.builds(
        KtoConfig,
        beta=betas,
        desirable_weight=st.sampled_from([1.0, 1.5]),
        undesirable_weight=st.sampled_from([1.0, 0.5]),
    ),
)


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_preference_loss_in_parts_equals_the_whole_mini_batch(
    name: str, data: st.DataObject
) -> None:
    config = data.draw(configs).model_copy(update={"objective": name})
    rows = data.draw(drawn_rows(kto=name == "kto"))
    cuts = data.draw(st.tuples(st.integers(0, 20), st.integers(0, 20)))
    tokens = [torch.from_numpy(row.current_T).double().requires_grad_() for row in rows]
    expected = exact_loss(rows, [row_T.sum() for row_T in tokens], config)
    expected.backward()
    loss, gradients, metrics = ours(rows, config, cuts)
    assert loss == pytest.approx(expected.item(), rel=RELATIVE, abs=1e-6)
    assert metrics["loss"] == pytest.approx(expected.item(), rel=RELATIVE, abs=1e-6)
    for row_T, found_T in zip(tokens, gradients, strict=True):
        exact_T = (
            np.zeros(len(row_T)) if row_T.grad is None else row_T.grad.numpy()
        )  # none: a mismatched row
        assert found_T == pytest.approx(exact_T, rel=RELATIVE, abs=1e-9)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_swap_of_labels_flips_the_sign_of_the_margin_s_gradient(name: str) -> None:
    """From where the policy is its reference and both answers are alike, no label is
    favoured."""
    logprobs_T = np.array([-1.0, -2.0, -0.5], np.float32)
    rows = [
        DrawnRow("a", logprobs_T, logprobs_T, {}),
        DrawnRow("a", logprobs_T, logprobs_T, {}),
    ]
    config = AlgorithmConfig(objective=name, simpo={"gamma": 0.0})
    slopes = []
    for first in (1.0, 0.0):
        labels = [first, 1 - first]
        if name == "kto":
            labelled = [
                replace(row, numbers={"desirable": label, "mismatched": 0.0})
                for row, label in zip(rows, labels, strict=True)
            ]
            labelled.append(
                replace(rows[0], numbers={"desirable": 1.0, "mismatched": 1.0})
            )
        else:
            labelled = [
                replace(row, numbers={"chosen": label})
                for row, label in zip(rows, labels, strict=True)
            ]
        _, gradients, _ = ours(labelled, config, (1, 2))
        slopes.append(
            gradients[0].sum() - gradients[1].sum()
        )  # of the first row's margin over the second
    assert slopes[0] < 0
    assert slopes[1] == pytest.approx(-slopes[0], rel=1e-6)


def test_preference_metrics_are_means_over_pairs() -> None:
    """One pair is in the right order and one is not; the mean is over pairs, wherever
    their rows are."""

    def row(group: str, current: float, reference: float, chosen: float) -> DrawnRow:
        values = (np.array([current], np.float32), np.array([reference], np.float32))
        return DrawnRow(group, *values, {"chosen": chosen})

    rows = [
        row("a", -1, -2, 1.0),
        row("b", -1, -3, 0.0),
        row("a", -4, -2, 0.0),
        row("b", -5, -5, 1.0),
    ]
    config = AlgorithmConfig(objective="dpo", dpo={"beta": 0.5})
    _, _, metrics = ours(rows, config, (1, 3))
    assert metrics["preference_accuracy"] == 0.5
    assert metrics["reward_chosen"] == pytest.approx((0.5 + 0.0) / 2)
    assert metrics["reward_rejected"] == pytest.approx((-1.0 + 1.0) / 2)
    assert metrics["reward_margin"] == pytest.approx((1.5 - 1.0) / 2)
    assert metrics["logprob_chosen"] == pytest.approx(-3.0)
    assert metrics["logprob_rejected"] == pytest.approx(-2.5)


def test_orpo_is_finite_if_an_answer_is_certain() -> None:
    """Log-probs of exactly 0: the odds are infinite, the loss and its slopes are
    not."""
    certain = RowSums(
        current=np.zeros(1), reference=np.zeros(1), tokens=np.full(1, 3.0)
    )
    unlikely = replace(certain, current=np.full(1, -30.0))
    for chosen, rejected in (
        (certain, unlikely),
        (unlikely, certain),
        (certain, certain),
    ):
        losses = orpo(chosen, rejected, weight=0.1)
        for values_P in (losses.loss_P, losses.chosen_slope_P, losses.rejected_slope_P):
            assert np.isfinite(values_P).all()
        assert losses.rejected_slope_P[0] >= 0
    steepest = orpo(unlikely, certain, weight=1.0).rejected_slope_P[0]
    assert steepest == pytest.approx(1 / -LARGEST_MEAN_LOGPROB / 3, rel=1e-6)


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        ({"a": [1.0, 1.0]}, "group a has 2 chosen and 0 rejected"),
        ({"a": [1.0, 0.0], "b": [0.0]}, "group b has 0 chosen and 1 rejected"),
        ({"a": [1.0, 0.0, 0.0]}, "group a has 1 chosen and 2 rejected"),
        ({"a": [1.0, 0.5]}, "is 0.5; it must be 0 or 1"),
    ],
)
def test_rows_that_are_not_pairs_are_refused(
    labels: dict[str, list[float]], reason: str
) -> None:
    logprob_T = np.array([-1.0], np.float32)
    rows = [
        DrawnRow(group, logprob_T, logprob_T, {"chosen": label})
        for group, of_group in labels.items()
        for label in of_group
    ]
    with pytest.raises(TrainError, match=reason):
        ours(rows, AlgorithmConfig(objective="dpo"), (1, 1))


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_rows_without_labels_are_refused(name: str) -> None:
    logprob_T = np.array([-1.0], np.float32)
    rows = [DrawnRow("a", logprob_T, logprob_T, {"other": 1.0})]
    with pytest.raises(TrainError, match="not every row has the number"):
        ours(rows, AlgorithmConfig(objective=name), (0, 0))


def test_kto_without_mismatched_rows_is_refused() -> None:
    logprob_T = np.array([-1.0], np.float32)
    rows = [DrawnRow("a", logprob_T, logprob_T, {"desirable": 1.0})]
    with pytest.raises(TrainError, match="1 rows have a label, 0 are mismatched"):
        ours(rows, AlgorithmConfig(objective="kto"), (0, 0))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    seed=st.integers(0, 2**31),
    aggregation=st.sampled_from(
        ["token_mean", "sequence_mean", "rollout_mean", "group_mean", "constant"]
    ),
    weighted=st.booleans(),
    cut=st.integers(0, 6),
)
def test_sft_is_the_cross_entropy(
    lengths: list[int], seed: int, aggregation: str, weighted: bool, cut: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = [
        DrawnRow(
            "g",
            -rng.exponential(2, length).astype(np.float32),
            np.zeros(length, np.float32),
            {},
        )
        for length in lengths
    ]
    weights = np.float32(rng.uniform(0, 2, len(rows)))
    config = AlgorithmConfig(
        objective="sft", aggregation=aggregation, aggregation_constant=7.0
    )
    tokens = [torch.from_numpy(row.current_T).double().requires_grad_() for row in rows]
    factors = weights if weighted else np.ones(len(rows))
    if aggregation == "token_mean":
        terms = [
            -row_T.sum() * float(factor) / sum(lengths)
            for row_T, factor in zip(tokens, factors, strict=True)
        ]
    elif aggregation == "constant":
        terms = [
            -row_T.sum() * float(factor) / 7 / len(rows)
            for row_T, factor in zip(tokens, factors, strict=True)
        ]
    else:  # each row is a rollout and a group of its own
        terms = [
            -row_T.mean() * float(factor) / len(rows)
            for row_T, factor in zip(tokens, factors, strict=True)
        ]
    expected = torch.stack(terms).sum()
    expected.backward()
    denominators = Denominators(
        tokens=sum(lengths), rows=len(rows), rollouts=len(rows), groups=len(rows)
    )
    numbers = [{"weight": float(weight)} if weighted else {} for weight in weights]
    loss = 0.0
    gradients: list[np.ndarray] = []
    for part in (slice(0, cut), slice(cut, None)):
        inputs = inputs_of(rows[part], numbers[part], denominators)
        outputs = objective_of(config)(inputs)
        outputs.loss.backward()
        loss += float(outputs.loss.detach())
        assert inputs.current_N.grad is not None
        gradients.append(inputs.current_N.grad.numpy())
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    exact_N = torch.cat(
        [row_T.grad for row_T in tokens if row_T.grad is not None]
    ).numpy()
    assert np.concatenate(gradients) == pytest.approx(exact_N, rel=1e-5, abs=1e-9)


def test_sft_needs_no_other_forward_pass() -> None:
    needs = needs_of(AlgorithmConfig(objective="sft"))
    assert needs == Needs()


# ----------------------------------------------------------------- mismatched rows


def sample(tokens: list[int], trained_from: int, **other: object) -> TrainSample:
    mask_T = np.arange(len(tokens)) >= trained_from
    values = {
        "tokens_T": np.array(tokens, np.int32),
        "loss_mask_T": mask_T,
        "rollout_logprobs_T": np.zeros(len(tokens), np.float32),
        "versions_T": np.where(mask_T, 0, -1).astype(np.int32),
        "reward": 0.0,
        "temperature": 1.0,
        "group_id": f"g{tokens[0]}",
        "rollout_id": f"r{tokens[0]}",
        "attempt": 0,
        "turn_ids": ("t",),
        "numbers": {"desirable": 1.0},
    }
    return TrainSample(**{**values, **other})  # type: ignore[arg-type]


def batch_of(*samples: TrainSample) -> TrainBatch:
    advantages = tuple(np.zeros(len(row.tokens_T), np.float32) for row in samples)
    return TrainBatch(
        batch_id=3, version=WeightVersion(0), samples=samples, advantages=advantages
    )


def test_a_mismatched_row_is_a_prompt_with_the_next_answer() -> None:
    answers_between = np.array(
        [False, False, True, False, True, True]
    )  # two assistant turns
    first = sample([1, 2, 3, 4, 5, 6], 2, loss_mask_T=answers_between)
    batch = batch_of(
        first, sample([20, 21], 2), sample([30, 31, 32, 33], 3), sample([40, 41], 1)
    )
    rows = with_mismatched_rows(batch, max_tokens=0).samples
    assert [row.numbers["mismatched"] for row in rows] == [0, 0, 0, 0, 1, 1, 1]
    assert [row.tokens_T.tolist() for row in rows[4:]] == [
        [1, 2, 33],
        [30, 31, 32, 41],
        [40, 3, 4, 5, 6],
    ]
    assert [row.loss_mask_T.tolist() for row in rows[4:]] == [
        [False, False, True],
        [False, False, False, True],
        [False, True, False, True, True],
    ]
    assert [row.group_id for row in rows[4:]] == [
        "g1",
        "g30",
        "g40",
    ]  # so it is in its prompt's mini-batch
    assert len({row.rollout_id for row in rows}) == len(rows)


def test_mismatched_rows_are_cut_and_need_two_rows() -> None:
    batch = batch_of(sample([1, 2, 3], 2), sample([4, 5, 6, 7], 1))
    *_, first, second = with_mismatched_rows(batch, max_tokens=4).samples
    assert first.tokens_T.tolist() == [1, 2, 5, 6]
    assert second.tokens_T.tolist() == [4, 3]
    with pytest.raises(TrainError, match="batch 3 has 1 rows to train"):
        with_mismatched_rows(
            batch_of(sample([1, 2, 3], 2), sample([4, 5], 2)), max_tokens=0
        )
