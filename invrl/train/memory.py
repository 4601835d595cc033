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

_ITEM_BYTES = {"bfloat16": 2, "float32": 4}
_PROCESS_BYTES = 0.9e9
"""Python, torch, Megatron and what they allocate for themselves, in a process on a CPU."""
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
    """Float32 master weights and two moments. With several replicas each rank holds a part of them."""
    step: float
    """What a step adds: activations and logits; or, if that is more, what loading a checkpoint adds."""
    staging: float
    """Weights that are staged for engines on the same machine: both slots, on the rank that sends."""
    process: float

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))

    def __str__(self) -> str:
        parts = [f"{field.name} {getattr(self, field.name) / 1e9:.2f}" for field in fields(self)]
        return f"{self.total / 1e9:.2f} GB a rank ({', '.join(parts)})"


def estimate_memory(
    train: TrainConfig,
    folder: Path,
    *,
    has_reference: bool,
    served_dtype: str,
    megatron: Mapping[str, object],
    on_cuda: bool,
) -> MemoryEstimate:
    """`folder` has passed `check_model_folder`. `megatron`: the `--megatron-*` options."""
    config = read_hf_config(folder)
    size = ModelSize.of(folder, config)
    item = _ITEM_BYTES[train.train_dtype]
    layout = train.layout
    # A tensor-parallel rank has its part of everything; norms, which it has whole, are negligible.
    parameters = size.total / layout.tensor
    # In float32 the weights are their own master weights.
    optimizer = parameters * (12 if item == 2 else 8)
    loading = 0.0
    if train.use_distributed_optimizer and layout.data > 1:
        loading = optimizer  # held whole once while a checkpoint is loaded
        optimizer /= layout.data
    activations = _activations(train, config, item, recomputes=_recomputes(megatron), on_cuda=on_cuda)
    logits = _logits(train, size, item, on_cuda=on_cuda)
    vocabulary_gradients = 2 * size.vocabulary * item / layout.tensor
    staging = 0.0
    if not on_cuda:
        staging = 2.0 * size.total * _ITEM_BYTES[served_dtype]
    return MemoryEstimate(
        weights=parameters * item * (2 if has_reference else 1),
        gradients=parameters * 4 + vocabulary_gradients,
        optimizer=optimizer,
        step=max(activations + logits, loading),
        staging=staging,
        process=_CUDA_CONTEXT_BYTES if on_cuda else _PROCESS_BYTES,
    )


def _recomputes(megatron: Mapping[str, object]) -> bool:
    """Whether whole layers are computed again in the backward pass instead of being kept."""
    options = {name.replace("-", "_"): value for name, value in megatron.items()}
    return options.get("recompute_granularity") == "full"


def _activations(
    train: TrainConfig, config: HuggingFaceConfig, item: int, *, recomputes: bool, on_cuda: bool
) -> float:
    """Of a full micro-batch. The backward pass of a layer needs about as much again as the layer saved."""
    hidden = config.hidden_size
    layers = range(config.num_hidden_layers)
    by_layer = [saved_bytes(config, layer, item, on_cuda=on_cuda) for layer in layers]
    if recomputes:
        a_token = len(by_layer) * hidden * item + 2 * max(by_layer)
    else:
        a_token = sum(by_layer) + max(by_layer)
    final_norm = (8 + item) * hidden
    return (a_token + final_norm) * train.max_tokens_per_microbatch / train.layout.tensor


def saved_bytes(config: HuggingFaceConfig, layer: int, item: int, *, on_cuda: bool) -> float:
    """Bytes that a layer saves of each token for its backward pass. `item`: bytes of a number in the dtype of
    the model."""
    hidden = config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    num_norms = 4 if config.post_norms else 2
    saved = num_norms * (8 * hidden + item * hidden + 4)  # float32 input and result, result in the dtype
    saved += item * hidden  # input of the output projection's residual
    saved += item * (queries + 2 * keys) + 4 * item * config.head_dim  # q, k, v and rotary factors
    attention_item = item if on_cuda else 4  # `device.attention_dtype`
    saved += attention_item * (2 * queries + 2 * keys) + 4 * config.num_attention_heads
    if config.qk_norm:
        saved += 8 * (queries + keys)
    experts = config.experts
    if experts is not None and config.has_experts(layer):
        an_expert = item * (4 * experts.intermediate_size + 2 * hidden)
        return saved + experts.chosen * an_expert + 8 * experts.count
    return saved + 4 * item * config.intermediate_size


def _logits(train: TrainConfig, size: ModelSize, item: int, *, on_cuda: bool) -> float:
    """Of a micro-batch whose tokens are all projected: the logits that are kept, the block of the moment,
    and the projected hidden states with their gradient in float32."""
    rows = train.max_tokens_per_microbatch
    vocabulary = size.vocabulary_size / train.layout.tensor
    kept = min(_KEPT_LOGITS_BYTES, rows * vocabulary * item / 2)
    block = min(_BLOCK_BYTES["cuda" if on_cuda else "cpu"], rows * vocabulary * 4)
    hidden = rows * size.vocabulary / size.vocabulary_size * (item + 4)
    return kept + _BLOCK_COPIES * block + hidden
