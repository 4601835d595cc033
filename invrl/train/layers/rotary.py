"""Rotary positions: rotation angles of each token's queries and keys.

Frequencies are computed in float32 and in transformers' order of operations, so that
they are the same numbers: at position 30,000 the last bit of a frequency is a
thousandth of a radian.
"""

import math
from dataclasses import dataclass

import torch

from invrl.families.rope import LinearRope, Llama3Rope, Rope, YarnRope


def frequencies(rope: Rope, dim: int) -> torch.Tensor:
    """Return radians per position, float32 [dim / 2], on the CPU. `dim` is the rotated
    dimensions of a head."""
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    plain = 1.0 / (rope.rope_theta**exponents)
    if isinstance(rope, LinearRope):
        return plain / rope.factor
    if isinstance(rope, Llama3Rope):
        return _llama3_frequencies(rope, plain)
    if isinstance(rope, YarnRope):
        return _yarn_frequencies(rope, dim)
    return plain


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """Cosines and sines [P, 1, 1, rotated dimensions] of each token's angles. The first
    half of the dimensions and the second have the same angles."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RotaryPositions:
    """Rotary positions of some layers: the inputs of their angles, shared by these
    layers."""

    frequencies_D: torch.Tensor
    """Radians per position, float32."""
    factor: float
    """Lengthens the rotated vectors."""
    dtype: torch.dtype

    def turns(self, positions_P: torch.Tensor) -> Turns:
        half_PD = torch.outer(positions_P.float(), self.frequencies_D)
        angles = torch.cat((half_PD, half_PD), dim=-1)[:, None, None, :]
        cos = (angles.cos() * self.factor).to(self.dtype)
        sin = (angles.sin() * self.factor).to(self.dtype)
        return Turns(cos, sin)


def turned(vectors: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first dimensions of vectors [P, 1, heads, dim], as many as `Turns`
    have. A number's pair is half of these dimensions away."""
    rotated_dim = cos.shape[-1]
    first, second = vectors[..., :rotated_dim].chunk(2, dim=-1)
    pairs = torch.cat((-second, first), dim=-1)
    rotated = vectors[..., :rotated_dim] * cos + pairs * sin
    return torch.cat((rotated, vectors[..., rotated_dim:]), dim=-1)


def _llama3_frequencies(rope: Llama3Rope, plain: torch.Tensor) -> torch.Tensor:
    context = rope.original_max_position_embeddings
    low = rope.low_freq_factor
    high = rope.high_freq_factor
    wavelengths = 2 * math.pi / plain
    longest_fast = context / high
    shortest_slow = context / low
    scaled = torch.where(wavelengths > shortest_slow, plain / rope.factor, plain)
    smooth = (context / wavelengths - low) / (high - low)
    between = (1 - smooth) * scaled / rope.factor + smooth * scaled
    is_between = (wavelengths >= longest_fast) & (wavelengths <= shortest_slow)
    return torch.where(is_between, between, scaled)


def _yarn_frequencies(rope: YarnRope, dim: int) -> torch.Tensor:
    """Scale frequencies. Dimensions that turn more than `beta_fast` times within the
    original context keep theirs. Those that turn less than `beta_slow` times are
    divided by the factor. A ramp connects the two."""
    periods = rope.rope_theta ** (torch.arange(0, dim, 2).float() / dim)
    extrapolated = 1.0 / periods
    interpolated = 1.0 / (rope.factor * periods)
    first = _dimension_with_turns(rope, rope.beta_fast, dim)
    last = _dimension_with_turns(rope, rope.beta_slow, dim)
    if rope.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, dim - 1)
    if first == last:
        last += 0.001  # the ramp is a step
    dimensions = torch.arange(dim // 2, dtype=torch.float32)
    ramp = (dimensions - first) / (last - first)
    ramp = ramp.clamp(0, 1)
    kept = 1 - ramp
    return interpolated * (1 - kept) + extrapolated * kept


def _dimension_with_turns(rope: YarnRope, turns: float, dim: int) -> float:
    """Return the dimension that turns this many times within the original context, as a
    real number."""
    positions_per_turn = rope.original_max_position_embeddings / (turns * 2 * math.pi)
    return dim * math.log(positions_per_turn) / (2 * math.log(rope.rope_theta))
