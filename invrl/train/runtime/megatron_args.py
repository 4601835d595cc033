"""`--megatron-*`: fields of Megatron's own configuration classes, checked against the
installed package.

`_ACCEPTED` has the fields that may be set, `_BY_FLAG` those with invrl's own flags.
What invrl itself sets is in `model.transformer_config` (TransformerConfig) and
`optimizer.distribute` (DDP and optimizer).

Invariant: an option that passes changes how the same function is computed or optimised,
never what is computed. Options that the model folder, invrl's own settings or the
training step decide are refused, with what to use instead. Megatron is imported inside
functions only.
"""

import contextlib
import difflib
import importlib.util
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from invrl.errors import ConfigError
from invrl.train.rank_settings import Scalar

_BY_FLAG = {
    "lr": "--lr",
    "min_lr": "--lr-min",
    "weight_decay": "--weight-decay",
    "adam_beta1": "--adam-beta1",
    "adam_beta2": "--adam-beta2",
    "clip_grad": "--clip-grad",
    "use_distributed_optimizer": "--use-distributed-optimizer",
    "optimizer_cpu_offload": "--optimizer-cpu-offload",
    "bf16": "--train-dtype",
    "fp16": "--train-dtype",
    "params_dtype": "--train-dtype",
    "pipeline_dtype": "--train-dtype",
    "autocast_dtype": "--train-dtype",
    "enable_autocast": "--train-dtype",
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "sequence_parallel": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "num_layers_in_first_pipeline_stage": "--num-layers-in-first-pipeline-stage",
    "num_layers_in_last_pipeline_stage": "--num-layers-in-last-pipeline-stage",
    "virtual_pipeline_model_parallel_size": "--virtual-pipeline-model-parallel-size",
    "context_parallel_size": "--context-parallel-size",
    "moe_enable_routing_replay": "--routing-replay",
    "expert_model_parallel_size": "--expert-model-parallel-size",
    "moe_router_bias_update_rate": "--moe-router-bias-update-rate",
    "num_distributed_optimizer_instances": "--data-parallel-size",
}
"""Fields that invrl sets itself -> the flag to use instead."""
_HYBRID_OPTIMIZER = (
    "it belongs to Megatron's optimizer on CPU and GPU, with which no run could resume: in version 0.16.1 it "
    "cannot load float32 master weights, and its precision-aware form needs TransformerEngine",
    "use --optimizer-cpu-offload, which moves all of the state and resumes",
)
_REFUSED = {
    "overlap_param_gather": (
        "the weights go to the engines when a step ends, so there is no forward pass beside which they could "
        "be gathered",
        "leave it out",
    ),
    "expert_tensor_parallel_size": (
        "ranks load, send and save every expert whole; ranks that each have other experts need as little "
        "memory, and send each token once where ranks with parts of an expert would each need it",
        "use --expert-model-parallel-size, which also divides the experts over tensor-parallel ranks",
    ),
    "optimizer_offload_fraction": _HYBRID_OPTIMIZER,
    "use_precision_aware_optimizer": _HYBRID_OPTIMIZER,
}
"""Fields that are refused -> the reason, and what to do instead."""
_ACCEPTED = """
    recompute_granularity recompute_method recompute_num_layers recompute_modules fp32_residual_connection
    deterministic_mode disable_bf16_reduced_precision_matmul bias_dropout_fusion barrier_with_L1_time
    config_logger_dir overlap_grad_reduce bucket_size grad_reduce_in_fp32 check_for_nan_in_grad
    check_for_large_grads pad_buckets_for_high_nccl_busbw suggested_communication_unit_size
    reduce_scatter_with_fp32_accumulation nccl_ub disable_symmetric_registration adam_eps
    decoupled_weight_decay apply_wd_to_qk_layernorm log_num_zeros_in_grad
""".split()
"""The fields that may be set. Every other field decides what is computed (config.json
does that), is fixed by the training step and its layers, would be ignored silently,
needs a library or a parallel layout that the trainer does not have, or breaks what
invrl promises (float32 master weights)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronOptions:
    """Parsed fields of Megatron's three classes. An option that several of them have is
    in each."""

    transformer: dict[str, object]
    ddp: dict[str, object]
    optimizer: dict[str, object]


def fix_of_field(name: str) -> str:
    """Say how to set this field of Megatron's, or what to do instead; "" for one that
    invrl sets, and for a name that is none."""
    if name in _REFUSED:
        _, fix = _REFUSED[name]
        return fix
    if name in _ACCEPTED:
        return f"write --megatron-{name.replace('_', '-')}"
    return ""


def check_megatron_options(
    options: Mapping[str, Scalar],
    *,
    num_layers: int = 1024,
    chunk_sizes: Collection[int] = (),
) -> None:
    """Raise ConfigError for the first option that is unknown, owned by invrl, or of the
    wrong type, and if Megatron's classes refuse the combination of options for a model
    with that many layers.

    `chunk_sizes` are the numbers of layers of the chunks of pipeline stages; empty: not
    known yet.
    """
    if not options:
        return
    with warnings.catch_warnings():
        # Megatron's warnings about libraries belong in the log of a rank
        warnings.simplefilter("ignore")
        parsed = parse_megatron_options(options)
        parsed.transformer.update(
            num_layers=num_layers, hidden_size=64, num_attention_heads=1
        )
        for owner, config_class in _config_classes().items():
            try:
                config_class(**getattr(parsed, owner))
            except Exception as error:  # Megatron's own checks raise many types
                fix = "change or add the options that it names, or leave these out"
                reason = f"Megatron refuses this: {error}"
                raise ConfigError("--megatron-*", dict(options), reason, fix) from error
    _check_recomputation(parsed.transformer, chunk_sizes)


def _check_recomputation(
    options: Mapping[str, Any], chunk_sizes: Collection[int]
) -> None:
    """Raise ConfigError for what Megatron only finds out in the first step."""
    granularity = options.get("recompute_granularity")
    if granularity == "full":
        num_layers = options["recompute_num_layers"]
        if num_layers < 1:
            raise _error(
                "recompute_num_layers",
                num_layers,
                "no layer would be recomputed",
                "set 1 or more",
            )
        if options["recompute_method"] == "uniform":
            for size in chunk_sizes:
                if size % num_layers:
                    raise _error(
                        "recompute_num_layers",
                        num_layers,
                        f"units of so many layers do not divide the {size} layers of a rank's chunk",
                        f"use a number that divides {size}, or --megatron-recompute-method block",
                    )
    elif granularity == "selective":
        modules: list[str] = options.get("recompute_modules") or []
        if (
            "layernorm" in modules
            and importlib.util.find_spec("transformer_engine") is None
        ):
            reason = "Megatron recomputes norms with TransformerEngine, which is not installed"
            fix = "leave layernorm out, or set --megatron-recompute-granularity full"
            raise _error("recompute_modules", ",".join(modules), reason, fix)


def parse_megatron_options(options: Mapping[str, Scalar]) -> MegatronOptions:
    """Parse options by field name ("recompute_granularity"), with values as flags or
    TOML give them."""
    parsed = MegatronOptions(transformer={}, ddp={}, optimizer={})
    if not options:
        return parsed
    types_by_owner: dict[str, dict[str, Any]] = {}
    known_names: set[str] = set()
    for owner, config_class in _config_classes().items():
        types_by_owner[owner] = {
            field.name: field.type for field in fields(config_class)
        }
        known_names.update(types_by_owner[owner])
    for name, value in options.items():
        _check_may_be_set(name, value, known_names)
        for owner, types in types_by_owner.items():
            if name in types:
                getattr(parsed, owner)[name] = _parse(name, value, types[name])
    return parsed


def _config_classes() -> dict[str, type[Any]]:
    """Map a field of MegatronOptions to Megatron's class. Imports Megatron."""
    from invrl.train.runtime import device

    device.prepare()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    return {
        "transformer": TransformerConfig,
        "ddp": DistributedDataParallelConfig,
        "optimizer": OptimizerConfig,
    }


