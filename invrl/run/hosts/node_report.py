"""What a node of a Ray cluster reports of itself, for a run that is about to use it.

`report_node` runs on the node, as one short task. It opens a connection to the driver
and accepts one from it, on ports that nobody chose: a firewall that lets only known
ports through is found here.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from invrl import __version__
from invrl.host.network.rendezvous import listen

PACKAGES = ("torch", "sglang", "megatron-core")
"""Packages whose versions are compared, besides invrl and Python."""
_CONNECT_DEADLINE_S = 10.0
_LONGEST_LINE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeQuestion:
    """What a node is asked."""

    model_path: Path
    marker: Path
    """File of the driver in the run folder."""
    node_address: str
    """The node's own address, at which it listens."""
    driver_address: str
    driver_port: int
    token: str = field(repr=False)
    """Proof of who connects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """State of a node."""

    versions: Mapping[str, str]
    """Versions by package; one that is not installed is left out."""
    model: str
    """Checksum of the model's config.json, or why it cannot be read."""
    sees_run_folder: bool
    free_cores: float
    free_memory_bytes: int
    port_fault: str = ""
    """Why it does not reach the driver, or the driver does not reach it; "": both
    do."""


def report_node(question: NodeQuestion) -> NodeReport:
    """Report the state of the node that this process is on."""
    report = local_report(question.model_path, question.marker)
    return NodeReport(
        versions=report.versions,
        model=report.model,
        sees_run_folder=report.sees_run_folder,
        free_cores=report.free_cores,
        free_memory_bytes=report.free_memory_bytes,
        port_fault=_port_fault(question),
    )


def local_report(model_path: Path, marker: Path) -> NodeReport:
    """Report the state of this machine, without its connections."""
    num_cores = len(os.sched_getaffinity(0))
    return NodeReport(
        versions=_versions(),
        model=_model_checksum(model_path),
        sees_run_folder=os.path.isfile(marker),  # also in a folder of another user
        free_cores=max(0.0, num_cores - os.getloadavg()[0]),
        free_memory_bytes=psutil.virtual_memory().available,
    )


def _versions() -> dict[str, str]:
    versions = {"invrl": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _model_checksum(model_path: Path) -> str:
    try:
        config = (model_path / "config.json").read_bytes()
    except OSError as error:
        return f"unreadable: {error.strerror}"
    return hashlib.sha256(config).hexdigest()[:12]


def _port_fault(question: NodeQuestion) -> str:
    """Connect to the driver, and be connected to by it."""
    driver = f"{question.driver_address}:{question.driver_port}"
    step = f"it does not listen on {question.node_address}"
    try:
        with listen(question.node_address) as listener:
            step = f"it does not reach the driver at {driver}"
            own_port = listener.getsockname()[1]
            with socket.create_connection(
                (question.driver_address, question.driver_port), _CONNECT_DEADLINE_S
            ) as connection:
                greeting = {
                    "token": question.token,
                    "time": time.time(),
                    "port": own_port,
                }
                connection.sendall(json.dumps(greeting).encode() + b"\n")
                own = f"{question.node_address}:{own_port}"
                step = f"the driver does not reach it at {own}"
                return _wait_for_driver(listener, question.token)
    except OSError as error:
        return f"{step} ({error})"


def _wait_for_driver(listener: socket.socket, token: str) -> str:
    """Accept connections until one proves to be the driver's. Raises OSError."""
    give_up_at = time.monotonic() + _CONNECT_DEADLINE_S
    while True:
        listener.settimeout(max(0.1, give_up_at - time.monotonic()))
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as lines:
            connection.settimeout(max(0.1, give_up_at - time.monotonic()))
            if lines.readline(_LONGEST_LINE).strip() == token.encode():
                return ""
