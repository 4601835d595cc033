"""What a trainer rank needs of memory, estimated before anything is loaded.

Weights, gradients and optimizer follow from the number of parameters, activations from what the layers save
for the backward pass (`tests/integration/test_memory.py` compares that with real forward passes). On a GPU
the estimate is of its memory, on a CPU of the process. Imports neither torch nor Megatron.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from invrl.train.config import TrainConfig
from invrl.train.families.model_config import HuggingFaceConfig
from invrl.train.hf_config import read_hf_config
from invrl.train.model_size import ModelSize
from invrl.train.parallel.layout import ParallelLayout

_ITEM_BYTES = {"bfloat16": 2, "float32": 4}
_PROCESS_BYTES = 0.5e9
"""Python, torch, Megatron and what they allocate for themselves, in a process on a CPU."""
_HEAP_SHARE = 0.55
"""Of the memory of a step. Tensors of many sizes come and go, and malloc fills the gaps only in part."""
_CUDA_CONTEXT_BYTES = 0.6e9
"""The CUDA context and the workspaces of its libraries, which are not in torch's own count."""
_KEPT_LOGITS_BYTES = 128 << 20
"""As `_KEPT_BYTES` in `logprobs.py`, which imports torch."""
_BLOCK_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
"""As `device.logit_block_bytes`."""
_BLOCK_COPIES = 3
"""A block's logits, their softmax, and their gradient in the dtype of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one rank at its peak."""

    weights: float
    """Those of the frozen reference too, if there is one."""
    gradients: float
    """Float32 sums, and the gradient of the vocabulary's weight before it is added."""
    optimizer: float
    """Float32 master weights and two moments. Ranks with equal weights may hold a part each."""
    step: float
    """What a step adds: activations and logits; or, if that is more, what loading a checkpoint adds."""
    heap: float
    """On a CPU: free memory between the tensors of a step, which malloc has and cannot use."""
    staging: float
    """Weights that are staged for engines on the same machine: both slots, on the rank that sends."""
    process: float

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))

    def __str__(self) -> str:
        parts = [f"{field.name} {getattr(self, field.name) / 1e9:.2f}" for field in fields(self)]
        return f"{self.total / 1e9:.2f} GB a rank ({', '.join(parts)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """What the estimate follows from. The model's folder is read once, by `of`."""

    train: TrainConfig
    config: HuggingFaceConfig
    size: ModelSize
    has_reference: bool
    served_dtype: str
    recomputes: bool
    """Whether whole layers are computed again in the backward pass instead of being kept."""
    on_cuda: bool

    @staticmethod
    def of(
        train: TrainConfig,
        folder: Path,
        *,
        has_reference: bool,
        served_dtype: str,
        megatron: Mapping[str, object],
        on_cuda: bool,
    ) -> "MemoryBudget":
        """`folder` has passed `check_model_folder`. `megatron`: the `--megatron-*` options."""
        config = read_hf_config(folder)
        return MemoryBudget(
            train=train,
            config=config,
            size=ModelSize.of(folder, config),
            has_reference=has_reference,
            served_dtype=served_dtype,
            recomputes=_recomputes(megatron),
            on_cuda=on_cuda,
        )

    def largest(self, num_tokens: int | None = None) -> MemoryEstimate:
        """Of the pipeline stage that needs most. `num_tokens`: of the largest micro-batch; None: a full one,
        all of whose tokens are trained."""
        return max(self.stages(num_tokens), key=lambda estimate: estimate.total)

    def stages(self, num_tokens: int | None = None) -> list[MemoryEstimate]:
        """Of a rank of each pipeline stage."""
        num_tokens = num_tokens or self.train.microbatch_tokens
        return [self._stage(stage, num_tokens) for stage in range(self.train.layout.pipeline)]

    def _stage(self, stage: int, num_tokens: int) -> MemoryEstimate:
        layout = self.train.layout
        is_first = stage == 0
        is_last = stage == layout.pipeline - 1
        # A tensor-parallel rank has its part of everything but the experts, which it has whole; so are the
        # norms, which are negligible.
        of_experts = sum(self.size.experts_by_layer[layer] for layer in self._layers(stage))
        dense = (self._parameters(stage) - of_experts) / layout.tensor
        experts = of_experts / layout.expert
        parameters = dense + experts
        # In float32 the weights are their own master weights.
        state_bytes = 12 if self._item == 2 else 8
        optimizer = parameters * state_bytes
        loading = 0.0
        copies = layout.data * layout.context
        copies_of_experts = copies * layout.tensor / layout.expert
        if self.train.use_distributed_optimizer and max(copies, copies_of_experts) > 1:
            loading = optimizer  # held whole once while a checkpoint is loaded
            optimizer = state_bytes * (dense / copies + experts / copies_of_experts)
        step = self._activations(stage, num_tokens)
        gradients = parameters * 4
        if is_last:
            step += self._logits(num_tokens)
        if is_first or is_last:
            gradients += (is_first + is_last) * self.size.vocabulary * self._item / layout.tensor
        staging = 0.0
        if is_first and not self.on_cuda:
            staging = 2.0 * self.size.total * _ITEM_BYTES[self.served_dtype]
        return MemoryEstimate(
            weights=parameters * self._item * (2 if self.has_reference else 1),
            gradients=gradients,
            optimizer=optimizer,
            step=max(step, loading),
            heap=0.0 if self.on_cuda else _HEAP_SHARE * step,
            staging=staging,
            process=_CUDA_CONTEXT_BYTES if self.on_cuda else _PROCESS_BYTES,
        )

    @property
    def _item(self) -> int:
        """Bytes of a number in the dtype of the model."""
        return _ITEM_BYTES[self.train.train_dtype]

    def _parameters(self, stage: int) -> int:
        """Of a pipeline stage. The last one has a copy of a tied embedding."""
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

    def _layers(self, stage: int) -> list[int]:
        chunks = self.train.layout.layers_of(stage, self.config.num_hidden_layers)
        return [layer for chunk in chunks for layer in chunk]

    def _activations(self, stage: int, num_tokens: int) -> float:
        """Bytes. The backward pass of a layer needs about as much again as the layer saved."""
        layout = self.train.layout
        hidden = self.config.hidden_size
        by_layer = [
            saved_bytes(self.config, layer, self._item, on_cuda=self.on_cuda, context_ranks=layout.context)
            for layer in self._layers(stage)
        ]
        if self.recomputes:
            kept = len(by_layer) * hidden * self._item
            backward = 2 * max(by_layer)
        else:
            kept = sum(by_layer)
            backward = max(by_layer)
        a_token = kept * _in_flight(layout, stage) + backward
        if stage == layout.pipeline - 1:
            a_token += (8 + self._item) * hidden  # the final norm
        return a_token * num_tokens / (layout.tensor * layout.context)

    def _logits(self, num_tokens: float) -> float:
        """Of a micro-batch whose tokens are all projected: the logits that are kept, the block of the moment,
        and the projected hidden states with their gradient in float32."""
        size = self.size
        num_tokens /= self.train.layout.context
        vocabulary = size.vocabulary_size / self.train.layout.tensor
        kept = min(_KEPT_LOGITS_BYTES, num_tokens * vocabulary * self._item / 2)
        block = min(_BLOCK_BYTES["cuda" if self.on_cuda else "cpu"], num_tokens * vocabulary * 4)
        hidden = num_tokens * size.vocabulary / size.vocabulary_size * (self._item + 4)
        return kept + _BLOCK_COPIES * block + hidden


