"""Routing replay: a forward pass sends tokens to the experts that an earlier pass chose
for them.

The earlier pass is the trainer's own for the old log-probs (GSPO, arXiv 2507.18071,
section 5.3; "R2"), or the engine's that sampled the tokens (arXiv 2510.11370; "R3").
The recorded indices decide which experts compute a token. Their weights come from this
model's router, so gradients flow through it.

The indices travel with the micro-batch to each layer, so a layer that is recomputed in
the backward pass gets the same ones. So do the routers' scores of these experts, if an
objective needs the router shift (`algorithms/policy_loss/router_shift.py`), whether or
not the experts are replayed. Imported after `device.prepare()`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer
from numpy.typing import NDArray

from invrl.algorithms.policy_loss.router_shift import layer_shift, score_logprobs
from invrl.errors import TrainError
from invrl.families.model_config import Experts
from invrl.train.batches.micro_batch import (
    UNKNOWN_EXPERT,
    MicroBatch,
    OldRouting,
    TokenSequence,
)
from invrl.train.parallel.context_parallel import own_share
from invrl.train.parallel.context_share import ContextShare
from invrl.train.runtime import device
from invrl.train.runtime.device import to_device
from invrl.types.metrics import Mean

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Megatron's choice: (scores [P, E], k, groups) -> (the chosen scores, the chosen
experts), [P, K] each."""


@dataclass(slots=True, eq=False)
class RoutingAgreement:
    """Agreement of this rank's routers with the replayed experts."""

    equal: float | torch.Tensor = 0.0
    """Pairs of a token and a layer in which they agree."""
    replayed: float | torch.Tensor = 0.0
    """All pairs with replayed experts."""

    def count(
        self, own_PK: torch.Tensor, replayed_PK: torch.Tensor, known_P: torch.Tensor
    ) -> None:
        """Count agreement. Both rows are sets: their order is irrelevant."""
        equal_P = (own_PK.sort(-1).values == replayed_PK.sort(-1).values).all(-1)
        self.equal = self.equal + (equal_P & known_P).sum()
        self.replayed = self.replayed + known_P.sum()

    def take(self) -> Mean:
        """Return the share of the equal ones in all layers of the model, and reset the
        counts. All ranks of a replica take part."""
        counts = torch.tensor(
            [float(self.equal), float(self.replayed)], dtype=torch.float64
        )
        counts = counts.to(device.device())
        torch.distributed.all_reduce(
            counts, group=parallel_state.get_model_parallel_group()
        )
        torch.distributed.all_reduce(
            counts, group=parallel_state.get_context_parallel_group()
        )
        self.equal = 0.0
        self.replayed = 0.0
        return Mean(float(counts[0]), float(counts[1]))


@dataclass(frozen=True, slots=True, eq=False)
class ChosenScores:
    """Experts, and the router's scores of them: [P, K] each."""

    experts_PK: torch.Tensor
    scores_PK: torch.Tensor
    """Logarithms of shares of all experts' scores."""


