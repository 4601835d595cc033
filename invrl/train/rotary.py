"""Rotary positions: the angle by which each token's queries and keys are turned.

Frequencies are computed in float32 and in the order of operations of transformers, so that they are the same
numbers: at position 30,000 the last bit of a frequency is a thousandth of a radian.
"""

import math

import torch

from invrl.train.families.rope import LinearRope, Llama3Rope, Rope, YarnRope


def frequencies(rope: Rope, dim: int) -> torch.Tensor:
    """Radians per position, float32 [dim / 2], on the CPU. `dim`: rotated dimensions of a head."""
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    plain = 1.0 / (rope.rope_theta**exponents)
    if isinstance(rope, LinearRope):
        return plain / rope.factor
    if isinstance(rope, Llama3Rope):
        return _llama3_frequencies(rope, plain)
    if isinstance(rope, YarnRope):
        return _yarn_frequencies(rope, dim)
    return plain


def angles(frequencies_D: torch.Tensor, positions_P: torch.Tensor) -> torch.Tensor:
    """Radians [P, 1, 1, 2 D] of each token's own position, in Megatron's order: D, then D again."""
    angles_PD = torch.outer(positions_P.float(), frequencies_D)
    return torch.cat((angles_PD, angles_PD), dim=-1)[:, None, None, :]


def _llama3_frequencies(rope: Llama3Rope, plain: torch.Tensor) -> torch.Tensor:
    wavelengths = 2 * math.pi / plain
    longest_fast = rope.original_max_position_embeddings / rope.high_freq_factor
    shortest_slow = rope.original_max_position_embeddings / rope.low_freq_factor
    scaled = torch.where(wavelengths > shortest_slow, plain / rope.factor, plain)
    smooth = (rope.original_max_position_embeddings / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * scaled / rope.factor + smooth * scaled
    is_between = (wavelengths >= longest_fast) & (wavelengths <= shortest_slow)
    return torch.where(is_between, between, scaled)


def _yarn_frequencies(rope: YarnRope, dim: int) -> torch.Tensor:
    """Dimensions that turn more than `beta_fast` times within the original context keep their frequency.
    Those that turn less than `beta_slow` times are divided by the factor. A ramp leads from one to the
    other."""
    periods = rope.rope_theta ** (torch.arange(0, dim, 2).float() / dim)
    extrapolated = 1.0 / periods
    interpolated = 1.0 / (rope.factor * periods)
    first = _dimension_of_turns(rope, rope.beta_fast, dim)
    last = _dimension_of_turns(rope, rope.beta_slow, dim)
    if rope.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, dim - 1)
    if first == last:
        last += 0.001  # the ramp is a step
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    kept = 1 - ramp
    return interpolated * (1 - kept) + extrapolated * kept


def _dimension_of_turns(rope: YarnRope, turns: float, dim: int) -> float:
    """The dimension that turns so many times within the original context, as a real number."""
    positions_per_turn = rope.original_max_position_embeddings / (turns * 2 * math.pi)
    return dim * math.log(positions_per_turn) / (2 * math.log(rope.rope_theta))
