"""Tasks from a file or a source: the same for the same seed, ids distinct, mistakes
named."""

from __future__ import annotations

import datetime
import decimal
import json
from itertools import islice

import pyarrow
import pyarrow.parquet
import pytest

from invrl.buffer.groups.task_feed import TaskFeed
from invrl.errors import ConfigError, PluginError
from invrl.rollout.config import EvalConfig, RolloutConfig
from invrl.rollout.tasks.tasks import (
    check_tasks,
    held_out_only,
    load_eval_tasks,
    load_tasks,
)
from invrl.types.tasks import Task


def rows(n):
    return "\n".join(
        json.dumps({"id": f"q{i}", "question": f"{i}?", "label": i}) for i in range(n)
    )


@pytest.fixture
def task_file(tmp_path):
    def write(text, name="tasks.jsonl"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def from_file(path, **fields):
    return RolloutConfig(task_file=path, **fields)


def ids(tasks, n):
    return [task.id for task in islice(tasks, n)]


def fed_ids(tasks, n):
    """The ids that groups get: `ids` with what tells repeats apart."""
    feed = TaskFeed(tasks)
    fed = [feed.next() for _ in range(n)]
    assert [task.source_id for task in fed] == [
        task.task.id.split("@")[0] for task in fed
    ]
    return [task.task.id for task in fed]


def test_train_repeats_in_seeded_epochs_with_distinct_ids(task_file):
    config = from_file(task_file(rows(10)))
    first = fed_ids(load_tasks(config, "train", 7), 30)
    assert (
        first
        == fed_ids(load_tasks(config, "train", 7), 30)
        != fed_ids(load_tasks(config, "train", 8), 30)
    )
    assert sorted(first[:10]) == sorted(f"q{i}" for i in range(10))
    assert sorted(first[10:20]) == sorted(f"q{i}@1" for i in range(10))
    assert sorted(first[20:]) == sorted(f"q{i}@2" for i in range(10))
    assert [i.split("@")[0] for i in first[10:20]] != first[:10]


def test_a_task_keeps_its_row_and_label(task_file):
    path = task_file('{"uid": 5, "gold": [1, 2], "q": "a\u2028b"}\n\n')
    config = from_file(path, task_id_key="uid", task_label_key="gold")
    task = next(load_tasks(config, "train", 0))
    assert task == Task(
        id="5",
        payload={
            "uid": 5,
            "gold": [1, 2],
            "q": "a\u2028b",
        },
        label=[1, 2],
    )


def test_task_without_an_id_is_named_by_its_line_number(task_file):
    config = from_file(None, eval={"task_file": task_file('{"q": 1}\n\n{"q": 2}\n')})
    assert [(t.id, t.label, t.split) for t in load_tasks(config, "eval", 0)] == [
        ("1", None, "eval"),
        ("3", None, "eval"),
    ]


@pytest.mark.parametrize(
    ("text", "fields", "seen"),
    [
        ("", {}, "has no tasks"),
        ("\n  \n", {}, "has no tasks"),
        ('{"id": 1}\nnot json', {}, "line 2 is not JSON"),
        ('{"id": 1}\n\n[1]', {}, "line 3 is a JSON list"),
        ("null", {}, "line 1 is a JSON NoneType"),
        ('{"id": 1}\n{"q": 1}', {}, "line 2 has no field 'id'"),
        ('{"id": 1, "label": 1}\n{"id": 2}', {}, "line 2 has no field 'label'"),
        (
            '{"id": 1, "q": 1}',
            {"task_label_key": "gold"},
            "line 1 has no field 'gold' (line 1 has: id, q)",
        ),
        ('{"q": 1}', {"task_id_key": "uid"}, "line 1 has no field 'uid'"),
        ('{"id": 1}\n{"id": 2}\n{"id": "1"}', {}, "lines 1 and 3 have the same id '1'"),
        ('{"id": [1]}', {}, "the id [1] is not a string or integer"),
        ('{"id": true}', {}, "the id True is not a string or integer"),
        ('{"id": ""}', {}, "the id '' is not"),
        ('{"id": "\\ud800"}', {}, "is not a string or integer that can be used"),
    ],
)
def test_error_in_a_task_file_names_its_line(task_file, text, fields, seen):
    with pytest.raises(ConfigError) as caught:
        check_tasks(from_file(task_file(text), **fields), seed=0)
    assert seen in caught.value.reason
    assert caught.value.field == "task_file"


def test_missing_and_binary_task_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        check_tasks(from_file(str(tmp_path / "none.jsonl")), seed=0)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        check_tasks(from_file(str(tmp_path / "binary")), seed=0)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"task_file": "a", "task_source_path": "b:c"},
    ],
)
def test_two_sources_of_tasks_are_refused(fields):
    with pytest.raises(ConfigError, match="give one of"):
        check_tasks(RolloutConfig(**fields), seed=0)


def test_an_evaluation_needs_held_out_tasks_and_enough_of_them(task_file):
    train = task_file(rows(3))
    with pytest.raises(ConfigError, match=r"eval\.task_file"):
        check_tasks(from_file(train, eval={"tasks": 2}), seed=0)
    config = from_file(
        train,
        eval={"task_file": task_file(rows(3), "eval.jsonl"), "tasks": 4},
    )
    with pytest.raises(ConfigError, match="has 3 tasks"):
        check_tasks(config, seed=0)
    fewer = EvalConfig(task_file=config.eval.task_file, tasks=2)
    assert [
        t.id
        for t in load_eval_tasks(
            config.model_copy(update={"eval": fewer}),
            0,
        )
    ] == ["q0", "q1"]


# ----------------------------------------------------------------- sources


