"""Measurements of each part of a run for a scrape, as series of
`observe/metrics/metric_families.py`.

Invariant: nothing here asks the trainer or the buffer's actor, and every question to
another process has a deadline. All may be called from any thread."""

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from invrl.buffer.groups.event_counts import BufferCounts
from invrl.buffer.ledger.open_group import RolloutState
from invrl.engines.fleet.fleet_state import FleetState
from invrl.host.network.direct_connections import direct_client
from invrl.observe.metrics.run_exporter import Histogram, Labels, Numbers
from invrl.run.checkpoints.checkpoints import Checkpoints
from invrl.store.run_folder import RunFolder
from invrl.types.reasons import DropReason, FailureReason

_GATEWAY_DEADLINE_S = 7.0
"""Longer than a gateway worker waits for the others, shorter than Prometheus waits for
us (10 s)."""
_NOTHING = BufferCounts(states={}, failed={}, dropped={})
_ENDS = (RolloutState.TRAINED, RolloutState.DROPPED)


def disk_numbers(folder: RunFolder) -> Numbers:
    usage = shutil.disk_usage(folder.path)
    return {
        "invrl_disk_free_bytes": {(): float(usage.free)},
        "invrl_disk_size_bytes": {(): float(usage.total)},
    }


def checkpoint_numbers(folder: RunFolder) -> Numbers:
    """Return the newest checkpoint's numbers; nothing without a checkpoint."""
    checkpoint = Checkpoints(folder.checkpoints_path).latest()
    if checkpoint is None:
        return {}
    return {
        "invrl_checkpoint_step": {(): float(checkpoint.step)},
        "invrl_checkpoint_timestamp_seconds": {(): _written_at(checkpoint.path)},
    }


def _written_at(checkpoint: Path) -> float:
    """Return the time of a checkpoint's last file."""
    return max(
        (path.stat().st_mtime for path in checkpoint.iterdir()),
        default=checkpoint.stat().st_mtime,
    )


def fleet_numbers(state: Callable[[], FleetState]) -> Numbers:
    fleet = state()
    restarts: dict[Labels, float] = {}
    for name in (*fleet.alive, *fleet.lost):
        restarts[(name,)] = float(fleet.restarts.get(name, 0))
    return {
        "invrl_engines": {
            ("alive",): float(len(fleet.alive)),
            ("lost",): float(len(fleet.lost)),
        },
        "invrl_engine_restarts": restarts,
    }


def read_gateway(
    url: str, env_key: str, timeout_s: float = _GATEWAY_DEADLINE_S
) -> Mapping[str, Any]:
    """Read all workers' numbers from the gateway's `/metrics`. Raises httpx.HTTPError
    or ValueError."""
    headers = {"authorization": f"Bearer {env_key}"}
    with direct_client(url, timeout_s=timeout_s, headers=headers) as http:
        return http.get("/metrics").raise_for_status().json()


def gateway_numbers(reply: Mapping[str, Any]) -> Numbers:
    """Convert an answer of `read_gateway`. Counts since a worker's start keep the
    worker as a label: each such series restarts with its worker, which a sum over
    workers would hide from Prometheus."""
    sessions = reply["sessions"]
    numbers: dict[str, dict[Labels, float | Histogram]] = defaultdict(dict)
    for state in ("open", "unrewarded"):
        count = float(sessions.get(state, 0))
        numbers["invrl_gateway_sessions"][(state,)] = count
    for worker, counts in reply["workers"].items():
        numbers["invrl_gateway_worker_starts"][(worker,)] = float(counts["starts"])
        for quantile, name in (("0.5", "p50"), ("0.99", "p99"), ("1", "max")):
            lag_s = counts[name] / 1000
            numbers["invrl_gateway_loop_lag_seconds"][(worker, quantile)] = lag_s
        for kind, count in counts["tokens"].items():
            numbers["invrl_gateway_tokens"][(worker, kind)] = float(count)
        for kind, count in counts["prompt_tokens"].items():
            numbers["invrl_gateway_prompt_tokens"][(worker, kind)] = float(count)
        if "gate" in counts:
            held = counts["gate"]
            numbers["invrl_gateway_turns_held"][(worker,)] = float(held["turns_held"])
            numbers["invrl_gateway_held_seconds"][(worker,)] = float(
                held["seconds_held"]
            )
        for route, counted in counts["requests"].items():
            for status, count in counted["statuses"].items():
                labels = (worker, route, status)
                numbers["invrl_gateway_requests"][labels] = float(count)
            numbers["invrl_gateway_request_seconds"][(worker, route)] = Histogram(
                buckets=counted["buckets"], total=counted["seconds"]
            )
    return numbers


@dataclass(slots=True)
class BufferNumbers:
    """Newest counts of the buffer, which a task of the loop requests. `resumed`: the
    buffer's counts continue from an earlier incarnation, while the exporter's restart
    with each."""

    resumed: bool
    _before: BufferCounts = _NOTHING
    _now: BufferCounts | None = None

    def update(self, counts: BufferCounts) -> None:
        if self.resumed and self._now is None:
            self._before = counts
        self._now = counts

    def numbers(self) -> Numbers:
        """Return the numbers; empty before the first update."""
        if self._now is None:
            return {}
        rollouts: dict[Labels, float] = {}
        groups: dict[Labels, float] = {}
        ended: dict[Labels, float] = {}
        for name, count in self._now.states.items():
            kind, _, state = name.partition("_")
            if kind == "groups":
                groups[(state,)] = float(count)
            elif state in _ENDS:
                ended[(state,)] = float(count - self._before.states.get(name, 0))
            else:
                rollouts[(state,)] = float(count)
        return {
            "invrl_rollouts": rollouts,
            "invrl_groups": groups,
            "invrl_rollouts_ended": ended,
            "invrl_rollouts_failed": _since(
                self._before.failed, self._now.failed, FailureReason
            ),
            "invrl_groups_dropped": _since(
                self._before.dropped, self._now.dropped, DropReason
            ),
        }


def _since(
    before: Mapping[str, int], now: Mapping[str, int], reasons: Iterable[str]
) -> dict[Labels, float]:
    """Return the differences by reason. All `reasons` are present from the beginning:
    Prometheus sees no rise in a series that begins with its first event."""
    names = dict.fromkeys([*map(str, reasons), *now])
    return {(name,): float(now.get(name, 0) - before.get(name, 0)) for name in names}


def memory_numbers(memory: Mapping[str, int]) -> Numbers:
    """`memory`: resident bytes by process."""
    return {
        "invrl_process_resident_bytes": {
            (name,): float(size) for name, size in memory.items()
        }
    }
