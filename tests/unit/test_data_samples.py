"""From rows to samples and batches: groups, numbers, rows that are too long, rows that
turn out unusable."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from invrl.datasets.config import DataConfig
from invrl.datasets.dataset import Dataset, load_dataset
from invrl.errors import ConfigError
from invrl.gateway.rendering.loading import load_renderer
from invrl.types.batches import TrainedCounts

ASK = {"role": "user", "content": "2+2?"}


def reply(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def dataset(
    folder: Path,
    model: Path,
    rows: Sequence[dict[str, Any]],
    *,
    objective: str = "sft",
    max_tokens: int = 200,
    **settings: Any,
) -> Dataset:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(data_path=str(file), **settings)
    renderer = load_renderer(
        str(model),
        512,
        chat_template="",
        keep_thinking=True,
        special_tokens_in_content="plain",
    )
    return load_dataset(config, objective, renderer, max_tokens=max_tokens, seed=1)


def test_both_rows_of_a_pair_are_one_group(tmp_path: Path, model: Path) -> None:
    rows = [
        {"prompt": "2+2?", "chosen": "4", "rejected": text} for text in ("5", "6", "7")
    ]
    data = dataset(tmp_path, model, rows, objective="dpo", batch_size=3, shuffle=False)
    batch = data.step(1).batch
    assert [sample.numbers for sample in batch.samples] == [
        {"chosen": 1.0},
        {"chosen": 0.0},
    ] * 3
    assert [sample.group_id for sample in batch.samples] == [
        "0/1",
        "0/1",
        "0/2",
        "0/2",
        "0/3",
        "0/3",
    ]
    assert len({sample.rollout_id for sample in batch.samples}) == 6
    counts = TrainedCounts.of(batch.samples)
    assert counts.groups == 3
    assert counts.samples == 6
    assert counts.rollouts == 6
    chosen, rejected = batch.samples[:2]
    context = np.flatnonzero(chosen.loss_mask_T)[0]
    assert chosen.tokens_T[:context].tolist() == rejected.tokens_T[:context].tolist()
    assert data.tokenizer.shown(chosen).endswith(
        "2+2?<|im_end|>\n<|im_start|>assistant\n[[4<|im_end|>]]"
    )


def test_batch_across_the_end_of_an_epoch_repeats_a_row(
    tmp_path: Path, model: Path
) -> None:
    data = dataset(tmp_path, model, [{"messages": [ASK, reply("4")]}], batch_size=3)
    batch = data.step(2).batch
    assert [sample.group_id for sample in batch.samples] == ["3/1", "4/1", "5/1"]
    assert batch.batch_id == 2
    assert batch.version == 1


def test_labelled_row_carries_its_label_as_a_number(
    tmp_path: Path, model: Path
) -> None:
    rows = [
        {"messages": [ASK, reply("4")], "label": True},
        {"messages": [ASK, reply("5")], "label": False},
    ]
    data = dataset(tmp_path, model, rows, objective="kto", batch_size=2, shuffle=False)
    assert [sample.numbers for sample in data.step(1).batch.samples] == [
        {"desirable": 1.0},
        {"desirable": 0.0},
    ]
    alone = dataset(tmp_path, model, rows, objective="kto", batch_size=1)
    assert alone.step(1).batch.samples == (), "kto compares rows"
    assert alone.step(1).skipped == 1, "kto compares rows"


def test_tokens_of_a_file_have_no_engine_logprobs(tmp_path: Path, model: Path) -> None:
    [sample] = (
        dataset(tmp_path, model, [{"messages": [ASK, reply("4")]}], batch_size=1)
        .step(1)
        .batch.samples
    )
    assert not sample.rollout_logprobs_T.any()
    assert np.array_equal(sample.versions_T, np.where(sample.loss_mask_T, 0, -1))
    assert sample.temperature == 1.0
    assert sample.reward == 0.0
    assert sample.numbers == {}


@pytest.mark.parametrize(
    ("objective", "data_kind", "kind"),
    [
        ("sft", "auto", "conversations"),
        ("my:own", "auto", "pairs"),
        ("my:own", "pairs", "pairs"),
    ],
)
def test_kind_of_a_row_follows_from_the_objective(
    tmp_path: Path, model: Path, objective: str, data_kind: Any, kind: str
) -> None:
    row: dict[str, Any] = {"messages": [ASK, reply("4")]}
    if kind == "pairs":
        row = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}
    data = dataset(tmp_path, model, [row], objective=objective, kind=data_kind)
    assert data.tokenizer.kind == kind


LONG = {"messages": [ASK, reply("4 " * 300)]}
SHORT = {"messages": [ASK, reply("4")]}


def test_a_row_that_is_too_long_is_skipped_and_counted(
    tmp_path: Path, model: Path
) -> None:
    data = dataset(tmp_path, model, [SHORT, LONG, SHORT], batch_size=3, shuffle=False)
    step = data.step(1)
    assert len(step.batch.samples) == 2
    assert step.rows == 3
    assert step.skipped == 1
    assert step.unusable == ()
    assert "3 rows" in data.check_tokens()


def test_a_row_that_is_too_long_is_cut(tmp_path: Path, model: Path) -> None:
    data = dataset(tmp_path, model, [LONG], batch_size=1, overlong="truncate")
    [sample] = data.step(1).batch.samples
    assert len(sample.tokens_T) == 200
    assert sample.loss_mask_T[-1]
    prompt = {"messages": [{"role": "user", "content": "2 " * 300}, reply("4")]}
    data = dataset(tmp_path, model, [prompt, SHORT], batch_size=2, overlong="truncate")
    assert data.step(1).skipped == 1, "nothing of it would be trained"


def test_a_row_that_is_too_long_is_refused(tmp_path: Path, model: Path) -> None:
    data = dataset(tmp_path, model, [SHORT, LONG], batch_size=2, overlong="refuse")
    with pytest.raises(
        ConfigError, match=r"line 2: it has \d+ tokens, and 200 are the most"
    ):
        data.check_tokens()
    with pytest.raises(ConfigError, match="line 2"):
        data.step(1)


def test_data_file_with_only_too_long_rows_is_refused(
    tmp_path: Path, model: Path
) -> None:
    with pytest.raises(ConfigError, match="none of 1 rows has 200 tokens or fewer"):
        dataset(tmp_path, model, [LONG]).check_tokens()
    (tmp_path / "held_out.jsonl").write_text(json.dumps(LONG))
    held_out = {"eval_path": str(tmp_path / "held_out.jsonl")}
    with pytest.raises(ConfigError, match="all 1 held-out rows are longer") as caught:
        dataset(tmp_path, model, [SHORT], **held_out).check_tokens()
    assert caught.value.field == "data.eval_path"


def test_pair_with_one_too_long_side_is_skipped(tmp_path: Path, model: Path) -> None:
    pair = {"prompt": "2+2?", "chosen": "4", "rejected": "4 " * 300}
    step = dataset(tmp_path, model, [pair], objective="dpo", batch_size=1).step(1)
    assert step.batch.samples == ()
    assert step.skipped == 1


REFUSING = "{{ raise_exception('no digits') if '7' in messages[-1].content }}"


def test_row_that_the_template_refuses_is_skipped_and_named(
    tmp_path: Path, model: Path
) -> None:
    """Found before the start where it is looked at; later it is left out and
    counted."""
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (tmp_path / "template.jinja").write_text(REFUSING + settings["chat_template"])
    rows = [SHORT, {"messages": [ASK, reply("7")]}, SHORT]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    renderer = load_renderer(
        str(model),
        512,
        chat_template=str(tmp_path / "template.jinja"),
        keep_thinking=True,
        special_tokens_in_content="plain",
    )
    config = DataConfig(data_path=str(tmp_path / "rows.jsonl"), batch_size=3)
    data = load_dataset(config, "sft", renderer, max_tokens=200, seed=0)
    with pytest.raises(ConfigError, match=r"line 2: .*no digits"):
        data.check_tokens()
    step = data.step(1)
    assert len(step.batch.samples) == 2
    [sentence] = step.unusable
    assert "line 2" in sentence
    assert "no digits" in sentence


def test_held_out_rows_are_one_batch(tmp_path: Path, model: Path) -> None:
    rows = [{"messages": [ASK, reply(str(number))]} for number in range(20)]
    data = dataset(tmp_path, model, rows, eval_fraction=0.2, batch_size=16)
    held_out = data.held_out_batch()
    assert held_out is not None
    trained = {sample.tokens_T.tobytes() for sample in data.step(1).batch.samples}
    kept_out = {sample.tokens_T.tobytes() for sample in held_out.samples}
    assert len(trained) == 16
    assert len(kept_out) == 4
    assert not trained & kept_out
    assert dataset(tmp_path, model, rows).held_out_batch() is None
    with pytest.raises(ConfigError, match="nothing would be left to train on"):
        dataset(tmp_path, model, rows[:1], eval_fraction=0.5)
