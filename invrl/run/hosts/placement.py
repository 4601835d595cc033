"""The nodes of a run in a Ray cluster: where its engines and trainer ranks are.

A role is placed by a label of nodes, a node's name or its address (`[placement]`).
Everything else is on the driver's node, which has the run folder and the gateway:
`start_actor` pins it there. Pure, except for `living_nodes`.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from invrl.engines.launch.engine_hosts import EngineHost
from invrl.errors import ConfigError
from invrl.run.settings.config import Config

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A living node of a Ray cluster."""

    id: str
    name: str
    address: str
    labels: Mapping[str, str]
    gpus: int

    @staticmethod
    def of(row: Mapping[str, Any]) -> Node:
        """Read an entry of `ray.nodes()`."""
        return Node(
            id=row["NodeID"],
            name=row.get("NodeName") or row["NodeManagerHostname"],
            address=row["NodeManagerAddress"],
            labels=row.get("Labels") or {},
            gpus=int(row["Resources"].get("GPU", 0)),
        )

    def matches(self, selector: str) -> bool:
        """Whether a label (KEY=VALUE), a name or an address means this node."""
        key, is_label, value = selector.partition("=")
        if is_label:
            return self.labels.get(key) == value
        return selector in (self.name, self.address)

    def __str__(self) -> str:
        own_labels = [
            f"{key}={value}"
            for key, value in sorted(self.labels.items())
            if not key.startswith("ray.io/")
        ]
        return f"{self.name} ({', '.join([self.address, *own_labels])})"


