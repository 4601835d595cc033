"""The gateway's metrics: counts of one worker, and of all workers together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from invrl.gateway.gate.gate import Gate
from invrl.gateway.registry import SessionRegistry
from invrl.gateway.server.settings import GatewaySettings
from invrl.gateway.server.workers.loop_lag import LoopLag
from invrl.gateway.server.workers.peers import Peers
from invrl.gateway.server.workers.request_counts import RequestCounts
from invrl.gateway.sessions.lifecycle import Lifecycle
from invrl.gateway.sessions.rollout_summary import token_shares
from invrl.gateway.turns.turns import Turns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GatewayMetrics:
    settings: GatewaySettings
    registry: SessionRegistry
    lifecycle: Lifecycle
    turns: Turns
    gates: Sequence[Gate]
    loop_lag: LoopLag
    requests: RequestCounts
    peers: Peers

    async def collect(self, *, all_workers: bool) -> Mapping[str, object]:
        """Return the numbers of this worker, or of all workers of the gateway."""
        metrics: Mapping[str, Any] = self._own()
        if all_workers:
            metrics = await self.peers.metrics(
                metrics, self.settings.env_key.get_secret_value()
            )
        return {**metrics, **token_shares(metrics["tokens"])}

    def _own(self) -> Mapping[str, object]:
        lag_ms = self.loop_lag.summary()
        place = self.peers.place
        tokens = self.lifecycle.tokens
        turns = self.turns.metrics()
        # What is counted since a worker's start falls when that worker is replaced: a
        # program that computes rates needs it for each worker.
        worker = {
            "starts": place.starts,
            **lag_ms,
            "tokens": tokens,
            "requests": self.requests.summary(),
            "prompt_tokens": {
                "cached": turns["turns"].get("cached_tokens", 0),
                "all": turns["turns"].get("prompt_tokens", 0),
            },
        }
        if self.gates:
            numbers = [gate.metrics() for gate in self.gates]
            worker["gate"] = {
                name: sum(gate_numbers[name] for gate_numbers in numbers)
                for name in numbers[0]
            }
        return {
            "run_id": self.settings.run_id,
            "tokens": tokens,
            "sessions": self.registry.counts(),
            "loop_lag_ms": lag_ms,
            "workers": {str(place.number): worker},
            **turns,
        }
