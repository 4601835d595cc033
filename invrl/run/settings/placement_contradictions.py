"""Contradictions between roles on other nodes of a Ray cluster and the other settings.

`contradictions.py` runs them. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from invrl.run.settings.algorithm_contradictions import Contradictions
from invrl.weights.config import CollectiveWeights, FileWeights

if TYPE_CHECKING:
    from invrl.run.settings.config import Config

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def placement(config: Config) -> Contradictions:
    """Roles that the run does not have, and weights that stay on one machine."""
    if config.engine_nodes:
        yield from _placed("placement.engines", config)
        if config.trains_alone:
            fix = "leave it out"
            yield "placement.engines", "the run starts only a trainer", fix
        if not config.engine.num_engines:
            fix = "leave it out, or set --num-engines to 1 or more"
            yield "placement.engines", "the run starts no engine of its own", fix
    if config.rank_nodes:
        yield from _placed("placement.trainer", config)
        if config.run.debug_rollout_only:
            fix = "leave one of the two out"
            yield (
                "placement.trainer",
                "with debug_rollout_only there is no trainer",
                fix,
            )
    if config.worker_nodes:
        if config.trains_alone:
            fix = "leave it out"
            yield "placement.rollout_workers", "the run starts only a trainer", fix
        if config.gateway.host in _LOOPBACK:
            reason = (
                "rollout workers on other nodes do not reach an address of loopback"
            )
            fix = "add --gateway.host 0.0.0.0, or this machine's address"
            yield "gateway.host", reason, fix


def _placed(field: str, config: Config) -> Contradictions:
    if config.run.colocate:
        reason = "with colocate engines and trainer use the same GPUs"
        yield field, reason, "leave one of the two out"
    sends_weights = not (config.trains_alone or config.run.debug_rollout_only)
    crosses_hosts = isinstance(config.weights, CollectiveWeights | FileWeights)
    if sends_weights and config.engine.tp_size > 1:
        reason = (
            "only the transport 'arena' sends weights to engines of several processes, and it goes by memory of "
            "one machine"
        )
        yield "engine.tp_size", reason, "leave it out, or the placement"
    elif sends_weights and not crosses_hosts:
        reason = (
            f"the transport {config.weights.transport!r} goes by memory of one machine, and engines and "
            "trainer are on several"
        )
        fix = "add --weights.transport collective, or delta or disk with --weights.host or a shared folder"
        yield "weights.transport", reason, fix
