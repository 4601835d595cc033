"""Roles of a run on the nodes of a Ray cluster: who is where, what is refused, and what
nodes report of themselves."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from invrl.cli.checks.cluster_table import cluster_table
from invrl.cli.flags import parse_flags
from invrl.errors import ConfigError
from invrl.run.hosts import cluster_check, node_report
from invrl.run.hosts.cluster_check import refuse_placement_without_cluster
from invrl.run.hosts.node_answer import NodeAnswer, NodeNeeds, node_faults
from invrl.run.hosts.node_report import NodeQuestion, NodeReport, report_node
from invrl.run.hosts.placement import (
    EnginePool,
    Node,
    WorkerNodes,
    engine_pool,
    place_run,
)
from invrl.run.processes.gpu_plan import plan_run
from invrl.run.settings.config import Config, resolve

DISK = ("--weights.transport", "disk")
POOL = ("--placement.engines", "pool=rollout", *DISK)


def node(name: str, *, gpus: int = 0, **labels: str) -> Node:
    number = ord(name) - ord("a") + 1
    return Node(
        id=f"id-{name}",
        name=name,
        address=f"10.0.0.{number}",
        labels=labels,
        gpus=gpus,
    )


A = node("a")
B = node("b", pool="rollout")
C = node("c", pool="rollout")


def configured(*flags: str) -> Config:
    required = ["--model-path", "model", "--rollout-function-path", "agent:rollout"]
    return resolve(*parse_flags([*required, *flags]))


def refusal(config: Config, *nodes: Node) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        place_run(config, nodes, "id-a")
    return caught.value


# --------------------------------------------------------------------- who is where


def test_without_a_placement_everything_is_on_the_drivers_node_and_meets_on_loopback() -> (
    None
):
    placement = place_run(configured(), [A, B, C], "id-a")
    assert placement.others == []
    assert placement.rank_address() == "127.0.0.1"
    assert engine_pool(configured(), placement) is None


@pytest.mark.parametrize("selector", ["pool=rollout", "b", "10.0.0.2"])
def test_engines_are_placed_by_label_name_or_address(selector: str) -> None:
    config = configured("--placement.engines", selector, *DISK)
    placement = place_run(config, [A, B], "id-a")
    assert placement.engine_pool == [B]
    # the trainer's ranks are on the driver's node, and engines reach them there
    assert placement.rank_address() == "10.0.0.1"


def test_ray_describes_its_nodes() -> None:
    row = {
        "NodeID": "id-b",
        "NodeName": "b",
        "NodeManagerHostname": "host",
        "NodeManagerAddress": "10.0.0.2",
        "Labels": {"pool": "rollout"},
        "Resources": {"CPU": 2.0},
    }
    assert Node.of(row) == B


def test_engines_spread_over_nodes_and_return_to_one_that_lives() -> None:
    living = [A, B, C]
    pool = EnginePool(
        "pool=rollout", tp_size=1, driver_id="id-a", read_nodes=lambda: living
    )
    hosts = [pool.host_of(f"engine-{index}") for index in range(4)]
    assert [host and host.name for host in hosts] == ["b", "c", "b", "c"]
    living.remove(B)
    assert [
        host and host.name
        for host in (pool.host_of("engine-0"), pool.host_of("engine-2"))
    ] == ["c", "c"]
    living.remove(C)
    assert pool.host_of("engine-0") is None


def test_the_drivers_node_gets_no_engine_by_a_label_that_it_shares() -> None:
    driver = node("a", pool="rollout")
    pool = EnginePool(
        "pool=rollout", tp_size=1, driver_id="id-a", read_nodes=lambda: [driver]
    )
    assert pool.host_of("engine-0") is None
    error = refusal(configured(*POOL), driver)
    assert error.field == "placement.engines"
    assert "the node of the driver" in error.reason


def test_an_engine_takes_the_gpus_that_a_node_has_left() -> None:
    big = node("b", gpus=4, pool="rollout")
    pool = EnginePool(
        "b", tp_size=2, driver_id="id-a", ranks=[big], read_nodes=lambda: [big]
    )
    first = pool.host_of("engine-0")
    assert first is not None
    assert first.num_gpus == 2
    assert pool.host_of("engine-1") is None  # a rank has the third


def test_ranks_fill_gpus_and_divide_cpus() -> None:
    flags = ("--placement.trainer", "pool=rollout", *DISK, "--data-parallel-size")
    on_cpus = place_run(configured(*flags, "4"), [A, B, C], "id-a")
    assert on_cpus.ranks == [B, B, C, C]
    assert on_cpus.rank_address() == "10.0.0.2"
    assert on_cpus.rank_address(2) == "10.0.0.3"
    big = node("b", gpus=3, pool="rollout")
    small = node("c", gpus=1, pool="rollout")
    on_gpus = place_run(configured(*flags, "4"), [A, big, small], "id-a")
    assert on_gpus.ranks == [big, big, big, small]


def test_the_drivers_gpus_are_planned_without_roles_on_other_nodes() -> None:
    plan = plan_run(configured(*POOL), 1)
    assert plan is not None
    assert (plan.ranks, plan.engines) == ((0,), ())
    plan = plan_run(configured("--placement.trainer", "b", *DISK), 1)
    assert plan is not None
    assert (plan.ranks, plan.engines) == ((), ((0,),))


def test_workers_take_the_living_nodes_in_turn() -> None:
    flags = ("--placement.rollout-workers", "pool=rollout", "--gateway.host", "0.0.0.0")
    placement = place_run(configured(*flags), [A, B, C], "id-a")
    assert placement.others == placement.worker_pool == [B, C]
    living = [A, B, C]
    nodes = WorkerNodes([B, C], read_nodes=lambda: living)
    assert [nodes.next_node() for _ in range(3)] == ["id-b", "id-c", "id-b"]
    living.remove(C)
    assert [nodes.next_node() for _ in range(2)] == ["id-b", "id-b"]
    living.remove(B)
    assert nodes.next_node() in ("id-b", "id-c")


# ------------------------------------------------------------------ what is refused


def test_a_label_that_no_node_has_is_refused_with_those_that_there_are() -> None:
    error = refusal(configured(*POOL), A, node("b", pool="other"))
    assert error.field == "placement.engines"
    assert error.value == "pool=rollout"
    assert "b (10.0.0.2, pool=other)" in error.fix


def test_a_pool_too_small_is_refused_with_the_numbers_that_fit() -> None:
    config = configured(*POOL, "--num-engines", "4")
    error = refusal(config, A, node("b", gpus=3, pool="rollout"))
    assert "3 GPUs" in error.reason
    assert "lower --num-engines to 3" in error.fix
    flags = ("--placement.trainer", "b", "--data-parallel-size", "4", *DISK)
    error = refusal(configured(*flags), A, node("b", gpus=2))
    assert "2 GPUs, and the trainer has 4 ranks" in error.reason


def test_ranks_that_ray_places_take_no_gpus_of_the_drivers_engines() -> None:
    own, other = node("a", gpus=2, pool="all"), node("b", gpus=2, pool="all")
    flags = ("--placement.trainer", "pool=all", *DISK)
    error = refusal(configured(*flags), own, other)
    assert error.field == "placement.trainer"
    elsewhere = configured(*flags, "--placement.engines", "b")
    assert place_run(elsewhere, [own, other], "id-a").ranks == [own]


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (("--placement.engines", "b"), "weights.transport"),
        (("--placement.trainer", "b"), "weights.transport"),
        (("--placement.engines", "b", "--engine.tp-size", "2"), "engine.tp_size"),
        (("--placement.engines", "b", *DISK, "--colocate"), "placement.engines"),
        (
            (
                *("--placement.engines", "b", *DISK, "--num-engines", "0"),
                *("--external-engines", "http://10.0.0.5:1"),
            ),
            "placement.engines",
        ),
        (
            ("--placement.trainer", "b", *DISK, "--debug-rollout-only"),
            "placement.trainer",
        ),
        (("--placement.rollout-workers", "b"), "gateway.host"),
    ],
)
def test_settings_that_contradict_a_placement_are_refused(
    flags: tuple[str, ...], field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(*flags)
    assert caught.value.field == field


def test_a_placement_needs_a_cluster() -> None:
    with pytest.raises(ConfigError, match="RAY_ADDRESS is not set"):
        refuse_placement_without_cluster(configured(*POOL))
    refuse_placement_without_cluster(configured())


# ----------------------------------------------------------- what nodes report

HERE = NodeReport(
    versions={
        "invrl": "0.1.0",
        "python": "3.12.3",
        "torch": "2.9.0+cpu",
        "sglang": "0.5.1",
    },
    model="aaaa",
    sees_run_folder=True,
    free_cores=2.0,
    free_memory_bytes=8 * 10**9,
)
FITS = NodeAnswer(node=B, roles=("engines",), report=HERE, clock_gap_s=0.1)


def faults(answer: NodeAnswer, *, opens_files: bool = False) -> list[str]:
    needs = NodeNeeds(driver=HERE, engines_open_files=opens_files)
    return [str(fault) for fault in node_faults(answer, needs)]


def test_a_node_like_the_drivers_is_accepted() -> None:
    assert faults(FITS) == []
    versions = {**HERE.versions, "python": "3.12.9", "torch": "2.9.0+cu128"}
    assert faults(replace(FITS, report=replace(HERE, versions=versions))) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"versions": {**HERE.versions, "sglang": "0.5.2"}}, "sglang of node b"),
        ({"versions": {"invrl": "0.1.0"}}, "python of node b"),
        ({"model": "bbbb"}, "model of node b"),
        ({"port_fault": "it does not reach the driver"}, "ports of node b"),
    ],
)
def test_a_node_that_differs_is_refused_by_name(
    change: dict[str, object], message: str
) -> None:
    found = faults(replace(FITS, report=replace(HERE, **change)))  # type: ignore[arg-type]
    assert message in found[0]
    assert "Fix: " in found[0]


def test_a_clock_that_is_apart_is_refused() -> None:
    [fault] = faults(replace(FITS, clock_gap_s=-2.5))
    assert "'-2.5 s'" in fault


def test_the_run_folder_must_be_shared_only_with_those_that_use_it() -> None:
    apart = replace(FITS, report=replace(HERE, sees_run_folder=False))
    assert faults(apart) == []
    assert "--weights.host" in faults(apart, opens_files=True)[0]
    assert "checkpoints" in faults(replace(apart, roles=("trainer",)))[0]
    assert "logs" in faults(replace(apart, roles=("workers",)))[0]


def test_a_node_without_an_answer_is_refused_only_if_the_run_uses_it() -> None:
    silent = replace(FITS, report=None, failure="it has not answered for 90 s")
    assert "it has not answered for 90 s" in faults(silent)[0]
    assert faults(replace(silent, roles=())) == []


async def asked(tmp_path: Path, *, token: str, node_id: str) -> tuple[str, list[str]]:
    """Ask this machine, as a node would be. Returns its fault, and the nodes whose
    clock was seen."""
    gaps: dict[str, float] = {}
    loopback = replace(A, address="127.0.0.1")
    # its connections come from 127.0.0.1
    addresses = {"b": "127.0.0.2"}
    async with cluster_check._listening(loopback, "secret", addresses, gaps) as port:
        question = NodeQuestion(
            model_path=tmp_path,
            marker=tmp_path,
            node_address="127.0.0.2",
            driver_address="127.0.0.1",
            driver_port=port,
            token=f"{token}-{node_id}",
        )
        report = await asyncio.to_thread(report_node, question)
    assert report.model.startswith("unreadable: No such file")
    assert all(abs(gap) < 5 for gap in gaps.values())
    return report.port_fault, list(gaps)


async def test_node_and_driver_reach_each_other(tmp_path: Path) -> None:
    assert await asked(tmp_path, token="secret", node_id="b") == ("", ["b"])


async def test_a_stranger_is_not_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_report, "_CONNECT_DEADLINE_S", 0.3)
    fault, seen = await asked(tmp_path, token="wrong", node_id="b")
    assert "the driver does not reach it" in fault
    assert seen == []


async def test_a_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_check, "_MEETING_DEADLINE_S", 0.05)
    loopback = replace(A, address="127.0.0.1")
    async with cluster_check._listening(loopback, "secret", {}, {}) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()


def test_a_closed_port_of_the_driver_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    question = NodeQuestion(
        model_path=tmp_path,
        marker=tmp_path,
        node_address="127.0.0.1",
        driver_address="127.0.0.1",
        driver_port=port,
        token="t-b",
    )
    assert (
        f"does not reach the driver at 127.0.0.1:{port}"
        in report_node(question).port_fault
    )


def test_the_table_has_a_line_per_node() -> None:
    silent = NodeAnswer(node=C, roles=(), report=None, failure="no")
    header, first, second = cluster_table([FITS, silent]).splitlines()
    assert header.split()[:4] == ["node", "roles", "invrl", "python"]
    assert "b (10.0.0.2, pool=rollout)" in first
    assert first.endswith("open")
    assert "+0.10 s" in first
    assert second.endswith("no answer")
