"""Run folders: one configuration each."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from run_config import config

from invrl.errors import ConfigError
from invrl.run.settings.config import Source, resolve
from invrl.run.settings.folder import check_run_folder, hold_run_folder, make_run_folder
from invrl.run.settings.resolved_config import load_resolved


def test_run_folder_holds_the_resolved_configuration_and_its_subfolders(
    tmp_path: Path,
) -> None:
    wanted = config(tmp_path, "first")
    folder = make_run_folder(wanted)
    assert folder.path == tmp_path / "first"
    assert load_resolved(folder.config_path) == wanted
    for path in (
        folder.checkpoints_path,
        folder.report_path,
        folder.log_path("x").parent,
    ):
        assert path.is_dir()


def test_a_new_folder_is_its_owner_s_alone_and_an_opened_one_stays_open(
    tmp_path: Path,
) -> None:
    before = os.umask(0)
    try:
        folder = make_run_folder(config(tmp_path / "root", "r"))
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    folder.path.chmod(0o755)  # a user shares it
    make_run_folder(config(tmp_path / "root", "r"))
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o755


def test_runs_of_the_same_second_get_different_folders(tmp_path: Path) -> None:
    folders = [make_run_folder(config(tmp_path)) for _ in range(3)]
    assert len({folder.path for folder in folders}) == 3


def test_same_configuration_reopens_a_run_folder_and_another_is_refused(
    tmp_path: Path,
) -> None:
    first = make_run_folder(config(tmp_path, "r", lr=0.5))
    first.metrics_path.write_text("kept")
    assert make_run_folder(config(tmp_path, "r", lr=0.5)) == first
    with pytest.raises(ConfigError, match=r"lr = 0\.25"):
        make_run_folder(config(tmp_path, "r", lr=0.25))
    assert first.metrics_path.read_text() == "kept"
    assert load_resolved(first.config_path).train.lr == 0.5


def test_folder_that_is_not_a_run_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(ConfigError, match="not a run folder"):
        make_run_folder(config(tmp_path, "photos"))


@pytest.mark.parametrize("name", ["a/b", "..", "/abs"])
def test_run_name_that_is_a_path_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a path"):
        make_run_folder(config(tmp_path, name))


def test_unusable_run_root_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        make_run_folder(config(tmp_path / "file" / "runs"))


def test_setting_newer_than_the_folder_counts_as_its_default(tmp_path: Path) -> None:
    folder = make_run_folder(config(tmp_path, "first"))
    lines = folder.config_path.read_text().splitlines()
    older = [line for line in lines if not line.startswith(("clip_grad", "# xxh3"))]
    folder.config_path.write_text("\n".join(older))
    make_run_folder(config(tmp_path, "first"))
    folder.config_path.write_text("\n".join(older))
    with pytest.raises(ConfigError, match=r"train\.clip_grad = 0\.5, not 1\.0"):
        make_run_folder(config(tmp_path, "first", clip_grad=0.5))


def test_settings_that_change_no_result_may_differ_on_resume(tmp_path: Path) -> None:
    make_run_folder(config(tmp_path, "first"))
    longer = resolve(
        Source(
            name="test",
            tables={
                "run": {
                    "run_root": str(tmp_path),
                    "run_name": "first",
                    "num_steps": 7,
                    "save_interval": 3,
                }
            },
        )
    )
    make_run_folder(longer)


@pytest.mark.parametrize(
    "train",
    [
        {
            "tensor_model_parallel_size": 2,
            "data_parallel_size": 3,
            "context_parallel_size": 2,
        },
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        {"data_parallel_size": 2, "expert_model_parallel_size": 2},
        {
            "max_tokens_per_micro_batch": 100,
            "reference_placement": "cpu_by_layer",
            "share_prefixes": False,
        },
    ],
    ids=["layout", "stages", "experts", "memory"],
)
def test_run_may_resume_with_other_ranks_and_less_memory(
    tmp_path: Path, train: dict[str, object]
) -> None:
    make_run_folder(config(tmp_path, "first"))
    make_run_folder(config(tmp_path, "first", **train))


@contextmanager
def another_process_holds(path: Path, command: str) -> Iterator[subprocess.Popen[str]]:
    program = textwrap.dedent(f"""
        import pathlib, sys
        from invrl.store.run_folder import RunFolder
        with RunFolder(path=pathlib.Path({str(path)!r})).held({command!r}):
            print("held", flush=True)
            sys.stdin.read()
    """)
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait(60)


def test_holder_of_a_run_folder_is_named_and_its_files_are_unchanged(
    tmp_path: Path,
) -> None:
    wanted = config(tmp_path, "r")
    folder = make_run_folder(wanted)
    check_run_folder(wanted)
    before = folder.config_path.stat()
    with another_process_holds(folder.path, "train") as holder:
        named = rf"process {holder.pid} \(invrl train\) works in {folder.path}"
        with pytest.raises(ConfigError, match=named), hold_run_folder(wanted, "serve"):
            pass
        with pytest.raises(ConfigError, match=named):
            check_run_folder(wanted)
        assert folder.config_path.stat() == before
        holder.kill()
        holder.wait(60)
    with hold_run_folder(wanted, "serve") as again:
        assert again == folder
        with (
            pytest.raises(ConfigError, match=r"\(invrl serve\)"),
            folder.held("replay"),
        ):
            pass
    check_run_folder(wanted)


def test_folder_just_created_by_another_process_is_held_by_its_creator(
    tmp_path: Path,
) -> None:
    (tmp_path / "new").mkdir()
    with another_process_holds(tmp_path / "new", "train") as holder:
        named = f"process {holder.pid} "
        with (
            pytest.raises(ConfigError, match=named),
            hold_run_folder(config(tmp_path, "new"), "train"),
        ):
            pass
