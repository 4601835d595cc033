"""Memory that the layers of a rank keep of each token for the backward pass, with and
without recomputation.

In bytes, from the model's description. `tests/integration/test_memory.py` compares them
with real forward passes on a CPU; on an H200 a step of a dense model came within two
hundredths of them. On a GPU, norms, SwiGLU, and the operations between the projection
and the attention are one kernel each, which keeps only its input. Imports neither torch
nor Megatron.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from invrl.families.model_config import HuggingFaceConfig, LatentAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerActivations:
    """Bytes that a layer saves of each token, by the part that saves them."""

    layer_input: float
    """Kept by a recomputed layer."""
    core_attention: float
    core_attention_recomputed: float
    """Replaces `core_attention` where it is recomputed: its inputs and its output, in
    the dtype of the model."""
    dense_mlp: float
    shared_experts: float
    routed_experts: float
    rest: float
    """Norms, and projections to queries, keys and values."""

    @property
    def total(self) -> float:
        of_mlp = self.dense_mlp + self.shared_experts + self.routed_experts
        return self.layer_input + self.core_attention + of_mlp + self.rest

    @staticmethod
    def of(
        config: HuggingFaceConfig,
        layer: int,
        item: int,
        *,
        on_cuda: bool,
        context_ranks: int = 1,
    ) -> "LayerActivations":
        """Estimate a layer. `item` is the bytes of a number in the dtype of the model.
        `context_ranks`: each has the keys and values of all of them."""
        hidden = config.hidden_size
        queries = config.num_attention_heads * config.head_dim
        attention_item = item if on_cuda else 4  # `device.attention_dtype`
        num_norms = 4 if config.post_norms else 2
        rest = num_norms * _norm(hidden, item, on_cuda=on_cuda)
        core_attention = 4.0 * config.num_attention_heads
        if config.latent_attention is None:
            keys_and_values = 2.0 * config.num_key_value_heads * config.head_dim
            outputs = queries
            core_attention += attention_item * (
                queries + outputs + keys_and_values * context_ranks
            )
            rest += _queries_and_keys(
                config, queries, keys_and_values, item, on_cuda=on_cuda
            )
        else:
            shape = config.latent_attention
            outputs = config.num_attention_heads * shape.value_dim
            keys_and_values = float(queries + outputs)
            # On a CPU, `AttentionCalls` pads all four to one size; the projection gets
            # a copy of the output.
            padded = keys_and_values if on_cuda else 2.0 * max(queries, outputs)
            core_attention += (
                attention_item * padded * (1 + context_ranks) + item * outputs
            )
            rest += _latent_vectors(shape, item, on_cuda=on_cuda)
        experts = config.experts
        dense_mlp = 0.0
        shared_experts = 0.0
        routed_experts = 0.0
        if experts is not None and config.has_experts(layer):
            an_expert = item * (3 * experts.intermediate_size + 2 * hidden)
            routed_experts = experts.chosen * an_expert + 8.0 * experts.count
            shared_experts = 4.0 * item * (experts.shared_size or 0)
        else:
            is_one_kernel = on_cuda and config.activation == "silu"
            dense_mlp = (
                (3.0 if is_one_kernel else 4.0) * item * config.intermediate_size
            )
        return LayerActivations(
            layer_input=item * hidden,
            core_attention=core_attention,
            core_attention_recomputed=item * (queries + keys_and_values + outputs),
            dense_mlp=dense_mlp,
            shared_experts=shared_experts,
            routed_experts=routed_experts,
            rest=rest,
        )


def _norm(size: int, item: int, *, on_cuda: bool) -> float:
    """Return the bytes of one number for the row; the result; and its input, on a CPU
    both in float32, too."""
    if on_cuda:
        return 2 * item * size + 4
    return 8 * size + item * size + 4


def _queries_and_keys(
    config: HuggingFaceConfig,
    queries: int,
    keys_and_values: float,
    item: int,
    *,
    on_cuda: bool,
) -> float:
    """Return the bytes from the projection to the attention: the split, normed and
    rotated parts."""
    if on_cuda:
        return item * (queries + keys_and_values) if config.qk_norm else 0.0
    saved = item * (queries + keys_and_values)
    if config.qk_norm:
        saved += 8 * (queries + keys_and_values / 2)
    return saved


def _latent_vectors(shape: LatentAttention, item: int, *, on_cuda: bool) -> float:
    """Return the bytes of the vectors that queries, and keys and values, come from,
    with their norms."""
    saved = _norm(shape.key_value_rank, item, on_cuda=on_cuda)
    if shape.query_rank is not None:
        saved += _norm(shape.query_rank, item, on_cuda=on_cuda)
    return saved


def recomputed_modules(megatron: Mapping[str, object]) -> tuple[str, ...]:
    """Return `--megatron-recompute-modules`, which is separated by commas; Megatron's
    default without it."""
    modules = str(megatron.get("recompute_modules") or "core_attn")
    return tuple(name.strip() for name in modules.split(","))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """Megatron's `--megatron-recompute-*` options."""

    granularity: Literal["", "full", "selective"] = ""
    method: str = "uniform"
    num_layers: int = 1
    """Number of layers of a recomputed unit (uniform), or of those at the start of a
    chunk that are recomputed (block)."""
    modules: tuple[str, ...] = ("core_attn",)

    @staticmethod
    def of(megatron: Mapping[str, object]) -> "Recomputation":
        """Read `--megatron-*` options that `megatron_args` has checked."""
        granularity = megatron.get("recompute_granularity")
        return Recomputation(
            granularity=granularity if granularity in ("full", "selective") else "",
            method=str(megatron.get("recompute_method") or "uniform"),
            num_layers=int(str(megatron.get("recompute_num_layers") or 1)),
            modules=recomputed_modules(megatron),
        )

    def kept(self, chunk: Sequence[LayerActivations]) -> float:
        """Return the bytes that a chunk of layers keeps of each token."""
        if self.granularity == "selective":
            return sum(layer.total - self._recomputed(layer) for layer in chunk)
        if self.granularity == "full" and self.method == "uniform":
            return sum(layer.layer_input for layer in chunk[:: self.num_layers])
        if self.granularity == "full":
            recomputed = sum(layer.layer_input for layer in chunk[: self.num_layers])
            return recomputed + sum(layer.total for layer in chunk[self.num_layers :])
        return sum(layer.total for layer in chunk)

    def backward(self, chunk: Sequence[LayerActivations]) -> float:
        """Return the bytes that the backward pass adds for each token: about what the
        largest layer saves, and with whole layers recomputed those of a unit."""
        totals = [layer.total for layer in chunk]
        if self.granularity != "full":
            return max(totals)
        if self.method == "block":
            return max(totals) + max(totals[: self.num_layers])
        units = [
            sum(totals[start : start + self.num_layers])
            for start in range(0, len(totals), self.num_layers)
        ]
        return max(totals) + max(units)

    def _recomputed(self, layer: LayerActivations) -> float:
        saved = 0.0
        if "core_attn" in self.modules:
            saved += layer.core_attention - layer.core_attention_recomputed
        if "mlp" in self.modules:
            saved += layer.dense_mlp
        if "moe" in self.modules:
            saved += layer.routed_experts + layer.shared_experts
        elif "shared_experts" in self.modules:
            saved += layer.shared_experts
        return saved
