"""The table of `invrl doctor --cluster`: what each node of a Ray cluster has, and what
keeps the run from using it."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from invrl.cli.flags import parse_flags
from invrl.errors import ConfigError
from invrl.host.ray.ray_setup import prepare_ray
from invrl.run.hosts.node_answer import NodeAnswer, node_faults
from invrl.run.hosts.node_report import PACKAGES
from invrl.run.settings.config import resolve

_HEADINGS = (
    "node",
    "roles",
    "invrl",
    "python",
    *PACKAGES,
    "model",
    "run folder",
    "clock",
    "free cores",
    "free GB",
    "ports",
)
_UNKNOWN = "-"


def print_cluster(arguments: Sequence[str]) -> bool:
    """Ask every node of the Ray that RAY_ADDRESS names, print the table and what is
    refused. Returns whether the run could use its nodes. Raises ConfigError."""
    config = resolve(*parse_flags(arguments))
    if not os.environ.get("RAY_ADDRESS"):
        reason = "--cluster asks the nodes of the Ray that it names"
        fix = "set it to the address that `ray start --head` prints, HOST:6379"
        raise ConfigError("RAY_ADDRESS", "", reason, fix)
    prepare_ray()
    # imports Ray, which must not be imported before
    from invrl.run.hosts.cluster_check import ask_cluster, needs_of
    from invrl.run.processes.ray_session import start_ray

    shared = _existing(Path(config.run.run_root).expanduser().absolute())
    with start_ray(config, shared):
        answers = asyncio.run(ask_cluster(config, shared))
    print(cluster_table(answers))
    needs = needs_of(config, shared)
    faults = [fault for answer in answers for fault in node_faults(answer, needs)]
    for fault in faults:
        print(f"FAILED   {fault}")
    print(f"{len(answers)} nodes, {len(faults)} faults")
    return not faults


def cluster_table(answers: Sequence[NodeAnswer]) -> str:
    """Return the table, a line per node."""
    rows = [list(_HEADINGS), *map(_row, answers)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    )


def _row(answer: NodeAnswer) -> list[str]:
    roles = ", ".join(answer.roles) or _UNKNOWN
    report = answer.report
    if report is None:
        blank = [_UNKNOWN] * (len(_HEADINGS) - 3)
        return [str(answer.node), roles, *blank, "no answer"]
    clock = _UNKNOWN
    if answer.clock_gap_s is not None:
        clock = f"{answer.clock_gap_s:+.2f} s"
    return [
        str(answer.node),
        roles,
        *(
            report.versions.get(name, _UNKNOWN)
            for name in ("invrl", "python", *PACKAGES)
        ),
        report.model,
        "seen" if report.sees_run_folder else "not seen",
        clock,
        f"{report.free_cores:.1f}",
        f"{report.free_memory_bytes / 1e9:.1f}",
        "closed" if report.port_fault else "open",
    ]


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    while not folder.is_dir():
        folder = folder.parent
    return folder
