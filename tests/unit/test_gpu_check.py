"""The check of the GPU paths (`launch/gpu`): what it says of a stage that fails and of
a card in use."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_check import __main__ as command
from gpu_check import card
from gpu_check.failure import describe_failure
from gpu_check.record import Record
from gpu_check.settings import CheckSettings
from gpu_check.stage import Outcome, Stage, parse_settings_argument, run_stage
from gpu_check.stages import STAGES, loop
from invrl.cli.flags import parse_flags
from invrl.run.settings.config import resolve
from invrl.weights.config import ArenaWeights

GPU_FOLDER = Path(__file__).parents[2] / "launch" / "gpu"
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 12.00 GiB. GPU 0 has a total capacity of "
    "79.11 GiB of which 3.50 GiB is free. Of the allocated memory 70.02 GiB is allocated by PyTorch, and 1.2 "
    "GiB is reserved by PyTorch but unallocated."
)


def settings_in(folder: Path) -> CheckSettings:
    return CheckSettings(
        out=folder, work=folder, smoke=True, model="half", trained_model=None
    )


def test_out_of_memory_names_the_requested_bytes_and_settings_that_need_less() -> None:
    failure = describe_failure(f"starting\n{OUT_OF_MEMORY}\n", "--model small")
    assert failure.reason.startswith("out of memory: Tried to allocate 12.00 GiB")
    assert "3.50 GiB is free" in failure.reason
    assert "70.02 GiB is allocated by PyTorch" in failure.reason
    assert failure.reason.endswith("To need less: --model small")


@pytest.mark.parametrize(
    ("line", "compiler"),
    [
        ("/tmp/kernel.cu(12): error: identifier is undefined", "nvcc"),
        ("ptxas fatal   : Unresolved extern function", "ptxas"),
        (
            "/usr/bin/ld: cannot find -lcuda: No such file or directory",
            "the host's C compiler",
        ),
        (
            "main.c:2:10: fatal error: Python.h: No such file or directory",
            "the host's C compiler",
        ),
        ("triton.compiler.errors.CompilationError: at 7:4:", "Triton"),
        ("torch._inductor.exc.InductorError: LoweringException", "torch's Inductor"),
    ],
)
def test_a_kernel_that_does_not_build_names_its_compiler(
    line: str, compiler: str
) -> None:
    noise = [f"line {number}" for number in range(100)]
    failure = describe_failure("\n".join([*noise[:50], line, *noise[50:]]), "")
    assert failure.reason == f"a kernel does not build: {compiler} failed"
    assert line in failure.last_lines


def test_other_stage_failures_show_their_last_line() -> None:
    failure = describe_failure(
        "one\nAssertionError: 3 tensors were not what was sent\n\n", ""
    )
    assert failure.reason == "AssertionError: 3 tensors were not what was sent"


def pretend_nvidia_smi(
    monkeypatch: pytest.MonkeyPatch, processes: str, used_mb: str
) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        answer = processes if "compute-apps" in command[1] else used_mb
        return subprocess.CompletedProcess(command, 0, stdout=answer)

    monkeypatch.setattr(card.subprocess, "run", run)


def test_used_gpu_names_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_nvidia_smi(monkeypatch, "412, python3, 70123\n", "70500\n")
    assert "by pid 412 (python3, 70123 MB)" in str(card.busy_reason())
    pretend_nvidia_smi(monkeypatch, "", "70500\n")
    assert "70500 MB" in str(card.busy_reason())


def test_process_with_little_gpu_memory_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_nvidia_smi(monkeypatch, "7, dcgm, [N/A]\n", "520\n")
    assert card.busy_reason() is None


def test_no_stage_runs_on_a_used_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SMOKE", raising=False)
    monkeypatch.setattr(command, "busy_reason", lambda: "the card is used by pid 412")
    assert (
        command.main(["machine", "--out", str(tmp_path), "--work", str(tmp_path)]) == 2
    )
    assert "the card is used by pid 412" in capsys.readouterr().err


def test_stages_that_no_longer_fit_into_the_time_are_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SMOKE", "1")
    arguments = [
        "flex",
        "loop",
        "--deadline",
        "5",
        "--out",
        str(tmp_path),
        "--work",
        str(tmp_path),
    ]
    assert command.main(arguments) == 1
    stages = json.loads((tmp_path / "gpu.json").read_text())["stages"]
    assert {name: stage["state"] for name, stage in stages.items()} == {
        "flex": "not run",
        "loop": "not run",
    }
    assert "of --deadline are left" in stages["loop"]["reason"]


@pytest.mark.slow
def test_hung_stage_ends_at_its_deadline_and_keeps_its_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "gpu_check"
    (package / "stages").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "stages" / "__init__.py").write_text("")
    (package / "stages" / "__main__.py").write_text(
        "import time\n"
        "print('RESULT {\"seen\": 1}', flush=True)\n"
        "print('waiting for the engine', flush=True)\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    stage = Stage(name="hangs", proves="", usual_s=1, deadline_s=1, smaller="")
    outcome = run_stage(
        stage, settings_in(tmp_path), deadline_s=10.0, environment=os.environ
    )
    assert outcome.state == "failed"
    assert outcome.results == [{"seen": 1}]
    assert outcome.reason == "it did not end within 10 s; waiting for the engine"


def test_gpu_record_is_complete_after_every_stage(tmp_path: Path) -> None:
    record = Record(tmp_path / "gpu.json")
    for number, name in enumerate(["flex", "engine"], 1):
        record.add(
            name, Outcome(state="passed", seconds=1.0, results=[{"figure": number}])
        )
        written = json.loads((tmp_path / "gpu.json").read_text())
        assert len(written["stages"]) == number
        assert written["stages"][name] == {
            "state": "passed",
            "seconds": 1.0,
            "results": [{"figure": number}],
        }
        assert "torch" in written["versions"]


@pytest.mark.parametrize("has_trained_model", [False, True])
def test_stages_with_a_run_give_the_flags_that_invrl_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_trained_model: bool
) -> None:
    """Those of a card, which a smoke run leaves out."""
    monkeypatch.setattr(loop, "random_model", lambda settings, name: tmp_path)
    model = tmp_path if has_trained_model else None
    settings = replace(settings_in(tmp_path), smoke=False, trained_model=model)
    flags = [*loop._task_flags(settings), *loop._run_flags(settings)]
    config = resolve(*parse_flags(flags))
    assert isinstance(config.weights, ArenaWeights)
    assert config.weights.arena_device == "cuda"
    assert config.engine.max_total_tokens == loop._CACHED_TOKENS


def test_every_stage_has_its_module_and_its_line_in_the_readme() -> None:
    readme = (GPU_FOLDER / "README.md").read_text()
    for name in STAGES:
        assert (GPU_FOLDER / "gpu_check" / "stages" / f"{name}.py").exists()
        assert f"| `{name}` |" in readme


def test_stage_process_receives_its_settings(tmp_path: Path) -> None:
    from gpu_check.stage import _as_argument

    settings = settings_in(tmp_path)
    assert parse_settings_argument(_as_argument(settings)) == settings
