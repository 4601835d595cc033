"""Bad input as a person gives it: `invrl.cli.main` answers with field, value, reason
and fix and exit code 2, and neither a process nor a run folder has come to be."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pyarrow
import pyarrow.parquet
import pytest
from tiny_model import make_tiny_model

from invrl.cli import main as cli
from invrl.cli.command_settings import settings_for_command
from invrl.cli.flags import parse_flags
from invrl.families.registry import FAMILIES
from invrl.rollout.tasks.tasks import held_out_only
from invrl.run.processes import supervisor
from invrl.run.settings.config import resolve
from invrl.run.settings.folder import make_run_folder

SOURCE = ("--task-source-path", "rollout_fns.calculator:task_source")
TAUGHT = (
    *("--objective", "distillation", "--teacher.url", "http://127.0.0.1:9"),
    *("--group-filter", "none"),
)
AGENT = ("--rollout-function-path", "rollout_fns.calculator:rollout")
Edit = Callable[[Path], object]


@pytest.fixture(scope="module")
def good_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def model(good_model: Path, tmp_path: Path) -> Path:
    """A model folder of the test's own."""
    return Path(shutil.copytree(good_model, tmp_path / "model"))


Refused = Callable[..., dict[str, str]]


@pytest.fixture
def refused(
    good_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Refused:
    """Runs `invrl train` with these flags on a good model; returns the block that it
    answers with."""

    def started(*_: object) -> None:
        raise AssertionError("processes would have been started")

    monkeypatch.setattr("invrl.cli.commands.serve.serve_model", started)
    monkeypatch.setattr(supervisor, "supervise", started)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    runs = tmp_path / "runs"

    def run(
        *flags: str, model: Path = good_model, tasks: tuple[str, ...] = SOURCE
    ) -> dict[str, str]:
        # not theirs: other tests' engines may start some
        children = set(psutil.Process().children())
        before = sorted(runs.rglob("*"))
        given = [
            "train",
            "--model-path",
            str(model),
            "--run-root",
            str(runs),
            *AGENT,
            *tasks,
            *flags,
        ]
        assert cli.main(given) == 2
        first, *lines = capsys.readouterr().err.rstrip("\n").split("\n")
        assert first == "invrl: bad input; nothing was started."
        block = {
            name.strip(): rest.strip()
            for name, _, rest in (line.partition(":") for line in lines)
        }
        assert list(block) == ["where", "value", "reason", "fix"]
        assert all(block.values())
        assert set(psutil.Process().children()) <= children
        assert sorted(runs.rglob("*")) == before
        return block

    return run


def edited(name: str, **changes: object) -> Edit:
    def edit(model: Path) -> None:
        file = model / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


def truncated(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def without_template(model: Path) -> None:
    edited("tokenizer_config.json", chat_template=None)(model)
    (model / "chat_template.jinja").unlink(missing_ok=True)


def template(text: str) -> Edit:
    return lambda model: (model / "chat_template.jinja").write_text(text)


@pytest.mark.parametrize(
    ("given", "is_hub_id"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", True),
        ("./Qwen/Qwen3-0.6B", False),
        ("/Qwen/Qwen3-0.6B", False),
        ("Qwen3-0.6B", False),
        ("a/b/c", False),
        ("here/model", False),
    ],
)
@pytest.mark.parametrize("command", ["train", "check-template", "prepare-model"])
def test_model_id_of_a_hub_is_recognized_and_explained(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    given: str,
    is_hub_id: bool,
) -> None:
    """What has a folder before its slash is a mistyped path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    (tmp_path / "here").mkdir()
    flags = {
        "train": ["--model-path", given, *SOURCE],
        "check-template": [given],
        "prepare-model": ["--from-folder", given, "--out", "out"],
    }
    assert cli.main([command, *flags[command]]) == 2
    error_text = capsys.readouterr().err
    assert repr(given) in error_text
    assert "no such folder" in error_text
    assert ("the id of a model on a hub" in error_text) is is_hub_id
    assert (f"hf download {given} --local-dir FOLDER" in error_text) is is_hub_id


def test_error_names_the_downloaded_folder_of_a_hub_model(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    snapshots = tmp_path / "hub" / "hub" / "models--Qwen--Qwen3-0.6B" / "snapshots"
    for age, name in enumerate(("new", "old")):
        (snapshots / name).mkdir(parents=True)
        (snapshots / name / "config.json").write_text("{}")
        os.utime(snapshots / name / "config.json", (10**9 - age, 10**9 - age))
    block = refused("--model-path", "Qwen/Qwen3-0.6B")
    assert "the id of a model on a hub" in block["reason"]
    assert block["fix"].endswith(f"give {snapshots / 'new'}")


@pytest.mark.parametrize(
    ("spoil", "reason", "fix"),
    [
        (shutil.rmtree, "no such folder", "prepare-model"),
        (
            lambda m: (m / "config.json").unlink(),
            "it has no config.json",
            "prepare-model",
        ),
        (
            lambda m: (m / "config.json").write_text("{"),
            "config.json is not readable JSON",
            "prepare-model",
        ),
        (
            lambda m: (m / "config.json").write_bytes(b"\xff"),
            "config.json is not readable",
            "prepare-model",
        ),
        (
            lambda m: (m / "model.safetensors").unlink(),
            "has no model.safetensors",
            "prepare-model",
        ),
        (truncated, "model.safetensors is damaged", "prepare-model"),
        (
            edited("config.json", model_type="mamba"),
            "model_type is 'mamba'",
            f"type {', '.join(sorted(FAMILIES))}",
        ),
        (
            edited("config.json", quantization_config={"bits": 4}),
            "weights are quantized",
            "prepare-model",
        ),
        (
            edited("config.json", hidden_act="gelu"),
            "does not support it",
            "another model",
        ),
        (
            edited("config.json", vocab_size=600),
            "the embedding has 512 rows",
            "prepare-model",
        ),
        (
            lambda m: (m / "tokenizer.json").write_text("{}"),
            "tokenizer.json cannot be read",
            "prepare-model",
        ),
        (
            lambda m: (m / "tokenizer.json").unlink(),
            "it has no tokenizer.json",
            "prepare-model",
        ),
        (
            lambda m: (m / "tokenizer_config.json").unlink(),
            "no tokenizer_config.json",
            "prepare-model",
        ),
        (
            edited(
                "tokenizer_config.json",
                added_tokens_decoder={"3": {"content": "<|im_end|>"}},
            ),
            "tokenizer_config.json and tokenizer.json differ on '<|im_end|>'",
            "save the tokenizer",
        ),
        (
            edited("tokenizer_config.json", added_tokens_decoder={"3": "<|im_end|>"}),
            "added_tokens_decoder in tokenizer_config.json is damaged",
            "save the tokenizer",
        ),
        (
            without_template,
            "no chat template",
            "--chat-template-path FILE (shipped here: chatml-tools, chatml-tools-short)",
        ),
        (
            template("{% for m in messages %}"),
            "Unexpected end of template",
            "chat_template.jinja",
        ),
        (
            template("{{ raise_exception('no') }}"),
            "refuses this conversation",
            "chat_template.jinja",
        ),
        (template("{{ '' }}"), "to nothing", "chat_template.jinja"),
    ],
)
def test_unusable_model_folder_is_refused_with_reason_and_fix(
    refused: Refused, model: Path, spoil: Edit, reason: str, fix: str
) -> None:
    spoil(model)
    block = refused(model=model)
    assert "model" in block["where"] or "config.json" in block["where"]
    assert reason in block["reason"]
    assert fix in block["fix"]


def swapped_tokens(model: Path) -> None:
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[100:102]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("spoil", "reason", "fix"),
    [
        (shutil.rmtree, "no such folder", "prepare-model"),
        (truncated, "model.safetensors is damaged", "prepare-model"),
        (
            edited("config.json", num_attention_heads=8, head_dim=8),
            "differs from",
            "the same model",
        ),
        (
            edited("config.json", rope_theta=5e5, rope_parameters=None),
            "differs from the model of --model-path in rope",
            "the same model",
        ),
        (edited("config.json", model_type="llama"), "in model_type", "the same model"),
        (swapped_tokens, "token 1", "the same model"),
    ],
)
def test_reference_or_critic_of_another_architecture_is_refused(
    refused: Refused, model: Path, spoil: Edit, reason: str, fix: str
) -> None:
    spoil(model)
    for flag, where, others in (
        (
            "--reference-model-path",
            "model.reference_model_path",
            ("--kl.coefficient", "0.1"),
        ),
        ("--critic.model-path", "critic.model_path", ()),
    ):
        block = refused(flag, str(model), *others)
        assert block["where"] == where
        assert block["value"] == repr(str(model))
        assert reason in block["reason"]
        assert fix in block["fix"]


def test_unused_reference_model_is_refused(refused: Refused, model: Path) -> None:
    block = refused("--reference-model-path", str(model))
    assert "there is no KL" in block["reason"]
    assert "set --kl.coefficient" in block["fix"]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda m: (m / "tokenizer.json").unlink(), "it has no tokenizer.json"),
        (
            lambda m: (m / "tokenizer.json").write_text("{}"),
            "tokenizer.json cannot be read",
        ),
        (
            edited(
                "tokenizer_config.json",
                added_tokens_decoder={"3": {"content": "<|im_end|>"}},
            ),
            "differ on",
        ),
    ],
)
def test_check_template_refuses_a_broken_tokenizer(
    model: Path, capsys: pytest.CaptureFixture[str], spoil: Edit, reason: str
) -> None:
    """It needs no more of the folder: one with a tokenizer and without weights will
    do."""
    (model / "model.safetensors").unlink()
    assert cli.main(["check-template", str(model)]) == 0
    spoil(model)
    assert cli.main(["check-template", str(model)]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ('{"source": "/a/b"', "Expecting"),
        ("[]", "not a JSON object"),
        ('{"source": "/a/b"}', "it has no dtype"),
        ("\udcff", "can't decode"),
    ],
)
def test_prepared_folder_with_a_damaged_record_is_neither_reused_nor_removed(
    good_model: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    reason: str,
) -> None:
    """The folder may hold another model, so it is neither reused nor removed."""
    record = model / "prepared.json"
    record.write_bytes(text.encode(errors="surrogateescape"))
    before = sorted(model.iterdir())
    assert (
        cli.main(
            ["prepare-model", "--from-folder", str(good_model), "--out", str(model)]
        )
        == 2
    )
    error = capsys.readouterr().err
    assert f"{record}, which says what the folder was made from, is damaged: " in error
    assert reason in error
    assert "remove the folder" in error
    assert sorted(model.iterdir()) == before


def test_replay_checks_the_model_folder_before_any_process_starts(
    refused: Refused, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--run-root", str(tmp_path / "runs"), "--run-name", "ended"]
    flags = ["--model-path", str(model), *place, *AGENT, *SOURCE]
    folder = make_run_folder(resolve(*parse_flags(flags)))
    (model / "config.json").unlink()
    before = sorted(folder.path.rglob("*"))
    assert cli.main(["replay", str(folder.path), "--step", "1"]) == 2
    error = capsys.readouterr().err
    assert "it has no config.json" in error
    assert "prepare-model" in error
    assert sorted(folder.path.rglob("*")) == before


@pytest.mark.parametrize(
    ("path", "reason", "fix"),
    [
        ("no_such_agent:rollout", "no module 'no_such_agent'", "as Python imports it"),
        ("bad_agent:rolout", "bad_agent has no 'rolout'", "did you mean 'rollout'"),
        ("bad_agent:number", "3 is not callable", "give a function"),
        (
            "bad_agent:rollout",
            "does not take the call",
            "write it as rollout(task, endpoint)",
        ),
        ("broken_agent:rollout", "importing broken_agent raised", "python -c"),
    ],
)
def test_unusable_rollout_function_is_refused_with_reason_and_fix(
    refused: Refused, tmp_path: Path, path: str, reason: str, fix: str
) -> None:
    (tmp_path / "bad_agent.py").write_text(
        "number = 3\ndef rollout(task): return 1.0\n"
    )
    (tmp_path / "broken_agent.py").write_text("import no_such_library\n")
    block = refused("--rollout-function-path", path)
    assert block["where"] == "rollout_function_path"
    assert block["value"] == repr(path)
    assert reason in block["reason"]
    assert fix in block["fix"]


def parquet(columns: dict[str, list[object]]) -> Edit:
    return lambda path: pyarrow.parquet.write_table(pyarrow.table(columns), path)


def text(content: str) -> Edit:
    return lambda path: path.write_text(content)


@pytest.mark.parametrize("flag", ["--task-file", "--eval.task-file"])
@pytest.mark.parametrize(
    ("name", "write", "reason", "fix"),
    [
        ("t.jsonl", lambda path: None, "cannot be read", "a JSONL file"),
        ("t.jsonl", text("\n"), "has no tasks", "one JSON object per line"),
        (
            "t.jsonl",
            text('{"answer": 1}\n{"answer": \n'),
            "line 2 is not JSON",
            "one JSON object per line",
        ),
        (
            "t.jsonl",
            text('{"answer": 1}\n{"q": 1}\n'),
            "line 2 has no field 'answer'",
            "--task-label-key",
        ),
        ("t.parquet", lambda path: None, "cannot be read", "a Parquet file"),
        ("t.parquet", text('{"answer": 1}\n'), "cannot be read", "a Parquet file"),
        ("t.parquet", parquet({"answer": []}), "has no tasks", "one row per task"),
        (
            "t.parquet",
            parquet({"q": ["a"]}),
            "row 1 has no field 'answer'",
            "--task-label-key",
        ),
    ],
)
def test_unusable_task_file_is_refused_with_reason_and_fix(
    refused: Refused,
    tmp_path: Path,
    flag: str,
    name: str,
    write: Edit,
    reason: str,
    fix: str,
) -> None:
    good = tmp_path / "good.jsonl"
    bad = tmp_path / name
    good.write_text('{"answer": 1}\n')
    write(bad)
    files = {"--task-file": str(good), "--eval.task-file": str(good)} | {flag: str(bad)}
    block = refused(
        *("--task-label-key", "answer", "--eval.tasks", "1"),
        tasks=tuple(part for pair in files.items() for part in pair),
    )
    assert block["where"] == flag[2:].replace("-", "_")
    assert block["value"] == repr(str(bad))
    assert reason in block["reason"]
    assert fix in block["fix"]


def test_taken_gateway_port_is_refused(refused: Refused) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        block = refused("--gateway.port", str(port))
    assert block["where"] == "gateway.port"
    assert block["value"] == str(port)
    assert "in use" in block["reason"]
    assert "or leave it out" in block["fix"]


def test_taken_metrics_port_is_refused(refused: Refused) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        block = refused("--metrics.port", str(port))
    assert block["where"] == "metrics.port"
    assert block["value"] == str(port)
    assert f"the metrics cannot listen on 127.0.0.1:{port}" in block["reason"]
    assert "in use" in block["reason"]
    assert "--metrics.port, or leave it out" in block["fix"]


@pytest.mark.parametrize(
    ("flags", "where", "reason", "fix"),
    [
        (
            ["--metrics.port", "65536"],
            "metrics.port",
            "less than or equal to 65535",
            "set metrics.port: port",
        ),
        (
            ["--metrics.port", "-1"],
            "metrics.port",
            "greater than or equal to 1",
            "set metrics.port: port",
        ),
        (
            ["--metrics.port", "http"],
            "metrics.port",
            "integer",
            "set metrics.port: port",
        ),
        (
            ["--metrics.port", "9464", "--gateway.port", "9464"],
            "metrics.port",
            "it is the gateway's port",
            "another --metrics.port",
        ),
        (
            [
                "--metrics.port",
                "9464",
                "--metrics.host",
                "192.0.2.1",
            ],  # of documentation, not of a machine
            "metrics.host",
            "cannot listen on 192.0.2.1:9464",
            "--metrics.host (127.0.0.1, or 0.0.0.0 for all)",
        ),
    ],
)
def test_unusable_metrics_address_is_refused(
    refused: Refused, flags: list[str], where: str, reason: str, fix: str
) -> None:
    block = refused(*flags)
    assert block["where"] == where
    assert reason in block["reason"]
    assert fix in block["fix"]


@pytest.mark.parametrize(
    ("flags", "where", "reason", "fix"),
    [
        # batch sizes that do not divide
        (
            ["--data-parallel-size", "33"],
            "train.data_parallel_size",
            "fewer than the 33 copies of the model",
            "--rollout-batch",
        ),
        (
            ["--objective", "dpo"],
            "data.data_path",
            "trains on a file",
            "--data-path FILE.jsonl",
        ),
        (
            ["--objective", "distillation"],
            "algorithm.objective",
            "needs a teacher",
            "--teacher.url",
        ),
        (
            ["--objective", "distillation", "--teacher.model-path", "/m"],
            "buffer.group_filter",
            "groups whose rewards are equal",
            "--group-filter none",
        ),
        (
            ["--objective", "rl", "--simpo.gamma", "1"],
            "algorithm.objective",
            "does not read the table [simpo], only simpo",
            "--objective or [simpo]",
        ),
        (
            ["--objective", "rl", "--teacher.url", "http://10.0.0.5:30000"],
            "algorithm.objective",
            "the objective rl has none",
            "[teacher]",
        ),
        (
            [*TAUGHT, "--teacher.model-path", "/m"],
            "teacher.url",
            "a run has one teacher",
            "leave one of the two",
        ),
        (
            [*TAUGHT, "--temperature", "0.7"],
            "rollout.temperature",
            "at temperature 1",
            "--teacher.model-path",
        ),
        (
            [*TAUGHT, "--gateway.constrained", "masked"],
            "gateway.constrained",
            "whole vocabulary",
            "leave it out",
        ),
        (
            [
                "--objective",
                "distillation",
                "--teacher.url",
                "http://user:key@10.0.0.5:30000",
            ],
            "teacher.url",
            "holds a user or a key",
            "http://10.0.0.5:30000",
        ),
        (
            ["--num-mini-batches", "5"],
            "algorithm.num_mini_batches",
            "whole groups",
            "--rollout-batch-size",
        ),
        (
            ["--routing-replay", "trainer"],
            "train.routing_replay",
            "is the old one",
            "--num-mini-batches",
        ),
        (
            [
                "--routing-replay",
                "trainer",
                "--num-mini-batches",
                "2",
                "--old-logprobs",
                "engine",
            ],
            "train.routing_replay",
            "makes no pass",
            "--old-logprobs recompute",
        ),
        (
            [
                *("--routing-replay", "trainer", "--num-mini-batches", "2"),
                *(
                    "--megatron-recompute-granularity",
                    "selective",
                    "--megatron-recompute-modules",
                    "mlp, moe",
                ),
            ],
            "megatron.recompute_modules",
            "without the routing",
            "--megatron-recompute-granularity full",
        ),
        # a world that does not fit
        (
            ["--data-parallel-size", "5000", "--rollout-batch-size", "5000"],
            "train.data_parallel_size",
            "every rank needs one",
            "lower --data-parallel-size to",
        ),
        (
            ["--context-parallel-size", "5000"],
            "train.context_parallel_size",
            "one copy of the model has 5000",
            "lower --context-parallel-size, so that",
        ),
        (
            ["--tensor-model-parallel-size", "3"],
            "train.tensor_model_parallel_size",
            "num_attention_heads 4, num_key_value_heads 2",
            "may be 1 or 2",
        ),
        (
            ["--pipeline-model-parallel-size", "3"],
            "train.pipeline_model_parallel_size",
            "2 layers",
            "may be 1 or 2",
        ),
        (
            ["--virtual-pipeline-model-parallel-size", "2"],
            "train.virtual_pipeline_model_parallel_size",
            "only one pipeline stage",
            "set --pipeline-model-parallel-size",
        ),
        (
            [
                "--pipeline-model-parallel-size",
                "2",
                "--virtual-pipeline-model-parallel-size",
                "2",
            ],
            "train.virtual_pipeline_model_parallel_size",
            "the 1 layers of a pipeline stage",
            "may be only 1",
        ),
        (
            [
                "--pipeline-model-parallel-size",
                "2",
                "--num-layers-in-last-pipeline-stage",
                "2",
            ],
            "train.num_layers_in_last_pipeline_stage",
            "other stages (1) need layers too",
            "--num-layers-in-last-pipeline-stage 1 fits",
        ),
        (
            ["--max-sample-tokens", "8"],
            "rollout.max_new_tokens",
            "a conversation holds 8",
            "--max-sample-tokens",
        ),
        (
            ["--gateway.host", "192.0.2.1"],
            "gateway.host",
            "cannot listen",
            "of this machine",
        ),
        (
            ["--weights.transport", "disk", "--weights.folder", "/nowhere"],
            "weights.folder",
            "not a folder that can be written",
            "leave --weights.folder out",
        ),
        (
            ["--weights.transport", "delta", "--weights.host", "192.0.2.1"],
            "weights.host",
            "annot assign requested address",
            "an address of this machine",
        ),
        (
            ["--weights.transport", "delta", "--weights.host", "0.0.0.0"],
            "weights.host",
            "every address of this machine",
            "an address of this machine",
        ),
        # contradictions
        (
            ["--weights.host", "127.0.0.1"],
            "weights.host",
            "'arena' has no such setting",
            "add --weights.transport collective or disk or delta",
        ),
        (
            ["--weights.folder", "/tmp"],
            "weights.folder",
            "'arena' has no such setting",
            "add --weights.transport disk",
        ),
        (
            ["--weights.arena-device", "cuda", "--weights.transport", "disk"],
            "weights.arena_device",
            "'disk' has no such setting",
            "add --weights.transport arena",
        ),
        (
            ["--weights.arena-device", "cuda", "--weights.arena-mode", "alias"],
            "weights.arena_mode",
            "CUDA graphs",
            "leave it out",
        ),
        (
            ["--engine.tp-size", "2", "--weights.transport", "disk"],
            "weights.transport",
            "slices of the weights from the arena",
            "--engine.tp-size",
        ),
        (
            ["--engine.tp-size", "2", "--weights.arena-mode", "alias"],
            "weights.arena_mode",
            "and copy them",
            "--engine.tp-size",
        ),
        (
            ["--weights.drain-timeout-s", "9"],
            "weights.drain_timeout_s",
            "nothing drains",
            "add --weights.inflight drain",
        ),
        (
            ["--session.ttl-s", "9"],
            "session.ttl_s",
            "rollout_timeout_s = 300",
            "--session.ttl-s",
        ),
        (
            ["--batch-timeout-s", "9"],
            "buffer.batch_timeout_s",
            "may take",
            "--rollout-timeout-s",
        ),
        (
            ["--late.expired", "accept"],
            "late.deadline_s",
            "Field required",
            "give late.deadline_s",
        ),
        (
            ["--late.deadline-s", "7201"],
            "late.deadline_s",
            "7200 s",
            "--batch-timeout-s",
        ),
        (
            ["--external-environments", "--session.ttl-s", "7140"],
            "session.ttl_s",
            "session.lease_timeout_s + session.ttl_s = 7200 s",
            "raise --batch-timeout-s",
        ),
        (
            [
                "--external-environments",
                "--late.expired",
                "accept",
                "--late.deadline-s",
                "3600",
            ],
            "session.ttl_s",
            "session.ttl_s + late.deadline_s = 7260 s",
            "raise --batch-timeout-s",
        ),
        (["--task-file", "x"], "task_source_path", "both", "give one of"),
        (
            ["--eval.interval", "3"],
            "eval.interval",
            "no held-out tasks",
            "--eval.tasks",
        ),
        (
            ["--megatron-recompute-granularity", "full"],
            "--megatron-*",
            "recompute_method",
            "change or add",
        ),
        # options of other packages
        (
            ["--sglang-attention-backend", "tritn"],
            "--sglang-attention-backend",
            "invalid choice",
            "triton",
        ),
        (
            ["--sglang-max-running-requests"],
            "--sglang-max-running-requests",
            "value is missing",
            "--help",
        ),
        (
            ["--router-max-payload-size", "x"],
            "--router-max-payload-size",
            "invalid int value",
            "--help",
        ),
        (
            ["--router-prefil", "x"],
            "--router-prefil",
            "no such field",
            "--router-prefill",
        ),
    ],
)
def test_settings_that_do_not_fit_each_other_are_refused_with_reason_and_fix(
    refused: Refused, flags: list[str], where: str, reason: str, fix: str
) -> None:
    block = refused(*flags)
    assert block["where"] == where
    assert reason in block["reason"]
    assert fix in block["fix"]


def test_guessable_environment_key_is_refused(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INVRL_ENV_KEY", "hunter2")
    block = refused()
    assert block["where"] == "INVRL_ENV_KEY"
    assert "hunter2" not in str(block)
    assert "16 or more random characters" in block["fix"]


@pytest.mark.parametrize("command", ["train", "resume", "serve", "eval", "replay"])
def test_run_folder_of_a_live_run_is_refused(
    refused: Refused,
    good_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    """No command that writes into it starts, and the gateway's keys and the logs in it
    stay as they are."""
    place = ["--run-root", str(tmp_path / "runs"), "--run-name", "live"]
    flags = ["--model-path", str(good_model), *place]
    if command != "serve":
        flags += [*AGENT, *SOURCE, "--eval.tasks", "2"]
    config = resolve(
        *parse_flags(flags, command=command), settings_for_command(command).source()
    )
    if command == "eval":
        config = config.model_copy(update={"rollout": held_out_only(config.rollout)})
    folder = make_run_folder(config)
    for name in ("evaluate.run_evaluation", "replay.replay_step"):
        monkeypatch.setattr(f"invrl.cli.commands.{name}", None)
    (folder.path / "private").mkdir()
    (folder.path / "private" / "gateway.json").write_text("the run's")
    with folder.held("train"):
        before = {path: path.stat().st_mtime_ns for path in folder.path.rglob("*")}
        given = {
            "resume": [str(folder.path)],
            "replay": [str(folder.path), "--step", "1"],
        }
        monkeypatch.setattr("invrl.host.processes.interrupts.catch", lambda: None)
        assert cli.main([command, *given.get(command, flags)]) == 2
        error = capsys.readouterr().err
        assert f"process {os.getpid()} (invrl train) works in {folder.path}" in error
        assert {
            path: path.stat().st_mtime_ns for path in folder.path.rglob("*")
        } == before


def test_run_folder_of_another_configuration_or_of_something_else_is_refused(
    refused: Refused, good_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("invrl.host.processes.interrupts.catch", lambda: None)
    handlers = logging.getLogger().handlers[:]
    monkeypatch.setattr(supervisor, "supervise", lambda config, folder: 0)
    runs = ("--run-root", str(tmp_path / "runs"), "--run-name", "first")
    assert (
        cli.main(["train", "--model-path", str(good_model), *AGENT, *SOURCE, *runs])
        == 0
    )
    logging.getLogger().handlers[:] = handlers
    block = refused("--run-name", "first", "--lr", "5e-5")
    assert block["where"] == "run.run_name"
    assert "another configuration; now: train.lr = 5e-05" in block["reason"]
    assert "choose another --run-name" in block["fix"]
    (tmp_path / "runs" / "photos").mkdir()
    (tmp_path / "runs" / "photos" / "cat.png").write_bytes(b"")
    assert "not a run folder" in refused("--run-name", "photos")["reason"]
    assert "not a path" in refused("--run-name", "../elsewhere")["reason"]
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert "cannot be written" in refused("--run-root", str(blocked / "runs"))["reason"]
