"""A run's metrics for Prometheus: their names, and their values from what a run
reports."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from metric_queries import sample_name, scraped
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from stored_rollouts import summary_of

from invrl.buffer.groups.event_counts import BufferCounts
from invrl.engines.fleet.fleet_state import FleetState
from invrl.observe.metrics.metric_families import FAMILIES
from invrl.observe.metrics.run_exporter import Histogram, RunExporter
from invrl.observe.metrics.step_metrics import (
    rollout_metrics,
    time_metrics,
    update_metrics,
)
from invrl.observe.sinks.sinks import JsonlSink
from invrl.rollout.dispatch.evaluation import EvalScore
from invrl.run.processes import metrics_sources as sources
from invrl.store.metrics_file import read_metrics
from invrl.store.run_folder import RunFolder
from invrl.types.batches import TakenBatch
from invrl.types.groups import Group
from invrl.types.leases import GroupLease, GroupMember
from invrl.types.metrics import resolve
from invrl.types.reasons import DropReason, FailureReason
from invrl.types.tasks import Task
from invrl.types.weights import WeightUpdate, WeightVersion

NAMES = """
invrl_step invrl_steps_total invrl_step_end_timestamp_seconds invrl_step_seconds invrl_phase_seconds_total
invrl_reward_mean invrl_reward_deviation invrl_group_reward_deviation invrl_held_out_accuracy_ratio
invrl_held_out_reward_mean invrl_held_out_loss invrl_logprob_gap_mean invrl_logprob_gap_max
invrl_kl_approximate invrl_kl_reference invrl_clip_ratio invrl_entropy invrl_loss invrl_gradient_norm
invrl_learning_rate invrl_rollout_tokens_per_second invrl_train_tokens_per_second invrl_sampled_tokens_total
invrl_trained_tokens_total invrl_trained_ratio invrl_truncated_ratio invrl_response_length_tokens
invrl_staleness_mean invrl_staleness_max invrl_token_age_mean invrl_token_age_beyond_ratio
invrl_trained_length_over_asked invrl_weight_version invrl_weight_sync_seconds
invrl_weight_sync_bytes invrl_canary_gap_max invrl_run_info invrl_steps_wanted
invrl_driver_start_timestamp_seconds invrl_phase invrl_phase_start_timestamp_seconds invrl_staleness_bound
invrl_rollouts invrl_groups invrl_rollouts_ended_total invrl_rollouts_failed_total invrl_groups_dropped_total
invrl_checkpoint_timestamp_seconds invrl_checkpoint_step invrl_source_up invrl_engines
invrl_engine_restarts_total invrl_disk_free_bytes invrl_disk_size_bytes invrl_process_resident_bytes
invrl_gateway_sessions invrl_gateway_requests_total invrl_gateway_request_seconds
invrl_gateway_tokens_total invrl_gateway_prompt_tokens_total invrl_gateway_turns_held_total
invrl_gateway_held_seconds_total invrl_gateway_loop_lag_seconds invrl_gateway_worker_starts_total
""".split()
"""Dashboards and alerts of users have these names: none is changed or taken away."""
UNITS = ("_seconds", "_bytes", "_ratio", "_tokens", "_per_second")


def test_exported_metric_names_are_stable() -> None:
    assert [sample_name(family) for family in FAMILIES.values()] == NAMES


def test_exported_names_and_units_follow_prometheus_conventions() -> None:
    for family in FAMILIES.values():
        assert family.name.startswith("invrl_")
        assert family.help
        assert not family.help.endswith("."), "no sentence"
        if family.name.endswith("_bytes"):
            assert family.unit == "bytes"
        if family.name.endswith("_ratio"):
            assert family.unit == "0 to 1"
        if family.name.endswith("_seconds"):
            assert family.unit in ("seconds", "seconds since 1970")
        if family.unit in ("seconds", "bytes", "tokens", "0 to 1"):
            assert family.name.endswith(UNITS), family.name


def text_of(exporter: RunExporter) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(exporter)
    return generate_latest(registry).decode()


def values_of(exporter: RunExporter) -> Mapping[tuple[str, ...], float]:
    """By name and label values in the order of the labels' names."""
    values: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text_of(exporter)):
        for sample in family.samples:
            labels = [sample.labels[name] for name in sorted(sample.labels)]
            values[(sample.name, *labels)] = sample.value
    return values


