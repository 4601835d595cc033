"""An adapter as a PEFT folder: `adapter_config.json` and `adapter_model.safetensors`,
beside the base's configuration, tokenizer and chat template.

`adapter_base.json` names the base by the checksum of its weights, because PEFT's own
configuration has only a path. Imports neither torch nor Megatron before weights are
touched.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import safe_open

from invrl.errors import ConfigError, TrainError
from invrl.families.parameter import Parameter
from invrl.families.projections import Projection
from invrl.interfaces import WeightLayout
from invrl.train.config import LoraConfig
from invrl.types.weights import TensorSpec

if TYPE_CHECKING:
    import torch

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
BASE_NAME = "adapter_base.json"
_PREFIX = "base_model.model."
"""Prefix of the tensors' names: the path of the model within PEFT's."""


class PeftConfig(BaseModel):
    """Fields of `adapter_config.json` that decide what an adapter computes, with the
    only values that the trainer computes."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    peft_type: Literal["LORA"] = "LORA"
    r: int
    lora_alpha: float
    lora_dropout: float = 0.0
    target_modules: list[str] | str = Field(default_factory=list)
    bias: Literal["none"] = "none"
    fan_in_fan_out: Literal[False] = False
    use_rslora: Literal[False] = False
    use_dora: Literal[False] = False
    use_qalora: Literal[False] = False
    lora_bias: Literal[False] = False
    init_lora_weights: bool | Literal["gaussian", "eva", "orthogonal"] = True
    """The other initialisations change the base, too."""
    rank_pattern: dict[str, object] = Field(default_factory=dict, max_length=0)
    alpha_pattern: dict[str, object] = Field(default_factory=dict, max_length=0)
    modules_to_save: None = None
    trainable_token_indices: None = None
    alora_invocation_tokens: None = None
    arrow_config: None = None
    use_bdlora: None = None
    target_parameters: None = None
    layers_to_transform: None = None
    layer_replication: None = None


class _Base(BaseModel):
    """Contents of `adapter_base.json`."""

    path: str
    """Folder that it was in."""
    checksum: str


