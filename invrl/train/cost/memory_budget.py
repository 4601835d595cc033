"""Memory that a trainer rank needs, estimated before anything is loaded.

Weights, gradients and optimizer follow from the number of parameters, activations from
what the layers save for the backward pass (`activation_memory.py`). On a GPU the
estimate is of its memory, on a CPU of the process. Imports neither torch nor Megatron.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from invrl.families.hf_config import read_hf_config
from invrl.families.model_config import HuggingFaceConfig
from invrl.train.config import TrainConfig
from invrl.train.cost.activation_memory import LayerActivations, Recomputation
from invrl.train.cost.memory_estimate import MemoryEstimate
from invrl.train.cost.model_size import AdapterSize, ModelSize
from invrl.train.parallel_layout import ParallelLayout
from invrl.train.runtime.logit_blocks import BLOCK_BYTES, KEPT_BYTES
from invrl.train.runtime.optimizer_memory import OFFLOADED_BYTES, STAGED_GRADIENT_BYTES
from invrl.user_code.model_folder import largest_item
from invrl.weights.transports.buckets import GPU_BUCKET_BYTES

_ITEM_BYTES = {"bfloat16": 2, "float32": 4}
_FLOAT_BYTES = 4
_PROCESS_BYTES = 0.5e9
"""Python, torch, Megatron and their own allocations, in a process on a CPU."""
_HEAP_SHARE = 0.55
"""Share of the memory of a step. Tensors of many sizes come and go, and malloc fills
the gaps only in part."""
_CUDA_CONTEXT_BYTES = 0.6e9
"""CUDA context and the workspaces of its libraries, which are not in torch's own
count."""
_BLOCK_COPIES = 3
"""A block's logits, their softmax, and their gradient in the dtype of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Inputs of the estimate. The model's folder is read once, by `of`."""

    train: TrainConfig
    config: HuggingFaceConfig
    size: ModelSize
    adapter: AdapterSize | None
    """Trained beside the frozen model; None: the model is trained."""
    frozen_models: int
    """Number of references and teachers that the trainer computes."""
    reference_moves: bool
    """Whether its weights are saved with a checkpoint."""
    reference_is_averaged: bool
    has_critic: bool
    """Whether a second model of the same shape is trained, without a projection to the
    vocabulary."""
    compares_routers: bool
    served_dtype: str
    file_item: int
    """Bytes of a number in the folder's files."""
    recomputation: Recomputation
    copies_checkpoints: bool
    """Whether checkpoints are written during training, from a copy."""
    on_cuda: bool
    arena_on_gpu: bool
    """Whether both slots of the weight arena are in the memory of the first rank's
    GPU."""
    sends_buckets: bool
    """Whether the first rank sends weights in buckets, on a GPU from its memory."""

    @staticmethod
    def of(
        train: TrainConfig,
        folder: Path,
        *,
        frozen_models: int,
        reference_moves: bool = False,
        reference_is_averaged: bool = False,
        has_critic: bool = False,
        compares_routers: bool = False,
        served_dtype: str,
        megatron: Mapping[str, object],
        copies_checkpoints: bool,
        on_cuda: bool,
        arena_on_gpu: bool = False,
        sends_buckets: bool = False,
    ) -> "MemoryBudget":
        """Read the budget of a folder that has passed `check_model_folder`. `megatron`
        has the `--megatron-*` options."""
        config = read_hf_config(folder)
        adapter = None
        if train.lora is not None:
            adapter = AdapterSize.of(folder, config, train.lora)
        return MemoryBudget(
            adapter=adapter,
            train=train,
            config=config,
            size=ModelSize.of(folder, config),
            frozen_models=frozen_models,
            reference_moves=reference_moves,
            reference_is_averaged=reference_is_averaged,
            has_critic=has_critic,
            compares_routers=compares_routers,
            served_dtype=served_dtype,
            file_item=largest_item(folder),
            recomputation=Recomputation.of(megatron),
            copies_checkpoints=copies_checkpoints,
            on_cuda=on_cuda,
            arena_on_gpu=arena_on_gpu,
            sends_buckets=sends_buckets,
        )

    def largest(self, num_tokens: int | None = None) -> MemoryEstimate:
        """Return the estimate of the pipeline stage that needs most. `num_tokens` is of
        the largest micro-batch; None: a full one, all of whose tokens are trained."""
        return max(self.stages(num_tokens), key=lambda estimate: estimate.total)

    def stages(self, num_tokens: int | None = None) -> list[MemoryEstimate]:
        """Return the estimate of a rank of each pipeline stage."""
        num_tokens = num_tokens or self.train.micro_batch_tokens
        return [
            self._stage(stage, num_tokens)
            for stage in range(self.train.layout.pipeline)
        ]

    def _stage(self, stage: int, num_tokens: int) -> MemoryEstimate:
        layout = self.train.layout
        is_first = stage == 0
        is_last = stage == layout.pipeline - 1
        parameters = sum(self._trained(stage))
        frozen = 0.0
        if self.adapter is not None:
            frozen = sum(self._divided(self._parameters(stage), self._layers(stage)))
        # In float32 the weights are their own master weights.
        optimizer = self._share(stage) * (12 if self._item == 2 else 8)
        if self.train.optimizer_cpu_offload:
            optimizer = 0.0 if self.on_cuda else self._offloaded(stage)
        loading = 0.0
        if not self.on_cuda and (self.adapter is None or self.has_critic):
            # A saved tensor and a buffer for it. The vocabulary's weight is the largest;
            # factors are small.
            loading = 2.0 * _FLOAT_BYTES * self.size.vocabulary
        logits = self._logits(num_tokens) if is_last else 0.0
        activations = self._activations(stage, num_tokens)
        step = activations + logits
        # leaves gaps of its own
        step_of_critic = activations if self.has_critic else 0.0
        reference = self._reference(stage)
        reference_pass = 0.0
        if reference.in_pass:
            reference_pass = (
                reference.in_pass + self._forward_only(stage, num_tokens) + logits
            )
        of_vocabulary = (
            (is_first + is_last) * self.size.vocabulary * self._item / layout.tensor
        )
        gradients = parameters * 4.0
        if self.adapter is None or self.has_critic:
            gradients += max(of_vocabulary, self._gradient_of_experts(stage))
        copy = 0.0
        if self.copies_checkpoints and not self.on_cuda:
            copy = parameters * self._saved_bytes
            if self.reference_moves:
                copy += (
                    sum(self._divided(self._parameters(stage), self._layers(stage)))
                    * self._kept_item
                )
            if is_first:  # the policy, for Hugging Face
                copy += self._trained_total * self._item
        return MemoryEstimate(
            weights=(parameters + frozen) * self._item + reference.kept,
            gradients=gradients,
            optimizer=optimizer,
            # Nothing is written while a checkpoint is loaded.
            step=max(step, reference_pass, loading - copy),
            heap=0.0 if self.on_cuda else _HEAP_SHARE * (step + step_of_critic),
            staging=self._staging if is_first else 0.0,
            copy=copy,
            process=_CUDA_CONTEXT_BYTES if self.on_cuda else _PROCESS_BYTES,
        )

    def _trained(self, stage: int) -> tuple[float, float]:
        """Return the parameters that a rank trains, with those of a critic on the same
        ranks: non-experts' and experts'."""
        dense, experts = self._trained_of_policy(stage)
        if self.has_critic:
            dense_of_critic, experts_of_critic = self._divided(
                self._critic_parameters(stage), self._layers(stage)
            )
            dense += dense_of_critic
            experts += experts_of_critic
        return dense, experts

    def _trained_of_policy(self, stage: int) -> tuple[float, float]:
        """Return the trained parameters of the policy on a rank: non-experts' and
        experts'. A rank that has a part of a projection has all of one factor of its
        adapter, and both are counted whole."""
        layers = self._layers(stage)
        if self.adapter is None:
            return self._divided(self._parameters(stage), layers)
        dense = sum(self.adapter.by_layer[layer] for layer in layers)
        experts = sum(self.adapter.experts_by_layer[layer] for layer in layers)
        return dense, experts / self.train.layout.expert

    @property
    def _trained_total(self) -> int:
        """Number of trained parameters of the policy, of all ranks."""
        return self.size.total if self.adapter is None else self.adapter.total

    def _share(self, stage: int) -> float:
        """Return the number of parameters whose optimizer state a rank holds."""
        dense, experts = self._trained(stage)
        if not self.train.use_distributed_optimizer:
            return dense + experts
        layout = self.train.layout
        copies = layout.data * layout.context
        copies_of_experts = copies * layout.tensor / layout.expert
        return dense / copies + experts / copies_of_experts

    def _offloaded(self, stage: int) -> float:
        """Return the bytes of a rank's optimizer in main memory, with the gradients
        that are on their way there."""
        share = self._share(stage)
        largest_gradient = (
            _FLOAT_BYTES * self.size.vocabulary / self.train.layout.tensor
        )
        staged = max(STAGED_GRADIENT_BYTES, largest_gradient)
        return OFFLOADED_BYTES * share + 2 * min(staged, _FLOAT_BYTES * share)

    @property
    def offloaded_bytes(self) -> float:
        """Bytes of main memory for the optimizers of all GPU ranks together, if they
        are moved there, always or while engines use the GPUs."""
        layout = self.train.layout
        ranks_of_stage = layout.world_size // layout.pipeline
        return ranks_of_stage * sum(
            self._offloaded(stage) for stage in range(layout.pipeline)
        )

    @property
    def _staging(self) -> float:
        """Return the bytes of weights for engines in the memory of the rank that
        sends."""
        item = _ITEM_BYTES[self.served_dtype]
        whole = self.size.total * item
        if self.arena_on_gpu == self.on_cuda:
            return 2.0 * whole
        if not self.sends_buckets:
            return 0.0
        # A bucket ends with the tensor that fills it. That one is also there by itself.
        largest_tensor = self.size.vocabulary * item
        return min(whole, GPU_BUCKET_BYTES + largest_tensor) + largest_tensor

    def _gradient_of_experts(self, stage: int) -> float:
        """Return the bytes of the gradient from one product for the first projection of
        all experts of a layer. It has two of their three matrices."""
        experts = max(
            self.size.experts_by_layer[layer] for layer in self._layers(stage)
        )
        return 2 / 3 * experts * self._item / self.train.layout.expert

    @property
    def copy_bytes(self) -> float:
        """Bytes of the copies that all ranks hold together while a checkpoint is
        written during training. They are in the memory of the CPU, also if the trainer
        is on a GPU."""
        return self.checkpoint_bytes if self.copies_checkpoints else 0.0

    @property
    def checkpoint_bytes(self) -> float:
        """Bytes of a checkpoint: the state of all ranks, and the model for Hugging
        Face."""
        trained = self._trained_total
        if self.has_critic:
            trained += sum(
                self._critic_parameters(stage)
                for stage in range(self.train.layout.pipeline)
            )
        of_reference = self.size.total * self._kept_item if self.reference_moves else 0
        return (
            trained * float(self._saved_bytes)
            + self._trained_total * self._item
            + of_reference
        )

    @property
    def _saved_bytes(self) -> int:
        """Bytes of a parameter in the trainer's state on disk: its weight, and in
        float32 its master weight and two moments."""
        return self._item + 12

    @property
    def _item(self) -> int:
        """Bytes of a number in the dtype of the model."""
        return _ITEM_BYTES[self.train.train_dtype]

    @property
    def _kept_item(self) -> int:
        """Bytes of a number of the reference, where it is kept as a whole."""
        return 4 if self.reference_is_averaged else self._item

    def _parameters(self, stage: int) -> int:
        """Count the parameters of a pipeline stage. The last one has a copy of a tied
        embedding."""
        layout = self.train.layout
        parameters = sum(self.size.by_layer[layer] for layer in self._layers(stage))
        rest = self.size.total - sum(self.size.by_layer)
        if layout.pipeline == 1:
            return parameters + rest
        if stage == 0:
            return parameters + self.size.vocabulary
        if stage < layout.pipeline - 1:
            return parameters
        if self.config.tie_word_embeddings:
            return parameters + rest
        return parameters + rest - self.size.vocabulary

    def _critic_parameters(self, stage: int) -> int:
        """Count the critic's parameters of a pipeline stage: the policy's without the
        projection. Its value head is negligible."""
        pipeline = self.train.layout.pipeline
        parameters = self._parameters(stage)
        has_projection = pipeline > 1 or not self.config.tie_word_embeddings
        if stage == pipeline - 1 and has_projection:
            parameters -= self.size.vocabulary
        return parameters

    def _layers(self, stage: int) -> list[int]:
        chunks = self.train.layout.stage_layers(stage, self.config.num_hidden_layers)
        return [layer for chunk in chunks for layer in chunk]

    def _divided(self, parameters: float, layers: Sequence[int]) -> tuple[float, float]:
        """Return the parameters of a rank from those of its stage: non-experts' and
        experts'. A tensor-parallel rank has its part of everything but the experts,
        which it has whole, like the negligible norms."""
        layout = self.train.layout
        of_experts = sum(self.size.experts_by_layer[layer] for layer in layers)
        return (parameters - of_experts) / layout.tensor, of_experts / layout.expert

    def _reference(self, stage: int) -> "_Reference":
        """Return the weights of the frozen models, as `FrozenReference` keeps them. One
        of them is in a pass."""
        if not self.frozen_models:
            return _Reference(kept=0.0, in_pass=0.0)
        one = self._one_reference(stage)
        # Of the reference and a teacher only the reference can be an average.
        kept = self.frozen_models * one.kept + one.kept * (
            self._kept_item / self._item - 1
        )
        return _Reference(kept=kept, in_pass=one.in_pass)

    def _one_reference(self, stage: int) -> "_Reference":
        layers = self._layers(stage)
        whole = sum(self._divided(self._parameters(stage), layers))
        by_layer = [
            sum(self._divided(self.size.by_layer[layer], [layer])) for layer in layers
        ]
        # By layer: what is in no layer is brought in whole, and one layer beside it.
        largest_pass = whole - sum(by_layer) + max(by_layer)
        placement = self.train.reference_placement
        if self.on_cuda:
            in_pass = {"device": 0.0, "cpu": whole, "cpu_by_layer": largest_pass}[
                placement
            ]
            return _Reference(
                kept=whole * self._item if placement == "device" else 0.0,
                in_pass=in_pass * self._item,
            )
        if placement == "cpu_by_layer" and self.file_item < self._item:
            return _Reference(
                kept=whole * self.file_item, in_pass=largest_pass * self._item
            )
        return _Reference(kept=whole * self._item, in_pass=0.0)

    def _saved(self, stage: int) -> list[list[LayerActivations]]:
        """Return the saved activations of the layers of each chunk of a stage."""
        layout = self.train.layout
        return [
            [
                LayerActivations.of(
                    self.config,
                    layer,
                    self._item,
                    on_cuda=self.on_cuda,
                    context_ranks=layout.context,
                )
                for layer in chunk
            ]
            for chunk in layout.stage_layers(stage, self.config.num_hidden_layers)
        ]

    def _activations(self, stage: int, num_tokens: int) -> float:
        """Return the bytes of activations. The backward pass of a layer needs about as
        much again as the layer saved."""
        layout = self.train.layout
        chunks = self._saved(stage)
        kept = sum(self.recomputation.kept(chunk) for chunk in chunks) + self._routes(
            stage
        )
        backward = max(self.recomputation.backward(chunk) for chunk in chunks)
        a_token = kept * _in_flight(layout, stage) + backward
        if stage == layout.pipeline - 1:
            a_token += (8 + self._item) * self.config.hidden_size  # the final norm
        return a_token * num_tokens / (layout.tensor * layout.context)

    def _forward_only(self, stage: int, num_tokens: int) -> float:
        """Return the bytes of a pass without gradient: one layer's."""
        largest = max(layer.total for chunk in self._saved(stage) for layer in chunk)
        return (
            largest
            * num_tokens
            / (self.train.layout.tensor * self.train.layout.context)
        )

    def _routes(self, stage: int) -> float:
        """Return the bytes of a token's replayed experts: int16 for all layers, and
        int64 for each layer with experts, once for the replayed and once for the
        router's choice. The old policy's, with which routers are compared, are the same
        with float32 scores."""
        experts = self.config.experts
        if experts is None:
            return 0.0
        num_layers = self.config.num_hidden_layers
        with_experts = sum(
            self.config.has_experts(layer) for layer in self._layers(stage)
        )
        an_expert = 0.0
        if self.train.routing_replay != "none":
            an_expert += 2.0 * num_layers + 16.0 * with_experts
        if self.compares_routers:
            an_expert += 6.0 * num_layers + 16.0 * with_experts
        return experts.chosen * an_expert

    def _logits(self, num_tokens: float) -> float:
        """Return the bytes for a micro-batch whose tokens are all projected: the kept
        logits, the current block, and the projected hidden states with their gradient
        in float32."""
        size = self.size
        num_tokens /= self.train.layout.context
        vocabulary = size.vocabulary_size / self.train.layout.tensor
        kept = min(KEPT_BYTES, num_tokens * vocabulary * self._item / 2)
        block = min(
            BLOCK_BYTES["cuda" if self.on_cuda else "cpu"], num_tokens * vocabulary * 4
        )
        hidden = num_tokens * size.vocabulary / size.vocabulary_size * (self._item + 4)
        return kept + _BLOCK_COPIES * block + hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reference:
    """Bytes of the frozen reference's weights in the estimated memory."""

    kept: float
    in_pass: float
    """Added there by its pass; 0: nothing new."""


def _in_flight(layout: ParallelLayout, stage: int) -> float:
    """Return the number of micro-batches whose activations a stage keeps at the same
    time, if there are enough of them: those that it has sent on and that have not come
    back (1F1B, or Megatron's interleaved schedule of chunks)."""
    stages_after = layout.pipeline - stage - 1
    if layout.virtual_pipeline == 1:
        return stages_after + 1
    chunks = 2 * stages_after + (layout.virtual_pipeline - 1) * layout.pipeline + 1
    return chunks / layout.virtual_pipeline
