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

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.loss_inputs import Denominators, LossInputs, Samples
from invrl.algorithms.objectives.mismatched_samples import with_mismatched_samples
from invrl.algorithms.objectives.objectives import (
    ON_PAIRS,
    Needs,
    load_coupling,
    load_objective,
    objective_needs,
)
from invrl.algorithms.objectives.preference_losses import (
    LARGEST_MEAN_LOGPROB,
    SampleSums,
    orpo,
)
from invrl.algorithms.objectives.sample_table import SampleTable
from invrl.algorithms.tables import (
    DpoConfig,
    IpoConfig,
    KtoConfig,
    OrpoConfig,
    SimpoConfig,
)
from invrl.errors import TrainError
from invrl.types.batches import TrainBatch, TrainSample
from invrl.types.metrics import Metric, merge, resolve
from invrl.types.weights import WeightVersion

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
            numbers = {"chosen": first}
            if kto:
                numbers = {"desirable": label, "mismatched": 1 - first}
            rows.append(DrawnRow(f"g{unit}", current_T, reference_T, numbers))
    return [rows[index] for index in rng.permutation(len(rows))]


# ----------------------------------------------------------------- from the papers


def exact_loss(
    rows: list[DrawnRow], sums: list[torch.Tensor], config: AlgorithmConfig
) -> torch.Tensor:
    """`sums`: of the rows' current log-probs, float64."""
    gaps: list[torch.Tensor] = []
    for row, total in zip(rows, sums, strict=True):
        gaps.append(total - float(row.reference_T.sum(dtype=np.float64)))
    if config.objective == "kto":
        return exact_kto(rows, gaps, config)
    chosen_by_group: dict[str, int] = {}
    rejected_by_group: dict[str, int] = {}
    for index, row in enumerate(rows):
        is_chosen = row.numbers["chosen"] == 1
        by_group = chosen_by_group if is_chosen else rejected_by_group
        assert row.group not in by_group
        by_group[row.group] = index
    assert chosen_by_group.keys() == rejected_by_group.keys()
    losses: list[torch.Tensor] = []
    for group, chosen in chosen_by_group.items():
        rejected = rejected_by_group[group]
        loss = exact_pair_loss(
            chosen_sum=sums[chosen],
            rejected_sum=sums[rejected],
            chosen_gap=gaps[chosen],
            rejected_gap=gaps[rejected],
            chosen_tokens=len(rows[chosen].current_T),
            rejected_tokens=len(rows[rejected].current_T),
            config=config,
        )
        losses.append(loss)
    return torch.stack(losses).mean()


def exact_pair_loss(
    *,
    chosen_sum: torch.Tensor,
    rejected_sum: torch.Tensor,
    chosen_gap: torch.Tensor,
    rejected_gap: torch.Tensor,
    chosen_tokens: int,
    rejected_tokens: int,
    config: AlgorithmConfig,
) -> torch.Tensor:
    chosen_mean = chosen_sum / chosen_tokens
    rejected_mean = rejected_sum / rejected_tokens
    if config.objective == "ipo":
        assert config.ipo is not None
        gap = chosen_gap / chosen_tokens - rejected_gap / rejected_tokens
        return (gap - 0.5 / config.ipo.beta) ** 2
    if config.objective == "orpo":
        assert config.orpo is not None
        chosen_odds = chosen_mean.exp() / (1 - chosen_mean.exp())
        rejected_odds = rejected_mean.exp() / (1 - rejected_mean.exp())
        log_odds_ratio = (chosen_odds / rejected_odds).log()
        return -chosen_mean - config.orpo.weight * F.logsigmoid(log_odds_ratio)
    if config.objective == "dpo":
        assert config.dpo is not None
        smoothing = config.dpo.label_smoothing
        margin = config.dpo.beta * (chosen_gap - rejected_gap)
    else:
        assert config.simpo is not None
        smoothing = config.simpo.label_smoothing
        margin = config.simpo.beta * (chosen_mean - rejected_mean)
        margin -= config.simpo.gamma
    in_order = -F.logsigmoid(margin)
    in_reverse = -F.logsigmoid(-margin)
    return (1 - smoothing) * in_order + smoothing * in_reverse