TRAINED = {
    "train/loss": 0.5,
    "train/tokens": 100.0,
    "train/clip_fraction": 0.1,
    "train/kl_reference": 0.2,
}


def test_gauges_show_the_newest_value_and_counters_add_up() -> None:
    exporter = RunExporter(clock=lambda: 1000.0)
    exporter.step(
        0,
        {
            "eval/greedy/accuracy": 0.25,
            "eval/math/sampled/accuracy": 0.5,
            "eval/loss": 2.0,
        },
    )
    exporter.step(
        1,
        {
            **TRAINED,
            "rollout/reward_mean": 0.1,
            "time/train_s": 2.0,
            "time/step_s": 3.0,
        },
    )
    exporter.step(
        2,
        {
            **TRAINED,
            "rollout/reward_mean": 0.3,
            "time/train_s": 4.0,
            "time/checkpoint_s": 7.0,
        },
    )
    values = values_of(exporter)
    assert values[("invrl_step",)] == 2
    assert values[("invrl_steps_total",)] == 2, "an evaluation is no step"
    assert values[("invrl_step_end_timestamp_seconds",)] == 1000.0
    assert values[("invrl_reward_mean",)] == 0.3
    assert values[("invrl_step_seconds",)] == 3.0
    assert values[("invrl_trained_tokens_total",)] == 200.0
    assert values[("invrl_phase_seconds_total", "train")] == 6.0
    assert values[("invrl_phase_seconds_total", "checkpoint")] == 7.0
    assert ("invrl_phase_seconds_total", "step") not in values
    assert values[("invrl_held_out_accuracy_ratio", "greedy")] == 0.25
    assert values[("invrl_held_out_accuracy_ratio", "math/sampled")] == 0.5
    assert values[("invrl_held_out_loss",)] == 2.0
    assert values[("invrl_kl_reference",)] == 0.2


def test_nonfinite_value_is_shown_as_nan_and_not_added() -> None:
    exporter = RunExporter()
    exporter.step(
        1, {"train/loss": math.inf, "train/tokens": math.nan, "time/train_s": math.nan}
    )
    exporter.step(2, {"train/tokens": 7.0})
    values = values_of(exporter)
    assert math.isnan(values[("invrl_loss",)])
    assert values[("invrl_trained_tokens_total",)] == 7.0


def some_batch() -> TakenBatch:
    """Two groups of three rollouts, of versions 0 and 1, taken at version 2."""
    groups: list[Group] = []
    for version in range(2):
        members = tuple(GroupMember(index=index, attempt=0) for index in range(3))
        lease = GroupLease(
            group_id=f"g{version}", task=Task(id="t", payload={}), members=members
        )
        rollouts = tuple(
            summary_of(lease, index=index, attempt=0, version=version)
            for index in range(3)
        )
        groups.append(Group(id=lease.group_id, task_id="t", rollouts_G=rollouts))
    return TakenBatch(batch_id=0, version=WeightVersion(2), groups=tuple(groups))


def some_update() -> WeightUpdate:
    return WeightUpdate(
        version=WeightVersion(3),
        num_bytes=1000,
        seconds={"load": 0.25, "pause": 0.5},
        canary_max_gap=0.02,
        canary_mean_gap=0.01,
    )


def test_exported_step_values_equal_metrics_jsonl(tmp_path: Path) -> None:
    """The families that a step feeds, from the functions that measure it, through both
    sinks."""
    taken = some_batch()
    values = {
        **resolve(rollout_metrics(taken), "rollout/"),
        **resolve(update_metrics(some_update()), "sync/"),
        **resolve(
            time_metrics({"rollout": 3.0, "train": 2.0, "sync": 1.0}, taken, 10.0),
            "time/",
        ),
        **EvalScore(
            mode="greedy", task_ids=("a",), rewards=((1.0,),), failures={}
        ).values(),
    }
    exporter = RunExporter()
    exporter.step(3, values)
    JsonlSink(tmp_path / "metrics.jsonl").step(3, values)
    [row] = read_metrics(tmp_path / "metrics.jsonl")
    shown = values_of(exporter)
    compared = set()
    for family in FAMILIES.values():
        for key, value in row.items():
            labels = family.label_in(key)
            if labels is not None and key != "time":
                assert shown[(sample_name(family), *labels)] == value, key
                compared.add(family.name)
    assert len(compared) >= 17
    assert shown[("invrl_phase_seconds_total", "sync")] == 1.0
    assert shown[("invrl_weight_sync_seconds", "load")] == row["sync/load_s"]
    phases = {
        labels[0] for name, *labels in shown if name == "invrl_phase_seconds_total"
    }
    assert phases == {"rollout", "train", "sync"}, "tokens per second are no phase"


