"""The policy: Megatron's GPTModel from a Hugging Face config, over packed rows.

`PolicyModel.forward` gives log-probs of the wanted tokens. The vocabulary projection is computed at the
positions that predict a wanted token, and nowhere else. Megatron's TransformerConfig is set in
`transformer_config`, its DDP and optimizer configurations in `optimizer.py`. Imported after
`device.prepare()`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from invrl.train import device
from invrl.train.attention import PackedRow, TreeAttention
from invrl.train.families.registry import FAMILIES
from invrl.train.hf_config import HuggingFaceConfig
from invrl.train.logprobs import projected_logprobs
from invrl.train.micro_batch import MicroBatch
from invrl.train.weights import load_weights


class PolicyModel(GPTModel):
    """A decoder that returns log-probs, not logits."""

    def forward(self, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:  # pyright: ignore
        """Log-probs and entropies of the wanted tokens, float32 [N] each."""
        target = device.device()
        tokens_P = torch.from_numpy(micro_batch.tokens_P).to(target)
        positions_P = torch.from_numpy(micro_batch.positions_P).to(target)
        project_U = torch.from_numpy(micro_batch.project_U).to(target)
        attention_dtype = device.attention_dtype(self.config.params_dtype)
        # [P, 1, hidden]: one row; the second axis is Megatron's batch axis.
        hidden = self.embedding(input_ids=tokens_P[None], position_ids=positions_P[None])
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=self._rotary(positions_P),
            packed_seq_params=PackedRow.of(micro_batch, target, attention_dtype),
        )
        hidden_UH = hidden.squeeze(1).index_select(0, project_U)
        return projected_logprobs(hidden_UH, self._projection_weight(), micro_batch)

    def _projection_weight(self) -> torch.Tensor:
        """The weight [vocabulary, hidden] whose product with a hidden state is its logits."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        weight = self.output_layer.weight
        assert weight is not None  # only a projection that is given its weight in each call has none
        return weight

    def _rotary(self, positions_P: torch.Tensor) -> torch.Tensor:
        """Rotary angles [P, 1, 1, head_dim] of each token's own position."""
        inv_freq = self.rotary_pos_emb.inv_freq.to(positions_P.device)
        angles = torch.outer(positions_P.float(), inv_freq)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


def build_model(
    config: HuggingFaceConfig,
    folder: str | Path,
    dtype: torch.dtype,
    options: Mapping[str, Any],
) -> PolicyModel:
    """The model with the folder's weights, on this rank's device.

    `options`: TransformerConfig fields that the user set, checked by `megatron_args`.
    """
    transformer = transformer_config(config, dtype, options)
    layer = get_gpt_layer_local_spec(qk_layernorm=transformer.qk_layernorm, normalization="RMSNorm")
    block = cast(TransformerLayerSubmodules, layer.submodules)
    attention = cast(SelfAttentionSubmodules, cast(ModuleSpec, block.self_attention).submodules)
    attention.core_attention = TreeAttention
    model = PolicyModel(
        config=transformer,
        transformer_layer_spec=TransformerBlockSubmodules(  # pyright: ignore[reportArgumentType]
            layer_specs=[layer] * config.num_hidden_layers,
            layer_norm=WrappedTorchNorm,  # pyright: ignore[reportArgumentType]
        ),
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=config.rope_theta,  # pyright: ignore[reportArgumentType]
        rope_scaling=config.rope_factor is not None,
        rope_scaling_factor=config.rope_factor or 1.0,
    )
    load_weights(model, config, folder)
    return model.to(device.device())


def transformer_config(
    config: HuggingFaceConfig, dtype: torch.dtype, options: Mapping[str, Any]
) -> TransformerConfig:
    """Megatron's description of the model.

    It computes the same function as Hugging Face's model, without fused kernels that need
    TransformerEngine or Apex. The user's `--megatron-*` options come last.
    """
    family = FAMILIES[config.model_type]
    fields: dict[str, Any] = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": config.head_dim,
        "ffn_hidden_size": config.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": family.qkv_bias,
        "qk_layernorm": family.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_cpu_initialization": True,
        "perform_initialization": False,  # every weight is loaded
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        # Losses are sums over global denominators and gradients are summed. Must be set before DDP is built.
        "calculate_per_token_loss": True,
    }
    return TransformerConfig(**fields | dict(options))
