"""`--megatron-*`: fields of Megatron's own configuration classes, checked against the installed package.

Invariant: an option that passes changes how the same function is computed or optimised, never what
is computed: what the model folder, invrl's own settings or the step decide is refused, with what to
use instead. Megatron is imported inside functions only; `cli/run_checks.py` calls
`check_megatron_options` at start-up, `rank.py` calls `parse_megatron_options`."""

import contextlib
import difflib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from invrl.errors import ConfigError

Scalar = bool | int | float | str

_SIZES = """
    tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
    context_parallel_size expert_model_parallel_size expert_tensor_parallel_size
    num_distributed_optimizer_instances
""".split()
_BY_FLAG = {
    **{name: f"--{name.replace('_', '-')}" for name in ("lr", "weight_decay", "adam_beta1", "adam_beta2")},
    **{"min_lr": "--lr-min", "clip_grad": "--clip-grad"},
    "use_distributed_optimizer": "--use-distributed-optimizer",
    **dict.fromkeys(("bf16", "fp16", "params_dtype", "pipeline_dtype"), "--train-dtype"),
    **dict.fromkeys(("autocast_dtype", "enable_autocast"), "--train-dtype"),
    **dict.fromkeys(_SIZES, "--data-parallel-size"),
}
_ACCEPTED = """
    recompute_granularity recompute_method recompute_num_layers recompute_modules fp32_residual_connection
    deterministic_mode disable_bf16_reduced_precision_matmul bias_dropout_fusion barrier_with_L1_time
    config_logger_dir bucket_size grad_reduce_in_fp32 check_for_nan_in_grad check_for_large_grads
    pad_buckets_for_high_nccl_busbw suggested_communication_unit_size reduce_scatter_with_fp32_accumulation
    nccl_ub disable_symmetric_registration adam_eps decoupled_weight_decay apply_wd_to_qk_layernorm
    log_num_zeros_in_grad
""".split()
"""What may be set. Every other field says what is computed (config.json decides that), is fixed by the
training step and its layers, would be ignored without a word, needs a library or a layout that the trainer
does not have, or breaks what invrl promises (float32 master weights)."""


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
        parsed = parse_megatron_options(options)
        parsed.transformer.update(num_layers=num_layers, hidden_size=64, num_attention_heads=1)
        for owner, cls in _classes().items():
            try:
                cls(**getattr(parsed, owner))
            except Exception as error:  # its own checks raise what they like
                fix = "change or add the options that it names, or leave these out"
                reason = f"Megatron refuses this: {error}"
                raise ConfigError("--megatron-*", dict(options), reason, fix) from error


def parse_megatron_options(options: Mapping[str, Scalar]) -> MegatronOptions:
    """Options by field name ("recompute_granularity"), values as flags or TOML give them."""
    parsed = MegatronOptions(transformer={}, ddp={}, optimizer={})
    for name, value in options.items():
        types = {owner: {each.name: each.type for each in fields(cls)} for owner, cls in _classes().items()}
        _refuse(name, value, set[str]().union(*types.values()))
        for owner, of_class in types.items():
            if name in of_class:
                getattr(parsed, owner)[name] = _parse(name, value, of_class[name])
    return parsed


def _classes() -> dict[str, type[Any]]:
    from invrl.train import device

    device.prepare()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    ddp = DistributedDataParallelConfig
    return {"transformer": TransformerConfig, "ddp": ddp, "optimizer": OptimizerConfig}


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


def _refuse(name: str, value: Scalar, known: set[str]) -> None:
    """ConfigError unless the option may be set. `known`: the fields that Megatron has."""
    if name in _BY_FLAG:
        raise _error(name, value, "invrl sets this field itself", f"use {_BY_FLAG[name]}")
    if name not in known:
        near = difflib.get_close_matches(name, sorted(known.intersection(_ACCEPTED)), n=1)
        settable = f"the ones that may be set: {', '.join(sorted(_ACCEPTED))}"
        fix = f"did you mean {_flag(near[0])}?" if near else settable
        raise _error(name, value, "Megatron has no such field", fix)
    if name not in _ACCEPTED:
        reason = "config.json or the training step decides this field, or the trainer is not built for it"
        raise _error(name, value, reason, "leave it out")


def _flag(name: str) -> str:
    return "--megatron-" + name.replace("_", "-")


def _error(name: str, value: Scalar, reason: str, fix: str) -> ConfigError:
    return ConfigError(_flag(name), value, reason, fix)
