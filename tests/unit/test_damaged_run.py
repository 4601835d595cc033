"""Files of a run folder that are not what was written: every one is named, none is
loaded."""

from __future__ import annotations

import json
import random
import re
import sqlite3
from pathlib import Path

import msgspec
import pytest
from run_config import config
from slow_cases import first_quick

from invrl.buffer.groups.snapshot import BufferSnapshot
from invrl.buffer.ledger.ledger_store import LedgerStore, read_incarnations, read_ledger
from invrl.cli import main as cli
from invrl.errors import ConfigError, DamagedFileError, RunStoreError
from invrl.run.checkpoints.checkpoint import Checkpoint, check_served
from invrl.run.checkpoints.checkpoints import Checkpoints
from invrl.run.checkpoints.store_check import check_checkpoint_store, check_store
from invrl.run.settings.folder import make_run_folder
from invrl.store.batch_file import batch_path, rename_lost_batches, saved_steps
from invrl.store.manifest import MANIFEST_NAME, check_manifest
from invrl.store.metrics_file import read_metrics
from invrl.store.schema import connect
from invrl.types.weights import WeightVersion

NO_MODEL = Path("/nowhere")
"""Nothing is compared with it: the checkpoints have no config.json."""


def write(checkpoints: Checkpoints, step: int) -> Checkpoint:
    filling = checkpoints.begin(step)
    (filling.megatron / "rng").mkdir(parents=True)
    filling.hugging_face.mkdir()
    draw = random.Random(step)
    for name in ("__0_0.distcp", ".metadata", "common.pt", "rng/rank-0.pt"):
        (filling.megatron / name).write_bytes(draw.randbytes(5000))
    (filling.hugging_face / "model.safetensors").write_bytes(draw.randbytes(20_000_000))
    filling.buffer.write_bytes(draw.randbytes(100))
    return checkpoints.commit(filling, {})


def files_of(checkpoint: Checkpoint) -> list[str]:
    paths = (path for path in checkpoint.path.rglob("*") if path.is_file())
    return sorted(path.relative_to(checkpoint.path).as_posix() for path in paths)


EVERY_FILE = [
    "buffer.json",
    "hugging_face/model.safetensors",
    "manifest.json",
    "megatron/.metadata",
    "megatron/__0_0.distcp",
    "megatron/common.pt",
    "megatron/rng/rank-0.pt",
]


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    place = random.Random(str(path)).randrange(len(content))
    content[place] ^= 1 << random.Random(0).randrange(8)
    path.write_bytes(content)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", first_quick([flip_a_bit, cut_short, empty, remove]))
@pytest.mark.parametrize("name", EVERY_FILE)
def test_damaged_checkpoint_is_put_aside_and_the_previous_one_is_used(
    tmp_path: Path, name: str, damage
) -> None:
    checkpoints = Checkpoints(tmp_path)
    older = write(checkpoints, 4)
    newer = write(checkpoints, 8)
    assert files_of(newer) == EVERY_FILE
    damage(newer.path / name)
    notes: list[str] = []
    assert checkpoints.newest_whole(notes.append, NO_MODEL) == older
    [line] = notes
    assert "checkpoint of step 8 is damaged" in line
    assert "Steps 5 to 8 are lost" in line
    if name != MANIFEST_NAME:
        assert Path(name).name in line
    assert "step-000008.damaged" in line
    assert (tmp_path / "step-000008.damaged").is_dir(), "kept, not deleted"
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [4]
    assert checkpoints.newest_whole(notes.append, NO_MODEL) == older
    assert len(notes) == 1


def make_newer(checkpoint: Checkpoint) -> None:
    """As a later version of invrl would write it."""
    path = checkpoint.path / MANIFEST_NAME
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "format": 2, "unknown": "field"}))


