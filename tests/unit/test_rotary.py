"""Rotary frequencies against transformers' own functions, for every scaling; what is
not computed is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from invrl.errors import ConfigError
from invrl.families.rope import attention_factor, read_rope
from invrl.train.layers.rotary import RotaryPositions, frequencies, turned

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
SCALINGS: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "llama3, other bounds": LLAMA3
    | {"factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0},
    "yarn": YARN,
    "yarn, other betas": YARN | {"beta_fast": 16, "beta_slow": 2},
    "yarn, a given factor of attention": YARN | {"attention_factor": 1.3},
    "yarn, two scales": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn, not truncated": YARN | {"truncate": False},
    "yarn, a short ramp": YARN
    | {"beta_fast": 1.0001, "beta_slow": 1, "truncate": False},
    "yarn within the original context": YARN | {"factor": 1.0},
}


@pytest.mark.parametrize("theta", [10000.0, 5e5])
@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_rotary_frequencies_equal_those_of_transformers(
    scaling: str, head_dim: int, theta: float
) -> None:
    parameters = SCALINGS[scaling] | {"rope_theta": theta}
    config = LlamaConfig(
        head_dim=head_dim,
        max_position_embeddings=2048,
        rope_parameters=dict(parameters),
    )
    if scaling == "plain":
        expected, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](
            config, torch.device("cpu")
        )
    rope = read_rope({"rope_parameters": parameters, "max_position_embeddings": 2048})
    measured = frequencies(rope, head_dim)
    assert torch.allclose(measured, expected, rtol=2e-7, atol=0)
    assert attention_factor(rope) == pytest.approx(factor, rel=1e-12)


def test_rotary_angles_are_positions_times_frequencies() -> None:
    rope = read_rope({"rope_theta": 100.0})
    positions = RotaryPositions(
        frequencies_D=frequencies(rope, 4), factor=2.0, dtype=torch.float32
    )
    turns = positions.turns(torch.tensor([0, 3]))
    assert turns.cos.shape == (2, 1, 1, 4)
    angles = torch.tensor([3.0, 0.3, 3.0, 0.3])
    assert torch.allclose(turns.cos[1, 0, 0], 2 * angles.cos())
    assert torch.allclose(turns.sin[1, 0, 0], 2 * angles.sin())


def test_vectors_are_turned_as_complex_numbers_are() -> None:
    """A dimension and the one half of the turned ones away are the two parts; the last
    ones stay."""
    angle = torch.tensor([0.3, 2.0])
    vectors = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).view(1, 1, 1, 5)
    angles = torch.cat((angle, angle)).view(1, 1, 1, 4)
    measured = turned(vectors, angles.cos(), angles.sin()).flatten()
    expected = torch.complex(
        torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    ) * torch.exp(1j * angle)
    assert torch.allclose(
        measured, torch.cat((expected.real, expected.imag, torch.tensor([5.0])))
    )


def test_both_formats_of_config_json_give_the_same_rope() -> None:
    old = read_rope({"rope_theta": 5e5, "rope_scaling": LLAMA3})
    new = read_rope({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}})
    assert old == new
    assert read_rope({"rope_scaling": {"type": "linear", "factor": 2}}).kind == "linear"
    assert read_rope({}) == read_rope(
        {"rope_scaling": None, "rope_parameters": {"rope_theta": 10000}}
    )


def test_original_context_defaults_to_that_of_the_model() -> None:
    incomplete = {"rope_type": "yarn", "factor": 4.0}
    rope = read_rope({"rope_scaling": incomplete, "max_position_embeddings": 2048})
    assert rope == read_rope(
        {"rope_scaling": incomplete | {"original_max_position_embeddings": 2048}}
    )


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "SGLang"),
        (
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
            "length of the row",
        ),
        ({"rope_type": "spiral"}, "'spiral' is unknown"),
        ({"rope_type": "linear"}, "linear needs factor"),
        ({"rope_type": "linear", "factor": "two"}, "linear needs factor"),
        ({"rope_type": "linear", "factor": 0.0}, "linear needs factor"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0},
            "llama3 needs high_freq_factor",
        ),
        ({"rope_type": "yarn"}, "yarn needs factor"),
    ],
)
def test_unsupported_rope_scaling_is_refused_by_name(
    parameters: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        read_rope({"rope_scaling": parameters, "max_position_embeddings": 2048})
    assert caught.value.field == "config.json: rope_parameters"
    assert caught.value.value == parameters
