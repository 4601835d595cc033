"""`--megatron-*`: fields of Megatron's own configuration classes, checked against the installed package.

Invariant: an option that passes changes how the same function is computed or optimised, never what
is computed: what the model folder, invrl's own settings or the step decide is refused, with what to
use instead. Megatron is imported inside functions only; `run_checks.py` calls
`check_megatron_options` at start-up, `rank.py` calls `parse_megatron_options`."""

from __future__ import annotations

import contextlib
import difflib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from invrl.errors import ConfigError

Scalar = bool | int | float | str

_BY_FLAG = {
    **dict.fromkeys(("lr", "min_lr"), "--lr"),
    "weight_decay": "--weight-decay",
    "adam_beta1": "--adam-beta1",
    "adam_beta2": "--adam-beta2",
    "clip_grad": "--clip-grad",
    "use_distributed_optimizer": "--use-distributed-optimizer",
    **dict.fromkeys(("bf16", "fp16", "params_dtype", "pipeline_dtype"), "--train-dtype"),
    **dict.fromkeys(("autocast_dtype", "enable_autocast"), "--train-dtype"),
}
_SIZES = """
    tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
    context_parallel_size expert_model_parallel_size expert_tensor_parallel_size
    num_distributed_optimizer_instances
""".split()
_FROM_MODEL = """
    num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels softmax_scale
    softmax_type hidden_dropout attention_dropout apply_residual_connection_post_layernorm layernorm_epsilon
    layernorm_zero_centered_gamma add_bias_linear add_qkv_bias gated_linear_unit activation_func
    glu_linear_offset activation_func_clamp_value num_moe_experts rotary_interleaved window_size
    window_attn_skip_freq normalization qk_layernorm qk_l2_norm attention_output_gate multi_latent_attention
    no_rope_freq experimental_attention_variant mrope_section is_hybrid_model heterogeneous_block_specs
    apply_query_key_layer_scaling test_mode
""".split()
"""What is computed: config.json says it."""
_BY_STEP = """
    calculate_per_token_loss finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func
    param_sync_func timers perform_initialization use_cpu_initialization init_method output_layer_init_method
    embedding_init_method init_model_with_meta_device average_in_collective overlap_grad_reduce
    overlap_param_gather overlap_param_gather_with_optimizer_step sequence_parallel variable_seq_lengths
    overlap_p2p_comm batch_p2p_comm use_ring_exchange_p2p transformer_impl use_megatron_fsdp use_custom_fsdp
    data_parallel_sharding_strategy delay_wgrad_compute flash_decode
""".split()
"""What the training step and the layer specification decide."""
_NOT_YET = tuple("moe_ fp8 fp4 tp_comm_ cuda_graph mtp_ mamba_ linear_ dsa_ cpu_offloading".split())
"""Prefixes of features that the dense trainer does not have."""
_ACCEPTED = """
    recompute_granularity recompute_method recompute_num_layers recompute_modules fp32_residual_connection
    deterministic_mode disable_bf16_reduced_precision_matmul bias_dropout_fusion barrier_with_L1_time
    config_logger_dir bucket_size grad_reduce_in_fp32 check_for_nan_in_grad check_for_large_grads
    pad_buckets_for_high_nccl_busbw suggested_communication_unit_size reduce_scatter_with_fp32_accumulation
    nccl_ub disable_symmetric_registration optimizer adam_eps sgd_momentum decoupled_weight_decay
    apply_wd_to_qk_layernorm log_num_zeros_in_grad
""".split()
"""What may be set. Every other field would be ignored without a word, needs a library or a layout that
the trainer does not have, or breaks what invrl promises (float32 master weights)."""
_OPTIMIZERS = ("adam", "sgd")


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronOptions:
    """Parsed fields of the three classes; an option that several of them have is in each."""

    transformer: dict[str, object]
    ddp: dict[str, object]
    optimizer: dict[str, object]


def check_megatron_options(options: Mapping[str, Scalar], *, num_layers: int = 1024) -> None:
    """Raises ConfigError for the first option that is unknown, owned by invrl, or of the wrong type, and
    where Megatron's classes refuse what they are given together, for a model of so many layers."""
    if not options:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Megatron says about libraries is for the log of a rank
        _construct(parse_megatron_options(options), num_layers)


def _construct(parsed: MegatronOptions, num_layers: int) -> None:
    sizes = {"num_layers": num_layers, "hidden_size": 64, "num_attention_heads": 1}
    for owner, cls in _classes().items():
        values: dict[str, Any] = getattr(parsed, owner)
        try:
            cls(**values, **(sizes if owner == "transformer" else {}))
        except Exception as error:  # its own checks raise what they like
            fix = "change or add the options that it names, or leave these out"
            raise ConfigError("--megatron-*", values, f"Megatron refuses this: {error}", fix) from error