def read_peft_config(folder: Path) -> PeftConfig:
    """Read the configuration of a PEFT folder. Raises ConfigError for an adapter of
    another kind."""
    file = folder / CONFIG_NAME
    try:
        return PeftConfig.model_validate_json(file.read_bytes())
    except OSError as error:
        raise _refused(folder, f"{CONFIG_NAME}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        reason = f"{CONFIG_NAME}: {field}: {first['msg']}"
        raise _refused(folder, reason) from error


def check_start(lora: LoraConfig, projections: Sequence[Projection]) -> None:
    """Raise ConfigError if the adapter to begin with is not the one that the settings
    describe. `projections` have adapters by the settings."""
    if lora.path is None:
        return
    folder = Path(lora.path).expanduser()
    found = read_peft_config(folder)
    for name, wanted, value in (
        ("rank", lora.rank, found.r),
        ("alpha", lora.alpha, found.lora_alpha),
    ):
        if wanted != value:
            raise ConfigError(
                f"lora.{name}",
                wanted,
                f"the adapter in {folder} has {value:g}",
                f"give --lora.{name} {value:g}",
            )
    with _opened(folder) as file:
        names = {name.removeprefix(_PREFIX) for name in file.keys()}  # noqa: SIM118
    wanted_names = {
        factor.megatron
        for projection in projections
        for factor in (projection.factor_a, projection.factor_b)
    }
    different = sorted(names ^ wanted_names)
    if different:
        kinds = {name.split(".lora_")[0].rpartition(".")[2] for name in names}
        raise ConfigError(
            "lora.targets",
            ",".join(lora.targets),
            f"the adapter in {folder} has others: they differ in {different[0]}",
            f"give --lora.targets {','.join(sorted(kinds))}, and --lora.experts as it was trained",
        )


def read_factors(
    folder: Path, table: Sequence[Parameter]
) -> Iterable[tuple[Parameter, Any]]:
    """Yield each factor with its open slice of the file."""
    with _opened(folder) as file:
        for entry in table:
            yield entry, file.get_slice(_PREFIX + entry.megatron)


def factor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all factors of a folder by name."""
    with _opened(folder) as file:
        return {
            name.removeprefix(_PREFIX): tuple(file.get_slice(name).get_shape())
            for name in file.keys()  # noqa: SIM118
        }


def open_factors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all factors of a folder by name."""
    with _opened(folder) as file:
        return {
            name.removeprefix(_PREFIX): file.get_tensor(name)
            for name in file.keys()  # noqa: SIM118
        }


def write_factors(
    folder: Path,
    layout: Sequence[TensorSpec],
    factors: Iterable[tuple[str, torch.Tensor]],
) -> dict[str, Any]:
    """Write the factors of the layout, in its order. Returns the file's entry by
    name."""
    from invrl.train.weights.safetensors_file import write_safetensors

    path = folder / WEIGHTS_NAME
    tensors = with_peft_names(factors)
    return {WEIGHTS_NAME: write_safetensors(path, peft_layout(layout), tensors)}


def peft_layout(layout: Sequence[TensorSpec]) -> WeightLayout:
    """Return the layout under the names that PEFT's files have."""
    return tuple(
        TensorSpec(name=_PREFIX + spec.name, shape=spec.shape, dtype=spec.dtype)
        for spec in layout
    )


def with_peft_names(
    factors: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in factors:
        yield _PREFIX + name, tensor


def write_description(
    folder: Path,
    lora: LoraConfig,
    kinds: Sequence[str],
    *,
    base_path: str,
    base_checksum: str,
) -> None:
    """Write what the adapter is, and of which base. `kinds` are the names of the
    adapted projections."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_path,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": list(kinds),
        "bias": "none",
        "inference_mode": True,
    }
    base = {"path": base_path, "checksum": base_checksum}
    for name, fields in ((CONFIG_NAME, config), (BASE_NAME, base)):
        text = json.dumps(fields, indent=2) + "\n"
        (folder / name).write_text(text, encoding="utf-8")


def has_base_checksum(folder: Path) -> bool:
    """Whether the folder says of which base its adapter is. One of PEFT's own does
    not."""
    return (folder / BASE_NAME).exists()


def check_base(folder: Path, base_path: str, base_checksum: str) -> None:
    """Raise ConfigError if the adapter was trained on another base, or its file that
    names the base is damaged. A folder of PEFT's own does not say."""
    if not has_base_checksum(folder):
        return
    try:
        base = _Base.model_validate_json((folder / BASE_NAME).read_bytes())
    except (OSError, ValidationError) as error:
        reason = f"{BASE_NAME}, which names its base, is damaged: {error}"
        raise _refused(folder, reason) from error
    if base.checksum != base_checksum:
        raise ConfigError(
            "lora.path",
            str(folder),
            f"it is an adapter of another model than {base_path}: of the one that was in {base.path}, "
            f"whose weights have the checksum {base.checksum}, not {base_checksum}",
            "give the model that it was trained on as --model-path",
        )


def is_peft_folder(folder: Path) -> bool:
    return (folder / CONFIG_NAME).is_file()


def _opened(folder: Path) -> Any:
    file = folder / WEIGHTS_NAME
    if not file.is_file():
        raise _refused(folder, f"it has no {WEIGHTS_NAME}")
    try:
        return safe_open(file, framework="pt")
    except Exception as error:  # safetensors raises its own, and bare ones
        raise TrainError(f"{file}: {error}") from error


def _refused(folder: Path, reason: str) -> ConfigError:
    fix = "give a PEFT folder with a plain LoRA adapter, as invrl and peft write it"
    return ConfigError("lora.path", str(folder), reason, fix)
