"""`invrl export`: a model out of a run's checkpoints, whole or not there, in one file
or in many."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
import torch
from crash_at import CrashAt
from run_config import config
from safetensors.torch import load_file
from tiny_model import make_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from invrl.cli import main as cli
from invrl.cli.commands.export import export_model
from invrl.errors import ConfigError, TrainError
from invrl.run.checkpoints.checkpoint import check_served, keep_model
from invrl.run.checkpoints.checkpoints import Checkpoints
from invrl.run.settings.folder import make_run_folder
from invrl.store.manifest import check_manifest
from invrl.store.run_folder import RunFolder
from invrl.train.weights.safetensors_file import divide_into_shards, write_weights
from invrl.types.weights import TensorSpec
from invrl.user_code.model_folder import tensor_files
from invrl.weights.tensors.tensor_spec import make_spec


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Checkpoints of steps 4 and 8, whose weights differ, and the saved model of step
    9."""
    folder = make_run_folder(config(tmp_path, "run"))
    checkpoints = Checkpoints(folder.checkpoints_path)
    for step in (4, 8):
        filling = checkpoints.begin(step)
        filling.megatron.mkdir()
        make_tiny_model(filling.hugging_face, seed=step)
        checkpoints.commit(filling, {})
    model = folder.checkpoints_path / "model-000009"
    make_tiny_model(model, seed=9)
    checkpoints._publish_model(model, model.with_name("new"), 9, {})
    model.with_name("new").rename(model)
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in set(tensor_files(folder).values()):
        tensors |= load_file(file)
    return tensors


def everything_in(folder: Path) -> dict[str, tuple[int, int]]:
    paths = [folder, *folder.rglob("*")]
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in paths}


def export(run: RunFolder, *arguments: str) -> int:
    return cli.main(["export", str(run.path), *arguments])


@pytest.mark.parametrize(
    "shard_gb", ["50", "0.0002", "1e-9"], ids=["one", "some", "one-per-tensor"]
)
def test_exported_model_equals_the_steps_weights_and_loads_in_transformers(
    run: RunFolder, tmp_path: Path, shard_gb: str
) -> None:
    before = everything_in(run.path)
    out = tmp_path / "exported"
    assert (
        export(run, "--step", "4", "--out", str(out), "--max-shard-gb", shard_gb) == 0
    )
    assert everything_in(run.path) == before, "the run may be live"
    source = run.checkpoints_path / "step-000004" / "hugging_face"
    expected = load_file(source / "model.safetensors")
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    if shard_gb == "50":
        assert (out / "model.safetensors").read_bytes() == (
            source / "model.safetensors"
        ).read_bytes()
        assert shards == ["model.safetensors"]
    else:
        assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
        assert (
            len(shards) == len(expected)
            if shard_gb == "1e-9"
            else 1 < len(shards) < len(expected)
        )
        total = json.loads((out / "model.safetensors.index.json").read_text())[
            "metadata"
        ]["total_size"]
        assert total == sum(tensor.nbytes for tensor in expected.values())
    exported = tensors_of(out)
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    prompt = torch.tensor([[1, 30, 40]])
    loaded = AutoModelForCausalLM.from_pretrained(out)(prompt).logits
    assert torch.equal(
        loaded, AutoModelForCausalLM.from_pretrained(source)(prompt).logits
    )
    assert AutoTokenizer.from_pretrained(out).chat_template
    check_served(out)
    (out / "config.json").write_text("{}")
    with pytest.raises(
        ConfigError, match=r"config\.json.*if you changed the file yourself, remove"
    ):
        check_served(out)


def test_export_without_a_step_writes_the_newest_model_to_a_folder_named_after_the_run(
    run: RunFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    keep_model(run.checkpoints_path / "model-000009")
    assert export(run) == 0
    assert capsys.readouterr().out == f"model: {tmp_path}/run-step-000009\n"
    check_manifest(tmp_path / "run-step-000009")
    assert not (tmp_path / "run-step-000009" / "keep-model").exists()
    keep_model(run.checkpoints_path / "step-000008" / "hugging_face")
    Checkpoints(run.checkpoints_path, keep=1).commit(
        Checkpoints(run.checkpoints_path).begin(12), {}
    )
    assert export(run, "--step", "8", "--out", "kept") == 0, (
        "its optimizer is gone, its model was kept"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "5"], "no checkpoint of this step; it has: 4, 8, 9"),
        (["--step", "last"], "reason: not a step"),
        (["--step", "4", "--out", "."], "exists and is not empty"),
        (["--out", "FILE"], "exists and is not empty"),
        (["--max-shard-gb", "0"], "a number of GB above 0"),
        (["--max-shard-gb", "large"], "a number of GB above 0"),
        (["--stop", "4"], "did you mean --step?"),
    ],
)
def test_export_refuses_bad_arguments(
    run: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    capsys,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(run.path.parent)
    Path("FILE").touch()
    assert export(run, *arguments) == 2
    assert message in capsys.readouterr().err


def test_export_names_a_missing_or_torn_checkpoint(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = (
        run.checkpoints_path / "step-000004" / "hugging_face" / "model.safetensors"
    )
    weights.write_bytes(weights.read_bytes()[:-1])
    assert export(run, "--step", "4", "--out", str(tmp_path / "out")) == 1
    size = weights.stat().st_size
    assert (
        f"{weights}: it has {size} bytes, and {size + 1} were written"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()
    empty = make_run_folder(config(tmp_path, "empty"))
    assert export(empty) == 2
    assert "it has no checkpoint yet" in capsys.readouterr().err


def test_export_names_a_step_removed_by_the_run_during_the_export(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove_then_copy(source: Path, *_: object, **__: object) -> None:
        source.parent.rename(source.parent.with_name("removed"))
        (source / "config.json").read_bytes()

    monkeypatch.setattr("invrl.cli.commands.export._copy_model", remove_then_copy)
    with pytest.raises(ConfigError, match="the run removed its checkpoint meanwhile"):
        export_model(run, 4, tmp_path / "out", max_shard_gb=1.0)


@pytest.mark.parametrize("crash_at", range(1, 20))
def test_crash_during_an_export_leaves_no_partial_model(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_at: int
) -> None:
    crash = CrashAt(crash_at)
    monkeypatch.setattr("os.fsync", crash.within(os.fsync))
    monkeypatch.setattr(Path, "rename", crash.within(Path.rename))
    out = tmp_path / "out"
    with contextlib.suppress(KeyboardInterrupt):
        export_model(run, 4, out, max_shard_gb=2e-4)
    if out.exists():
        check_manifest(out)
    monkeypatch.undo()
    if not out.exists():
        export_model(run, 4, out, max_shard_gb=2e-4)


def spec(name: str, size: int) -> TensorSpec:
    return TensorSpec(name=name, shape=(size,), dtype="float32")


def test_exported_shards_are_filled_in_order() -> None:
    layout = tuple(
        spec(str(number), size) for number, size in enumerate([3, 3, 9, 1, 1, 4])
    )
    sizes = [
        [part.shape[0] for part in shard] for shard in divide_into_shards(layout, 6 * 4)
    ]
    assert sizes == [[3, 3], [9], [1, 1, 4]]


def test_export_refuses_an_unexpected_tensor_in_sharded_weights(tmp_path: Path) -> None:
    tensors = {name: torch.ones(2) for name in "abc"}
    layout = tuple(make_spec(name, tensor) for name, tensor in tensors.items())
    with pytest.raises(TrainError, match="c is not in the layout"):
        write_weights(tmp_path, layout[:2], tensors.items(), max_shard_bytes=8)
