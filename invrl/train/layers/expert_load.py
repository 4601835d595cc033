"""Load of the experts in a step, on all ranks together, and balancing of the experts by
a bias of the router.

Balancing without an auxiliary loss: Wang et al. 2024, "Auxiliary-Loss-Free Load
Balancing Strategy for Mixture-of-Experts" (arXiv 2408.15664), algorithm 1; DeepSeek-V3
(arXiv 2412.19437), section 2.1.2. Imported after `device.prepare()`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from invrl.families.model_config import HuggingFaceConfig
from invrl.train.layers.expert_router import ExpertRouter, expert_routers
from invrl.train.runtime import device
from invrl.types.metrics import Max, Mean, Metric, Min


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLoad:
    """Load of the rows of one optimizer step, per layer that has experts."""

    tokens_LE: torch.Tensor
    """Tokens that each expert computed, float64. A prefix that rows share counts once
    for each of them."""
    entropy_L: torch.Tensor
    """Entropy of the router's scores over all experts, in nats, summed over tokens."""
    chosen: int
    """Number of experts that compute a token."""

    def metrics(self) -> dict[str, Metric]:
        """Return load relative to the mean of the layer's experts; nothing for a step
        without tokens."""
        mean_L = self.tokens_LE.mean(-1)
        if not bool(mean_L.all()):
            return {}
        busiest_L = self.tokens_LE.amax(-1) / mean_L
        idlest_L = self.tokens_LE.amin(-1) / mean_L
        num_tokens_L = self.tokens_LE.sum(-1) / self.chosen
        entropy_L = self.entropy_L / num_tokens_L
        return {
            "expert_load_max": Mean(float(busiest_L.mean())),
            "expert_load_max_of_layers": Max(float(busiest_L.max())),
            "expert_load_min": Mean(float(idlest_L.mean())),
            "expert_load_min_of_layers": Min(float(idlest_L.min())),
            "dead_experts": Mean(float((self.tokens_LE == 0).double().mean())),
            "router_entropy": Mean(float(entropy_L.mean())),
            "router_entropy_min_of_layers": Min(float(entropy_L.min())),
        }

    def bias_directions(self) -> torch.Tensor:
        """Return [L, E]: 1 for an expert with fewer tokens than the mean of its layer,
        -1 for one with more. Exact, because the numbers are whole."""
        num_experts = self.tokens_LE.shape[-1]
        return torch.sign(
            self.tokens_LE.sum(-1, keepdim=True) - num_experts * self.tokens_LE
        )


class ExpertRouters:
    """Routers of this rank's part of a model with experts."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        config: HuggingFaceConfig,
        *,
        bias_update_rate: float,
    ) -> None:
        """`bias_update_rate` is above 0 only if the family's routers have a bias."""
        assert config.experts is not None, f"{config.model_type} has no experts"
        layers = [
            layer
            for layer in range(config.num_hidden_layers)
            if config.has_experts(layer)
        ]
        self._routers: dict[int, ExpertRouter] = {}
        """Routers by the position of their layer among all that have experts."""
        for router in (router for chunk in chunks for router in expert_routers(chunk)):
            assert router.layer_number is not None, (
                "Megatron numbers all layers, from 1"
            )
            self._routers[layers.index(router.layer_number - 1)] = router
        self._num_layers = len(layers)
        self._experts = config.experts
        self._bias_update_rate = bias_update_rate

    def clear(self) -> None:
        for router in self._routers.values():
            router.clear()

    def load(self) -> ExpertLoad:
        """Return the load since the last `clear`, of all layers and over all ranks,
        which call it together."""
        tallies = torch.zeros(
            self._num_layers,
            self._experts.count + 1,
            dtype=torch.float64,
            device=device.device(),
        )
        for place, router in self._routers.items():
            tallies[place] = router.tally
        # No rank routes what another one routes: tensor-parallel ranks divide the
        # tokens, too.
        torch.distributed.all_reduce(tallies)
        tallies = tallies.cpu()
        return ExpertLoad(tallies[:, :-1], tallies[:, -1], self._experts.chosen)

    def balance(self, load: ExpertLoad) -> None:
        """Move the biases by the load of the step that was just made."""
        if self._bias_update_rate == 0.0:
            return
        change_LE = self._bias_update_rate * load.bias_directions()
        for place, router in self._routers.items():
            bias_E = router.expert_bias
            assert bias_E is not None, (
                "only a family whose routers have a bias may have a rate"
            )
            bias_E += change_LE[place].to(bias_E)
