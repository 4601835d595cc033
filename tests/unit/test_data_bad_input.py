"""Training on a file: what is wrong is told before a process starts, with field, value,
reason and fix."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from invrl.cli import main as cli
from invrl.cli.checks.check_warnings import CheckWarning
from invrl.cli.checks.checklist import select_checks
from invrl.cli.checks.data_checks import check_data
from invrl.run.processes import supervisor
from invrl.run.settings.config import Config, Source, resolve

GOOD = {
    "messages": [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
    ]
}
PAIR = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}
SFT = ("--objective", "sft", "--data-path", "DATA")
Refused = Callable[..., dict[str, str]]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD) + "\n")
    return file


@pytest.fixture
def refused(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Refused:
    def started(*_: object) -> None:
        raise AssertionError("processes would have been started")

    monkeypatch.setattr(supervisor, "supervise", started)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    runs = tmp_path / "runs"

    def run(*flags: str) -> dict[str, str]:
        assert (
            cli.main(
                ["train", "--model-path", str(model), "--run-root", str(runs), *flags]
            )
            == 2
        )
        first, *lines = capsys.readouterr().err.rstrip("\n").split("\n")
        assert first == "invrl: bad input; nothing was started."
        block = {
            name.strip(): rest.strip()
            for name, _, rest in (line.partition(":") for line in lines)
        }
        assert list(block) == ["where", "value", "reason", "fix"]
        assert all(block.values())
        assert not runs.exists()
        return block

    return run


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "has no rows"),
        ('{"messages": [\n', "line 1 is not JSON"),
        ("[1]\n", "line 1 is a JSON list, not an object"),
        (
            json.dumps(GOOD) + "\n" + json.dumps({"messages": GOOD["messages"][:1]}),
            "line 2: no message is the",
        ),
        (json.dumps({"messages": "text"}), "line 1: `messages` is text"),
        (
            json.dumps({"messages": [{"role": "bot", "content": ""}]}),
            "'bot' is not one of",
        ),
        (json.dumps(PAIR), "line 1: it has neither `messages` nor"),
    ],
)
def test_unusable_data_file_is_refused_with_the_reason(
    refused: Refused, data: Path, content: str, reason: str
) -> None:
    data.write_text(content)
    block = refused("--objective", "sft", "--data-path", str(data))
    assert block["where"] == "data.data_path"
    assert str(data) in block["value"]
    assert reason in block["reason"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**PAIR, "chosen": ""}, "line 1: `chosen` is empty"),
        ({**PAIR, "rejected": "4"}, "line 1: `chosen` and `rejected` are equal"),
        (GOOD, "line 1: it has not both `chosen` and `rejected`"),
    ],
)
def test_pair_without_two_sides_is_refused(
    refused: Refused, data: Path, row: dict[str, object], reason: str
) -> None:
    data.write_text(json.dumps(row))
    own = ("--objective", "test_data_bad_input:objective", "--data.kind", "pairs")
    block = refused(*own, "--data-path", str(data))
    assert reason in block["reason"]


def objective(inputs: object) -> object:
    """Stands for one of the user's."""
    raise AssertionError


def test_missing_data_file_is_refused(refused: Refused, tmp_path: Path) -> None:
    block = refused(
        "--objective", "sft", "--data-path", str(tmp_path / "missing.jsonl")
    )
    assert "cannot be read" in block["reason"]
    block = refused(
        "--objective", "sft", "--data-path", str(tmp_path / "missing.parquet")
    )
    assert block["where"] == "data.data_path"


