"""Held-out tasks that are training tasks too are found, and files that only look alike
are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from invrl.cli.checks.check_warnings import CheckWarning
from invrl.cli.checks.task_checks import check_held_out_apart
from invrl.rollout.tasks.held_out_overlap import shared_tasks
from invrl.run.settings.config import Config, Source, resolve
from invrl.types.tasks import Json, Task

ROWS: list[dict[str, Json]] = [
    {"question": f"{n} + 1?", "label": n + 1} for n in range(10)
]


def tasks(rows: list[dict[str, Json]]) -> list[Task]:
    return [Task(id=str(row.get("id", n)), payload=row) for n, row in enumerate(rows)]


def numbered(rows: list[dict[str, Json]], prefix: str = "") -> list[dict[str, Json]]:
    return [{"id": f"{prefix}{n}", **row} for n, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("training", "held_out", "shared"),
    [
        (ROWS, ROWS, 10),
        (ROWS[:6], ROWS[4:], 2),
        (ROWS[:6], ROWS[6:], 0),
        (numbered(ROWS[:5]), numbered(ROWS[5:]), 0),
        (numbered(ROWS[:5], "train-"), numbered(ROWS[5:], "train-"), 0),
        (numbered(ROWS, "train-"), numbered(ROWS, "test-"), 10),
        (
            [{**row, "split": "train"} for row in ROWS],
            [{**row, "split": "test"} for row in ROWS],
            10,
        ),
        (
            [{"id": "france", "q": "capital?"}, {"id": "italy", "q": "which?"}],
            [{"id": "france", "q": "the capital?"}, {"id": "spain", "q": "and Spain?"}],
            1,
        ),
        (
            [
                {"extra_info": {"split": "train", "index": n}, **row}
                for n, row in enumerate(ROWS)
            ],
            [
                {"extra_info": {"split": "test", "index": n}, **row}
                for n, row in enumerate(ROWS[5:])
            ],
            5,
        ),
        (
            [
                {"index": n, "prompt": [{"content": row["question"]}]}
                for n, row in enumerate(ROWS[:5])
            ],
            [
                {"index": n, "prompt": [{"content": row["question"]}]}
                for n, row in enumerate(ROWS[5:])
            ],
            0,
        ),
        (
            [{"index": n} for n in range(5)],
            [{"index": n} for n in range(4, 9)],
            1,
        ),
        (
            [{"problem_id": n, "kind": "hard"[: n % 2]} for n in range(6)],
            [{"problem_id": n, "kind": "hard"[: n % 2]} for n in range(6, 9)],
            0,
        ),
        (ROWS, [{**row, "question": f" {row['question']}\n"} for row in ROWS], 10),
        (ROWS[:1], ROWS[:1], 1),
        (ROWS[:1], ROWS[1:2], 0),
        ([], ROWS, 0),
    ],
)
def test_tasks_are_the_same_by_content_or_by_a_name(
    training: list[dict[str, Json]], held_out: list[dict[str, Json]], shared: int
) -> None:
    assert len(shared_tasks(tasks(training), tasks(held_out), id_key="id")) == shared


def configuration(**rollout: Any) -> Config:
    return resolve(
        Source(
            name="test", tables={"rollout": {"rollout_function_path": "a:b", **rollout}}
        )
    )


def written(file: Path, rows: list[dict[str, Json]]) -> str:
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return str(file)


def test_the_training_file_as_the_held_out_file_is_doubted(tmp_path: Path) -> None:
    file = written(tmp_path / "tasks.jsonl", ROWS)
    other = written(
        tmp_path / "other.jsonl",
        [{"question": f"{n} - 1?", "label": n - 1} for n in range(3)],
    )
    with pytest.raises(
        CheckWarning, match="10 of 10 held-out tasks are training tasks too"
    ):
        check_held_out_apart(
            configuration(
                task_file=file,
                eval={"task_file": file, "tasks": 10},
            )
        )
    sets = f"new={other},seen={file}"
    with pytest.raises(CheckWarning, match="too: what") as caught:
        check_held_out_apart(
            configuration(
                task_file=file,
                eval={"sets": sets, "tasks": 3},
            )
        )
    assert caught.value.reason.startswith("3 of 3 held-out tasks of the set seen are")
    apart = configuration(
        task_file=file,
        eval={"task_file": other, "tasks": 3},
    )
    assert check_held_out_apart(apart) == "others than those of training"


SOURCE = """
from invrl.types import Task

def same(split, seed):
    for n in range(100):
        yield Task(id=str(n), payload={"n": n}, split=split)

def apart(split, seed):
    first = 0 if split == "train" else 20
    for n in range(first, first + 100):
        yield Task(id=str(n), payload={"n": n}, split=split)
"""


def test_a_source_that_ignores_the_split_is_doubted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a few tasks of a source come in both splits, its author may have meant
    it."""
    (tmp_path / "overlapping_source.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CheckWarning, match="64 of 100 held-out tasks"):
        check_held_out_apart(
            configuration(
                task_source_path="overlapping_source:same", eval={"tasks": 100}
            )
        )
    check_held_out_apart(
        configuration(task_source_path="overlapping_source:apart", eval={"tasks": 100})
    )
