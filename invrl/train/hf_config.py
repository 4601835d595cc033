"""What the trainer takes from a Hugging Face folder's `config.json`: a typed, checked subset.

Invariant: a `HuggingFaceConfig` describes a model that `model.py` computes exactly; whatever it would
compute differently is refused here, by name, before a weight is read. Imports neither torch nor
transformers, so a run can be checked before any process starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from invrl.errors import ConfigError
from invrl.train.hf_names.families import FAMILIES
from invrl.types import Json

_MEGATRON_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The parameters of Llama 3's scaled frequencies that Megatron fixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceConfig:
    """Shape of a dense decoder with grouped-query attention, rotary positions and gated SiLU MLPs."""

    model_type: str
    vocab_size: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    rope_factor: float | None
    """Llama 3's scaling factor; None: plain rotary frequencies."""
    tie_embeddings: bool


def read_hf_config(folder: str | Path) -> HuggingFaceConfig:
    """Raises ConfigError for a folder without config.json, a family without a name file, or a feature
    that the trainer does not compute."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        fix = "give a Hugging Face model folder (`invrl prepare-model` makes one)"
        raise ConfigError("model", str(folder), "it holds no config.json", fix)
    return parse_hf_config(json.loads(path.read_text()))


def parse_hf_config(config: Mapping[str, Json]) -> HuggingFaceConfig:
    """Accepts the field names of transformers 4 and 5 (`rope_theta` or `rope_parameters`)."""
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        raise _refused("model_type", model_type, f"supported are {', '.join(sorted(FAMILIES))}")
    for name, allowed in (
        ("hidden_act", ("silu",)),
        ("attention_bias", (False, None)),
        ("mlp_bias", (False, None)),
        ("use_sliding_window", (False, None)),
        ("attention_dropout", (0, None)),
        ("partial_rotary_factor", (1, None)),
        ("quantization_config", (None,)),
    ):
        if config.get(name, allowed[-1]) not in allowed:
            raise _refused(name, config.get(name), "the trainer would compute another function")
    heads = _int(config, "num_attention_heads")
    theta, factor = _rope(config)
    return HuggingFaceConfig(
        model_type=model_type,
        vocab_size=_int(config, "vocab_size"),
        num_layers=_int(config, "num_hidden_layers"),
        hidden_size=_int(config, "hidden_size"),
        intermediate_size=_int(config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=_int(config, "num_key_value_heads", heads),
        head_dim=_int(config, "head_dim", _int(config, "hidden_size") // heads),
        max_positions=_int(config, "max_position_embeddings"),
        rms_norm_eps=_float(config, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_factor=factor,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def _rope(config: Mapping[str, Json]) -> tuple[float, float | None]:
    """Base and Llama 3 factor of the rotary frequencies."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = found if isinstance(found, Mapping) else {}
    theta = _float(rope, "rope_theta", _float(config, "rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "llama3" and all(rope.get(name) == value for name, value in _MEGATRON_LLAMA3.items()):
        return theta, _float(rope, "factor", 8.0)
    raise _refused("rope_parameters", dict(rope), f"only default and llama3 with {_MEGATRON_LLAMA3}")


def _int(config: Mapping[str, Json], name: str, default: int | None = None) -> int:
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, int):
        raise _refused(name, value, "a whole number is needed")
    return value


def _float(config: Mapping[str, Json], name: str, default: float) -> float:
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, int | float):
        raise _refused(name, value, "a number is needed")
    return float(value)


def _refused(name: str, value: object, why: str) -> ConfigError:
    reason = f"the trainer does not support it ({why})"
    return ConfigError(f"config.json: {name}", value, reason, "use another model")
