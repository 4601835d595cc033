"""The policy: Megatron's GPTModel from a Hugging Face config, over packed rows.

`PolicyModel.forward` returns log-probs of the wanted tokens. The vocabulary projection
is computed only at the positions that predict a wanted token. Tensor-parallel ranks
compute the same micro-batch together and get the same log-probs; context-parallel ranks
each compute a part of its tokens, and get the log-probs of all. With pipeline
parallelism a model is one chunk of the layers, or several (virtual stages); only the
last chunk projects. Megatron's TransformerConfig is set in `transformer_config`, its
DDP and optimizer configurations in `optimizer.py`. Imported after `device.prepare()`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig,
    TransformerConfig,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from invrl.families.model_config import (
    Activation,
    HuggingFaceConfig,
    LatentAttention,
)
from invrl.families.rope import Rope, attention_factor
from invrl.train.adapters.adapter import Adapter
from invrl.train.batches.micro_batch import MicroBatch
from invrl.train.layers.attention import PackedRow
from invrl.train.layers.expert_router import counting, expert_routers
from invrl.train.layers.layer_specs import decoder_layer
from invrl.train.layers.rms_norm import RmsNorm
from invrl.train.layers.rotary import RotaryPositions, frequencies
from invrl.train.layers.routing_replay import Routing, RoutingRecorder
from invrl.train.model.logprobs import projected_logprobs
from invrl.train.parallel.context_parallel import gather_wanted, own_share
from invrl.train.parallel.context_share import ContextShare
from invrl.train.parallel.partitions import HEAD, chunk_parameters, note_partitions
from invrl.train.parallel_layout import ParallelLayout
from invrl.train.runtime import device
from invrl.train.runtime.device import to_device
from invrl.train.weights.conversion import load_weights, parameters

_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu_pytorch_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}


class PolicyModel(GPTModel):
    """A decoder, or a chunk of its layers, that returns log-probs, not logits."""

    projects: ClassVar[bool] = True
    """Whether it ends with a projection to the vocabulary."""
    shape: HuggingFaceConfig
    routing: RoutingRecorder | None = None
    """Set if routing is replayed. The trained model has one, its frozen reference has
    none."""
    adapter: Adapter | None
    """Trained instead of the other parameters, which are frozen. None: they are
    trained."""

    def describe(self, shape: HuggingFaceConfig) -> None:
        """Complete the construction, whose arguments are Megatron's."""
        self.shape = shape
        self.adapter = None
        self._routers = expert_routers(self)
        attentions = [
            shape.attention(layer) for layer in range(shape.num_hidden_layers)
        ]
        self._windows = {attention.window for attention in attentions}
        self._in_one_kernel = device.attends_in_one_kernel(shape.smallest_head_dim)
        self._positions: dict[Rope, RotaryPositions] = {}
        for rope in {attention.rope for attention in attentions}:
            self._positions[rope] = RotaryPositions(
                frequencies_D=frequencies(rope, shape.rotary_dim).to(device.device()),
                # YaRN's factor: for plain attention it is in the scale of the scores
                # (`layers/layer_specs.py`).
                factor=attention_factor(rope)
                if shape.latent_attention is not None
                else 1.0,
                dtype=self.config.params_dtype,
            )

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, micro_batch: MicroBatch
    ) -> tuple[torch.Tensor | None, ...] | torch.Tensor:
        """Return log-probs and entropies of the wanted tokens, float32 [N] each, the
        log-probs of their candidates [N, K] and the router shift where they are
        predicted [N], the last two None where there are none; from a chunk that is not
        the last the hidden states [Q, 1, hidden] of this rank's tokens, which
        Megatron's schedule passes on."""
        share = own_share(micro_batch)
        if self.adapter is not None:
            self.adapter.drops = torch.is_grad_enabled()
        routing = None
        if self.routing is not None:
            routing = self.routing.begin(self.vp_stage or 0, share)
        hidden = self._decode(share, routing)
        if not self.post_process:
            return hidden
        return (*self._outputs(hidden, share), self._router_shift(share, routing))

    def _decode(self, share: ContextShare, routing: Routing | None) -> torch.Tensor:
        """Return hidden states [Q, 1, hidden] after this chunk's layers, one row: the
        second axis is Megatron's batch axis. Each tensor-parallel rank has an equal
        part of the share's tokens."""
        attention_dtype = device.attention_dtype(self.config.params_dtype)
        hidden = self._embed(share) if self.pre_process else None
        packed_row = PackedRow.of(
            share,
            device.device(),
            attention_dtype,
            windows=self._windows,
            in_one_kernel=self._in_one_kernel,
            positions=self._positions,
            routing=routing,
        )
        with self._counted_experts(share):
            return self.decoder(
                hidden_states=hidden, attention_mask=None, packed_seq_params=packed_row
            )

    def _outputs(
        self, hidden: torch.Tensor, share: ContextShare
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the results of `forward` from the last hidden states, without the
        router shift."""
        target = device.device()
        # The gradient of what is gathered is summed over the ranks: each projects onto
        # its own part of the vocabulary.
        hidden = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=True
        )
        projections, is_own_N = share.own_projections()
        project_U = to_device(share.own_indices(projections.project_U), target)
        hidden_UH = hidden.squeeze(1).index_select(0, project_U)
        weight_VH = self._projection_weight()
        group = cast(
            torch.distributed.ProcessGroup,
            parallel_state.get_tensor_model_parallel_group(),
        )
        outputs = projected_logprobs(
            hidden_UH,
            weight_VH,
            projections,
            start=group.rank() * len(weight_VH),
            group=group if group.size() > 1 else None,
            softcap=self.shape.logit_softcap,
        )
        is_own = to_device(is_own_N, target)
        return tuple(
            None if own is None else gather_wanted(own, is_own) for own in outputs
        )

    def _router_shift(
        self, share: ContextShare, routing: Routing | None
    ) -> torch.Tensor | None:
        """Return the router shift of `forward`. A token is predicted where the previous
        one is routed."""
        own_P = None if routing is None else routing.shift_P
        if own_P is None:
            return None
        with torch.no_grad():
            shift_Q = gather_from_sequence_parallel_region(
                own_P, tensor_parallel_output_grad=False
            )
        projections, is_own_N = share.own_projections()
        places_S = share.own_indices(projections.project_U)[projections.projection_N]
        own_S = shift_Q[to_device(places_S, shift_Q.device)]
        return gather_wanted(own_S, to_device(is_own_N, shift_Q.device))

    @contextmanager
    def _counted_experts(self, share: ContextShare) -> Iterator[None]:
        """Let the routers count the experts that they choose, in a trained forward
        pass."""
        if not self._routers or not torch.is_grad_enabled():
            yield
            return
        sequences_Q = to_device(share.sequences_Q, device.device())
        parts = sequences_Q.chunk(parallel_state.get_tensor_model_parallel_world_size())
        with counting(
            self._routers, parts[parallel_state.get_tensor_model_parallel_rank()]
        ):
            yield

    def _embed(self, share: ContextShare) -> torch.Tensor:
        """Return embeddings [Q, 1, hidden] of this rank's part of the tokens."""
        tokens_Q = to_device(share.tokens_Q, device.device())
        positions_Q = to_device(share.positions_Q, device.device())
        hidden = self.embedding(
            input_ids=tokens_Q[None], position_ids=positions_Q[None]
        )
        scale = self.shape.embedding_scale
        if scale is not None:
            # transformers rounds the factor to the dtype of the weights.
            hidden = hidden * torch.tensor(scale).to(hidden)
        if self.adapter is not None and torch.is_grad_enabled():
            # Layers that are computed again need an input with a gradient, and a frozen
            # embedding has none.
            hidden = hidden.detach().requires_grad_()
        return hidden

    def _projection_weight(self) -> torch.Tensor:
        """Return the weight [V, hidden] whose product with a hidden state is its
        logits, on this rank's part of the vocabulary."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        weight = self.output_layer.weight
        # only a projection that is given its weight in each call has none
        assert weight is not None
        return weight


Model = TypeVar("Model", bound=PolicyModel)


def build_model(
    model_class: type[Model],
    config: HuggingFaceConfig,
    folder: str | Path,
    dtype: torch.dtype,
    layout: ParallelLayout,
    options: Mapping[str, Any],
) -> list[Model]:
    """Build this rank's chunks of the model with the folder's weights, on its device:
    one, or with virtual stages several.

    `options` are TransformerConfig fields that the user set, checked by
    `megatron_args`.
    """
    transformer = transformer_config(config, dtype, layout, options)
    num_chunks = transformer.virtual_pipeline_model_parallel_size
    numbers = [None] if num_chunks is None else range(num_chunks)
    chunks = [
        _build_chunk(model_class, config, transformer, number) for number in numbers
    ]
    own_parameters = chunk_parameters(chunks)
    if not model_class.projects:
        own_parameters.pop(HEAD, None)
    note_partitions(own_parameters, parameters(config))
    load_weights(own_parameters, config, folder)
    return [chunk.to(device.device()) for chunk in chunks]


def _build_chunk(
    model_class: type[Model],
    config: HuggingFaceConfig,
    transformer: TransformerConfig,
    number: int | None,
) -> Model:
    """Build one chunk. `number` is that of the chunk on this stage; None: the stage has
    one."""
    first_layer = get_transformer_layer_offset(transformer, number)
    num_layers = get_num_layers_to_build(transformer, number)
    is_first = parallel_state.is_pipeline_first_stage(
        ignore_virtual=number is None, vp_stage=number
    )
    is_last = parallel_state.is_pipeline_last_stage(
        ignore_virtual=number is None, vp_stage=number
    )
    model = model_class(
        config=transformer,
        transformer_layer_spec=TransformerBlockSubmodules(  # pyright: ignore[reportArgumentType]
            layer_specs=[
                decoder_layer(config, transformer, layer)
                for layer in range(first_layer, first_layer + num_layers)
            ],
            layer_norm=RmsNorm,  # pyright: ignore[reportArgumentType]
        ),
        pre_process=is_first,
        post_process=is_last,
        vp_stage=number,
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        share_embeddings_and_output_weights=config.tie_word_embeddings
        and model_class.projects,
        position_embedding_type="none",  # the packed row has the angles
    )
    model.describe(config)
    return model


def transformer_config(
    config: HuggingFaceConfig,
    dtype: torch.dtype,
    layout: ParallelLayout,
    options: Mapping[str, Any],
) -> TransformerConfig:
    """Return Megatron's description of the model.

    It computes the same function as Hugging Face's model, without fused kernels that
    need TransformerEngine or Apex. On a GPU torch compiles SwiGLU and its gradient into
    a kernel each. The user's `--megatron-*` options come last.
    """
    is_interleaved = layout.virtual_pipeline > 1
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tensor,
        "sequence_parallel": layout.tensor > 1,
        "context_parallel_size": layout.context,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline
        if is_interleaved
        else None,
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers or None,
        "num_layers_in_last_pipeline_stage": layout.last_stage_layers or None,
        "variable_seq_lengths": layout.pipeline
        > 1,  # micro-batches have different lengths
        "moe_token_dispatcher_type": "alltoall",  # Megatron's default refuses them, for dense models too
        # Two stages are each other's previous and next one. In the interleaved schedule
        # Megatron's batched messages between them are then confused.
        "batch_p2p_comm": not is_interleaved,
        "overlap_p2p_comm": is_interleaved,
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": config.head_dim,
        "ffn_hidden_size": config.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "layernorm_zero_centered_gamma": config.zero_centered_norms,
        "gated_linear_unit": True,
        "activation_func": _ACTIVATIONS[config.activation],
        "add_bias_linear": False,
        "add_qkv_bias": config.qkv_bias,
        "qk_layernorm": config.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_cpu_initialization": True,
        "perform_initialization": False,  # every weight is loaded
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": device.fuses() and config.activation == "silu",
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        # Losses are sums over global denominators and gradients are summed. Must be set
        # before DDP is built.
        "calculate_per_token_loss": True,
    }
    fields |= _expert_fields(config, layout)
    if config.latent_attention is not None:
        latent_fields = _latent_fields(config.latent_attention)
        return MLATransformerConfig(**fields | latent_fields | dict(options))
    return TransformerConfig(**fields | dict(options))


def _latent_fields(shape: LatentAttention) -> dict[str, Any]:
    """Return Megatron's fields of latent attention."""
    return {
        "multi_latent_attention": True,
        "q_lora_rank": shape.query_rank,
        "kv_lora_rank": shape.key_value_rank,
        "qk_head_dim": shape.plain_dim,
        "qk_pos_emb_head_dim": shape.rotary_dim,
        "v_head_dim": shape.value_dim,
        "rope_type": "rope",  # not used: the packed row has the positions
    }


def _expert_fields(config: HuggingFaceConfig, layout: ParallelLayout) -> dict[str, Any]:
    """Return Megatron's fields of experts; empty for a model without."""
    experts = config.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.count,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": 1,
        "moe_router_topk": experts.chosen,
        "moe_ffn_hidden_size": experts.intermediate_size,
        "moe_layer_freq": [
            int(config.has_experts(layer)) for layer in range(config.num_hidden_layers)
        ],
        # A softmax over the chosen experts is that over all of them, divided by the sum
        # of the chosen.
        "moe_router_pre_softmax": experts.score == "softmax" and not experts.normalized,
        "moe_router_score_function": experts.score,
        "moe_router_enable_expert_bias": experts.has_bias,
        "moe_router_bias_update_rate": 0.0,  # the bias is that of the folder
        "moe_router_topk_scaling_factor": experts.scale
        if experts.scale != 1.0
        else None,
        "moe_router_num_groups": experts.groups if experts.groups > 1 else None,
        "moe_router_group_topk": experts.chosen_groups if experts.groups > 1 else None,
        "moe_router_dtype": "fp32" if experts.router_in_float32 else None,
        "moe_shared_expert_intermediate_size": experts.shared_size,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": False,
    }