def _in_flight(layout: ParallelLayout, stage: int) -> float:
    """Micro-batches whose activations a stage keeps at once, if there are enough of them: those that it has
    sent on and that have not come back (1F1B, or Megatron's interleaved schedule of chunks)."""
    stages_after = layout.pipeline - stage - 1
    if layout.virtual_pipeline == 1:
        return stages_after + 1
    chunks = 2 * stages_after + (layout.virtual_pipeline - 1) * layout.pipeline + 1
    return chunks / layout.virtual_pipeline


def _recomputes(megatron: Mapping[str, object]) -> bool:
    options = {name.replace("-", "_"): value for name, value in megatron.items()}
    return options.get("recompute_granularity") == "full"


def saved_bytes(
    config: HuggingFaceConfig, layer: int, item: int, *, on_cuda: bool, context_ranks: int = 1
) -> float:
    """Bytes that a layer saves of each token for its backward pass. `item`: bytes of a number in the dtype of
    the model. `context_ranks`: each has the keys and values of all of them."""
    hidden = config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    num_norms = 4 if config.post_norms else 2
    saved = num_norms * (8 * hidden + item * hidden + 4)  # float32 input and result, result in the dtype
    saved += item * hidden  # input of the output projection's residual
    saved += item * (queries + 2 * keys) + 4 * item * config.head_dim  # q, k, v and rotary factors
    attention_item = item if on_cuda else 4  # `device.attention_dtype`
    saved += attention_item * (2 * queries + 2 * keys * context_ranks) + 4 * config.num_attention_heads
    if config.qk_norm:
        saved += 8 * (queries + keys)
    experts = config.experts
    if experts is not None and config.has_experts(layer):
        an_expert = item * (4 * experts.intermediate_size + 2 * hidden)
        saved += experts.chosen * an_expert + 8 * experts.count
        return saved + 4 * item * (experts.shared_size or 0)
    return saved + 4 * item * config.intermediate_size
