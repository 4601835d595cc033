"""Asks the nodes of a Ray cluster, before anything starts, whether they can serve the
run.

Invariant: `check_cluster` returns only if every node of the run answered in time, has
the driver's versions and model, and reaches the driver and is reached by it. Refusals
name the node, the value and the fix.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from invrl.errors import ConfigError
from invrl.host.ray.actor import own_node
from invrl.run.hosts.node_answer import NodeAnswer, NodeNeeds, node_faults
from invrl.run.hosts.node_report import (
    NodeQuestion,
    NodeReport,
    local_report,
    report_node,
)
from invrl.run.hosts.placement import Node, Placement, living_nodes, place_run
from invrl.run.settings.config import Config
from invrl.store.run_folder import unwritable
from invrl.weights.config import FileWeights

_DEADLINE_S = 90.0
"""Seconds for a node to start a worker and answer."""
_MEETING_DEADLINE_S = 15.0
"""Seconds for whoever connects to greet, and to be connected back to. A node itself
waits 10 s."""
_LONGEST_LINE = 4096
_WRONG_GREETINGS = (OSError, ValueError, TypeError, LookupError)


async def check_cluster(config: Config, shared: Path) -> Placement | None:
    """Place the run on the Ray that this process has joined and check the nodes that it
    uses; None if the run starts its own Ray. `shared`: folder that nodes must see if
    they use files of the run. Raises ConfigError."""
    if not os.environ.get("RAY_ADDRESS"):
        refuse_placement_without_cluster(config)
        return None
    placement = place_run(config, living_nodes(), own_node())
    answers = await ask_nodes(config, placement, placement.others, shared)
    needs = needs_of(config, shared)
    for answer in answers:
        for fault in node_faults(answer, needs):
            raise fault
    return placement


def refuse_placement_without_cluster(config: Config) -> None:
    """Raise ConfigError if roles are placed on nodes of a Ray that nobody named."""
    for name, selector in (
        ("engines", config.engine_nodes),
        ("trainer", config.rank_nodes),
        ("rollout_workers", config.worker_nodes),
    ):
        if selector:
            raise ConfigError(
                f"placement.{name}",
                selector,
                "RAY_ADDRESS is not set, and the Ray that a run starts has one node",
                "set RAY_ADDRESS to the address of a running cluster, or add --no-placement",
            )


async def ask_cluster(config: Config, shared: Path) -> list[NodeAnswer]:
    """Ask every living node of the Ray that this process has joined. Raises ConfigError
    if the run cannot be placed."""
    nodes = living_nodes()
    placement = place_run(config, nodes, own_node())
    return await ask_nodes(config, placement, nodes, shared)


async def ask_nodes(
    config: Config, placement: Placement, nodes: Sequence[Node], shared: Path
) -> list[NodeAnswer]:
    """Ask these nodes at the same time."""
    if not nodes:
        return []
    token = secrets.token_hex(16)
    clock_gaps: dict[str, float] = {}
    with _marker(shared) as marker:
        addresses = {node.id: node.address for node in nodes}
        async with _listening(placement.driver, token, addresses, clock_gaps) as port:
            questions = [
                NodeQuestion(
                    model_path=config.model.folder,
                    marker=marker,
                    node_address=node.address,
                    driver_address=placement.driver.address,
                    driver_port=port,
                    token=f"{token}-{node.id}",
                )
                for node in nodes
            ]
            replies = await asyncio.gather(
                *map(_ask, nodes, questions), return_exceptions=True
            )
    answers: list[NodeAnswer] = []
    for node, reply in zip(nodes, replies, strict=True):
        failure = ""
        if isinstance(reply, TimeoutError):
            failure = f"it has not answered for {_DEADLINE_S:g} s"
        elif isinstance(reply, BaseException):
            failure = _last_line(reply)
        answers.append(
            NodeAnswer(
                node=node,
                roles=_roles(node, placement),
                report=reply if isinstance(reply, NodeReport) else None,
                failure=failure,
                clock_gap_s=clock_gaps.get(node.id),
            )
        )
    return answers


def needs_of(config: Config, shared: Path) -> NodeNeeds:
    """Return what the run needs of its nodes. Reads this machine's state."""
    weights = config.weights
    return NodeNeeds(
        driver=local_report(config.model.folder, shared),
        engines_open_files=isinstance(weights, FileWeights) and not weights.host,
    )


def _roles(node: Node, placement: Placement) -> list[str]:
    roles: list[str] = []
    if node.id == placement.driver.id:
        roles.append("driver")
    if node in (placement.engine_pool or ()):
        roles.append("engines")
    if node in (placement.ranks or ()):
        roles.append("trainer")
    if node in (placement.worker_pool or ()):
        roles.append("workers")
    return roles


async def _ask(node: Node, question: NodeQuestion) -> NodeReport:
    remote: Any = ray.remote
    task = remote(num_cpus=0, max_retries=0)(report_node)
    reference = task.options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)
    ).remote(question)
    async with asyncio.timeout(_DEADLINE_S):
        return await asyncio.wrap_future(reference.future())


@contextlib.contextmanager
def _marker(shared: Path) -> Iterator[Path]:
    """Write a file that nodes look for, and remove it at the end."""
    marker = shared / f".seen-by-nodes-{secrets.token_hex(8)}"
    try:
        marker.touch()
    except OSError as error:
        raise unwritable(shared, error) from error
    try:
        yield marker
    finally:
        marker.unlink(missing_ok=True)


@asynccontextmanager
async def _listening(
    driver: Node,
    token: str,
    addresses: Mapping[str, str],
    clock_gaps: dict[str, float],
) -> AsyncIterator[int]:
    """Listen on the driver's address for nodes, connect back to the address of each,
    and record how far its clock is ahead. `addresses`: by Ray's id of the node. Yields
    the port."""

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with _ending_in_time(writer):
            line = await reader.readline()
            now = time.time()
            greeting = json.loads(line)
            proof, _, node_id = str(greeting["token"]).partition("-")
            if not secrets.compare_digest(proof, token):
                return
            clock_gaps[node_id] = float(greeting["time"]) - now
            _, back = await asyncio.open_connection(
                addresses[node_id], int(greeting["port"])
            )
            with contextlib.closing(back):
                back.write(f"{greeting['token']}\n".encode())
                await back.drain()

    server = await asyncio.start_server(meet, driver.address, 0, limit=_LONGEST_LINE)
    async with server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def _ending_in_time(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    """Close the connection at the end of the block, which ends by itself after a
    deadline or a wrong greeting. From Python 3.12 on a server's end waits for its
    connections."""
    with contextlib.closing(writer), contextlib.suppress(*_WRONG_GREETINGS):
        async with asyncio.timeout(_MEETING_DEADLINE_S):
            yield


def _last_line(error: BaseException) -> str:
    """Return the last line of an error: Ray puts the cause there, below the
    traceback."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
