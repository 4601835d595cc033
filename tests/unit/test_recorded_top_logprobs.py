"""The likeliest tokens in the place of sampled ones: from the engine's answer through
the store to a row, a saved batch, and a packed micro-batch.

The fake engine's likeliest is the sampled token t, then t + 1, t + 2, ..., each half a
nat below."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes import fake_logprob
from running_gateway import ASK, Running, edited_conversation, running
from training_samples_example import rows_of_pair

from invrl.cli.flags import parse_flags
from invrl.errors import ConfigError
from invrl.gateway.rendering.renderer import Renderer
from invrl.run.settings.config import resolve
from invrl.store.batch_file import load_batch, save_batch
from invrl.store.row_checksums import top_item
from invrl.store.rows import top_from_row, top_values
from invrl.train.batches.grammar_masks import GrammarMasks
from invrl.train.batches.packing import pack
from invrl.train.parallel.context_share import ContextShare
from invrl.types.batches import TrainBatch, TrainSample
from invrl.types.rollouts import RolloutSummary
from invrl.types.sessions import Session
from invrl.types.top_logprobs import MAX_TOP_LOGPROBS, NO_TOKEN, TopLogprobs
from invrl.types.weights import WeightVersion

K = 3


def expected(sample: TrainSample, width: int = K) -> TopLogprobs:
    """Of the fake engine, for the trained tokens of a row."""
    ids_TK = (sample.tokens_T[:, None] + np.arange(width)) % 512
    first_T = np.array([fake_logprob(token) for token in sample.tokens_T.tolist()])
    logprobs_TK = (first_T[:, None] - np.arange(width) / 2).astype(np.float32)
    top = TopLogprobs(ids_TK=ids_TK.astype(np.int32), logprobs_TK=logprobs_TK)
    return top.where(sample.loss_mask_T)


def assert_same(top: TopLogprobs | None, other: TopLogprobs) -> None:
    assert top is not None
    assert top.ids_TK.dtype == np.int32
    assert top.logprobs_TK.dtype == np.float32
    np.testing.assert_array_equal(top.ids_TK, other.ids_TK)
    np.testing.assert_allclose(top.logprobs_TK, other.logprobs_TK, rtol=0, atol=1e-6)


async def finished(gateway: Running, session: Session) -> list[TrainSample]:
    summary = await gateway.finish(session)
    assert isinstance(summary, RolloutSummary)
    return rows_of_pair(gateway, summary)


# ----------------------------------------------------------------- the gateway


@pytest.mark.parametrize("stream", [False, True])
async def test_row_has_top_logprobs_of_all_its_trained_tokens(
    tmp_path: Path,
    model: Path,
    renderer: Renderer,
    stream: bool,
) -> None:
    """A rollout of two branches: context, and what is trained in the other row, has
    none."""
    async with running(tmp_path, model, renderer, record_top_logprobs=K) as gateway:
        [session] = await gateway.open()
        await edited_conversation(gateway, session, stream=stream)
        samples = await finished(gateway, session)
        assert [request["top_logprobs_num"] for request in gateway.engine.requests] == [
            K
        ] * 4
    assert len(samples) == 2
    for sample in samples:
        assert 0 < sample.loss_mask_T.sum() < len(sample.tokens_T)
        assert_same(sample.top_logprobs, expected(sample))


@pytest.mark.parametrize("shown", [0, 2, 5])
@pytest.mark.parametrize("stream", [False, True])
async def test_client_gets_the_number_of_top_logprobs_it_requested(
    tmp_path: Path,
    model: Path,
    renderer: Renderer,
    shown: int,
    stream: bool,
) -> None:
    """And K are recorded, whether clients ask for fewer or for more."""
    async with running(tmp_path, model, renderer, record_top_logprobs=K) as gateway:
        [session] = await gateway.open()
        answer = await gateway.client(session).chat.completions.create(
            model="tiny",
            messages=[ASK],
            logprobs=True,
            top_logprobs=shown,
            stream=stream,
        )
        choices = (
            [event.choices[0] async for event in answer] if stream else answer.choices
        )
        tokens = [
            place
            for choice in choices
            if choice.logprobs
            for place in choice.logprobs.content or ()
        ]
        assert tokens
        assert {len(token.top_logprobs) for token in tokens} == {shown}
        [sample] = await finished(gateway, session)
        assert [request["top_logprobs_num"] for request in gateway.engine.requests] == [
            max(shown, K)
        ]
    assert_same(sample.top_logprobs, expected(sample))


@pytest.mark.parametrize(
    ("purpose", "recorded"),
    [
        ("train", 0),
        ("eval", K),
        ("serve", K),
    ],
)
async def test_top_logprobs_are_requested_only_for_trained_sessions(
    tmp_path: Path,
    model: Path,
    renderer: Renderer,
    purpose: str,
    recorded: int,
) -> None:
    async with running(
        tmp_path, model, renderer, record_top_logprobs=recorded
    ) as gateway:
        [session] = await gateway.open(purpose=purpose)
        await edited_conversation(gateway, session, stream=False)
        samples = await finished(gateway, session)
        assert all(
            "top_logprobs_num" not in request for request in gateway.engine.requests
        )
    assert [sample.top_logprobs for sample in samples] == [None, None]


async def test_tokens_of_a_turn_without_a_record_have_no_top_logprobs(
    tmp_path: Path,
    model: Path,
    renderer: Renderer,
) -> None:
    async with running(tmp_path, model, renderer, record_top_logprobs=K) as gateway:
        [session] = await gateway.open()
        await edited_conversation(gateway, session, stream=False)
        summary = await gateway.finish(session)
        assert isinstance(summary, RolloutSummary)
        first = gateway.turns(session)[0]
        gateway.store._db.execute("PRAGMA query_only=0")
        gateway.store._db.execute(
            "DELETE FROM top_logprobs WHERE turn_id=?", (first.id,)
        )
        gateway.store._db.execute(
            "DELETE FROM checksums WHERE item=?", (top_item(first.id),)
        )
        [sample, _] = rows_of_pair(gateway, summary)
    start = len(first.context_ids_T)
    end = start + len(first.sampled_ids_T)
    assert sample.loss_mask_T[start:end].all()
    is_known_T = sample.loss_mask_T.copy()
    is_known_T[start:end] = False
    assert_same(sample.top_logprobs, expected(sample).where(is_known_T))


# --------------------------------------------------------------- store and batch file


def test_top_logprobs_are_read_back_from_the_store_bit_for_bit() -> None:
    """Also those that a grammar excluded: no id, and no probability."""
    reported = TopLogprobs.reported(
        np.array([[5, 7], [3, 9]], np.int32),
        np.array([[-0.1, -2.3], [-0.0, -np.inf]], np.float32),
    )
    assert reported.ids_TK.tolist() == [[5, 7], [3, NO_TOKEN]]
    read = top_from_row(top_values("turn-1", reported))
    assert read.ids_TK.tobytes() == reported.ids_TK.tobytes()
    assert read.logprobs_TK.tobytes() == reported.logprobs_TK.tobytes()
    assert read.ids_TK.shape == (2, 2)
    none = top_from_row(top_values("turn-2", TopLogprobs.none(0, K)))
    assert none.ids_TK.shape == (0, K)


def sample_with(top: TopLogprobs | None, number: int, tokens: list[int]) -> TrainSample:
    mask_T = np.arange(len(tokens)) >= 2
    return TrainSample(
        tokens_T=np.array(tokens, np.int32),
        loss_mask_T=mask_T,
        rollout_logprobs_T=np.where(mask_T, -1.0, 0.0).astype(np.float32),
        versions_T=np.where(mask_T, 0, -1).astype(np.int32),
        reward=0.0,
        temperature=1.0,
        group_id="g",
        rollout_id=f"r{number}",
        attempt=0,
        turn_ids=("t",),
        top_logprobs=None if top is None else top.where(mask_T),
    )


def random_batch(widths: list[int]) -> TrainBatch:
    """Rows of a shared beginning. Width 0: a row without."""
    rng = np.random.default_rng(0)
    samples: list[TrainSample] = []
    for number, width in enumerate(widths):
        tokens = [1, 2, *rng.integers(3, 500, 4 + number).tolist()]
        top = None
        if width:
            ids_TK = rng.integers(0, 500, (len(tokens), width)).astype(np.int32)
            logprobs_TK = -np.sort(rng.uniform(0, 9, ids_TK.shape)).astype(np.float32)
            top = TopLogprobs.reported(ids_TK, logprobs_TK)
        samples.append(sample_with(top, number, tokens))
    return TrainBatch(
        batch_id=3,
        version=WeightVersion(0),
        samples=tuple(samples),
        advantages=tuple(
            np.zeros(len(sample.tokens_T), np.float32) for sample in samples
        ),
    )


def test_saved_batch_has_its_top_logprobs(tmp_path: Path) -> None:
    batch = random_batch([K, 0, 1])
    save_batch(tmp_path / "step-000001.batch", batch)
    loaded = load_batch(tmp_path / "step-000001.batch")
    for sample, other in zip(loaded.samples, batch.samples, strict=True):
        if other.top_logprobs is None:
            assert sample.top_logprobs is None
        else:
            assert_same(sample.top_logprobs, other.top_logprobs)


def test_top_logprobs_of_another_length_are_refused() -> None:
    sample = random_batch([K]).samples[0]
    assert sample.top_logprobs is not None
    with pytest.raises(ValueError, match="lengths differ"):
        replace(sample, top_logprobs=TopLogprobs.none(len(sample.tokens_T) + 1, K))
    with pytest.raises(ValueError, match="one shape"):
        TopLogprobs(
            ids_TK=np.zeros((2, 3), np.int32), logprobs_TK=np.zeros((2, 2), np.float32)
        )


# ----------------------------------------------------------------- the trainer's side


@pytest.mark.parametrize("share_prefixes", [False, True])
def test_packed_and_sharded_tokens_keep_their_top_logprobs(
    model: Path,
    share_prefixes: bool,
) -> None:
    """Rows of other widths, and one without, in one micro-batch."""
    batch = random_batch([K, 0, 1, K, 2])
    packed_rows = GrammarMasks(model, 512).sequences(batch.samples)
    [micro_batch] = pack(packed_rows, max_tokens=500, share_prefixes=share_prefixes)
    assert micro_batch.candidates_NK is not None
    assert micro_batch.candidates_NK.shape == (len(micro_batch.targets_N), K)
    start = 0
    for index, wanted_N in micro_batch.sequences:
        end = start + len(wanted_N)
        top = batch.samples[index].top_logprobs or TopLogprobs.none(
            len(batch.samples[index].tokens_T), K
        )
        np.testing.assert_array_equal(
            micro_batch.candidates_NK[start:end],
            top.widened(K).ids_TK[wanted_N],
            err_msg=f"row {index}",
        )
        start = end
    found_NK = np.full_like(micro_batch.candidates_NK, -7)
    for rank in range(2):
        own, is_own_N = ContextShare.of(
            micro_batch, rank=rank, ranks=2, multiple=1
        ).own_projections()
        assert own.candidates_NK is not None
        found_NK[is_own_N] = own.candidates_NK
    np.testing.assert_array_equal(found_NK, micro_batch.candidates_NK)


def test_rows_without_top_logprobs_have_no_candidates(model: Path) -> None:
    [micro_batch] = pack(
        GrammarMasks(model, 512).sequences(random_batch([0, 0]).samples),
        max_tokens=500,
        share_prefixes=True,
    )
    assert micro_batch.candidates_NK is None


# ----------------------------------------------------------------- bad input


def test_loss_over_top_tokens_needs_a_run_that_records_them() -> None:
    for name in (
        "invrl.contrib.dppo_topk:DPPOTotalVariation",
        "invrl.contrib.dppo_topk:DPPODivergence",
        "invrl.contrib.simko:SimKO",
    ):
        with pytest.raises(
            ConfigError, match=f"{name} reads the likeliest tokens"
        ) as caught:
            resolve(*parse_flags(["--policy-loss", name]))
        assert caught.value.field == "rollout.rollout_top_logprobs"
        assert "set --rollout-top-logprobs" in str(caught.value)
        config = resolve(
            *parse_flags(["--policy-loss", name, "--rollout-top-logprobs", "20"])
        )
        assert config.rollout.rollout_top_logprobs == 20
        flags = [
            "--policy-loss",
            name,
            "--rollout-top-logprobs",
            "20",
            "--correction",
            "none",
        ]
        with pytest.raises(ConfigError, match="single tokens"):
            resolve(*parse_flags([*flags, "--ratio-level", "sequence"]))


@pytest.mark.parametrize("number", ["-1", str(MAX_TOP_LOGPROBS + 1), "many"])
def test_invalid_numbers_of_top_logprobs_are_refused(number: str) -> None:
    with pytest.raises(ConfigError, match="rollout_top_logprobs"):
        resolve(*parse_flags(["--rollout-top-logprobs", number]))
