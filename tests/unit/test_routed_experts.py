"""The experts that computed each token: from the engine's report to the row of a
training batch."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from fakes import fake_experts
from family_models import make_family_model
from numpy.typing import NDArray
from running_gateway import edited_conversation, running
from training_samples_example import rows_of_pair

from invrl.engines.client.routed_experts import ExpertsShape, first_row, turn_experts
from invrl.engines.inside_sglang.request_labels import EXPERTS_LABEL
from invrl.gateway.rendering.renderer import Renderer
from invrl.store.row_checksums import experts_item
from invrl.types.batches import TrainSample
from invrl.types.rollouts import RolloutSummary
from invrl.types.routed_experts import RoutedExperts, experts_dtype, unknown_expert
from invrl.types.turns import VersionSpan
from invrl.types.weights import WeightVersion

SHAPE = ExpertsShape(layers=3, chosen=2, count=8)
PATH = 5
PROMPT = 9
SAMPLED = 4
UNKNOWN = 255


def report(first: int, end: int) -> str:
    """The engine's, of positions [first, end)."""
    return base64.b64encode(
        fake_experts(range(20, 20 + end))[first:].tobytes()
    ).decode()


def spans(*ends: int) -> tuple[VersionSpan, ...]:
    starts = (0, *ends)
    return tuple(
        VersionSpan(version=WeightVersion(number), start=start, end=end)
        for number, (start, end) in enumerate(zip(starts, ends, strict=False))
    )


def read(
    encoded: str | None, *, path: int = PATH, sampled: tuple[int, ...] = (SAMPLED,)
):
    return turn_experts(
        encoded, SHAPE, path_tokens=path, prompt_tokens=PROMPT, spans=spans(*sampled)
    )


def test_a_turn_has_the_experts_of_the_passes_that_predicted_its_tokens() -> None:
    every_PLK = fake_experts(range(20, 20 + PROMPT + SAMPLED))
    experts_TLK = read(report(first_row(PATH), PROMPT + SAMPLED - 1))
    assert experts_TLK is not None
    assert experts_TLK.dtype == np.uint8
    assert np.array_equal(experts_TLK, every_PLK[PATH - 1 : -1])


def test_first_token_of_a_path_has_no_experts() -> None:
    experts_TLK = read(report(0, PROMPT + SAMPLED - 1), path=0)
    assert experts_TLK is not None
    assert len(experts_TLK) == PROMPT + SAMPLED
    assert (experts_TLK[0] == UNKNOWN).all()
    assert np.array_equal(
        experts_TLK[1:], fake_experts(range(20, 20 + PROMPT + SAMPLED - 1))
    )


def test_experts_recorded_before_an_update_are_unknown() -> None:
    """The engine has computed those positions again, under the new weights."""
    whole = report(first_row(PATH), PROMPT + SAMPLED - 1)
    experts_TLK = read(whole, sampled=(1, 3, SAMPLED))
    kept_TLK = read(whole)
    assert experts_TLK is not None
    assert kept_TLK is not None
    num_context = PROMPT - PATH
    assert (experts_TLK[num_context : num_context + 3] == UNKNOWN).all()
    assert np.array_equal(experts_TLK[:num_context], kept_TLK[:num_context])
    assert np.array_equal(experts_TLK[num_context + 3 :], kept_TLK[num_context + 3 :])


@pytest.mark.parametrize(
    "encoded",
    [
        None,
        "no base64!",
        report(first_row(PATH), PROMPT + SAMPLED),  # a position too many
        report(first_row(PATH) + 1, PROMPT + SAMPLED - 1),
        base64.b64encode(
            np.full((8, 3, 2), 8, np.int32).tobytes()
        ).decode(),  # there are 8 experts
        base64.b64encode(np.full((8, 3, 2), -1, np.int32).tobytes()).decode(),
    ],
)
def test_invalid_expert_report_is_not_recorded(encoded: str | None) -> None:
    assert read(encoded) is None


