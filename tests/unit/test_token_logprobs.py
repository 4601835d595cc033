"""Log-probs, entropies and gradients of the blockwise vocabulary projection, against
float64 formulas."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from logprob_problem import (
    HIDDEN,
    VOCABULARY,
    Problem,
    Results,
    assert_equal,
    set_block_tokens,
)

from invrl.train.batches.micro_batch import EMPTY_MICRO_BATCH, MicroBatch, TokenSequence
from invrl.train.batches.packing import pack
from invrl.train.model import logprobs
from invrl.train.model.logprobs import projected_logprobs
from invrl.types.top_logprobs import NO_TOKEN

BLOCKS = {"one block": 64, "blocks of 16": 16, "blocks of 5": 5, "blocks of one": 1}


@pytest.fixture(params=BLOCKS.values(), ids=BLOCKS)
def block_tokens(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> int:
    set_block_tokens(monkeypatch, request.param)
    return request.param


def awkward_micro_batch(
    seed: int = 5, vocabulary: int = VOCABULARY, *, num_candidates: int = 0
) -> MicroBatch:
    """Rows that share a beginning, at two temperatures, equal rows, and tokens under
    two masks. With candidates, the wanted token is the third of every fourth; under a
    mask it is the only one; and the last row has none."""
    rng = np.random.default_rng(seed)
    tokens_T = rng.integers(0, vocabulary, 30).astype(np.int32)
    other_T = tokens_T.copy()
    other_T[18:] = rng.integers(0, vocabulary, 12)
    other_T[29] = 0
    masks = []
    for share in (0.7, 0.0):
        kept_V = rng.random(vocabulary) < share
        kept_V[0] = True
        masks.append(np.packbits(kept_V, bitorder="little").tobytes())
    wanted_N = np.arange(5, 30)
    rows = [
        TokenSequence(tokens_T=tokens_T, wanted_N=wanted_N, temperature=0.8),
        TokenSequence(tokens_T=tokens_T, wanted_N=wanted_N[::2], temperature=0.8),
        TokenSequence(
            tokens_T=other_T,
            wanted_N=wanted_N,
            temperature=1.3,
            allowed_N=(*[None] * 24, masks[0]),
        ),
        TokenSequence(
            tokens_T=other_T,
            wanted_N=wanted_N,
            temperature=1.3,
            allowed_N=(*[None] * 24, masks[1]),
        ),
        TokenSequence(tokens_T=tokens_T, wanted_N=wanted_N, temperature=1.3),
    ]
    if num_candidates:
        rows[:4] = [
            with_candidates(row, num_candidates, rng, vocabulary) for row in rows[:4]
        ]
    (micro_batch,) = pack(rows, max_tokens=1000, share_prefixes=True)
    assert len(micro_batch.restricted_M) == 2
    assert len(np.unique(micro_batch.projection_N)) < len(micro_batch.projection_N)
    return micro_batch


def with_candidates(
    row: TokenSequence, number: int, rng: np.random.Generator, vocabulary: int
) -> TokenSequence:
    drawn = [rng.permutation(vocabulary)[:number] for _ in row.wanted_N]
    candidates_NK = np.array(drawn, np.int32)
    for index, position in enumerate(row.wanted_N):
        target = row.tokens_T[position]
        if row.allowed_N and row.allowed_N[index] is not None:
            candidates_NK[index] = NO_TOKEN
            candidates_NK[index, 0] = target
        elif index % 4 == 0 and target not in candidates_NK[index]:
            candidates_NK[index, 2] = target
    return replace(row, candidates_NK=candidates_NK)


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["plain", "soft cap"])
@pytest.mark.parametrize("kept_bytes", [0, 1 << 20], ids=["none kept", "half kept"])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.7], ids=["", "entropy"])
def test_logprobs_entropies_and_gradients_equal_float64(
    monkeypatch: pytest.MonkeyPatch,
    block_tokens: int,
    softcap: float | None,
    kept_bytes: int,
    entropy_weight: float,
) -> None:
    monkeypatch.setattr(logprobs, "KEPT_BYTES", kept_bytes)
    problem = Problem.random(
        awkward_micro_batch(), softcap=softcap, entropy_weight=entropy_weight
    )
    # An entropy's gradient has log p, of up to 19 nats here, in float32.
    assert_equal(
        problem.measured(), problem.exact(), atol=3e-5 if entropy_weight else 1e-5
    )


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["plain", "soft cap"])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.7], ids=["", "entropy"])
def test_candidate_logprobs_equal_float64(
    monkeypatch: pytest.MonkeyPatch,
    block_tokens: int,
    softcap: float | None,
    entropy_weight: float,
) -> None:
    """The likeliest tokens in the place of each one, with their gradient, beside the
    sampled token's."""
    monkeypatch.setattr(logprobs, "KEPT_BYTES", 1 << 20)
    micro_batch = awkward_micro_batch(num_candidates=5)
    problem = Problem.random(
        micro_batch, softcap=softcap, entropy_weight=entropy_weight
    )
    measured = problem.measured()
    assert_equal(measured, problem.exact(), atol=6e-5 if entropy_weight else 2e-5)
    assert measured.top_NK is not None
    assert micro_batch.candidates_NK is not None
    is_sampled_NK = torch.from_numpy(
        micro_batch.candidates_NK == micro_batch.targets_N[:, None]
    )
    assert is_sampled_NK.any(1).sum() > 10
    sampled_N, _ = is_sampled_NK.nonzero(as_tuple=True)
    assert torch.equal(measured.top_NK[is_sampled_NK], measured.logprobs_N[sampled_N])
    without = Problem.random(replace(micro_batch, candidates_NK=None), softcap=softcap)
    assert torch.equal(without.measured().logprobs_N, measured.logprobs_N)


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["plain", "soft cap"])
def test_gradients_pass_numerical_gradcheck(
    monkeypatch: pytest.MonkeyPatch, softcap: float | None
) -> None:
    """Numerical derivatives in float64; the backward pass may run more than once."""
    set_block_tokens(monkeypatch, 16)
    problem = Problem.random(awkward_micro_batch(), torch.float64, softcap)
    hidden_UH = problem.hidden_UH.requires_grad_()
    weight_VH = problem.weight_VH.requires_grad_()

    def compute(
        hidden_UH: torch.Tensor, weight_VH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs_N, entropy_N, _ = projected_logprobs(
            hidden_UH, weight_VH, problem.micro_batch, softcap=softcap
        )
        return logprobs_N, entropy_N

    assert torch.autograd.gradcheck(compute, (hidden_UH, weight_VH), fast_mode=True)


def test_candidate_gradients_pass_numerical_gradcheck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_block_tokens(monkeypatch, 16)
    problem = Problem.random(awkward_micro_batch(num_candidates=4), torch.float64)

    def compute(hidden_UH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
        logprobs_N, entropy_N, top_NK = projected_logprobs(
            hidden_UH, weight_VH, problem.micro_batch
        )
        return problem.loss(logprobs_N, entropy_N, top_NK)

    inputs = (problem.hidden_UH.requires_grad_(), problem.weight_VH.requires_grad_())
    assert torch.autograd.gradcheck(compute, inputs, fast_mode=True)


def test_removed_tokens_have_no_gradient(block_tokens: int) -> None:
    """A row of which a mask keeps only the target: its log-prob is 0, and nothing
    depends on it."""
    only_zero = (1).to_bytes(6, "little")
    row = TokenSequence(
        tokens_T=np.array([7, 0], np.int32),
        wanted_N=np.array([1]),
        temperature=1.0,
        allowed_N=(only_zero,),
    )
    (micro_batch,) = pack([row], max_tokens=10, share_prefixes=True)
    results = Problem.random(micro_batch).measured()
    assert results.logprobs_N.tolist() == [0.0]
    assert results.entropy_N.tolist() == [0.0]
    assert results.hidden_grad_UH.abs().max() == 0
    assert results.weight_grad_VH.abs().max() == 0


def test_batch_without_wanted_tokens_has_zero_gradients(block_tokens: int) -> None:
    """The weight has a gradient all the same: a rank without data takes part in the
    step."""
    results = Problem.random(EMPTY_MICRO_BATCH).measured()
    assert len(results.logprobs_N) == 0
    assert results.weight_grad_VH.shape == (VOCABULARY, HIDDEN)
    assert results.weight_grad_VH.abs().max() == 0


def test_the_gradient_of_bf16_logits_is_rounded_once() -> None:
    """Two tokens that nearly cancel: what is left of 1 - p must not be lost in
    bfloat16."""
    row = TokenSequence(
        tokens_T=np.array([1, 0], np.int32), wanted_N=np.array([1]), temperature=1.0
    )
    (micro_batch,) = pack([row, row], max_tokens=10, share_prefixes=True)
    logits_V = torch.tensor([6.0, 0.0, 0.0]).bfloat16()
    hidden_UH = torch.ones(1, 1).bfloat16()
    # whose gradient is then that of the logits
    weight_VH = logits_V[:, None].clone().requires_grad_()
    logprobs_N, _, _ = projected_logprobs(hidden_UH, weight_VH, micro_batch)
    logprobs_N.sum().backward()
    assert weight_VH.grad is not None
    exact_V = -2 * logits_V.double().softmax(0)
    exact_V[0] += 2
    torch.testing.assert_close(
        weight_VH.grad[:, 0].double(), exact_V, rtol=2**-8, atol=0
    )


def test_bf16_logits_are_worked_on_in_float32(block_tokens: int) -> None:
    """One bf16 rounding step at 30 nats is 0.125: a sum in bf16 would be far off."""
    problem = Problem.random(awkward_micro_batch(), torch.bfloat16)
    logits_UV = (problem.hidden_UH @ problem.weight_VH.T).double()
    rounded = Problem(
        micro_batch=problem.micro_batch,
        hidden_UH=logits_UV,
        weight_VH=torch.eye(VOCABULARY, dtype=torch.float64),
        grad_N=problem.grad_N,
    )
    measured = problem.measured()
    assert measured.logprobs_N.dtype == torch.float32
    assert (
        measured.logprobs_N.double() - rounded.exact().logprobs_N
    ).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_under_a_mask_is_finite(
    dtype: torch.dtype, block_tokens: int
) -> None:
    problem = Problem.random(awkward_micro_batch(), dtype)
    measured = problem.measured()
    for name in ("logprobs_N", "entropy_N", "hidden_grad_UH", "weight_grad_VH"):
        assert getattr(measured, name).isfinite().all(), name


def test_logprobs_without_a_gradient_are_the_same(block_tokens: int) -> None:
    problem = Problem.random(awkward_micro_batch())
    with torch.no_grad():
        logprobs_N, _, _ = projected_logprobs(
            problem.hidden_UH, problem.weight_VH, problem.micro_batch
        )
    assert torch.equal(logprobs_N, problem.measured().logprobs_N)


def test_at_most_half_of_the_logits_exist_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In blocks of one token, so that a count of blocks is a count of tokens."""
    set_block_tokens(monkeypatch, 1)
    problem = Problem.random(awkward_micro_batch())
    projected: list[weakref.ref[torch.Tensor]] = []
    num_alive: list[int] = []
    project = logprobs._project

    def recording(
        hidden_UH: torch.Tensor, weight_VH: torch.Tensor, block: logprobs._Block
    ) -> torch.Tensor:
        logits_UW = project(hidden_UH, weight_VH, block)
        projected.append(weakref.ref(logits_UW))
        num_alive.append(sum(reference() is not None for reference in projected))
        return logits_UW

    monkeypatch.setattr(logprobs, "_project", recording)
    problem.measured()
    half = VOCABULARY // 2
    assert len(projected) == VOCABULARY + (VOCABULARY - half), (
        "half of the blocks are projected once"
    )
    assert max(num_alive) <= half + 2
    projected.clear()
    num_alive.clear()
    monkeypatch.setattr(logprobs, "KEPT_BYTES", 3 * 4 * len(problem.hidden_UH))
    problem.measured()
    assert len(projected) == VOCABULARY + (VOCABULARY - 3)
    assert max(num_alive) <= 3 + 2


# ------------------------------------------------------------- a vocabulary in shards


def shard_results(
    problems: list[Problem], rank: int, shards: list[slice], store: str
) -> list[Results]:
    """Of one rank; runs in a process of its own."""
    torch.set_num_threads(1)
    file_store = torch.distributed.FileStore(store, len(shards))
    torch.distributed.init_process_group(
        "gloo", store=file_store, rank=rank, world_size=len(shards)
    )
    try:
        return [
            problem.shard(shards[rank], torch.distributed.group.WORLD)
            for problem in problems
        ]
    finally:
        torch.distributed.destroy_process_group()


def test_sharded_vocabulary_gives_the_logprobs_of_the_whole(tmp_path: Path) -> None:
    """Every rank has the same log-probs; gradients of hidden states add up, those of
    the weight are rows of the whole one's. In one shard a mask removes every token."""
    shards = [
        slice(0, 3),
        slice(3, 26),
        slice(26, VOCABULARY),
    ]
    problems = [
        Problem.random(
            awkward_micro_batch(num_candidates=number),
            softcap=softcap,
            entropy_weight=entropy_weight,
        )
        for number, softcap, entropy_weight in (
            (0, None, 0.0),
            (0, 3.0, 0.0),
            (0, None, 0.7),
            (5, 3.0, 0.0),
        )
    ]
    with torch.multiprocessing.get_context("spawn").Pool(len(shards)) as pool:
        arguments = [
            (problems, rank, shards, str(tmp_path / "store"))
            for rank in range(len(shards))
        ]
        results_by_rank = pool.starmap(shard_results, arguments, chunksize=1)
    for problem, results in zip(
        problems, zip(*results_by_rank, strict=True), strict=True
    ):
        first = results[0]
        for measured in results:
            assert torch.equal(measured.logprobs_N, first.logprobs_N)
            assert torch.equal(measured.entropy_N, first.entropy_N)
            if first.top_NK is not None:
                assert measured.top_NK is not None
                assert torch.equal(measured.top_NK, first.top_NK)
        whole = Results(
            logprobs_N=first.logprobs_N,
            entropy_N=first.entropy_N,
            top_NK=first.top_NK,
            hidden_grad_UH=torch.stack(
                [measured.hidden_grad_UH for measured in results]
            ).sum(0),
            weight_grad_VH=torch.cat([measured.weight_grad_VH for measured in results]),
        )
        assert_equal(whole, problem.exact())
