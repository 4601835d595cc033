"""Rotary positions as config.json describes them: the base frequency, and its scaling
for long contexts.

`train/layers/rotary.py` computes the frequencies. A scaling that the trainer does not
compute is refused here by name. Imports no torch.
"""

import math
from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt, ValidationError

from invrl.families.refusal import refused
from invrl.types.tasks import Json


class Rope(BaseModel, frozen=True, strict=True):
    """Plain rotary positions. The scalings are subclasses. Fields have the names of
    config.json."""

    kind: ClassVar[str] = "default"

    rope_theta: PositiveFloat


class LinearRope(Rope, frozen=True):
    """Positions are divided by `factor`."""

    kind: ClassVar[str] = "linear"

    factor: PositiveFloat


class Llama3Rope(Rope, frozen=True):
    """Llama 3.1: slow frequencies are divided by `factor`, fast ones stay, and those
    between are interpolated."""

    kind: ClassVar[str] = "llama3"

    factor: PositiveFloat
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_max_position_embeddings: PositiveInt


class YarnRope(Rope, frozen=True):
    """YaRN (arXiv 2309.00071): frequencies are interpolated by a ramp over the
    dimensions, and queries and keys are multiplied by an attention factor."""

    kind: ClassVar[str] = "yarn"

    factor: PositiveFloat
    original_max_position_embeddings: PositiveInt
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    attention_factor: float | None = Field(None, ge=0)
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's sharpening of attention over a context that is `factor` times as
    long."""
    if factor <= 1:
        return 1.0
    return 0.1 * mscale * math.log(factor) + 1.0


def attention_factor(rope: Rope) -> float:
    """Return the factor of queries and keys that comes with the scaling; 1 for all but
    YaRN."""
    if not isinstance(rope, YarnRope):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_magnitude(rope.factor, rope.mscale) / yarn_magnitude(
            rope.factor, rope.mscale_all_dim
        )
    return yarn_magnitude(rope.factor)


ROPES: dict[str, type[Rope]] = {
    rope.kind: rope for rope in (Rope, LinearRope, Llama3Rope, YarnRope)
}
"""`rope_type` in config.json -> its class."""
_NOT_COMPUTED = {
    "dynamic": "transformers scales by the length of the row, SGLang always by the longest one, so trainer "
    "and engine would compute different models",
    "longrope": "the frequencies would depend on the length of the row",
}


def read_rope(config: Mapping[str, Json]) -> Rope:
    """Read the rotary positions of a config.json, in the form of transformers 4
    (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`). Raises ConfigError for a
    scaling that is not computed or incomplete."""
    return build_rope(_parameters(config), config, default_theta=10000.0)


def partial_rotary(config: Mapping[str, Json]) -> dict[str, Json]:
    """Return `partial_rotary_factor`, the rotated part of a head, if the rope's own
    fields have it."""
    factor = _parameters(config).get("partial_rotary_factor")
    if factor is None:
        return {}
    return {"partial_rotary_factor": factor}


def _parameters(config: Mapping[str, Json]) -> Mapping[str, Json]:
    """Return the rope's fields in a config.json."""
    return rope_fields(config, "rope_scaling") or rope_fields(config, "rope_parameters")


def rope_fields(config: Mapping[str, Json], name: str) -> Mapping[str, Json]:
    """Return the object `name` of a config.json; an empty one if it is missing or null.
    Raises ConfigError for another value, which would silently mean plain positions."""
    fields = config.get(name)
    if fields is None:
        return {}
    if not isinstance(fields, Mapping):
        raise refused(name, fields, "it is not an object")
    return fields


def build_rope(
    parameters: Mapping[str, Json], config: Mapping[str, Json], *, default_theta: float
) -> Rope:
    """Build a rope from its fields in config.json. Missing ones come from `config`
    itself, or have transformers' defaults."""
    fields: dict[str, Json] = {
        name: value for name, value in parameters.items() if value is not None
    }
    theta = config.get("rope_theta")
    fields.setdefault("rope_theta", default_theta if theta is None else theta)
    kind = fields.get("rope_type", fields.get("type", "default"))
    rope = ROPES.get(str(kind))
    if rope is None:
        reason = _NOT_COMPUTED.get(
            str(kind), f"rope_type {kind!r} is unknown; known are {', '.join(ROPES)}"
        )
        raise refused("rope_parameters", dict(parameters), reason)
    fields.setdefault(
        "original_max_position_embeddings", config.get("max_position_embeddings")
    )
    try:
        return rope.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{rope.kind} needs {first['loc'][0]}: {first['msg']}"
        raise refused("rope_parameters", dict(parameters), reason) from None