def test_later_incarnation_keeps_gauges_and_restarts_counters() -> None:
    exporter = RunExporter()
    exporter.recall(
        [
            {
                "step": 4,
                "time": 50.0,
                "rollout/reward_mean": 0.7,
                "train/tokens": 9.0,
                "train/loss": None,
            }
        ]
    )
    values = values_of(exporter)
    assert values[("invrl_step",)] == 4
    assert values[("invrl_step_end_timestamp_seconds",)] == 50.0
    assert values[("invrl_reward_mean",)] == 0.7
    assert math.isnan(values[("invrl_loss",)])
    assert ("invrl_trained_tokens_total",) not in values


@pytest.mark.parametrize("is_recalled", [False, True])
def test_evaluation_of_an_earlier_step_leaves_the_newest_step(
    is_recalled: bool,
) -> None:
    exporter = RunExporter()
    if is_recalled:
        exporter.recall([{"step": 4}, {"step": 2, "eval/greedy/accuracy": 0.5}])
    else:
        exporter.step(4, TRAINED)
    exporter.step(2, {"eval/greedy/accuracy": 0.5})
    values = values_of(exporter)
    assert values[("invrl_step",)] == 4
    assert values[("invrl_held_out_accuracy_ratio", "greedy")] == 0.5


def test_exactly_one_phase_is_exported_with_its_start() -> None:
    now = [10.0]
    exporter = RunExporter(clock=lambda: now[0])
    exporter.phase("rollout", 1)
    now[0] = 20.0
    exporter.phase("rollout", 1)
    assert values_of(exporter)[("invrl_phase_start_timestamp_seconds",)] == 10.0
    exporter.phase("train", 1)
    values = values_of(exporter)
    assert values[("invrl_phase_start_timestamp_seconds",)] == 20.0
    assert [key for key in values if key[0] == "invrl_phase"] == [
        ("invrl_phase", "train")
    ]


def test_failing_part_is_named_and_other_parts_are_exported() -> None:
    exporter = RunExporter()

    def fails() -> Mapping[str, Mapping[tuple[str, ...], float | Histogram]]:
        raise TimeoutError("no answer")

    exporter.attach(
        {"gateway": fails, "disk": lambda: {"invrl_disk_free_bytes": {(): 5.0}}}
    )
    values = values_of(exporter)
    assert values[("invrl_source_up", "gateway")] == 0
    assert values[("invrl_source_up", "disk")] == 1
    assert values[("invrl_disk_free_bytes",)] == 5.0
    exporter.detach(["gateway"])
    assert ("invrl_source_up", "gateway") not in values_of(exporter)


def test_steps_and_scrapes_may_be_concurrent() -> None:
    exporter = RunExporter()
    errors: list[Exception] = []

    def scrape() -> None:
        try:
            for _ in range(30):
                text_of(exporter)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=scrape) for _ in range(3)]
    for thread in threads:
        thread.start()
    for step in range(300):
        exporter.step(step, {f"time/phase{step}_s": 1.0, "train/loss": 1.0})
    for thread in threads:
        thread.join()
    assert not errors
    assert values_of(exporter)[("invrl_steps_total",)] == 300


def counts(trained: int, failed: Mapping[str, int], in_flight: int = 0) -> BufferCounts:
    states = {
        "groups_ready": 2,
        "rollouts_in_flight": in_flight,
        "rollouts_trained": trained,
    }
    return BufferCounts(states=states, failed=failed, dropped={"filtered/dull": 3})


def test_buffer_counters_start_with_the_incarnation() -> None:
    fresh = sources.BufferNumbers(resumed=False)
    assert fresh.numbers() == {}
    fresh.update(counts(8, {"timeout": 1}, in_flight=4))
    numbers = fresh.numbers()
    assert numbers["invrl_rollouts"] == {("in_flight",): 4}
    assert numbers["invrl_groups"] == {("ready",): 2}
    assert numbers["invrl_rollouts_ended"] == {("trained",): 8}
    failed = numbers["invrl_rollouts_failed"]
    assert {reason for (reason,) in failed} == set(FailureReason), (
        "a series that begins with its first event"
    )
    assert failed[("timeout",)] == 1
    assert failed[("empty",)] == 0
    dropped = numbers["invrl_groups_dropped"]
    assert {reason for (reason,) in dropped} == {*DropReason, "filtered/dull"}

    resumed = sources.BufferNumbers(resumed=True)
    resumed.update(counts(8, {"timeout": 1}))
    resumed.update(counts(12, {"timeout": 3}))
    numbers = resumed.numbers()
    assert numbers["invrl_rollouts_ended"] == {("trained",): 4}
    assert numbers["invrl_rollouts_failed"][("timeout",)] == 2


