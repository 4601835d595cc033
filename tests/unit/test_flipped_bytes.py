"""A byte of a run's store or configuration that changed is found before anything is
trained with it."""

from __future__ import annotations

import contextlib
import random
import shutil
import sqlite3
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stored_rollouts import finish, summary_of

from invrl.errors import ConfigError, DamagedFileError
from invrl.run.checkpoints.store_check import check_store
from invrl.run.settings.config import Source, resolve
from invrl.run.settings.folder import make_run_folder
from invrl.run.settings.resolved_config import load_resolved
from invrl.store.run_store import RunStore
from invrl.store.run_store_writer import RunStoreWriter
from invrl.types.batches import TakenBatch
from invrl.types.extra_columns import ExtraNumbers
from invrl.types.groups import Group
from invrl.types.leases import GroupLease, GroupMember
from invrl.types.rollouts import Outcome, Rollout, RolloutSummary
from invrl.types.tasks import Task

_FLIPS = 120


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight rollouts of three turns, with numbers of tokens, in one file without a
    log."""
    path = tmp_path_factory.mktemp("store") / "run.sqlite"
    writer = RunStoreWriter(path)
    for group in range(2):
        members = tuple(GroupMember(index=index, attempt=0) for index in range(4))
        lease = GroupLease(
            group_id=f"g{group}", task=Task(id=f"t{group}", payload={}), members=members
        )
        for index in range(4):
            summary = summary_of(lease, index=index, attempt=0, version=group)
            finish(writer, replace(summary, num_turns=3))
            numbers = ExtraNumbers(
                token_numbers={f"{summary.session_id}/1": {"value": [0.5]}}
            )
            writer.add_numbers(summary.session_id, numbers).result(60)
    writer.close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.execute("PRAGMA journal_mode=DELETE")
    return path


def read(path: Path) -> tuple[list[Outcome], list[object]]:
    """What the buffer learns and what the trainer gets, in a form that can be compared.
    Raises DamagedFileError where a run would end, and leaves out what a run drops."""
    check_store(path)
    with contextlib.closing(RunStore(path)) as opened:
        outcomes = [outcome for _, outcome in opened.outbox_after(0)]
        summaries = [
            outcome for outcome in outcomes if isinstance(outcome, RolloutSummary)
        ]
        faults = opened.without_tokens(summaries)
        whole = [summary for summary in summaries if summary.session_id not in faults]
        groups = tuple(
            Group(id=one.session_id, task_id=one.task_id, rollouts_G=(one,))
            for one in whole
        )
        rollouts = opened.taken_rollouts(
            TakenBatch(batch_id=0, version=summaries[0].newest_version, groups=groups)
        )
        return outcomes, [comparable(rollout) for rollout in rollouts]


def comparable(rollout: Rollout) -> object:
    turns = [
        {name: getattr(turn, name) for name in turn.__dataclass_fields__}
        for trajectory in rollout.trajectories
        for turn in trajectory.turns
    ]
    return str((rollout.summary, turns, rollout.token_numbers))


def differences(path: Path, expected: tuple[list[Outcome], list[object]]) -> str:
    """How a run would be told; "" if it would train the same, "SILENT" if it would
    train something else."""
    try:
        outcomes, rollouts = read(path)
    except (DamagedFileError, sqlite3.DatabaseError) as error:
        return type(error).__name__
    if (
        any(rollout not in expected[1] for rollout in rollouts)
        or outcomes != expected[0]
    ):
        return "SILENT"
    if len(rollouts) < len(expected[1]):
        return "dropped"
    return ""


def flipped(path: Path, place: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


@pytest.mark.slow
def test_a_flip_anywhere_in_a_store_is_found_or_harmless(store: Path, tmp_path: Path):
    expected = read(store)
    assert [len(part) for part in expected] == [8, 8]
    chance = random.Random(28)
    content = store.read_bytes()
    # most of a small store is empty
    used = [place for place, byte in enumerate(content) if byte]
    verdicts: dict[str, int] = {}
    silent: list[int] = []
    for number in range(_FLIPS):
        place = chance.choice(used)
        copy = tmp_path / f"{number}.sqlite"
        shutil.copy(store, copy)
        flipped(copy, place, chance.randrange(8))
        verdict = differences(copy, expected)
        verdicts[verdict] = verdicts.get(verdict, 0) + 1
        if verdict == "SILENT":
            silent.append(place)
    assert not silent, verdicts
    assert verdicts.keys() > {"", "dropped"}, (
        "flips in values and flips in what nobody reads"
    )


_Change = Callable[[sqlite3.Connection], object]
_CHANGES: dict[str, tuple[_Change, str]] = {
    "a log-prob": (lambda db: flip_value(db, "turns", "logprobs"), "dropped"),
    "a sampled token": (lambda db: flip_value(db, "turns", "sampled_ids"), "dropped"),
    "a token of the context": (
        lambda db: flip_value(db, "turns", "context_ids"),
        "dropped",
    ),
    "a span": (
        lambda db: db.execute("UPDATE turns SET spans='[]' WHERE seq=1"),
        "dropped",
    ),
    "a temperature": (
        lambda db: db.execute("UPDATE turns SET temperature=1.1 WHERE seq=1"),
        "dropped",
    ),
    "a delivery": (
        lambda db: db.execute("UPDATE turns SET delivered=0 WHERE seq=1"),
        "dropped",
    ),
    "a message": (
        lambda db: db.execute("UPDATE turns SET messages='[ ]' WHERE seq=1"),
        "dropped",
    ),
    "a turn that is gone": (
        lambda db: db.execute("DELETE FROM turns WHERE seq=3"),
        "dropped",
    ),
    "the checksum of a turn": (
        lambda db: flip_value(db, "checksums", "checksum", "item LIKE 'turn/%'"),
        "dropped",
    ),
    "a number of a token": (
        lambda db: flip_value(db, "token_numbers", "numbers"),
        "dropped",
    ),
    "one copy of an outcome": (lambda db: flip_value(db, "outbox", "outcome"), ""),
    "the other copy": (lambda db: flip_value(db, "sessions", "outcome"), ""),
    "the checksum of an outcome": (
        lambda db: flip_value(db, "checksums", "checksum", "item LIKE 'out%'"),
        "",
    ),
    "whether it failed": (lambda db: db.execute("UPDATE outbox SET failed=1"), ""),
    "both copies of an outcome": (
        lambda db: (
            flip_value(db, "outbox", "outcome"),
            flip_value(db, "sessions", "outcome", bit=1),
        ),
        "DamagedFileError",
    ),
}


def flip_value(
    db: sqlite3.Connection, table: str, column: str, which: str = "1", *, bit: int = 0
) -> None:
    """One bit in the middle of the first such value."""
    sql = f"SELECT {column} FROM {table} WHERE {which} LIMIT 1"
    (value,) = db.execute(sql).fetchone()
    changed = bytearray(value)
    changed[len(changed) // 2] ^= 1 << bit
    db.execute(
        f"UPDATE {table} SET {column}=? WHERE {column}=?", (bytes(changed), value)
    )


@pytest.mark.parametrize("name", _CHANGES)
def test_a_change_of_each_part_has_its_verdict(store: Path, tmp_path: Path, name: str):
    expected = read(store)
    change, verdict = _CHANGES[name]
    copy = tmp_path / "run.sqlite"
    shutil.copy(store, copy)
    with contextlib.closing(sqlite3.connect(copy)) as db, db:
        change(db)
    assert differences(copy, expected) == verdict


def test_a_flip_anywhere_in_a_configuration_is_refused_or_harmless(tmp_path: Path):
    tables: dict[str, dict[str, Any]] = {
        "run": {"run_root": str(tmp_path), "run_name": "r"},
        "train": {"lr": 1e-5},
        "buffer": {"success_reward": 1.0},
        "sglang": {"mem-fraction-static": 0.7},
    }
    wanted = resolve(Source(name="test", tables=tables))
    path = make_run_folder(wanted).config_path
    content = path.read_bytes()
    chance = random.Random(28)
    settings_begin = content.index(b"\n[run]")
    refused = 0
    for number in range(_FLIPS):
        place = chance.randrange(settings_begin if number % 4 else 0, len(content))
        path.write_bytes(content)
        flipped(path, place, chance.randrange(8))
        try:
            loaded = load_resolved(path)
        except ConfigError:
            refused += 1
            continue
        assert loaded == wanted, content[place - 40 : place + 10]
    assert refused > _FLIPS / 2


@pytest.mark.parametrize(
    ("edited", "field"),
    [
        (("success_reward = 1.0", "success_reward = 1.2"), "buffer.success_reward"),
        (("\nlr = 1e-05", "\nlr = 1e-06"), "train.lr"),
        (("\nlr = 1e-05\n", "\n"), "[train]"),
    ],
)
def test_an_edited_setting_is_named_with_its_value_and_what_to_do(
    tmp_path: Path, edited: Sequence[str], field: str
):
    tables = {
        "run": {"run_root": str(tmp_path), "run_name": "r"},
        "train": {"lr": 1e-5},
    }
    path = make_run_folder(resolve(Source(name="test", tables=tables))).config_path
    text = path.read_text()
    assert edited[0] in text
    path.write_text(text.replace(edited[0], edited[1]))
    with pytest.raises(
        ConfigError, match="was changed since the run wrote it"
    ) as caught:
        load_resolved(path)
    assert caught.value.field == field
    assert "copy back" in caught.value.fix
    accepted = "".join(
        line
        for line in path.read_text().splitlines(keepends=True)
        if "# xxh3" not in line
    )
    path.write_text(accepted)
    assert load_resolved(path) == resolve(
        Source(name="edited", tables=tomllib.loads(accepted))
    )


@pytest.mark.parametrize("kept", [0, 1, 2000, 4000])
def test_a_cut_configuration_is_refused(tmp_path: Path, kept: int):
    tables = {"run": {"run_root": str(tmp_path), "run_name": "r"}}
    path = make_run_folder(resolve(Source(name="test", tables=tables))).config_path
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ConfigError):
        load_resolved(path)