def save_config(checkpoints: Checkpoints, step: int, **changes: object) -> Checkpoint:
    filling = checkpoints.begin(step)
    filling.megatron.mkdir()
    filling.hugging_face.mkdir()
    write_config(filling.hugging_face, **changes)
    return checkpoints.commit(filling, {})


def write_config(folder: Path, **changes: object) -> None:
    architecture = {
        "model_type": "llama",
        "vocab_size": 8,
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "max_position_embeddings": 8,
    }
    (folder / "config.json").write_text(json.dumps({**architecture, **changes}))


def test_checkpoint_of_a_newer_format_is_put_aside_for_the_previous_one(
    tmp_path: Path,
) -> None:
    checkpoints = Checkpoints(tmp_path)
    older = write(checkpoints, 4)
    newer = write(checkpoints, 8)
    make_newer(newer)
    notes: list[str] = []
    assert checkpoints.newest_whole(notes.append, NO_MODEL) == older
    [line] = notes
    assert (
        "manifest.json: it is of format 2, and this version of invrl reads formats up to 1"
        in line
    )
    assert "kept as step-000008.refused" in line
    make_newer(older)
    with pytest.raises(
        DamagedFileError,
        match=r"step-000004/manifest.json: it is of format 2.*Fix: use the",
    ):
        checkpoints.newest_whole(notes.append, NO_MODEL)
    assert older.path.is_dir(), "the version that wrote it finds it"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3, and in .*model it is 2"),
        (
            {"model_type": "qwen2"},
            "model_type is 'qwen2', and in .*model it is 'llama'",
        ),
        ({"rope_theta": 5.0}, "rope is "),
    ],
)
def test_checkpoint_of_another_model_is_put_aside_for_the_previous_one(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_config(model, dtype="bfloat16")
    checkpoints = Checkpoints(tmp_path / "run")
    older = save_config(checkpoints, 4, dtype="float32", eos_token_id=7)
    save_config(checkpoints, 8, **changes)
    notes: list[str] = []
    assert checkpoints.newest_whole(notes.append, model) == older
    [line] = notes
    assert re.search(
        f"step 8 cannot be used: config.json: it is of another model: {reason}", line
    )
    write_config(model, num_hidden_layers=5)
    with pytest.raises(DamagedFileError, match="another model: num_hidden_layers is 2"):
        checkpoints.newest_whole(notes.append, model)
    assert older.path.is_dir(), "the right model finds it"


def test_whole_checkpoint_is_used_without_a_message(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest_whole(pytest.fail, NO_MODEL) is None
    newest = write(checkpoints, 8)
    assert checkpoints.newest_whole(pytest.fail, NO_MODEL) == newest
    size = sum(
        (newest.path / name).stat().st_size
        for name in EVERY_FILE
        if name != MANIFEST_NAME
    )
    assert check_manifest(newest.path) == size, "every byte is read"


def test_run_without_a_whole_checkpoint_is_refused_each_time(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (4, 8):
        flip_a_bit(write(checkpoints, step).buffer)
    for _ in range(2):
        with pytest.raises(
            DamagedFileError,
            match=r"step-000004.damaged, step-000008.damaged.*--run-name",
        ):
            checkpoints.newest_whole(lambda _: None, NO_MODEL)


def test_second_damaged_checkpoint_of_a_step_is_kept_under_a_new_name(
    tmp_path: Path,
) -> None:
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 4)
    for _ in range(3):
        remove(write(checkpoints, 8).buffer)
        checkpoints.newest_whole(lambda _: None, NO_MODEL)
    names = sorted(path.name for path in tmp_path.iterdir())
    ends = ["", "8.damaged", "8.damaged-2", "8.damaged-3"]
    assert names == ["step-000004", *(f"step-00000{end}" for end in ends[1:])]


def test_damaged_checkpoint_is_not_removed_by_keep(tmp_path: Path) -> None:
    """`keep` is of whole ones; a damaged one is neither kept in its place nor
    removed."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (2, 4):
        write(checkpoints, step)
    remove(tmp_path / "step-000004" / "buffer.json")
    checkpoints.newest_whole(lambda _: None, NO_MODEL)
    write(checkpoints, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-000002",
        "step-000004",
        "step-000004.damaged",
    ]


def test_served_checkpoint_is_checked_except_for_files_that_are_not_served(
    tmp_path: Path,
) -> None:
    newest = write(Checkpoints(tmp_path), 8)
    flip_a_bit(newest.buffer)
    check_served(newest.hugging_face)
    flip_a_bit(newest.hugging_face / "model.safetensors")
    with pytest.raises(
        ConfigError,
        match=r"model\.safetensors: its checksum is [0-9a-f]{32}, and [0-9a-f]{32} was written",
    ):
        check_served(newest.hugging_face)
    (tmp_path / "hugging_face").mkdir()
    check_served(tmp_path / "hugging_face")  # of no checkpoint


# --------------------------------------------------------------------- the store


def snapshot(*, incarnation: int, outbox_seq: int = 0) -> bytes:
    return msgspec.json.encode(
        BufferSnapshot(
            version=WeightVersion(3),
            trained=WeightVersion(4),
            groups_leased=0,
            batches_taken=4,
            in_flight=(),
            ready=(),
            counts={},
            dropped={},
            failed={},
            sequence=7,
            incarnation=incarnation,
            outbox_seq=outbox_seq,
        )
    )


def store(path: Path, incarnations: int = 1, rows: int = 400) -> Path:
    """Of several pages, and with its log in it."""
    ledger = LedgerStore(path)
    for _ in range(incarnations):
        ledger.begin(parent=0, step=0, sequence=0)
    db = connect(path)
    for number in range(rows):
        db.execute(
            "INSERT INTO outbox (session_id, failed, outcome) VALUES (?,0,?)",
            (f"s{number}", b"x" * 900),
        )
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    return path


CHECKPOINT = Path("/run/checkpoints/step-000004")


def damage_pages(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for page in range(2, len(content) // 4096 - 1):
        content[page * 4096 : page * 4096 + 64] = b"\xa5" * 64
    path.write_bytes(content)


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garbage(path: Path) -> None:
    path.write_bytes(b"\xa5" * path.stat().st_size)


@pytest.mark.parametrize("damage", [damage_pages, cut_in_half, garbage, empty, remove])
def test_store_that_contradicts_the_checkpoint_is_named_with_a_fix(
    tmp_path: Path, damage
) -> None:
    path = store(tmp_path / "run.sqlite")
    check_checkpoint_store(path, CHECKPOINT, snapshot(incarnation=1, outbox_seq=400))
    damage(path)
    with pytest.raises(DamagedFileError) as error:
        check_checkpoint_store(path, CHECKPOINT, snapshot(incarnation=1))
    assert str(error.value).startswith(f"{path}: ")
    assert f"begin a new run: --run-name NEW --model-path {CHECKPOINT}" in str(
        error.value
    )
    assert path.exists() == (damage is not remove), "it is not made anew"


@pytest.mark.parametrize(
    ("incarnation", "row"),
    [
        (2, 0),
        (1, 401),
    ],
)
def test_older_copy_of_the_store_is_refused(
    tmp_path: Path, incarnation: int, row: int
) -> None:
    path = store(tmp_path / "run.sqlite")
    with pytest.raises(DamagedFileError, match="older, or another run's"):
        check_checkpoint_store(
            path, CHECKPOINT, snapshot(incarnation=incarnation, outbox_seq=row)
        )


def test_incarnation_continues_only_from_an_incarnation_of_the_store(
    tmp_path: Path,
) -> None:
    ledger = LedgerStore(tmp_path / "run.sqlite")
    with pytest.raises(RunStoreError, match="the checkpoint is of incarnation 1"):
        ledger.begin(parent=1, step=4, sequence=7)
    assert read_incarnations(tmp_path / "run.sqlite") == []


def test_circular_incarnations_are_refused(tmp_path: Path) -> None:
    """A store from before that check: its only incarnation is its own parent."""
    path = store(tmp_path / "run.sqlite")
    with sqlite3.connect(path) as db:
        db.execute("UPDATE incarnations SET parent=1")
    with pytest.raises(RunStoreError, match="incarnation 1 resumed from incarnation 1"):
        read_ledger(path)


@pytest.mark.parametrize("damage", [damage_pages, garbage, remove])
def test_ledger_command_reports_a_damaged_store_in_one_line(
    tmp_path: Path, damage, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run_folder(config(tmp_path, "r"))
    store(folder.store_path)
    assert cli.main(["ledger", str(folder.path)]) == 0
    damage(folder.store_path)
    capsys.readouterr()
    assert cli.main(["ledger", str(folder.path)]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"invrl: {folder.store_path}: ")
    assert len(captured.err.splitlines()) == 1
    assert folder.store_path.exists() == (damage is not remove)


def test_whole_store_passes_the_check(tmp_path: Path) -> None:
    check_store(store(tmp_path / "run.sqlite"))


# ------------------------------------------------------------------- metrics, batches


def test_damaged_metrics_lines_are_left_out_and_the_file_is_kept(
    tmp_path: Path,
) -> None:
    folder = make_run_folder(config(tmp_path, "r"))
    lines = [json.dumps({"step": step, "time": 1.0}).encode() for step in range(1, 6)]
    lines[2] = b'{"step": 3, "ti\xff\xfe\x00'
    content = b"\n".join(lines) + b"\n"
    folder.metrics_path.write_bytes(content)
    finding = folder.rewind_metrics(4)
    assert finding.startswith("1 damaged lines of")
    assert (folder.path / "metrics.jsonl.damaged").read_bytes() == content
    assert [row["step"] for row in read_metrics(folder.metrics_path)] == [1, 2, 4]
    assert folder.rewind_metrics(4) == ""


def test_torn_last_metrics_line_does_not_count_as_damage(tmp_path: Path) -> None:
    folder = make_run_folder(config(tmp_path, "r"))
    folder.metrics_path.write_bytes(b'{"step": 1}\n{"step": 2, "ti')
    assert folder.rewind_metrics(1) == ""
    assert not (folder.path / "metrics.jsonl.damaged").exists()


def test_missing_metrics_are_reported_after_the_first_step(tmp_path: Path) -> None:
    folder = make_run_folder(config(tmp_path, "r"))
    assert folder.rewind_metrics(0) == ""
    folder.metrics_path.write_text(
        "".join(f'{{"step": {step}}}\n' for step in range(1, 4))
    )
    assert folder.rewind_metrics(3) == ""
    assert "was cut: it has no rows of steps 4 to 6" in folder.rewind_metrics(6)
    assert folder.rewind_metrics(2) == "rows of steps 3 to 3 are cut from metrics.jsonl"
    folder.metrics_path.unlink()
    assert "is missing" in folder.rewind_metrics(4)
    assert folder.metrics_path.read_bytes() == b""


@pytest.mark.parametrize(
    "name", ["step-000003 (copy).batch", "step-3.batch", "step-new.batch"]
)
def test_unexpected_batch_file_is_named(tmp_path: Path, name: str) -> None:
    for step in (1, 2):
        batch_path(tmp_path, step).touch()
    (tmp_path / name).touch()
    with pytest.raises(ConfigError) as error:
        saved_steps(tmp_path, after_step=0)
    assert name in error.value.reason


def test_batches_of_a_lost_incarnation_are_put_aside(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        batch_path(tmp_path, step).touch()
    aside = rename_lost_batches(tmp_path, after_step=2)
    assert [path.name for path in aside] == [
        "step-000003.batch.lost",
        "step-000004.batch.lost",
    ]
    assert saved_steps(tmp_path, after_step=0) == [1, 2]