def test_exporter_shows_living_and_lost_engines() -> None:
    state = FleetState(
        alive={"engine-1": "http://x"},
        lost=("engine-0",),
        restarts={"engine-0": 2},
        router_metrics={},
    )
    numbers = sources.fleet_numbers(lambda: state)
    assert numbers["invrl_engines"] == {("alive",): 1, ("lost",): 1}
    assert numbers["invrl_engine_restarts"] == {("engine-0",): 2, ("engine-1",): 0}


WORKER = {
    "starts": 2,
    "p50": 1.0,
    "p99": 20.0,
    "max": 300.0,
    "tokens": {"sampled": 9},
    "prompt_tokens": {"all": 100, "cached": 96},
    "requests": {
        "/v1/messages": {
            "statuses": {"200": 3, "503": 1},
            "buckets": {"0.1": 1, "+Inf": 4},
            "seconds": 8.5,
        }
    },
}


def test_gateway_metrics_are_exported_per_worker() -> None:
    answer = {
        "sessions": {"open": 3, "finished": 9},
        "workers": {
            "0": WORKER,
            "1": {**WORKER, "gate": {"turns_held": 4, "seconds_held": 2.5}},
        },
    }
    exporter = RunExporter()
    exporter.attach({"gateway": lambda: sources.gateway_numbers(answer)})
    values = values_of(exporter)
    assert values[("invrl_gateway_sessions", "open")] == 3
    assert values[("invrl_gateway_requests_total", "/v1/messages", "503", "1")] == 1
    assert (
        values[("invrl_gateway_request_seconds_bucket", "0.1", "/v1/messages", "0")]
        == 1
    )
    assert (
        values[("invrl_gateway_request_seconds_bucket", "+Inf", "/v1/messages", "0")]
        == 4
    )
    assert values[("invrl_gateway_request_seconds_count", "/v1/messages", "0")] == 4
    assert values[("invrl_gateway_request_seconds_sum", "/v1/messages", "0")] == 8.5
    assert values[("invrl_gateway_tokens_total", "sampled", "0")] == 9
    assert values[("invrl_gateway_loop_lag_seconds", "0.99", "0")] == pytest.approx(
        0.02
    )
    assert values[("invrl_gateway_worker_starts_total", "0")] == 2
    assert values[("invrl_gateway_prompt_tokens_total", "cached", "0")] == 96
    assert values[("invrl_gateway_turns_held_total", "1")] == 4
    assert values[("invrl_gateway_held_seconds_total", "1")] == 2.5
    assert ("invrl_gateway_turns_held_total", "0") not in values


def test_exported_disk_and_checkpoint_are_those_of_the_run_folder(
    tmp_path: Path,
) -> None:
    folder = RunFolder(path=tmp_path)
    exporter = RunExporter()
    exporter.attach({"disk": lambda: sources.disk_numbers(folder)})
    disk = values_of(exporter)
    assert 0 < disk[("invrl_disk_free_bytes",)] < disk[("invrl_disk_size_bytes",)]
    folder.checkpoints_path.mkdir()
    assert sources.checkpoint_numbers(folder) == {}


def test_every_series_has_all_labels_of_its_family() -> None:
    """A family's labels are those that its series have."""
    exporter = RunExporter({"invrl_run_info": {("r", "train", "0"): 1.0}})
    exporter.step(
        1, {"time/train_s": 1.0, "sync/load_s": 1.0, "eval/greedy/accuracy": 1.0}
    )
    exporter.phase("train", 1)
    answer = {"sessions": {}, "workers": {"0": WORKER}}
    exporter.attach({"gateway": lambda: sources.gateway_numbers(answer)})
    labels_of = scraped(text_of(exporter))
    for family in FAMILIES.values():
        name = sample_name(family) + ("_count" if family.kind == "histogram" else "")
        if name in labels_of:
            assert labels_of[name] == set(family.labels), name
    assert json.dumps(sorted(labels_of)).count("invrl_gateway") >= 6