def endless(split, seed):
    for i in range(1000):
        yield Task(id=f"{seed}-{i}", payload={}, split=split)


def three_then_ends(split, seed):
    return iter([Task(id=name, payload={}) for name in "abc"])


def nothing(split, seed):
    return iter(())


def no_tasks_but_strings(split, seed):
    yield "What is 1+1?"


def broken(split, seed):
    yield Task(id="a", payload={}) if split == "train" else 1 / 0


def bad_id(split, seed):
    yield Task(id="", payload={})


def raises_at_once(split, seed):
    raise OSError("the dataset is not there")


def from_source(function, **fields):
    return RolloutConfig(task_source_path=f"{__name__}:{function.__name__}", **fields)


def test_task_source_is_called_with_split_and_seed():
    assert ids(load_tasks(from_source(endless), "train", 3), 2) == ["3-0", "3-1"]


def test_training_source_that_ends_is_restarted():
    assert ids(load_tasks(from_source(three_then_ends), "train", 0), 5) == [
        "a",
        "b",
        "c",
        "a",
        "b",
    ]
    assert fed_ids(load_tasks(from_source(three_then_ends), "train", 0), 5) == [
        "a",
        "b",
        "c",
        "a@1",
        "b@1",
    ]
    assert ids(load_tasks(from_source(three_then_ends), "eval", 0), 5) == [
        "a",
        "b",
        "c",
    ]


@pytest.mark.parametrize(
    ("function", "seen"),
    [
        (nothing, "has no tasks"),
        (no_tasks_but_strings, "yielded a str"),
        (bad_id, "task id ''"),
        (broken, "ZeroDivisionError"),
        (raises_at_once, "not there"),
    ],
)
def test_bad_task_source_is_a_plugin_error(function, seen):
    with pytest.raises(PluginError) as caught:
        check_tasks(from_source(function, eval={"tasks": 1}), seed=0)
    assert seen in caught.value.reason
    assert caught.value.field == "task_source_path"


def test_calculator_source_passes_the_task_check():
    check_tasks(
        RolloutConfig(
            task_source_path="rollout_fns.calculator:task_source",
            eval=EvalConfig(tasks=200),
        ),
        seed=0,
    )


# ----------------------------------------------------------------- Parquet


def parquet_file(path, columns, **options):
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **options)
    return str(path)


def test_parquet_rows_equal_those_of_jsonl(tmp_path, task_file):
    columns = {
        "id": [7, 8],
        "label": [["a", "b"], []],
        "chat": [[{"role": "user", "content": "1+1?"}], None],
        "score": [0.5, 1.0],
    }
    text = "\n".join(
        json.dumps(
            {name: values[n] for name, values in columns.items()}, ensure_ascii=False
        )
        for n in range(2)
    )
    expected = list(
        load_tasks(RolloutConfig(eval=EvalConfig(task_file=task_file(text))), "eval", 0)
    )
    file = parquet_file(tmp_path / "t.parquet", columns)
    assert (
        list(load_tasks(RolloutConfig(eval=EvalConfig(task_file=file)), "eval", 0))
        == expected
    )
    config = from_file(
        file,
        eval={"task_file": file, "tasks": 2},
    )
    check_tasks(config, seed=0)
    assert next(load_tasks(config, "train", 3)).payload["score"] in (0.5, 1.0)


def test_parquet_values_without_a_json_type_become_text(tmp_path):
    day = datetime.datetime(2026, 2, 3, 4, 5)
    price = decimal.Decimal("1.25")
    columns = {
        "when": [day],
        "price": [price],
        "pairs": pyarrow.array([[("k", 1)]], pyarrow.map_("string", "int8")),
    }
    task = next(
        load_tasks(from_file(parquet_file(tmp_path / "t.parquet", columns)), "train", 0)
    )
    assert task.payload == {
        "when": "2026-02-03T04:05:00",
        "price": 1.25,
        "pairs": [["k", 1]],
    }
    assert json.loads(json.dumps(task.payload)) == task.payload
    assert task.id == "1"
    assert task.label is None


def test_error_in_a_parquet_file_names_its_row(tmp_path):
    def refused(columns, **fields):
        with pytest.raises(ConfigError) as caught:
            check_tasks(
                from_file(parquet_file(tmp_path / "t.parquet", columns), **fields),
                seed=0,
            )
        assert caught.value.field == "task_file"
        return caught.value.reason

    assert "has no tasks" in refused({"id": pyarrow.array([], "int64")})
    assert "rows 1 and 2 have the same id '3'" in refused({"id": [3, 3]})
    assert "row 2: the id None is not" in refused({"id": ["a", None]})
    assert "row 1 has no field 'gold' (row 1 has: id)" in refused(
        {"id": [1]}, task_label_key="gold"
    )
    assert (
        "row 1 holds what JSON does not have: Type is not JSON serializable: bytes"
        in refused({"picture": [b"\xff"]})
    )


@pytest.mark.parametrize("content", [b"", b"PAR1 and no more", b'{"id": 1}\n', None])
def test_missing_or_invalid_parquet_file_is_refused(tmp_path, content):
    path = tmp_path / "t.parquet"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        check_tasks(from_file(str(path)), seed=0)
    assert "give a Parquet file" in caught.value.fix


def test_an_evaluation_without_tasks_names_its_own_flags() -> None:
    with pytest.raises(ConfigError) as caught:
        held_out_only(RolloutConfig())
    assert "--eval.sets NAME=FILE" in caught.value.fix
    assert "--task-file FILE" in caught.value.fix
    with pytest.raises(ConfigError) as caught:
        check_tasks(RolloutConfig(), 0)
    assert caught.value.fix == "give one of --task-source-path and --task-file"
