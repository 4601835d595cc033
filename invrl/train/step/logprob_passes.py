"""LogprobPasses of one rank's model without gradient: log-probs of sequences under the
policy and under frozen models.

Imported after `device.prepare()`.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import islice

from megatron.core.distributed import DistributedDataParallel

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.objectives.objectives import objective_needs
from invrl.train.batches.micro_batch import TokenSequence
from invrl.train.batches.sharding import Shard
from invrl.train.config import TrainConfig
from invrl.train.cost.model_size import ComputeCost
from invrl.train.layers.routing_replay import RoutingRecorder
from invrl.train.model.pipeline_schedule import (
    Packed,
    SampleNumbers,
    concatenate_micro_batches,
    forward_pass,
    pack_sequences,
)
from invrl.train.model.reference import BaseReference, FrozenReference
from invrl.train.model.step_progress import StepProgress
from invrl.train.parallel_layout import ParallelLayout
from invrl.train.runtime import device
from invrl.types.batches import TrainBatch


@dataclass(slots=True, eq=False)
class LogprobPasses:
    """Packs sequences into micro-batches, and runs them through the chunks of one
    rank."""

    chunks: Sequence[DistributedDataParallel]
    _: KW_ONLY
    layout: ParallelLayout
    train: TrainConfig
    algorithm: AlgorithmConfig
    cost: ComputeCost
    routing: RoutingRecorder | None
    """Records the experts of the pass for the old log-probs. None: they are neither
    replayed nor compared."""
    progress: StepProgress = field(default_factory=StepProgress)
    """Current work. Other threads may read it."""

    def pack(self, sequences: Sequence[TokenSequence]) -> Packed:
        """Pack sequences. Raises TrainError for sequences with replayed experts that
        are not those of this model."""
        if self.routing is not None and self.train.routing_replay == "engine":
            self.routing.check(sequences)
        else:
            sequences = [replace(sequence, experts_TLK=None) for sequence in sequences]
        if not objective_needs(self.algorithm).top_logprobs:
            sequences = [
                replace(sequence, candidates_NK=None) for sequence in sequences
            ]
        return pack_sequences(
            sequences, train=self.train, layout=self.layout, cost=self.cost
        )

    def logprobs(self, sequences: Sequence[TokenSequence]) -> SampleNumbers:
        """Return log-probs under the current policy: one array [T] per sequence, 0 for
        unwanted tokens. All 0 on a pipeline stage that is not the last."""
        [logprobs] = self.forward([self.pack(sequences)], "log-probs")
        return logprobs

    def forward(self, packed: Sequence[Packed], work: str) -> list[SampleNumbers]:
        """Make one forward pass of the current model over all these sequences, with the
        results of `logprobs` for each part. `work` is its name in `progress`."""
        self.progress.begin(work)
        logprobs = forward_pass(self.chunks, packed, self.progress)
        self.progress.end_pass()
        return logprobs

    def old_logprobs(
        self, shard: Shard, packed: list[Packed], seconds: dict[str, float]
    ) -> Sequence[SampleNumbers | None]:
        """Return log-probs under the old policy, per mini-batch, computed before the
        first optimizer step changes the model. None for the first mini-batch, where
        they equal the current ones, and where the objective does not need them.

        With the trainer's routing replay, or if the objective needs the router shift,
        the micro-batches of `packed` get the experts that this pass chooses.
        """
        if len(shard) < 2 or not objective_needs(self.algorithm).old:
            return [None] * len(shard)
        with device.timed(seconds, "old_logprobs"):
            if self.routing is None or not self.routing.records:
                return [None, *self.forward(packed[1:], "old log-probs")]
            with self.routing.recording():
                old_by_step = self.forward(packed[1:], "old log-probs")
            routed = iter(
                self.routing.with_recorded(concatenate_micro_batches(packed[1:]))
            )
            for index in range(1, len(packed)):
                part = packed[index]
                packed[index] = Packed(
                    part.sequences, list(islice(routed, len(part.micro_batches)))
                )
            return [None, *old_by_step]

    def frozen_logprobs(
        self,
        frozen: FrozenReference | BaseReference | None,
        phase: str,
        packed: Sequence[Packed],
        seconds: dict[str, float],
    ) -> Sequence[SampleNumbers | None]:
        """Return log-probs under a frozen model, per mini-batch; None without one. Its
        routers choose the experts."""
        if frozen is None or not packed:
            return [None] * len(packed)
        unrouted: list[Packed] = []
        for part in packed:
            micro_batches = [
                replace(micro_batch, experts_PLK=None)
                for micro_batch in part.micro_batches
            ]
            unrouted.append(Packed(part.sequences, micro_batches))
        with device.timed(seconds, phase), frozen.in_place():
            return [*self.forward(unrouted, f"log-probs of the {phase}")]

    def logprobs_before_step(
        self, mini_batch: TrainBatch, packed: Packed, seconds: dict[str, float]
    ) -> SampleNumbers:
        """Return log-probs under the old policy of a mini-batch whose loss does not
        need them: the engine's, if they are not recomputed, or if rewards and targets
        do not depend on them."""
        algorithm = self.algorithm
        with_kl = algorithm.kl_in_token_rewards or algorithm.kl_in_rollout_rewards
        with_vtrace = (
            algorithm.critic is not None and algorithm.critic.targets == "vtrace"
        )
        is_read = with_kl or with_vtrace
        if not is_read or algorithm.old_logprobs != "recompute":
            return [sample.rollout_logprobs_T for sample in mini_batch.samples]
        with device.timed(seconds, "old_logprobs"):
            [logprobs] = self.forward([packed], "old log-probs")
        return logprobs