def parse_megatron_options(options: Mapping[str, Scalar]) -> MegatronOptions:
    """Options by field name ("recompute_granularity"), values as flags or TOML give them."""
    parsed = MegatronOptions(transformer={}, ddp={}, optimizer={})
    if not options:
        return parsed
    _refuse_known_wrong(options)
    known = _known_fields()
    for name, value in options.items():
        _refuse_owned(name, value)
        owners = [(owner, types[name]) for owner, types in known.items() if name in types]
        if not owners:
            names = {field for types in known.values() for field in types}
            near = difflib.get_close_matches(name, sorted(names.intersection(_ACCEPTED)), n=1)
            settable = f"the ones that may be set: {', '.join(sorted(_ACCEPTED))}"
            fix = f"did you mean {_flag(near[0])}?" if near else settable
            raise _error(name, value, "Megatron has no such field", fix)
        if name not in _ACCEPTED and name not in _SIZES:
            raise _error(name, value, "the trainer is not built for this field", "leave it out")
        for owner, annotation in owners:
            getattr(parsed, owner)[name] = _parse(name, value, annotation)
    return parsed


def _classes() -> dict[str, type[Any]]:
    from invrl.train import device

    device.prepare()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    ddp = DistributedDataParallelConfig
    return {"transformer": TransformerConfig, "ddp": ddp, "optimizer": OptimizerConfig}


def _known_fields() -> dict[str, dict[str, Any]]:
    """Field name -> annotation, per class."""
    return {owner: {field.name: field.type for field in fields(cls)} for owner, cls in _classes().items()}


def _parse(name: str, value: Scalar, annotation: Any) -> object:
    """As the field's own type; a list is written with commas."""
    candidates: list[object] = [value]
    if isinstance(value, str):
        candidates.append([part.strip() for part in value.split(",")])
    adapter = TypeAdapter(annotation, config={"arbitrary_types_allowed": True})
    for candidate in candidates:
        with contextlib.suppress(ValidationError):
            return adapter.validate_python(candidate)
    shown = annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
    raise _error(name, value, f"Megatron wants {shown}", "give such a value")


def _refuse_known_wrong(options: Mapping[str, Scalar]) -> None:
    """Layouts that megatron-core 0.16.1 computes wrongly without saying so."""

    def size(name: str) -> int:
        value = str(options.get(name, 1))
        return int(value) if value.isdecimal() else 1

    virtual, tensor = "virtual_pipeline_model_parallel_size", "tensor_model_parallel_size"
    expert = "expert_model_parallel_size"
    if size(virtual) > 1 and options.get("batch_p2p_comm") is not False:
        reason = "interleaved pipelines train wrongly with batched point-to-point communication, the default"
        raise _error(virtual, options[virtual], reason, "leave it out")
    if size("num_moe_experts") > 1 and size(tensor) > size(expert):
        reason = "with experts that are not parallel, expert gradients are not reduced over tensor ranks"
        raise _error(tensor, options[tensor], reason, "leave it out")
    if size(expert) > 1:
        reason = "an optimizer saved under another expert-parallel size cannot be loaded"
        raise _error(expert, options[expert], reason, "leave it out")


def _refuse_owned(name: str, value: Scalar) -> None:
    if name in _BY_FLAG:
        raise _error(name, value, "invrl sets this field itself", f"use {_BY_FLAG[name]}")
    if name in _SIZES and str(value) != "1":
        fix = "use --data-parallel-size for more ranks"
        raise _error(name, value, "the trainer is data-parallel only, as yet", fix)
    if name in _FROM_MODEL:
        raise _error(name, value, "the model folder's config.json decides what is computed", "leave it out")
    if name in _BY_STEP:
        raise _error(name, value, "the training step is built for one value of it", "leave it out")
    if name == "optimizer" and value not in _OPTIMIZERS:
        raise _error(name, value, "the trainer does not have this optimizer", f"use {', '.join(_OPTIMIZERS)}")
    if name.startswith(_NOT_YET):
        raise _error(name, value, "the trainer does not support this feature yet", "leave it out")


def _flag(name: str) -> str:
    return "--megatron-" + name.replace("_", "-")


def _error(name: str, value: Scalar, reason: str, fix: str) -> ConfigError:
    return ConfigError(_flag(name), value, reason, fix)
