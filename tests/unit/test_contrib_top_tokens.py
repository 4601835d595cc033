"""Losses that read the likeliest tokens (DPPO's top-k divergences, SimKO) against
float64 in plain loops over whole distributions, with gradients by finite differences of
the log-probs of tokens and of candidates."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_samples import tokens_alone

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.loss_inputs import LossInputs, LossOutputs, Samples, TopTokens
from invrl.algorithms.objectives.objectives import objective_needs
from invrl.algorithms.policy_loss.losses import policy_loss
from invrl.contrib.dppo_topk import DPPODivergence
from invrl.contrib.simko import SimKO
from invrl.types.metrics import resolve
from invrl.user_code.plugins import plugin_name

TOTAL_VARIATION = "invrl.contrib.dppo_topk:DPPOTotalVariation"
DIVERGENCE = "invrl.contrib.dppo_topk:DPPODivergence"
SIMKO = "invrl.contrib.simko:SimKO"
ON_TOP_TOKENS = (TOTAL_VARIATION, DIVERGENCE, SIMKO)
VOCABULARY = 9
STEP = 1e-6


@dataclass(frozen=True, kw_only=True)
class Token:
    """One trained token: whole distributions, as log-probs by id, under each policy."""

    rollout: list[float]
    old: list[float]
    current: list[float]
    sampled: int
    candidates: list[int]
    """The likeliest of the rollout policy, the likeliest first; may be fewer than K, or
    none."""
    advantage: float

    @property
    def entropy(self) -> float:
        return -sum(math.exp(logprob) * logprob for logprob in self.current)


def random_tokens(lengths: list[int], width: int, seed: int) -> list[list[Token]]:
    """One list for each row. Every fifth token has no candidates, every seventh one
    only."""
    rng = np.random.default_rng(seed)

    def distribution(near_V: np.ndarray, scale: float) -> np.ndarray:
        logits_V = near_V + rng.normal(0, scale, VOCABULARY)
        return logits_V - np.log(np.exp(logits_V).sum())

    rows: list[list[Token]] = []
    for length in lengths:
        row: list[Token] = []
        for _ in range(length):
            rollout_V = distribution(np.zeros(VOCABULARY), rng.uniform(0.3, 3.0))
            count = {0: 0, 1: 1}.get(int(rng.integers(7)), width)
            probability_V = np.exp(rollout_V) / np.exp(rollout_V).sum()
            row.append(
                Token(
                    rollout=rollout_V.tolist(),
                    old=distribution(rollout_V, 0.2).tolist(),
                    current=distribution(rollout_V, 0.5).tolist(),
                    sampled=int(rng.choice(VOCABULARY, p=probability_V)),
                    candidates=np.argsort(-rollout_V)[:count].tolist(),
                    advantage=float(rng.normal(0, 1.5)),
                )
            )
        rows.append(row)
    return rows


# ----------------------------------------------------------------- the reference


def divergence_of(token: Token, *, name: str) -> float:
    """Over the candidates, the sampled token and everything else, written out over the
    vocabulary."""
    named = {*token.candidates, token.sampled}
    others = [token_id for token_id in range(VOCABULARY) if token_id not in named]
    outcomes = [[token_id] for token_id in named] + ([others] if others else [])
    total = 0.0
    for outcome in outcomes:
        q = sum(math.exp(token.rollout[token_id]) for token_id in outcome)
        p = sum(math.exp(token.current[token_id]) for token_id in outcome)
        total += abs(q - p) / 2 if name == TOTAL_VARIATION else q * math.log(q / p)
    return total


def quantile_of(values: list[float], share: float) -> float:
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def reference_loss(
    rows: list[list[Token]],
    config: AlgorithmConfig,
    moved: dict[tuple[int, int, int], float],
) -> float:
    """The mean over tokens. `moved`: by how much a current log-prob is moved where it
    has a gradient, by row, token, and -1 for the sampled one or the number of a
    candidate."""
    losses: list[float] = []
    tables = config.plugin.by_name
    simko = SimKO.model_validate(tables.get("SimKO", {}))
    dppo_table = tables.get(plugin_name(config.policy_loss), {})
    threshold = dppo_table.get("threshold", DPPODivergence().threshold)
    for row_index, row in enumerate(rows):
        bound = quantile_of([token.entropy for token in row], simko.entropy_quantile)
        for t, token in enumerate(row):
            still = token.current[token.sampled]
            before = token.rollout if config.old_logprobs == "engine" else token.old
            old = before[token.sampled]
            ratio = math.exp(still + moved.get((row_index, t, -1), 0.0) - old)
            a = token.advantage
            if config.policy_loss in (TOTAL_VARIATION, DIVERGENCE):
                p = still
                q = token.rollout[token.sampled]
                is_far = divergence_of(token, name=config.policy_loss) > threshold
                masked = is_far and ((a > 0 and p > q) or (a < 0 and p < q))
                losses.append(0.0 if masked else -ratio * a)
                continue
            if token.entropy > bound and a > 0 and token.candidates:
                own = (1 - simko.alpha) * ratio
                for k, candidate in enumerate(token.candidates):
                    # eq. 4, with the old log-prob of the candidate, which cancels
                    stopped = math.exp(still - old) / math.exp(
                        token.current[candidate] - before[candidate]
                    )
                    logprob = token.current[candidate] + moved.get(
                        (row_index, t, k), 0.0
                    )
                    of_candidate = math.exp(logprob - before[candidate])
                    own += simko.alpha / len(token.candidates) * stopped * of_candidate
                ratio = own
            if (
                token.entropy > bound
                and a < 0
                and token.candidates[:1] == [token.sampled]
            ):
                ratio = simko.top1_weight * ratio
            low = 1 - config.eps_clip_low
            high = 1 + config.eps_clip_high
            losses.append(-min(ratio * a, min(max(ratio, low), high) * a))
    return sum(losses) / len(losses)


# ----------------------------------------------------------------- what is tested


def inputs_of(
    rows: list[list[Token]], width: int, dtype: torch.dtype = torch.float64
) -> LossInputs:
    tokens = [token for row in rows for token in row]

    def sampled(policy: str) -> torch.Tensor:
        return torch.tensor(
            [getattr(token, policy)[token.sampled] for token in tokens], dtype=dtype
        )

    def candidates(policy: str) -> torch.Tensor:
        values = torch.full((len(tokens), width), -math.inf, dtype=dtype)
        for n, token in enumerate(tokens):
            for k, candidate in enumerate(token.candidates):
                values[n, k] = getattr(token, policy)[candidate]
        return values

    ids_NK = torch.full((len(tokens), width), -1)
    for n, token in enumerate(tokens):
        ids_NK[n, : len(token.candidates)] = torch.tensor(
            token.candidates, dtype=torch.int64
        )
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    entropies = [token.entropy for token in tokens]
    return LossInputs(
        current_N=sampled("current").requires_grad_(),
        entropy_N=torch.tensor(entropies, dtype=dtype, requires_grad=True),
        samples=Samples(
            sample_N=torch.arange(len(rows)).repeat_interleave(lengths),
            tokens_R=lengths.to(dtype),
            rollout_tokens_R=lengths.to(dtype),
            group_tokens_R=lengths.to(dtype),
        ),
        denominators=tokens_alone(len(tokens)),
        old_N=sampled("old"),
        rollout_N=sampled("rollout"),
        advantages_N=torch.tensor([token.advantage for token in tokens], dtype=dtype),
        reference_N=None,
        top=TopTokens(
            current_NK=candidates("current").requires_grad_(),
            rollout_NK=candidates("rollout"),
            ids_NK=ids_NK,
            is_sampled_NK=ids_NK
            == torch.tensor([token.sampled for token in tokens], dtype=torch.int64)[
                :, None
            ],
        ),
    )


def run(
    inputs: LossInputs, config: AlgorithmConfig
) -> tuple[LossOutputs, torch.Tensor, torch.Tensor]:
    """Outputs, and the gradients of the current log-probs of tokens and candidates."""
    outputs = policy_loss(inputs, config)
    outputs.loss.backward()
    assert inputs.top is not None
    assert inputs.current_N.grad is not None
    of_top_NK = inputs.top.current_NK.grad
    return (
        outputs,
        inputs.current_N.grad,
        torch.zeros_like(inputs.top.current_NK) if of_top_NK is None else of_top_NK,
    )


thresholds = st.fixed_dictionaries({"threshold": st.sampled_from([0.02, 0.1, 0.2])})
configs = st.builds(
    AlgorithmConfig,
    policy_loss=st.sampled_from(ON_TOP_TOKENS),
    plugin=st.fixed_dictionaries(
        {
            "DPPOTotalVariation": thresholds,
            "DPPODivergence": thresholds,
            "SimKO": st.fixed_dictionaries(
                {
                    "alpha": st.sampled_from([0.0, 0.01, 0.3]),
                    "top1_weight": st.sampled_from([1.1, 2.0]),
                    "entropy_quantile": st.sampled_from([0.0, 0.5, 0.8]),
                }
            ),
        }
    ),
    eps_clip_low=st.just(0.3),
    eps_clip_high=st.just(0.4),
    dual_clip=st.none(),
    correction=st.just("none"),
    old_logprobs=st.sampled_from(["recompute", "engine"]),
)
row_lengths = st.lists(st.integers(1, 6), min_size=1, max_size=4)
widths = st.integers(1, VOCABULARY)


@settings(max_examples=150, deadline=None)
@given(
    lengths=row_lengths,
    width=widths,
    seed=st.integers(0, 10**6),
    config=configs,
)
def test_loss_and_gradient_equal_float64_loops(
    lengths: list[int], width: int, seed: int, config: AlgorithmConfig
) -> None:
    rows = random_tokens(lengths, width, seed)
    outputs, gradient_N, of_top_NK = run(inputs_of(rows, width), config)
    middle = reference_loss(rows, config, {})
    assert outputs.loss.item() == pytest.approx(middle, rel=1e-9, abs=1e-9)
    n = 0
    for row_index, row in enumerate(rows):
        for t, token in enumerate(row):
            for k in range(-1, len(token.candidates)):
                above = reference_loss(rows, config, {(row_index, t, k): STEP})
                below = reference_loss(rows, config, {(row_index, t, k): -STEP})
                if abs((above - middle) - (middle - below)) > 1e-3 * STEP:
                    continue  # on a bound of the clip
                measured = gradient_N[n] if k < 0 else of_top_NK[n, k]
                assert measured.item() == pytest.approx(
                    (above - below) / (2 * STEP), rel=1e-5, abs=1e-7
                )
            assert (of_top_NK[n, len(token.candidates) :] == 0).all()
            n += 1


@settings(max_examples=100, deadline=None)
@given(
    lengths=row_lengths,
    width=widths,
    seed=st.integers(0, 10**6),
    config=configs,
)
def test_float32_is_near_float64_and_finite(
    lengths: list[int], width: int, seed: int, config: AlgorithmConfig
) -> None:
    rows = random_tokens(lengths, width, seed)
    exact, exact_N, exact_NK = run(inputs_of(rows, width), config)
    outputs, gradient_N, of_top_NK = run(inputs_of(rows, width, torch.float32), config)
    assert outputs.loss.item() == pytest.approx(exact.loss.item(), rel=1e-4, abs=1e-5)
    assert gradient_N.tolist() == pytest.approx(exact_N.tolist(), rel=1e-3, abs=1e-5)
    torch.testing.assert_close(of_top_NK.double(), exact_NK, rtol=1e-3, atol=1e-5)


@settings(max_examples=100, deadline=None)
@given(
    width=widths,
    seed=st.integers(0, 10**6),
    name=st.sampled_from(["tv", "kl"]),
)
def test_divergence_over_more_top_tokens_is_not_smaller(
    width: int, seed: int, name: str
) -> None:
    """So binary masks are a subset of top-k masks; without candidates the two are
    equal."""
    rows = random_tokens([5, 4], width, seed)
    settings_of = {
        "correction": "none",
        "old_logprobs": "engine",
    }
    threshold = {"threshold": 0.05}
    binary = AlgorithmConfig.model_validate(
        {**settings_of, "policy_loss": f"dppo_{name}", "dppo": threshold}
    )
    path = {"tv": TOTAL_VARIATION, "kl": DIVERGENCE}[name]
    top_k = AlgorithmConfig.model_validate(
        {
            **settings_of,
            "policy_loss": path,
            "plugin": {plugin_name(path): threshold},
        }
    )
    _, binary_N, _ = run(inputs_of(rows, width), binary)
    _, top_k_N, _ = run(inputs_of(rows, width), top_k)
    assert ((top_k_N == 0) | (top_k_N == binary_N)).all()
    assert (top_k_N[binary_N == 0] == 0).all()
    unknown = [[replace(token, candidates=[]) for token in row] for row in rows]
    _, unknown_N, _ = run(inputs_of(unknown, width), top_k)
    torch.testing.assert_close(unknown_N, binary_N, rtol=0, atol=0)


def test_divergence_over_the_whole_vocabulary_is_exact() -> None:
    """With every token a candidate nothing is left for the others, also in float32."""
    rows = random_tokens([8], VOCABULARY, 3)
    full = [
        [replace(token, candidates=list(range(VOCABULARY))) for token in row]
        for row in rows
    ]
    for name in (TOTAL_VARIATION, DIVERGENCE):
        exact = [divergence_of(token, name=name) for token in full[0]]
        for bound in (min(exact), max(exact)):
            for shift in (0.999, 1.001):
                config = AlgorithmConfig(
                    policy_loss=name,
                    plugin={plugin_name(name): {"threshold": bound * shift}},
                    correction="none",
                    old_logprobs="engine",
                )
                outputs, gradient_N, _ = run(
                    inputs_of(full, VOCABULARY, torch.float32), config
                )
                expected = reference_loss(full, config, {})
                assert outputs.loss.item() == pytest.approx(expected, rel=1e-5)
                assert torch.isfinite(gradient_N).all()


def test_simko_moves_a_share_of_the_gradient_and_no_loss_value() -> None:
    """At alpha 0.3 the sampled token keeps 0.7 of its gradient, and its 2 candidates
    get 0.15 each."""
    token = random_tokens([1], 2, 0)[0][0]
    token = replace(
        token, candidates=[0, 1], sampled=2, advantage=2.0, old=token.current
    )
    flat = replace(
        token, current=[math.log(1 / VOCABULARY)] * VOCABULARY, old=token.current
    )
    rows = [[token, flat]]
    if token.entropy > flat.entropy:
        pytest.fail("a uniform distribution has the largest entropy")
    config = AlgorithmConfig(
        policy_loss=SIMKO,
        plugin={"SimKO": {"alpha": 0.3}},
        eps_clip_low=0.9,
        eps_clip_high=1e6,
        dual_clip=None,
        correction="none",
    )
    outputs, gradient_N, of_top_NK = run(inputs_of(rows, 2), config)
    ratio = math.exp(flat.current[2] - flat.old[2])
    assert gradient_N.tolist() == pytest.approx([-1.0, -0.7 * ratio])
    assert of_top_NK.tolist() == [
        [0.0, 0.0],
        pytest.approx([-0.15 * ratio, -0.15 * ratio]),
    ]
    assert outputs.loss.item() == pytest.approx(-(1 + ratio))
    metrics = resolve(outputs.metrics)
    assert metrics["simko_mixed_fraction"] == 0.5
    assert metrics["simko_raised_fraction"] == 0.0


def test_top_token_losses_of_an_empty_batch_are_0() -> None:
    """A rank without data takes part in the step."""
    for name in ON_TOP_TOKENS:
        inputs = inputs_of([], 3)
        outputs, _, _ = run(
            replace(inputs, denominators=tokens_alone(5.0)),
            AlgorithmConfig(policy_loss=name),
        )
        assert outputs.loss.item() == 0.0


def test_only_top_token_losses_need_top_logprobs() -> None:
    for name in ON_TOP_TOKENS:
        assert objective_needs(AlgorithmConfig(policy_loss=name)).top_logprobs
        assert objective_needs(
            AlgorithmConfig(policy_loss=name, objective="distillation")
        ).top_logprobs
    assert not objective_needs(AlgorithmConfig(policy_loss="dppo_tv")).top_logprobs
    assert not objective_needs(AlgorithmConfig(objective="sft")).top_logprobs


def test_top_tokens_of_another_shape_are_refused() -> None:
    inputs = inputs_of(random_tokens([3], 2, 0), 2)
    assert inputs.top is not None
    with pytest.raises(ValueError, match=r"not all of one shape \[N, K\]"):
        replace(inputs, top=replace(inputs.top, ids_NK=inputs.top.ids_NK[:, :1]))
    shorter = {
        name: getattr(inputs.top, name)[:2]
        for name in ("current_NK", "rollout_NK", "ids_NK")
    }
    with pytest.raises(ValueError, match=r"not all of one shape \[N\]"):
        replace(
            inputs, top=TopTokens(**shorter, is_sampled_NK=inputs.top.is_sampled_NK[:2])
        )
