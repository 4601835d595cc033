"""A random small model of every family, made by transformers' own classes: what the
trainer is compared with.

`CONFIGS` has one entry per family. A test holds that these are the families that invrl
knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiny_model import IM_END_ID, PAD_ID, write_tokenizer

if TYPE_CHECKING:
    import torch

_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": IM_END_ID,
    "pad_token_id": PAD_ID,
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "head_dim": 16,  # transformers' name for the next one too
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "q_lora_rank": 20,
        "kv_lora_rank": 28,
        "rms_norm_eps": 1e-3,  # that of the norms within attention is another
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 2.0,
            "mscale_all_dim": 1.0,
        },
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
    },
    "glm4_moe": {
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 48,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
    },
    "gemma3_text": {
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 20,
        "final_logit_softcapping": 5.0,
    },
    "llama": {},
    "mistral": {"sliding_window": 7},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
}
"""`model_type` -> what its config.json has besides `_COMMON`. Windows are shorter than
the tests' rows."""


def make_family_model(
    path: Path,
    model_type: str,
    *,
    dtype: str = "float32",
    seed: int = 0,
    **fields: object,
) -> Path:
    """A folder with config, weights and tokenizer. `fields`: of config.json, in place
    of the family's own.

    Every weight is random, those of norms and biases too, so that a tensor in another's
    place shows.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        model_type, **{**_COMMON, **CONFIGS[model_type], **fields}
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _randomize(name, parameter)
    model.to(getattr(torch, dtype))
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):  # float32 in every folder
            bias = 0.1 * torch.randn(len(module.e_score_correction_bias))
            module.e_score_correction_bias = bias
    model.save_pretrained(path)
    write_tokenizer(path, config.vocab_size, config.max_position_embeddings)
    return path


def _randomize(name: str, parameter: torch.Tensor) -> None:
    """A norm keeps its center (1, or 0 in families that add 1 to it)."""
    import torch

    if "norm" in name:
        parameter.add_(0.1 * torch.randn_like(parameter))
    elif parameter.dim() == 1:
        parameter.copy_(0.2 * torch.randn_like(parameter))