def _parse(name: str, value: Scalar, annotation: Any) -> object:
    """Parse the value as the field's own type; a list is written with commas."""
    candidates: list[object] = [value]
    if isinstance(value, str):
        candidates.append([part.strip() for part in value.split(",")])
    adapter = TypeAdapter(annotation, config={"arbitrary_types_allowed": True})
    for candidate in candidates:
        with contextlib.suppress(ValidationError):
            return adapter.validate_python(candidate)
    if isinstance(annotation, type):
        type_name = annotation.__name__
    else:
        type_name = str(annotation).replace("typing.", "")
    raise _error(name, value, f"Megatron wants {type_name}", "give such a value")


def _check_may_be_set(name: str, value: Scalar, known_names: set[str]) -> None:
    """Raise ConfigError unless the option may be set. `known_names` are Megatron's
    fields."""
    if name in _BY_FLAG:
        raise _error(
            name, value, "invrl sets this field itself", f"use {_BY_FLAG[name]}"
        )
    if name in _REFUSED:
        reason, fix = _REFUSED[name]
        raise _error(name, value, reason, fix)
    if name not in known_names:
        settable = sorted(known_names.intersection(_ACCEPTED))
        nearest = difflib.get_close_matches(name, settable, n=1)
        if nearest:
            fix = f"did you mean {_flag(nearest[0])}?"
        else:
            fix = f"the ones that may be set: {', '.join(sorted(_ACCEPTED))}"
        raise _error(name, value, "Megatron has no such field", fix)
    if name not in _ACCEPTED:
        reason = "config.json or the training step decides this field, or the trainer is not built for it"
        raise _error(name, value, reason, "leave it out")


def _flag(name: str) -> str:
    return "--megatron-" + name.replace("_", "-")


def _error(name: str, value: Scalar, reason: str, fix: str) -> ConfigError:
    return ConfigError(_flag(name), value, reason, fix)
