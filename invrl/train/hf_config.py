"""What the trainer reads from a Hugging Face folder's `config.json`: a typed, checked subset.

Invariant: a `HuggingFaceConfig` describes a model that `model.py` computes exactly. A feature that it would
compute differently is refused here, by name, before a weight is read. The folder has passed the one check of
a model folder (`invrl/model_folder.py`), so its family is a supported one and its weights are plain. Imports
neither torch nor transformers, so a run can be checked before any process starts.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from invrl.errors import ConfigError
from invrl.train.families.registry import FAMILIES
from invrl.types import Json

_MEGATRON_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Parameters of Llama 3's scaled frequencies whose values are fixed in Megatron."""


class HuggingFaceConfig(BaseModel):
    """Shape of a dense decoder with grouped-query attention, rotary positions and gated SiLU MLPs.

    Fields have the names of config.json. One that config.json leaves out has its documented default.
    """

    model_config = ConfigDict(frozen=True, strict=True, protected_namespaces=())

    model_type: str
    vocab_size: PositiveInt
    num_hidden_layers: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt = Field(default_factory=lambda fields: fields["num_attention_heads"])
    head_dim: PositiveInt = Field(
        default_factory=lambda fields: fields["hidden_size"] // fields["num_attention_heads"]
    )
    max_position_embeddings: PositiveInt
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_factor: float | None = None
    """Llama 3's scaling factor; None: plain rotary frequencies."""
    tie_word_embeddings: bool = False
    # The trainer computes only these values of the fields below.
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    use_sliding_window: Literal[False] = False
    attention_dropout: float = Field(0.0, le=0)
    partial_rotary_factor: float = Field(1.0, ge=1, le=1)


def read_hf_config(folder: str | Path) -> HuggingFaceConfig:
    """Reads config.json of a folder that has passed `check_model_folder`. Raises ConfigError for an
    unsupported feature."""
    return parse_hf_config(json.loads((Path(folder) / "config.json").read_text()))


def parse_hf_config(config: Mapping[str, Json]) -> HuggingFaceConfig:
    """Accepts the field names of transformers 4 and 5 (`rope_theta` or `rope_parameters`)."""
    fields = {name: value for name, value in config.items() if value is not None}
    fields |= _rope_fields(fields)
    try:
        parsed = HuggingFaceConfig.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise _refused(name, config.get(name), first["msg"]) from None
    _check_window(parsed, config)
    return parsed


def _check_window(parsed: HuggingFaceConfig, config: Mapping[str, Json]) -> None:
    """Raises ConfigError for a sliding window that does not reach over every position: the trainer computes
    attention over all earlier tokens."""
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


def _rope_fields(config: Mapping[str, Json]) -> dict[str, Json]:
    """`rope_theta` and `rope_factor` of the rotary frequencies, as far as config.json has them."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return {}
    fields: dict[str, Json] = {}
    if rope.get("rope_theta") is not None:
        fields["rope_theta"] = rope["rope_theta"]
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return fields
    if kind == "llama3" and all(rope.get(name) == value for name, value in _MEGATRON_LLAMA3.items()):
        fields["rope_factor"] = rope.get("factor", 8.0)
        return fields
    raise _refused("rope_parameters", dict(rope), f"only default and llama3 with {_MEGATRON_LLAMA3}")


def _refused(name: str, value: object, why: str) -> ConfigError:
    reason = f"the trainer does not support it ({why})"
    return ConfigError(f"config.json: {name}", value, reason, "use another model")