def living_nodes() -> list[Node]:
    """Return the living nodes of the Ray that this process has joined."""
    import ray

    return [Node.of(row) for row in ray.nodes() if row["Alive"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Nodes of a run."""

    driver: Node
    engine_pool: Sequence[Node] | None = None
    """Nodes that its engines may be on; None: they are on the driver's."""
    ranks: Sequence[Node] | None = None
    """Node of each trainer rank, the policy's before the critic's; None: the
    driver's."""
    worker_pool: Sequence[Node] | None = None
    """Nodes that the rollout workers may be on; None: the driver's."""

    @property
    def others(self) -> list[Node]:
        """Nodes of the run besides the driver's, each once."""
        placed = (*(self.engine_pool or ()), *self._ranks, *(self.worker_pool or ()))
        nodes = {node.id: node for node in placed}
        return [node for node in nodes.values() if node.id != self.driver.id]

    def rank_address(self, first: int = 0) -> str:
        """Return the address at which the ranks from `first` meet, and engines join a
        broadcast: loopback if the whole run is on one node."""
        if not self.others:
            return LOOPBACK
        return self._ranks[first].address if self._ranks else self.driver.address

    @property
    def _ranks(self) -> Sequence[Node]:
        return self.ranks or ()


def place_run(config: Config, nodes: Sequence[Node], driver_id: str) -> Placement:
    """Place the roles of a run on the nodes. Raises ConfigError for a label that no
    node has, and for nodes with too few GPUs."""
    [driver] = [node for node in nodes if node.id == driver_id]
    ranks = None
    if config.rank_nodes:
        pool = _pool("placement.trainer", config.rank_nodes, nodes)
        ranks = _place_ranks(config, pool)
        if driver.gpus and driver in ranks and config.engines_here:
            raise ConfigError(
                "placement.trainer",
                config.rank_nodes,
                f"{driver} has it, the node of the driver, whose engines have GPUs there that Ray would give "
                "to ranks",
                "choose nodes without the driver's, or place the engines elsewhere (--placement.engines)",
            )
    engine_pool = None
    if config.engine_nodes:
        matching = _pool("placement.engines", config.engine_nodes, nodes)
        engine_pool = [node for node in matching if node.id != driver_id]
        if not engine_pool:
            raise ConfigError(
                "placement.engines",
                config.engine_nodes,
                f"only {driver} has it, the node of the driver",
                "leave it out: the run's engines are there without it",
            )
        _check_engine_gpus(config, engine_pool, ranks or ())
    worker_pool = None
    if config.worker_nodes:
        worker_pool = _pool("placement.rollout_workers", config.worker_nodes, nodes)
    return Placement(
        driver=driver, engine_pool=engine_pool, ranks=ranks, worker_pool=worker_pool
    )


class EnginePool:
    """The node of each engine, chosen when it starts: one of those that live then, with
    the fewest other engines. Any thread may ask."""

    def __init__(
        self,
        selector: str,
        *,
        tp_size: int,
        driver_id: str,
        ranks: Sequence[Node] = (),
        read_nodes: Callable[[], Sequence[Node]] = living_nodes,
    ) -> None:
        """`ranks`: nodes of the trainer's ranks, each with a GPU less where it has
        any."""
        self._selector = selector
        self._tp_size = tp_size
        self._driver_id = driver_id
        self._ranks = ranks
        self._read_nodes = read_nodes
        self._node_of: dict[str, str] = {}
        self._lock = threading.Lock()

    def host_of(self, engine: str) -> EngineHost | None:
        """Return the node on which the engine is to start now; None while none that it
        may be on has room."""
        with self._lock:
            node = self._choose(engine)
        if node is None:
            return None
        return EngineHost(
            node_id=node.id,
            name=node.name,
            address=node.address,
            num_gpus=self._tp_size if node.gpus else None,
        )

    def _choose(self, engine: str) -> Node | None:
        self._node_of.pop(engine, None)
        num_engines = Counter(self._node_of.values())
        nodes = [
            node
            for node in self._read_nodes()
            if node.matches(self._selector)
            and node.id != self._driver_id
            and num_engines[node.id] < _engine_room(node, self._tp_size, self._ranks)
        ]
        if not nodes:
            return None
        node = min(nodes, key=lambda candidate: num_engines[candidate.id])
        self._node_of[engine] = node.id
        return node

    @property
    def description(self) -> str:
        """Describe the nodes for a message."""
        return f"a node for --placement.engines {self._selector}"


def engine_pool(config: Config, placement: Placement | None) -> EnginePool | None:
    """Return the nodes that the engines start on; None: the driver's."""
    if placement is None or not config.engine_nodes:
        return None
    return EnginePool(
        config.engine_nodes,
        tp_size=config.engine.tp_size,
        driver_id=placement.driver.id,
        ranks=placement.ranks or (),
    )


class WorkerNodes:
    """The node of each new rollout worker: the living ones in turn."""

    def __init__(
        self,
        pool: Sequence[Node],
        read_nodes: Callable[[], Sequence[Node]] = living_nodes,
    ) -> None:
        self._turns = itertools.cycle(pool)
        self._size = len(pool)
        self._read_nodes = read_nodes

    def next_node(self) -> str:
        """Return Ray's id of a node; of one that is gone if none of them lives, on
        which no worker will start."""
        living = {node.id for node in self._read_nodes()}
        for _ in range(self._size):
            node = next(self._turns)
            if node.id in living:
                return node.id
        return next(self._turns).id


def _pool(field: str, selector: str, nodes: Sequence[Node]) -> list[Node]:
    pool = [node for node in nodes if node.matches(selector)]
    if pool:
        return pool
    listed = ", ".join(map(str, nodes))
    raise ConfigError(
        field,
        selector,
        "no living node of this Ray has that label, name or address",
        f"choose one of: {listed}; a label is set by `ray start --labels`",
    )


def _place_ranks(config: Config, pool: Sequence[Node]) -> list[Node]:
    """Fill one node after the other: by GPUs, or in equal parts on CPUs."""
    num_ranks = config.num_ranks
    if any(node.gpus for node in pool):
        slots = [node for node in pool for _ in range(node.gpus)]
        if len(slots) < num_ranks:
            raise ConfigError(
                "placement.trainer",
                config.rank_nodes,
                f"its nodes have {len(slots)} GPUs, and the trainer has {num_ranks} ranks",
                f"lower the ranks to {len(slots)} (--data-parallel-size), or add nodes",
            )
        return slots[:num_ranks]
    each = -(-num_ranks // len(pool))
    return [pool[rank // each] for rank in range(num_ranks)]


def _engine_room(node: Node, tp_size: int, ranks: Sequence[Node]) -> float:
    """Return how many engines fit on a node, beside the trainer's ranks there."""
    if not node.gpus:
        return float("inf")
    num_ranks = sum(rank.id == node.id for rank in ranks)
    return (node.gpus - num_ranks) // tp_size


def _check_engine_gpus(
    config: Config, pool: Sequence[Node], ranks: Sequence[Node]
) -> None:
    tp_size = config.engine.tp_size
    num_engines = config.engine.num_engines
    room = sum(_engine_room(node, tp_size, ranks) for node in pool)
    if room >= num_engines:
        return
    gpus = sum(node.gpus for node in pool)
    reason = (
        f"its nodes have {gpus} GPUs, and {num_engines} engine(s) need {tp_size} each"
    )
    num_ranks = sum(node in pool for node in ranks)
    if num_ranks:
        reason += f", beside {num_ranks} trainer rank(s)"
    fix = "choose nodes with more"
    if room:
        fix = f"lower --num-engines to {room}, or {fix}"
    raise ConfigError("placement.engines", config.engine_nodes, reason, fix)