@pytest.mark.parametrize(
    ("count", "dtype"),
    [
        (8, np.uint8),
        (255, np.uint8),
        (256, np.uint16),
    ],
)
def test_unknown_experts_have_their_own_number(count: int, dtype: type) -> None:
    assert experts_dtype(count) == dtype
    assert unknown_expert(experts_dtype(count)) >= count


@pytest.mark.parametrize(
    ("family", "count", "chosen"),
    [
        ("qwen3_moe", 4, 2),
        ("glm4_moe", 8, 4),
        ("deepseek_v3", 8, 3),
    ],
)
def test_expert_shape_is_read_from_the_model(
    tmp_path: Path, family: str, count: int, chosen: int
) -> None:
    folder = make_family_model(tmp_path / "model", family)
    config = json.loads((folder / "config.json").read_text())
    expected = ExpertsShape(
        layers=config["num_hidden_layers"], chosen=chosen, count=count
    )
    assert ExpertsShape.of(folder) == expected


def test_model_without_experts_has_no_expert_shape(tmp_path: Path) -> None:
    folder = make_family_model(tmp_path / "model", "qwen3")
    with pytest.raises(ValueError, match="has no experts"):
        ExpertsShape.of(folder)


# -------------------------------------------------- through the gateway and the store


def expected(sample: TrainSample) -> NDArray[np.int32]:
    """Of all tokens but the last one, which no pass has computed."""
    return fake_experts(sample.tokens_T.tolist())[:-1]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_sample_has_the_experts_of_all_its_turns(
    tmp_path: Path,
    model: Path,
    renderer: Renderer,
    stream: bool,
) -> None:
    async with running(tmp_path, model, renderer, experts=SHAPE) as gateway:
        [session] = await gateway.open()
        await edited_conversation(gateway, session, stream=stream)
        summary = await gateway.finish(session)
        assert isinstance(summary, RolloutSummary)
        samples = rows_of_pair(gateway, summary)
        assert len(samples) == 2
        for sample in samples:
            experts_TLK = sample.experts_TLK
            assert experts_TLK is not None
            assert np.array_equal(experts_TLK[:-1], expected(sample))
            assert (experts_TLK[-1] == UNKNOWN).all()


async def test_tokens_of_a_turn_without_a_record_have_unknown_experts(
    tmp_path: Path,
    model: Path,
    renderer: Renderer,
) -> None:
    async with running(tmp_path, model, renderer, experts=SHAPE) as gateway:
        [session] = await gateway.open()
        await edited_conversation(gateway, session, stream=False)
        summary = await gateway.finish(session)
        assert isinstance(summary, RolloutSummary)
        [sample, _] = rows_of_pair(gateway, summary)
        [first, second, *_] = gateway.turns(session)
        gateway.store._db.execute("PRAGMA query_only=0")
        gateway.store._db.execute(
            "DELETE FROM routed_experts WHERE turn_id=?", (second.id,)
        )
        gateway.store._db.execute(
            "DELETE FROM checksums WHERE item=?", (experts_item(second.id),)
        )
        [without, _] = rows_of_pair(gateway, summary)
    known: list[RoutedExperts | None] = [sample.experts_TLK, without.experts_TLK]
    assert known[0] is not None
    assert known[1] is not None
    # Its tokens are predicted from the token before its first one to the one before its
    # last one.
    start = len(first.context_ids_T) + len(first.sampled_ids_T) - 1
    end = start + len(second.context_ids_T) + len(second.sampled_ids_T)
    assert (known[1][start:end] == UNKNOWN).all()
    assert np.array_equal(known[1][:start], known[0][:start])
    assert np.array_equal(known[1][end:], known[0][end:])


async def test_experts_are_requested_only_if_the_run_replays_them(
    tmp_path: Path,
    model: Path,
    renderer: Renderer,
) -> None:
    async with running(tmp_path, model, renderer) as gateway:
        [session] = await gateway.open()
        await edited_conversation(gateway, session, stream=False)
        summary = await gateway.finish(session)
        assert isinstance(summary, RolloutSummary)
        for request in gateway.engine.requests:
            assert EXPERTS_LABEL not in request["custom_labels"]
        assert [sample.experts_TLK for sample in rows_of_pair(gateway, summary)] == [
            None,
            None,
        ]
