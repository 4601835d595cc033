"""The gateway's metrics: counts of one worker, and of all workers together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from invrl.gateway.server.workers.worker_parts import WorkerParts
from invrl.gateway.sessions.rollout_summary import token_shares


@dataclass(frozen=True, slots=True, eq=False)
class GatewayMetrics:
    parts: WorkerParts

    async def collect(self, *, all_workers: bool) -> Mapping[str, object]:
        """Return the numbers of this worker, or of all workers of the gateway."""
        metrics: Mapping[str, Any] = self._own()
        if all_workers:
            metrics = await self.parts.peers.metrics(
                metrics, self.parts.settings.env_key.get_secret_value()
            )
        return {**metrics, **token_shares(metrics["tokens"])}

    def _own(self) -> Mapping[str, object]:
        parts = self.parts
        lag_ms = parts.loop_lag.summary()
        place = parts.peers.place
        tokens = parts.lifecycle.tokens
        turns = parts.turns.counts.metrics()
        # What is counted since a worker's start falls when that worker is replaced: a
        # program that computes rates needs it for each worker.
        worker = {
            "starts": place.starts,
            **lag_ms,
            "tokens": tokens,
            "requests": parts.requests.summary(),
            "prompt_tokens": {
                "cached": turns["turns"].get("cached_tokens", 0),
                "all": turns["turns"].get("prompt_tokens", 0),
            },
        }
        if parts.gates:
            numbers = [gate.metrics() for gate in parts.gates]
            worker["gate"] = {
                name: sum(gate_numbers[name] for gate_numbers in numbers)
                for name in numbers[0]
            }
        return {
            "run_id": parts.settings.run_id,
            "tokens": tokens,
            "sessions": parts.registry.counts(),
            "loop_lag_ms": lag_ms,
            "workers": {str(place.number): worker},
            **turns,
        }