@dataclass(slots=True, eq=False)
class LayerRouting:
    """Routing of one micro-batch in one layer. Replaces Megatron's `RouterReplay`."""

    replayed_PK: torch.Tensor | None
    """Experts of this rank's tokens; `UNKNOWN_EXPERT` where the router chooses. None:
    it always does."""
    agreement: RoutingAgreement
    old: ChosenScores | None = None
    """Scores of the pass for the old log-probs. None: nothing is compared with it."""
    keeps_scores: bool = False
    """Whether this is that pass."""
    chosen_PK: torch.Tensor | None = None
    """Experts that computed the tokens, once the layer has run."""
    scores_PK: torch.Tensor | None = None
    """The router's scores of them, if kept."""
    shift_P: torch.Tensor | None = None
    """Shift of the router since `old`."""

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: TopK,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores [P, K] of the chosen experts, and the experts. Called by
        Megatron's router."""
        own_scores, own_PK = default_compute_topk(
            scores, topk, num_groups=num_groups, group_topk=group_topk
        )
        if self.replayed_PK is None:
            self.chosen_PK = own_PK
            return own_scores, own_PK
        known_P = self.replayed_PK[:, 0] != UNKNOWN_EXPERT
        chosen_PK = torch.where(known_P[:, None], self.replayed_PK, own_PK)
        if (
            torch.is_grad_enabled()
        ):  # once in an update, also if the layer is recomputed
            self.agreement.count(own_PK, self.replayed_PK, known_P)
        self.chosen_PK = chosen_PK
        return scores.gather(1, chosen_PK), chosen_PK

    def note(self, logits_PE: torch.Tensor, score: str) -> None:
        """Note the router's logits after its choice. `score` is its function of
        them."""
        if not self.keeps_scores and self.old is None:
            return
        with torch.no_grad():
            scores_PE = score_logprobs(logits_PE, score)
            if self.keeps_scores:
                assert self.chosen_PK is not None, "the router has chosen"
                self.scores_PK = scores_PE.gather(1, self.chosen_PK)
            if self.old is not None:
                current_PK = scores_PE.gather(1, self.old.experts_PK)
                self.shift_P = layer_shift(current_PK, self.old.scores_PK)


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Routing of one micro-batch in all layers."""

    experts_PLK: torch.Tensor | None
    """Experts of this rank's tokens, by the layer's number in the whole model. None:
    the routers choose."""
    agreement: RoutingAgreement
    old_experts_PLK: torch.Tensor | None = None
    """Experts of this rank's tokens in the pass for the old log-probs. None: nothing is
    compared with it."""
    old_scores_PLK: torch.Tensor | None = None
    keeps_scores: bool = False
    """Whether this is that pass."""
    layers: dict[int, LayerRouting] = field(default_factory=dict)

    @staticmethod
    def of(
        share: ContextShare, agreement: RoutingAgreement, *, keeps_scores: bool = False
    ) -> "Routing":
        places = _routed_places(share)

        def own(array_PLK: NDArray[Any] | None) -> torch.Tensor | None:
            return (
                None
                if array_PLK is None
                else to_device(array_PLK[places], device.device())
            )

        old = share.micro_batch.old_routing
        return Routing(
            experts_PLK=own(share.micro_batch.experts_PLK),
            agreement=agreement,
            old_experts_PLK=None if old is None else own(old.experts_PLK),
            old_scores_PLK=None if old is None else own(old.scores_PLK),
            keeps_scores=keeps_scores,
        )

    @property
    def shift_P(self) -> torch.Tensor | None:
        """Shift of the routers where this rank routes tokens: the mean over the layers.
        None: nothing was compared."""
        shifts = [
            layer.shift_P for layer in self.layers.values() if layer.shift_P is not None
        ]
        return torch.stack(shifts).mean(0) if shifts else None

    def layer(self, number: int) -> LayerRouting:
        """Return the routing of the layer of this number in the whole model, counted
        from 0."""
        replayed_PK = None
        if self.experts_PLK is not None:
            replayed_PK = self.experts_PLK[:, number].long()
        old = None
        if self.old_experts_PLK is not None and self.old_scores_PLK is not None:
            # Padding has no known routing, and nobody reads its shift.
            experts_PK = self.old_experts_PLK[:, number].long().clamp(min=0)
            old = ChosenScores(experts_PK, self.old_scores_PLK[:, number])
        routing = LayerRouting(
            replayed_PK, self.agreement, old=old, keeps_scores=self.keeps_scores
        )
        self.layers[number] = routing
        return routing


def _routed_places(share: ContextShare) -> NDArray[np.int64]:
    """Return the places in the micro-batch of the tokens that this rank's routers see:
    tensor-parallel ranks divide those of a share between layers."""
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    return np.split(share.places_Q, ranks)[rank]


class RoutedLayer(TransformerLayer):
    """A layer with experts. It passes its router the routing of the micro-batch."""

    def forward(self, *args: Any, packed_seq_params: Any, **options: Any) -> Any:
        experts: Any = self.mlp
        routing: Routing | None = packed_seq_params.routing
        layer_routing = (
            None if routing is None else routing.layer(self.layer_number - 1)
        )
        experts.router.router_replay = layer_routing
        return super().forward(*args, packed_seq_params=packed_seq_params, **options)


@dataclass(slots=True, eq=False)
class RoutingRecorder:
    """Keeps the experts that the chunks of one rank choose in the passes of a
    `recording` block, and their scores."""

    num_layers: int
    experts: Experts
    replays: bool
    keeps_scores: bool
    """Whether later passes are compared with the recorded scores."""
    agreement: RoutingAgreement = field(default_factory=RoutingAgreement)
    _recorded: dict[int, list[Routing]] = field(default_factory=dict)
    """Recorded routings by the chunk's number: one per micro-batch."""
    _is_recording: bool = False

    @property
    def records(self) -> bool:
        """Whether recorded data is used."""
        return self.replays or self.keeps_scores

    def check(self, sequences: Iterable[TokenSequence]) -> None:
        """Raise TrainError if the experts of a sequence are not those of such a
        model."""
        expected = (self.num_layers, self.experts.chosen)
        for sequence in sequences:
            if sequence.experts_TLK is None:
                continue
            found = sequence.experts_TLK.shape[1:]
            highest = int(sequence.experts_TLK.max(initial=UNKNOWN_EXPERT))
            if found != expected or highest >= self.experts.count:
                raise TrainError(
                    f"the batch has experts of another model: {found[1]} of at least {highest + 1} in each "
                    f"of {found[0]} layers, where this one has {self.experts.chosen} of {self.experts.count} "
                    f"in each of {self.num_layers}. Train it with --routing-replay none"
                )

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._recorded.clear()
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    def begin(self, chunk: int, share: ContextShare) -> Routing:
        """Return the routing of a new forward pass."""
        routing = Routing.of(
            share, self.agreement, keeps_scores=self.keeps_scores and self._is_recording
        )
        if self._is_recording:
            self._recorded.setdefault(chunk, []).append(routing)
        return routing

    def with_recorded(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches of the recorded passes, with the chosen experts and
        their scores, for replay and comparison. Both are unknown for layers that other
        ranks hold, tokens that other ranks route, and layers without experts."""
        routed: list[MicroBatch] = []
        for index, micro_batch in enumerate(micro_batches):
            if not micro_batch.sequences:  # a placeholder without data
                routed.append(micro_batch)
                continue
            layers: dict[int, LayerRouting] = {}
            for routings in self._recorded.values():
                layers |= routings[index].layers
            routed.append(self._with_layers(micro_batch, layers))
        self._recorded.clear()
        return routed

    def _with_layers(
        self, micro_batch: MicroBatch, layers: dict[int, LayerRouting]
    ) -> MicroBatch:
        if not layers:  # a stage whose layers have no experts
            return micro_batch
        share = own_share(micro_batch)
        routed_places = _routed_places(share)
        shape = (len(share.micro_batch.tokens_P), self.num_layers, self.experts.chosen)
        experts_PLK = np.full(shape, UNKNOWN_EXPERT, np.int16)
        scores_PLK = np.zeros(shape if self.keeps_scores else (0, 0, 0), np.float32)
        for number, layer in layers.items():
            assert layer.chosen_PK is not None, f"layer {number} has run"
            experts_PLK[routed_places, number] = layer.chosen_PK.cpu().numpy()
            if self.keeps_scores:
                assert layer.scores_PK is not None, f"layer {number} has run"
                scores_PLK[routed_places, number] = layer.scores_PK.cpu().numpy()
        num_tokens = len(micro_batch.tokens_P)
        experts_PLK = experts_PLK[:num_tokens]
        if self.replays:
            micro_batch = replace(micro_batch, experts_PLK=experts_PLK)
        if self.keeps_scores:
            old = OldRouting(
                experts_PLK=experts_PLK, scores_PLK=scores_PLK[:num_tokens]
            )
            micro_batch = replace(micro_batch, old_routing=old)
        return micro_batch
