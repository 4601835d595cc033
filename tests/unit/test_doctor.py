"""`invrl doctor`: each planted fault is found by the check of its name, with a fix, and
hides no other check. Faults are planted for real; only what a test cannot change
(memory, GPUs, limits) is planted as a fact."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.numpy import load_file, save_file
from tiny_model import CHAT_TEMPLATE, make_tiny_model

from invrl.cli import main as cli
from invrl.cli.checks import machine as machine_facts
from invrl.cli.checks import machine_checks
from invrl.cli.checks.checklist import check_before_start, select_checks
from invrl.cli.checks.machine import Machine
from invrl.cli.commands.doctor import Finding, Status, diagnose
from invrl.cli.flags import parse_flags
from invrl.errors import ConfigError
from invrl.families.hf_config import read_hf_config
from invrl.host.files.disk import FULL_BYTES
from invrl.host.gpus import CudaSoftware, Gpu, GpuProcess
from invrl.run.processes import supervisor
from invrl.run.settings.config import resolve
from invrl.run.settings.folder import make_run_folder
from invrl.train.config import TrainConfig
from invrl.train.cost.memory_budget import MemoryBudget
from invrl.train.cost.model_size import ModelSize

CHECKS = [
    "configuration",
    *(check.name for check in select_checks("doctor", resolve())),
]
HEALTHY = Machine(
    python=(3, 11),
    cpus=8,
    gpus=0,
    nvidia=False,
    torch="2.13.0+cpu",
    memory_bytes=64 * 10**9,
    memory_total_bytes=64 * 10**9,
    shared_memory_bytes=8 * 10**9,
)

CARD = Gpu(memory_bytes=80 * 10**9, name="H100")
BUSY = replace(
    CARD,
    used_bytes=30 * 10**9,
    processes=(GpuProcess(pid=2**22, name="python", memory_bytes=30 * 10**9),),
)


@pytest.fixture(scope="module")
def good_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@dataclass
class Plot:
    """Where a fault is planted: a folder with a model, flags that are well, a machine,
    the environment."""

    here: Path
    flags: dict[str, str]
    patch: pytest.MonkeyPatch
    machine: Machine = HEALTHY
    more: tuple[str, ...] = ()
    clean_up: tuple[Callable[[], object], ...] = ()

    @property
    def model(self) -> Path:
        return self.here / "model"

    @property
    def arguments(self) -> list[str]:
        return [*(part for pair in self.flags.items() for part in pair), *self.more]

    def dist_info(self, name: str, version: str, metadata: str = "") -> None:
        folder = self.here / "site" / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}"
        (folder / "METADATA").write_text(text)
        self.patch.syspath_prepend(folder.parent)


@pytest.fixture
def plot(
    good_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Plot]:
    shutil.copytree(good_model, tmp_path / "model")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "doctors_agent.py").write_text(
        "def rollout(task): ...\ndef reward(task, result): ...\n"
    )
    flags = {
        "--model-path": str(tmp_path / "model"),
        "--run-root": str(tmp_path / "runs"),
        "--task-source-path": "rollout_fns.calculator:task_source",
        "--rollout-function-path": "rollout_fns.calculator:rollout",
    }
    fault_plot = Plot(here=tmp_path, flags=flags, patch=monkeypatch)
    yield fault_plot
    for end in fault_plot.clean_up:
        end()


def flag(**flags: str) -> Callable[[Plot], None]:
    return lambda plot: plot.flags.update(
        {"--" + k.replace("_", "-"): v for k, v in flags.items()}
    )


def fact(**facts: object) -> Callable[[Plot], None]:
    def plant(plot: Plot) -> None:
        plot.machine = replace(plot.machine, **facts)  # type: ignore[arg-type]

    return plant


def model_json(name: str, **changes: object) -> Callable[[Plot], None]:
    def plant(plot: Plot) -> None:
        file = plot.model / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return plant


def model_file(name: str, text: str) -> Callable[[Plot], None]:
    return lambda plot: (plot.model / name).write_text(text)


def few_gpus(plot: Plot) -> None:
    fact(gpus=2)(plot)
    flag(num_engines="2")(plot)


def large_cache(plot: Plot) -> None:
    fact(gpus=1, gpu_memory_bytes=10**10)(plot)
    flag(**{"engine.max_total_tokens": "2000000000"})(plot)


def hidden_gpus(plot: Plot) -> None:
    fact(nvidia=True)(plot)
    plot.patch.setenv("CUDA_VISIBLE_DEVICES", "")


def gpu_of_another_run(plot: Plot) -> None:
    command = [sys.executable, "-c", "input()", "invrl.cli"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    plot.clean_up += (process.communicate,)
    holder = GpuProcess(pid=process.pid, name="python")
    fact(gpus=2, cards=(replace(BUSY, processes=(holder,)), CARD))(plot)


without_template = model_json("tokenizer_config.json", chat_template=None)


def truncated_weights(plot: Plot) -> None:
    file = plot.model / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1000)


def lost_layer(plot: Plot) -> None:
    file = plot.model / "model.safetensors"
    tensors = load_file(file)
    save_file(
        {name: tensor for name, tensor in tensors.items() if "layers.1." not in name},
        file,
    )


def full_disk(plot: Plot) -> None:
    usage = psutil.disk_usage(str(plot.here))._replace(free=10**6)
    plot.patch.setattr(psutil, "disk_usage", lambda _: usage)


def endless_weights_by_disk(plot: Plot) -> None:
    with (plot.model / "more.safetensors").open("wb") as file:
        file.truncate(10**13)  # sparse
    folder = {"weights.transport": "disk", "weights.folder": str(plot.here)}
    flag(**folder)(plot)


def bound_port(plot: Plot) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    plot.clean_up += (server.close,)
    plot.flags["--gateway.port"] = str(server.getsockname()[1])


def closed_ray(plot: Plot) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    plot.patch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")


def task_file(name: str, content: str) -> Callable[[Plot], None]:
    def plant(plot: Plot) -> None:
        (plot.here / name).write_text(content)
        del plot.flags["--task-source-path"]
        plot.flags["--task-file"] = str(plot.here / name)

    return plant


def no_labels(plot: Plot) -> None:
    task_file("t.jsonl", '{"question": "1 + 1?", "gold": 2}\n')(plot)
    plot.flags["--rollout-function-path"] = "rollout_fns.math_single_turn:rollout"


def held_out_again(plot: Plot) -> None:
    task_file("t.jsonl", '{"question": "1 + 1?", "answer": 2}\n')(plot)
    plot.flags |= {"--eval.task-file": plot.flags["--task-file"], "--eval.tasks": "1"}


def toml_key(plot: Plot) -> None:
    (plot.here / "c.toml").write_text("[rollout]\ntemprature = 1\n")
    plot.flags["--config"] = str(plot.here / "c.toml")


def root_below_a_file(plot: Plot) -> None:
    (plot.here / "file").write_text("")
    plot.flags["--run-root"] = str(plot.here / "file" / "runs")


def other_run(plot: Plot) -> None:
    plot.flags["--run-name"] = "mine"
    make_run_folder(resolve(*parse_flags([*plot.arguments, "--lr", "0.5"])))


def missing_package(plot: Plot) -> None:
    plot.dist_info("invrl", "0.1.0", "Requires-Dist: a-library-nobody-has\n")


def extra(*more: str) -> Callable[[Plot], None]:
    def plant(plot: Plot) -> None:
        plot.more = more

    return plant


FAILED = Status.FAILED
WARNING = Status.WARNING
FAULTS: list[tuple[str, Callable[[Plot], object], str, Status, str, str]] = [
    # name, how it is planted, the check that finds it, how bad, what it says, what to
    # do
    (
        "unknown flag",
        extra("--temperatur", "1"),
        "configuration",
        FAILED,
        "no such flag",
        "--temperature",
    ),
    ("bad value", flag(lr="fast"), "configuration", FAILED, "valid number", "set lr"),
    ("TOML key", toml_key, "configuration", FAILED, "no such key", "temperature"),
    (
        "contradiction",
        flag(batch_timeout_s="5"),
        "configuration",
        FAILED,
        "rollout_timeout_s",
        "raise",
    ),
    ("old python", fact(python=(3, 9)), "python", FAILED, "3.11 or 3.12", "install.sh"),
    (
        "missing package",
        missing_package,
        "packages",
        FAILED,
        "a-library-nobody-has is missing",
        "install.sh",
    ),
    (
        "wrong version",
        lambda p: p.dist_info("ray", "9.9.9"),
        "packages",
        FAILED,
        "ray is 9.9.9",
        "install.sh",
    ),
    (
        "idle GPU",
        fact(nvidia=True),
        "gpu",
        WARNING,
        "cannot use a GPU",
        "INVRL_DEVICE=gpu",
    ),
    (
        "ranks",
        flag(data_parallel_size="9"),
        "cpus",
        FAILED,
        "8 CPUs",
        "lower --data-parallel-size to 8",
    ),
    (
        "long answers",
        flag(max_new_tokens="600", max_sample_tokens="500"),
        "row length",
        FAILED,
        "a conversation holds 500 tokens",
        "raise --max-sample-tokens",
    ),
    ("one CPU", fact(cpus=1), "cpus", WARNING, "share one CPU", "2 or more"),
    (
        "no bfloat16",
        fact(is_slow_in_bfloat16=True),
        "precision",
        WARNING,
        "no AVX-512",
        "--engine.dtype float32 --train-dtype float32",
    ),
    (
        "no memory",
        fact(memory_bytes=10**9),
        "memory",
        FAILED,
        "first processes",
        "RAY_memory_usage_threshold",
    ),
    (
        "a GPU too small",
        fact(gpus=1, gpu_memory_bytes=10**8),
        "trainer memory",
        FAILED,
        "a step would not fit",
        "--max-tokens-per-micro-batch",
    ),
    (
        "a GPU nearly full",
        fact(gpus=1, gpu_memory_bytes=700 * 10**6),
        "trainer memory",
        WARNING,
        "a step may not fit",
        "--megatron-recompute-granularity",
    ),
    (
        "a GPU too small for both",
        fact(gpus=1, gpu_memory_bytes=700 * 10**6),
        "divided gpu",
        FAILED,
        "do not fit on it together",
        "second GPU",
    ),
    (
        "a cache too large beside the trainer",
        large_cache,
        "divided gpu",
        WARNING,
        "has memory for about",
        "lower it",
    ),
    ("too few GPUs", few_gpus, "gpu plan", FAILED, "needs 3", "--num-engines to 1"),
    (
        "an old driver",
        fact(gpus=2, cuda=CudaSoftware(driver=(12, 8), torch=(13, 0), nvcc=None)),
        "gpu",
        FAILED,
        "built for CUDA 13.0",
        "a driver for CUDA 13",
    ),
    (
        "hidden GPUs",
        hidden_gpus,
        "gpu",
        WARNING,
        "CUDA_VISIBLE_DEVICES is ''",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    (
        "a GPU of others",
        fact(gpus=2, cards=(CARD, BUSY)),
        "gpu in use",
        FAILED,
        "GPU 1: 30.0 of 80.0 GB in use",
        "CUDA_VISIBLE_DEVICES",
    ),
    (
        "a GPU of another container",
        fact(gpus=2, cards=(CARD, replace(BUSY, processes=()))),
        "gpu in use",
        FAILED,
        "shows no process",
        "CUDA_VISIBLE_DEVICES",
    ),
    (
        "a GPU of another run",
        gpu_of_another_run,
        "gpu in use",
        FAILED,
        "may belong to another run",
        "CUDA_VISIBLE_DEVICES",
    ),
    (
        "mixed cards",
        fact(gpus=2, cards=(CARD, Gpu(memory_bytes=24 * 10**9, name="L4"))),
        "gpu kinds",
        WARNING,
        "H100 (80 GB), L4 (24 GB)",
        "equal cards",
    ),
    (
        "a part of a card",
        fact(gpus=1, cards=(replace(CARD, is_mig=True),)),
        "gpu kinds",
        WARNING,
        "MIG",
        "a whole card",
    ),
    (
        "no compiler",
        fact(gpus=2, cuda=CudaSoftware(driver=(13, 0), torch=(13, 0), nvcc=None)),
        "nvcc",
        WARNING,
        "compiles some kernels",
        "CUDA_HOME",
    ),
    (
        "far too little",
        fact(memory_bytes=5 * 10**9),
        "memory",
        FAILED,
        "would be killed",
        "smaller model",
    ),
    (
        "little memory",
        fact(memory_bytes=7 * 10**9),
        "memory",
        WARNING,
        "may not be enough",
        "end other",
    ),
    (
        "full disk",
        full_disk,
        "disk",
        FAILED,
        "too small for one checkpoint",
        "--run-root",
    ),
    (
        "full disk of the weights",
        endless_weights_by_disk,
        "weight folder's disk",
        FAILED,
        "too small for the weights",
        "--weights.folder",
    ),
    (
        "crowded disk",
        flag(**{"checkpoints.keep": "2000000000"}),
        "disk",
        WARNING,
        "may fill",
        "--checkpoints.keep",
    ),
    (
        "no /dev/shm",
        fact(shared_memory_bytes=10**6),
        "shared memory",
        FAILED,
        "64 MB",
        "--shm-size",
    ),
    (
        "small /dev/shm",
        fact(shared_memory_bytes=10**8),
        "shared memory",
        WARNING,
        "Ray writes its objects to disk",
        "--shm-size",
    ),
    (
        "Ray is down",
        closed_ray,
        "ray",
        FAILED,
        "no Ray can be reached",
        "ray start --head",
    ),
    (
        "Ray nowhere",
        lambda p: p.patch.setenv("RAY_ADDRESS", "here"),
        "ray",
        FAILED,
        "host:port",
        "unset it",
    ),
    ("taken port", bound_port, "gateway port", FAILED, "in use", "or leave it out"),
    (
        "foreign host",
        flag(**{"gateway.host": "192.0.2.1"}),
        "gateway port",
        FAILED,
        "cannot listen",
        "0.0.0.0",
    ),
    (
        "read-only root",
        root_below_a_file,
        "run folder",
        FAILED,
        "cannot be written",
        "writable --run-root",
    ),
    (
        "other run",
        other_run,
        "run folder",
        FAILED,
        "another configuration",
        "choose another --run-name",
    ),
    (
        "no model",
        flag(model_path="/no/such"),
        "model folder",
        FAILED,
        "no such folder",
        "prepare-model",
    ),
    (
        "truncated weights",
        truncated_weights,
        "model folder",
        FAILED,
        "damaged",
        "prepare-model",
    ),
    (
        "model type",
        model_json("config.json", model_type="mamba"),
        "model folder",
        FAILED,
        "'mamba'",
        "qwen3",
    ),
    (
        "tokenizer",
        model_file("tokenizer.json", "{}"),
        "model folder",
        FAILED,
        "cannot be read",
        "prepare",
    ),
    (
        "no template",
        without_template,
        "chat template",
        FAILED,
        "no chat template",
        "--chat-template-path FILE (shipped here: chatml-tools, chatml-tools-short)",
    ),
    (
        "broken template",
        flag(chat_template_path=__file__),
        "chat template",
        FAILED,
        "refuses",
        "--chat-template-path",
    ),
    (
        "template",
        model_file("chat_template.jinja", "{% if %}"),
        "chat template",
        FAILED,
        "refuses",
        "jinja",
    ),
    (
        "activation",
        model_json("config.json", hidden_act="gelu"),
        "trainable model",
        FAILED,
        "not support",
        "model",
    ),
    (
        "missing tensor",
        lost_layer,
        "servable model",
        FAILED,
        "tensors are missing",
        "belong together",
    ),
    (
        "window",
        model_json("config.json", model_type="mistral", sliding_window=128),
        "servable model",
        FAILED,
        "SGLang computes attention over all",
        "max_position_embeddings",
    ),
    (
        "no engine on a CPU",
        model_json("config.json", model_type="deepseek_v3"),
        "engine for the model",
        FAILED,
        "no latent attention (MLA) on CPU",
        "--debug-train-only",
    ),
    (
        "engine of several processes",
        flag(**{"engine.tp_size": "4"}),
        "engine for the model",
        FAILED,
        "num_key_value_heads 2",
        "a divisor",
    ),
    (
        "arena without a GPU",
        flag(**{"weights.arena_device": "cuda"}),
        "engine for the model",
        FAILED,
        "there is no GPU",
        "leave it out",
    ),
    (
        "no agent",
        flag(rollout_function_path="nobody:f"),
        "rollout function",
        FAILED,
        "no module",
        "module",
    ),
    (
        "signature",
        flag(rollout_function_path="doctors_agent:rollout"),
        "rollout function",
        FAILED,
        "does not take",
        "write it as rollout(task, endpoint)",
    ),
    (
        "reward",
        flag(reward_function_path="doctors_agent:rewrd"),
        "reward function",
        FAILED,
        "no 'rewrd'",
        "'reward'",
    ),
    (
        "task line",
        task_file("t.jsonl", '{"id": 1}\n{"id"\n'),
        "tasks",
        FAILED,
        "line 2 is not JSON",
        "per line",
    ),
    (
        "parquet",
        task_file("t.parquet", "PAR1"),
        "tasks",
        FAILED,
        "cannot be read",
        "a Parquet file",
    ),
    (
        "no labels",
        no_labels,
        "labels",
        WARNING,
        "math_single_turn.py reads Task.label",
        "--task-label-key",
    ),
    (
        "held-out training tasks",
        held_out_again,
        "held-out tasks apart",
        WARNING,
        "1 of 1",
        "hold out other",
    ),
    (
        "advantage",
        flag(advantage="grpoo"),
        "algorithm functions",
        FAILED,
        "built-in",
        "'grpo'",
    ),
    (
        "exponent",
        flag(lr="3"),
        "magnitudes",
        WARNING,
        "lr = 3, usually 1e-08 to 0.001",
        "exponent",
    ),
    (
        "heat",
        flag(temperature="10"),
        "magnitudes",
        WARNING,
        "temperature = 10",
        "exponent",
    ),
    (
        "stale",
        flag(max_staleness="2", correction="none"),
        "off-policy correction",
        WARNING,
        "2 versions",
        "set",
    ),
    (
        "SGLang option",
        flag(sglang_attention_backend="tritn"),
        "sglang options",
        FAILED,
        "choice",
        "triton",
    ),
    (
        "router option",
        flag(router_polcy="manual"),
        "router options",
        FAILED,
        "no such field",
        "--router-policy",
    ),
    (
        "Megatron option",
        flag(megatron_hidden_size="8"),
        "megatron options",
        FAILED,
        "config.json",
        "leave it",
    ),
]


def by_check(findings: list[Finding]) -> dict[str, list[Finding]]:
    grouped: dict[str, list[Finding]] = {}
    for finding in findings:
        grouped.setdefault(finding.check, []).append(finding)
    return grouped


@pytest.mark.parametrize(
    ("plant", "check", "status", "reason", "fix"),
    [fault[1:] for fault in FAULTS],
    ids=[f[0] for f in FAULTS],
)
def test_doctor_finds_each_planted_fault(
    plot: Plot,
    plant: Callable[[Plot], object],
    check: str,
    status: Status,
    reason: str,
    fix: str,
) -> None:
    plant(plot)
    findings = by_check(diagnose(plot.arguments, plot.machine))
    assert list(findings) == CHECKS, "every check has its line"
    (finding,) = findings[check]
    assert finding.status is status
    assert reason in f"{finding.value} {finding.reason}"
    assert fix in finding.fix
    assert "itself raised" not in "".join(
        str(shown_finding) for several in findings.values() for shown_finding in several
    )


@pytest.mark.parametrize(
    ("gpus", "more"),
    [
        (1, ()),
        (0, ("--debug-train-only", "--load-rollout-data", "saved")),
    ],
    ids=["gpu", "trainer alone"],
)
def test_family_without_cpu_engines_is_accepted_if_no_engine_runs_on_a_cpu(
    plot: Plot, gpus: int, more: tuple[str, ...]
) -> None:
    model_json("config.json", model_type="deepseek_v3")(plot)
    plot.more = more
    plot.machine = replace(plot.machine, gpus=gpus)
    findings = by_check(diagnose(plot.arguments, plot.machine)).get(
        "engine for the model", []
    )
    assert [finding.status for finding in findings] == ([] if more else [Status.OK])


def test_checks_that_need_the_model_folder_are_skipped_if_it_is_broken(
    plot: Plot, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each rule about the folder stands in one check, and the others do not report its
    fault again."""
    (plot.model / "config.json").unlink()
    findings = by_check(diagnose(plot.arguments, plot.machine))
    assert findings["model folder"][0].status is FAILED
    skipped = [
        check
        for check, [finding] in findings.items()
        if finding.status is Status.SKIPPED
    ]
    needing = [
        "trainable model",
        "reference model",
        "teacher",
        "critic",
        "servable model",
        "engine for the model",
        "row length",
    ]
    beside = [
        "training data",
        "megatron options",
        "trainer kernels",
        "longest conversation",
    ]
    assert skipped == ["chat template", *needing, *beside]
    assert cli.main(["doctor", *plot.arguments]) == 1
    assert (
        "skipped  chat template: not checked: the check of the model folder failed\n"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("template", ["chatml-tools", "own.jinja"])
@pytest.mark.parametrize(
    "command", ["doctor", "serve", "train", "eval", "check-template"]
)
def test_every_command_accepts_a_given_chat_template_for_a_missing_one(
    plot: Plot, command: str, template: str
) -> None:
    """In every command that looks for one."""
    without_template(plot)
    (plot.here / "own.jinja").write_text(CHAT_TEMPLATE)
    path = template if template == "chatml-tools" else str(plot.here / template)
    plot.flags["--chat-template-path"] = path
    config = resolve(*parse_flags(plot.arguments))
    match command:
        case "doctor":
            findings = diagnose(plot.arguments, plot.machine)
            assert not [
                str(finding) for finding in findings if finding.status is FAILED
            ]
        case "check-template":
            model = str(plot.model)
            assert (
                cli.main(["check-template", model, "--chat-template-path", path]) == 0
            )
            assert cli.main(["check-template", model]) == 2
        case _:
            check_before_start(command, config, plot.machine)


def test_doctor_names_the_longest_conversation_that_fits(plot: Plot) -> None:
    """A conversation that is longer than a micro-batch is one alone."""
    plot.flags |= {"--max-tokens-per-micro-batch": "100", "--max-new-tokens": "50"}
    budget = MemoryBudget.of(
        TrainConfig(max_tokens_per_micro_batch=100),
        plot.model,
        frozen_models=0,
        served_dtype="bfloat16",
        megatron={},
        copies_checkpoints=False,
        on_cuda=True,
        arena_on_gpu=True,
    )
    full = budget.largest(100).total
    longest = budget.largest(2048).total
    machine = replace(
        plot.machine, gpus=1, gpu_memory_bytes=int((full + longest) / 2 / 0.9)
    )
    [finding] = by_check(diagnose(plot.arguments, machine))["longest conversation"]
    assert finding.status is WARNING
    assert "2048 tokens: " in finding.value
    named = re.search(r"set --max-sample-tokens (\d+),", finding.fix)
    assert named is not None
    fitting = int(named[1])
    assert 100 < fitting < 2048
    assert (
        budget.largest(fitting).total
        <= 0.9 * machine.gpu_memory_bytes
        < budget.largest(fitting + 1).total
    )

    plot.flags["--max-sample-tokens"] = str(fitting)
    [finding] = by_check(diagnose(plot.arguments, machine))["longest conversation"]
    assert finding.status is Status.OK


def test_train_only_run_needs_no_chat_template(plot: Plot) -> None:
    without_template(plot)
    plot.more = ("--debug-train-only", "--load-rollout-data", str(plot.here))
    findings = by_check(diagnose(plot.arguments, plot.machine))
    assert findings["model folder"][0].status is Status.OK
    assert "chat template" not in findings


def test_healthy_machine_passes_all_checks(
    plot: Plot, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("invrl.cli.checks.machine.inspect_machine", lambda: HEALTHY)
    before = sorted(plot.here.rglob("*"))
    assert cli.main(["doctor", *plot.arguments, "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {finding["check"] for finding in findings} == set(CHECKS)
    assert "FAILED" not in {finding["status"] for finding in findings}
    assert sorted(plot.here.rglob("*")) == before, "nothing is left behind"


def test_doctor_checks_the_real_machine_and_exits_with_1_on_a_failure(
    plot: Plot, capsys: pytest.CaptureFixture[str]
) -> None:
    plot.flags |= {"--lr": "fast", "--num-steps": "few", "--advantage": "grpoo"}
    assert cli.main(["doctor", *plot.arguments]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if line.startswith("FAILED")]
    assert [line.split()[1] for line in failed][:2] == [
        "configuration:",
        "configuration:",
    ]
    assert all("Fix: " in line for line in failed)
    assert last == f"{len(lines)} checks, {len(failed)} failed"


@pytest.mark.parametrize("gpus", [0, 1])
def test_disk_check_counts_copies_of_checkpoints(plot: Plot, gpus: int) -> None:
    """Once for all ranks: one checkpoint is written at a time, and each number by one
    rank."""
    machine = replace(plot.machine, gpus=gpus, gpu_memory_bytes=80 * 10**9)
    plot.flags["--data-parallel-size"] = "2"
    needed: list[float] = []
    for more in ([], ["--checkpoints.background"]):
        config = resolve(*parse_flags([*plot.arguments, *more]))
        needed.append(machine_checks._needed_memory(config, machine))
    size = ModelSize.of(plot.model, read_hf_config(plot.model))
    assert needed[1] - needed[0] == pytest.approx(16 * size.total)


@pytest.mark.parametrize(
    "flag_of_offloading", ["--optimizer-cpu-offload", "--colocate"]
)
def test_memory_check_counts_an_optimizer_in_main_memory(
    plot: Plot, flag_of_offloading: str
) -> None:
    """Two ranks on GPUs have it there together, with gradients on their way."""
    machine = replace(plot.machine, gpus=4, gpu_memory_bytes=80 * 10**9)
    plot.flags["--data-parallel-size"] = "2"
    needed: list[float] = []
    for more in ([], [flag_of_offloading]):
        config = resolve(*parse_flags([*plot.arguments, *more]))
        needed.append(machine_checks._needed_memory(config, machine))
    size = ModelSize.of(plot.model, read_hf_config(plot.model))
    assert needed[1] - needed[0] == pytest.approx((12 + 2 * 4) * size.total)


@pytest.mark.parametrize(
    ("missing", "more", "code", "said"),
    [
        (0, (), 0, ""),
        (1, (), 2, "too small for one checkpoint: the run needs 0.02 GB there"),
        (1, ("--debug-rollout-only",), 0, ""),
        (10**9, ("--debug-rollout-only",), 2, "is full: "),
    ],
)
def test_train_refuses_a_disk_that_holds_no_checkpoint_before_it_makes_anything(
    plot: Plot,
    capsys: pytest.CaptureFixture[str],
    missing: int,
    more: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    """A checkpoint has 16 bytes of each parameter: what `benchmarks.checkpoint_cost`
    measured."""
    size = ModelSize.of(plot.model, read_hf_config(plot.model))
    free = max(0, 16 * size.total + FULL_BYTES - missing)
    for module in (psutil, shutil):
        usage = module.disk_usage(str(plot.here))
        plot.patch.setattr(
            module, "disk_usage", lambda _, usage=usage: usage._replace(free=free)
        )
    plot.patch.setattr(machine_facts, "inspect_machine", lambda: HEALTHY)
    began: list[object] = []
    plot.patch.setattr(
        supervisor, "supervise", lambda config, folder: began.append(folder) or 0
    )
    assert cli.main(["train", *plot.arguments, *more]) == code
    assert len(began) == (code == 0)
    assert (plot.here / "runs").exists() == (code == 0)
    err = capsys.readouterr().err
    assert said in err
    assert ("--run-root" in err) == (code == 2 or not more)


@pytest.mark.parametrize("command", ["eval", "serve"])
def test_a_run_without_a_trainer_is_refused_on_a_full_disk(
    plot: Plot, command: str
) -> None:
    config = resolve(*parse_flags(plot.arguments))
    usage = shutil.disk_usage(plot.here)._replace(free=FULL_BYTES)
    plot.patch.setattr(shutil, "disk_usage", lambda _: usage)
    check_before_start(command, config, plot.machine)
    plot.patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10**6))
    with pytest.raises(ConfigError, match=r"is full: 1\.0 MB are free.*16 MB there"):
        check_before_start(command, config, plot.machine)


@pytest.mark.parametrize("command", ["train", "eval", "serve", "engine"])
def test_a_command_is_refused_where_temporary_files_find_no_space(
    plot: Plot, command: str
) -> None:
    config = resolve(*parse_flags(plot.arguments))
    temporary = plot.here / "temporary"
    temporary.mkdir()
    plot.patch.setattr(machine_checks, "temporary_parents", lambda: {temporary})
    check_before_start(command, config, plot.machine)
    usage = shutil.disk_usage(plot.here)

    def disk_usage(folder: Path) -> Any:
        return usage._replace(free=10**6 if folder == temporary else usage.free)

    plot.patch.setattr(shutil, "disk_usage", disk_usage)
    reason = rf"TMPDIR.*{temporary}.*is full: 1\.0 MB are free.*16 MB there"
    with pytest.raises(ConfigError, match=reason):
        check_before_start(command, config, plot.machine)


@pytest.mark.parametrize("alone", [True, False])
def test_train_only_run_needs_no_sglang(plot: Plot, alone: bool) -> None:
    """As on a machine without it: the requirements name packages of its family that
    nobody has."""
    needs = "Requires-Dist: sglang-nobody-has\n"
    plot.dist_info("invrl", "0.1.0", needs)
    plot.more = (
        ("--debug-train-only", "--load-rollout-data", str(plot.here)) if alone else ()
    )
    [packages] = by_check(diagnose(plot.arguments, plot.machine))["packages"]
    assert ("sglang-nobody-has is missing" in packages.value) is not alone
    assert (packages.status is Status.FAILED) is not alone


@pytest.mark.parametrize(
    ("free_gb", "code", "said"),
    [
        (64, 0, ""),
        (7, 0, "it may not be enough"),
        (5, 0, "would be killed"),
        (3, 2, "first processes"),
    ],
)
def test_train_refuses_a_run_that_cannot_fit_in_memory(
    plot: Plot, capsys: pytest.CaptureFixture[str], free_gb: int, code: int, said: str
) -> None:
    """Ray keeps 3.2 GB of these 64 free; that a run needs more is an estimate, and
    told."""
    machine = replace(HEALTHY, memory_bytes=free_gb * 10**9)
    plot.patch.setattr(machine_facts, "inspect_machine", lambda: machine)
    began: list[object] = []
    plot.patch.setattr(
        supervisor, "supervise", lambda config, folder: began.append(folder) or 0
    )
    assert cli.main(["train", *plot.arguments, "--data-parallel-size", "1"]) == code
    assert len(began) == (code == 0)
    err = capsys.readouterr().err
    assert said in err
    assert ("below it Ray kills processes" in err) == bool(said)
    assert ("invrl: warning: memory: " in err) == (bool(said) and code == 0)


def test_page_cache_of_a_container_counts_as_free_memory(tmp_path: Path) -> None:
    """A container that has read a model has its whole limit in use. Ray does not count
    files either."""
    host = psutil.virtual_memory()
    assert machine_facts.container_memory(tmp_path) == (
        pytest.approx(host.available, rel=0.5),
        host.total,
    )
    files = {
        "memory.max": "1000000",
        "memory.current": "1000000",
        "memory.stat": "anon 50000\ninactive_file 700000\nactive_file 200000\nshmem 20000",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert machine_facts.container_memory(tmp_path) == (900_000, 1_000_000)
    (tmp_path / "memory.max").write_text("max\n")
    assert machine_facts.container_memory(tmp_path)[1] == host.total