@pytest.mark.parametrize(
    ("flags", "where", "reason"),
    [
        (
            ["--objective", "sft"],
            "data.data_path",
            "the objective sft trains on a file",
        ),
        (
            ["--objective", "dpo"],
            "data.data_path",
            "the objective dpo trains on a file",
        ),
        (["--data-path", "DATA"], "algorithm.objective", "it trains on rollouts"),
        (
            ["--data.batch-size", "4"],
            "data.batch_size",
            "only where a run trains on data_path",
        ),
        (
            [*SFT, "--data.kind", "pairs"],
            "data.kind",
            "trains on conversations",
        ),
        (
            [
                "--objective",
                "sft",
                "--data-path",
                "DATA",
                "--data.eval-path",
                "x",
                "--data.eval-fraction",
                "0.1",
            ],
            "data.eval_fraction",
            "held-out rows come from the file x",
        ),
        (
            [*SFT, "--eval.interval", "2"],
            "eval.interval",
            "no rows are held out",
        ),
        (
            [*SFT, "--checkpoints.keep-best", "2"],
            "checkpoints.keep_best",
            "no rows are held out",
        ),
        (
            [*SFT, "--n-samples-per-prompt", "4"],
            "rollout.n_samples_per_prompt",
            "no rollouts",
        ),
        (
            [*SFT, "--rollout-function-path", "a:b"],
            "rollout.rollout_function_path",
            "no rollouts",
        ),
        (
            [*SFT, "--max-staleness", "1"],
            "buffer.max_staleness",
            "no rollouts",
        ),
        (
            [*SFT, "--num-engines", "2"],
            "engine.num_engines",
            "no engine",
        ),
        (
            [*SFT, "--sglang-tp-size", "2"],
            "sglang.tp_size",
            "neither engine",
        ),
        (
            [*SFT, "--num-mini-batches", "64"],
            "algorithm.num_mini_batches",
            "a batch has 32",
        ),
        (
            [*SFT, "--debug-rollout-only"],
            "run.debug_rollout_only",
            "starts the trainer alone",
        ),
        (
            [*SFT, "--reference-model-path", "x"],
            "model.reference_model_path",
            "the objective sft has no reference",
        ),
        (
            [*SFT, "--objective", "orpo", "--kl.coefficient", "0.1"],
            "algorithm.kl",
            "orpo does not read it",
        ),
        *(
            (
                [*SFT, "--objective", "dpo", f"--{flag}", value],
                where,
                "dpo does not read it",
            )
            for flag, value, where in (
                ("eps-clip-low", "0.1", "algorithm.eps_clip_low"),
                ("eps-clip-high", "0.1", "algorithm.eps_clip_high"),
                ("dual-clip", "2", "algorithm.dual_clip"),
                ("correction-cap", "3", "algorithm.correction_cap"),
                ("kl.coefficient", "3", "algorithm.kl"),
                ("advantage-std.eps", "0.1", "advantage_std.eps"),
                ("advantage-std.estimator", "population", "advantage_std.estimator"),
                ("aggregation-constant", "3", "algorithm.aggregation_constant"),
                ("entropy.coefficient", "0.1", "algorithm.entropy"),
            )
        ),
        (
            [*SFT, "--data.eval-fraction", "1.5"],
            "data.eval_fraction",
            "less than 1",
        ),
    ],
)
def test_contradicting_data_settings_are_refused(
    refused: Refused, data: Path, flags: list[str], where: str, reason: str
) -> None:
    block = refused(*[str(data) if flag == "DATA" else flag for flag in flags])
    assert block["where"] == where
    assert reason in block["reason"]


def configuration(data: Path, model: Path) -> Config:
    tables = {
        "algorithm": {"objective": "sft"},
        "data": {"data_path": str(data), "eval_fraction": 0.5},
        "model": {"model_path": str(model)},
    }
    return resolve(Source(name="test", tables=tables))


def test_run_on_a_file_checks_only_what_it_starts(data: Path, model: Path) -> None:
    names = {check.name for check in select_checks("train", configuration(data, model))}
    assert {"model folder", "chat template", "training data", "trainer memory"} <= names
    assert (
        not {"rollout function", "tasks", "router", "gateway port", "servable model"}
        & names
    )
    other = {"messages": [*GOOD["messages"][:1], {"role": "assistant", "content": "5"}]}
    data.write_text(json.dumps(GOOD) + "\n" + json.dumps(other) + "\n")
    seen = check_data(configuration(data, model))
    assert seen.startswith("1 rows (conversations), rows of up to")
    assert seen.endswith("1 held out")


def test_held_out_rows_that_are_trained_on_are_doubted(data: Path, model: Path) -> None:
    with pytest.raises(
        CheckWarning, match="1 of 1 held-out rows are trained on too"
    ) as caught:
        check_data(configuration(data, model))
    assert caught.value.field == "data.eval_fraction"
    same_file = {"data_path": str(data), "eval_path": str(data)}
    tables = {
        "algorithm": {"objective": "sft"},
        "data": same_file,
        "model": {"model_path": str(model)},
    }
    with pytest.raises(
        CheckWarning, match="2 of 2 held-out rows are trained on too"
    ) as caught:
        check_data(resolve(Source(name="test", tables=tables)))
    assert caught.value.field == "data.eval_path"
