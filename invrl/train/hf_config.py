"""What the trainer takes from a Hugging Face folder's `config.json`: a typed, checked subset.

Invariant: a `HuggingFaceConfig` describes a model that `model.py` computes exactly; whatever it would
compute differently is refused here, by name, before a weight is read. Imports neither torch nor
transformers, so a run can be checked before any process starts."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from invrl.errors import ConfigError
from invrl.train.families.registry import FAMILIES
from invrl.types import Json

_MEGATRON_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The parameters of Llama 3's scaled frequencies that Megatron fixes."""


def _known(model_type: str) -> str:
    if model_type not in FAMILIES:
        raise ValueError(f"supported are {', '.join(sorted(FAMILIES))}")
    return model_type


class HuggingFaceConfig(BaseModel):
    """Shape of a dense decoder with grouped-query attention, rotary positions and gated SiLU MLPs, under the
    names of config.json; where it leaves a field out, its documented default."""

    model_config = ConfigDict(frozen=True, strict=True, protected_namespaces=())

    model_type: Annotated[str, AfterValidator(_known)]
    vocab_size: PositiveInt
    num_hidden_layers: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt = Field(default_factory=lambda given: given["num_attention_heads"])
    head_dim: PositiveInt = Field(
        default_factory=lambda given: given["hidden_size"] // given["num_attention_heads"]
    )
    max_position_embeddings: PositiveInt
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_factor: float | None = None
    """Llama 3's scaling factor; None: plain rotary frequencies."""
    tie_word_embeddings: bool = False
    # What has one value here is computed for no other.
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    use_sliding_window: Literal[False] = False
    attention_dropout: float = Field(0.0, le=0)
    partial_rotary_factor: float = Field(1.0, ge=1, le=1)
    quantization_config: None = None


def read_hf_config(folder: str | Path) -> HuggingFaceConfig:
    """ConfigError for a folder without config.json, an unknown family, or a feature that is not computed."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        fix = "give a Hugging Face model folder (`invrl prepare-model` makes one)"
        raise ConfigError("model", str(folder), "it holds no config.json", fix)
    return parse_hf_config(json.loads(path.read_text()))


def parse_hf_config(config: Mapping[str, Json]) -> HuggingFaceConfig:
    """Accepts the field names of transformers 4 and 5 (`rope_theta` or `rope_parameters`)."""
    given = {name: value for name, value in config.items() if value is not None}
    try:
        parsed = HuggingFaceConfig.model_validate(given | _rope(given))
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise _refused(name, config.get(name), first["msg"]) from None
    _check_window(parsed, config)
    return parsed


def _check_window(parsed: HuggingFaceConfig, config: Mapping[str, Json]) -> None:
    """Attention is computed over all earlier tokens, so a window must reach over every position."""
    family = FAMILIES[parsed.model_type]
    if family.default_window is None:
        return
    window = config.get("sliding_window", family.default_window)
    positions = parsed.max_position_embeddings
    if window is None or (isinstance(window, int) and window >= positions):
        return
    reason = (
        f"each token would attend to the last {window} only (config.json without sliding_window means "
        f"{family.default_window}), and the trainer computes attention over all {positions} positions"
    )
    fix = (
        "use a model without a window (if its authors say that this one has none, write "
        f'"sliding_window": null into its config.json), or lower max_position_embeddings to {window}'
    )
    raise ConfigError("config.json: sliding_window", config.get("sliding_window"), reason, fix)


def _rope(config: Mapping[str, Json]) -> dict[str, Json]:
    """Base and Llama 3 factor of the rotary frequencies, as far as they are given."""
    found = config.get("rope_parameters") or config.get("rope_scaling")
    rope = found if isinstance(found, Mapping) else {}
    base = {name: value for name, value in rope.items() if name == "rope_theta" and value is not None}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return base
    if kind == "llama3" and all(rope.get(name) == value for name, value in _MEGATRON_LLAMA3.items()):
        return base | {"rope_factor": rope.get("factor", 8.0)}
    raise _refused("rope_parameters", dict(rope), f"only default and llama3 with {_MEGATRON_LLAMA3}")


def _refused(name: str, value: object, why: str) -> ConfigError:
    reason = f"the trainer does not support it ({why})"
    return ConfigError(f"config.json: {name}", value, reason, "use another model")