def exact_kto(
    rows: list[DrawnRow], gaps: list[torch.Tensor], config: AlgorithmConfig
) -> torch.Tensor:
    assert config.kto is not None
    mismatched_gaps: list[torch.Tensor] = []
    for row, gap in zip(rows, gaps, strict=True):
        if row.numbers["mismatched"]:
            mismatched_gaps.append(gap)
    z = torch.stack(mismatched_gaps).mean().detach().clamp(min=0)
    losses: list[torch.Tensor] = []
    for row, gap in zip(rows, gaps, strict=True):
        if row.numbers["mismatched"]:
            continue
        weight = config.kto.undesirable_weight
        margin = z - gap
        if row.numbers["desirable"]:
            weight = config.kto.desirable_weight
            margin = gap - z
        value = torch.sigmoid(config.kto.beta * margin)
        losses.append(weight * (1 - value))
    return torch.stack(losses).mean()


# ----------------------------------------------------------------- ours


def table_of(rows: list[DrawnRow], reference: bool) -> SampleTable:
    current = [row.current_T.sum(dtype=np.float64) for row in rows]
    references = [row.reference_T.sum(dtype=np.float64) for row in rows]
    names = rows[0].numbers if rows else {}
    return SampleTable(
        group_ids=tuple(row.group for row in rows),
        tokens_M=np.array([float(len(row.current_T)) for row in rows]),
        current_M=np.array(current),
        reference_M=np.array(references) if reference else None,
        numbers={name: np.array([row.numbers[name] for row in rows]) for name in names},
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
        samples=Samples.each_a_rollout(
            torch.arange(len(rows)).repeat_interleave(lengths)
        ),
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
    objective = load_objective(config)
    needs_reference = objective_needs(config).reference
    first, second = sorted(cut % (len(rows) + 1) for cut in cuts)
    first_rank = table_of(rows[:first], needs_reference)
    second_rank = table_of(rows[first:], needs_reference)
    table = SampleTable.joined([first_rank, second_rank])
    coupled = load_coupling(config.objective, objective)(table)
    numbers: list[dict[str, float]] = []
    for index, row in enumerate(rows):
        of_coupling = {
            name: float(values_M[index]) for name, values_M in coupled.items()
        }
        numbers.append({**row.numbers, **of_coupling})
    denominators = Denominators(
        tokens=sum(len(row.current_T) for row in rows),
        samples=len(rows),
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
        lengths = [len(row.current_T) for row in rows[part]]
        if lengths:
            gradient_N = inputs.current_N.grad.numpy()
            gradients += np.split(gradient_N, np.cumsum(lengths)[:-1])
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
    for row_T, gradient_T in zip(tokens, gradients, strict=True):
        expected_T = np.zeros(len(row_T))
        if row_T.grad is not None:  # none: a mismatched row
            expected_T = row_T.grad.numpy()
        assert gradient_T == pytest.approx(expected_T, rel=RELATIVE, abs=1e-9)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_swap_of_labels_flips_the_sign_of_the_margin_s_gradient(name: str) -> None:
    """From where the policy is its reference and both answers are alike, no label is
    favoured."""
    logprobs_T = np.array([-1.0, -2.0, -0.5], np.float32)
    config = AlgorithmConfig(
        objective=name, simpo=SimpoConfig(gamma=0.0) if name == "simpo" else None
    )

    def row(**numbers: float) -> DrawnRow:
        return DrawnRow("a", logprobs_T, logprobs_T, numbers)

    def slope(first_label: float) -> float:
        """The gradient of the first row's margin over the second."""
        labels = [first_label, 1 - first_label]
        rows = [row(chosen=label) for label in labels]
        if name == "kto":
            rows = [row(desirable=label, mismatched=0.0) for label in labels]
            rows.append(row(desirable=1.0, mismatched=1.0))
        _, [first_T, second_T, *_], _ = ours(rows, config, (1, 2))
        return first_T.sum() - second_T.sum()

    in_order = slope(first_label=1.0)
    assert in_order < 0
    assert slope(first_label=0.0) == pytest.approx(-in_order, rel=1e-6)


def test_preference_metrics_are_means_over_pairs() -> None:
    """One pair is in the right order and one is not; the mean is over pairs, wherever
    their rows are."""

    def row(group: str, current: float, reference: float, chosen: float) -> DrawnRow:
        current_T = np.array([current], np.float32)
        reference_T = np.array([reference], np.float32)
        return DrawnRow(group, current_T, reference_T, {"chosen": chosen})

    rows = [
        row("a", current=-1, reference=-2, chosen=1.0),
        row("b", current=-1, reference=-3, chosen=0.0),
        row("a", current=-4, reference=-2, chosen=0.0),
        row("b", current=-5, reference=-5, chosen=1.0),
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
    certain = SampleSums(
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
    with pytest.raises(TrainError, match="not every sample has the number"):
        ours(rows, AlgorithmConfig(objective=name), (0, 0))


def test_kto_without_mismatched_rows_is_refused() -> None:
    logprob_T = np.array([-1.0], np.float32)
    rows = [DrawnRow("a", logprob_T, logprob_T, {"desirable": 1.0})]
    with pytest.raises(TrainError, match="1 samples have a label, 0 are mismatched"):
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
    rows: list[DrawnRow] = []
    for length in lengths:
        current_T = -rng.exponential(2, length).astype(np.float32)
        rows.append(DrawnRow("g", current_T, np.zeros(length, np.float32), {}))
    weights = np.float32(rng.uniform(0, 2, len(rows))).tolist()
    if not weighted:
        weights = [1.0] * len(rows)
    config = AlgorithmConfig(
        objective="sft", aggregation=aggregation, aggregation_constant=7.0
    )
    tokens = [torch.from_numpy(row.current_T).double().requires_grad_() for row in rows]
    terms: list[torch.Tensor] = []
    for row_T, weight in zip(tokens, weights, strict=True):
        # in every aggregation but two, each row is a rollout and a group of its own
        denominator = len(row_T) * len(rows)
        if aggregation == "token_mean":
            denominator = sum(lengths)
        elif aggregation == "constant":
            denominator = 7 * len(rows)
        terms.append(-row_T.sum() * weight / denominator)
    expected = torch.stack(terms).sum()
    expected.backward()
    denominators = Denominators(
        tokens=sum(lengths), samples=len(rows), rollouts=len(rows), groups=len(rows)
    )
    numbers = [{"weight": weight} if weighted else {} for weight in weights]
    loss = 0.0
    gradients: list[np.ndarray] = []
    for part in (slice(0, cut), slice(cut, None)):
        inputs = inputs_of(rows[part], numbers[part], denominators)
        outputs = load_objective(config)(inputs)
        outputs.loss.backward()
        loss += float(outputs.loss.detach())
        assert inputs.current_N.grad is not None
        gradients.append(inputs.current_N.grad.numpy())
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    expected_N = torch.cat([row_T.grad for row_T in tokens if row_T.grad is not None])
    gradient_N = np.concatenate(gradients)
    assert gradient_N == pytest.approx(expected_N.numpy(), rel=1e-5, abs=1e-9)


def test_sft_needs_no_other_forward_pass() -> None:
    needs = objective_needs(AlgorithmConfig(objective="sft"))
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
    two_assistant_turns = np.array([False, False, True, False, True, True])
    batch = batch_of(
        sample([1, 2, 3, 4, 5, 6], 2, loss_mask_T=two_assistant_turns),
        sample([20, 21], 2),
        sample([30, 31, 32, 33], 3),
        sample([40, 41], 1),
    )
    rows = with_mismatched_samples(batch, max_tokens=0).samples
    assert [row.numbers["mismatched"] for row in rows] == [0, 0, 0, 0, 1, 1, 1]
    first, second, third = rows[4:]
    assert first.tokens_T.tolist() == [1, 2, 33]
    assert first.loss_mask_T.tolist() == [False, False, True]
    assert second.tokens_T.tolist() == [30, 31, 32, 41]
    assert second.loss_mask_T.tolist() == [False, False, False, True]
    assert third.tokens_T.tolist() == [40, 3, 4, 5, 6]
    assert third.loss_mask_T.tolist() == [False, True, False, True, True]
    # so each is in its prompt's mini-batch
    assert first.group_id == "g1"
    assert second.group_id == "g30"
    assert third.group_id == "g40"
    assert len({row.rollout_id for row in rows}) == len(rows)


def test_mismatched_rows_are_cut_and_need_two_rows() -> None:
    batch = batch_of(sample([1, 2, 3], 2), sample([4, 5, 6, 7], 1))
    *_, first, second = with_mismatched_samples(batch, max_tokens=4).samples
    assert first.tokens_T.tolist() == [1, 2, 5, 6]
    assert second.tokens_T.tolist() == [4, 3]
    one_trained_row = batch_of(sample([1, 2, 3], 2), sample([4, 5], 2))
    with pytest.raises(TrainError, match="batch 3 has 1 samples to train"):
        with_mismatched_samples(one_trained_row, max_tokens=0)
