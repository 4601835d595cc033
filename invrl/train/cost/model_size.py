"""Numbers of parameters of a model, and the cost of a token: from its folder, before
anything is loaded.

Counted from the shapes in the model's safetensors files, so that it holds for every
family. Imports neither torch nor transformers.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from invrl.families.hf_config import read_hf_config
from invrl.families.model_config import HuggingFaceConfig
from invrl.train.config import LoraConfig
from invrl.user_code.model_folder import tensor_shapes

_UNKNOWN_ATTENTION_TOKENS = 4096
"""Context at which a token's attention costs as much as the rest of an unknown
model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Numbers of parameters. A tied embedding counts once."""

    total: int
    vocabulary: int
    """One matrix [vocabulary, hidden]: the embedding, and the projection to logits."""
    vocabulary_size: int
    layers: int
    """Everything but embedding and projection."""
    by_layer: tuple[int, ...]
    experts_by_layer: tuple[int, ...]
    """Parameters of each decoder layer that belong to one of its experts (not the
    shared ones)."""
    active: float
    """Parameters of `layers` that compute one token: of a layer's experts, the chosen
    share."""

    @staticmethod
    def of(folder: Path, config: HuggingFaceConfig) -> "ModelSize":
        shapes = tensor_shapes(folder)
        counts = {
            name: prod(shape)
            for name, shape in shapes.items()
            if not config.leaves_out(name)
        }
        of_vocabulary = ("embed_tokens.weight", "lm_head.weight")
        in_layers = {
            name: count
            for name, count in counts.items()
            if not name.endswith(of_vocabulary)
        }
        of_experts = {
            name: count for name, count in in_layers.items() if ".experts." in name
        }
        active = float(sum(in_layers.values()))
        if config.experts is not None:
            active -= sum(of_experts.values()) * (
                1 - config.experts.chosen / config.experts.count
            )
        return ModelSize(
            total=sum(counts.values()),
            vocabulary=config.vocab_size * config.hidden_size,
            vocabulary_size=config.vocab_size,
            layers=sum(in_layers.values()),
            by_layer=_by_layer(in_layers, config),
            experts_by_layer=_by_layer(of_experts, config),
            active=active,
        )


def _by_layer(counts: Mapping[str, int], config: HuggingFaceConfig) -> tuple[int, ...]:
    """Sum the numbers of parameters by tensor into those by layer."""
    return tuple(
        sum(count for name, count in counts.items() if f".layers.{layer}." in name)
        for layer in range(config.num_hidden_layers)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSize:
    """Numbers of parameters of an adapter."""

    by_layer: tuple[int, ...]
    """Those of each decoder layer, without its experts."""
    experts_by_layer: tuple[int, ...]

    @staticmethod
    def of(folder: Path, config: HuggingFaceConfig, lora: LoraConfig) -> "AdapterSize":
        shapes = tensor_shapes(folder)
        dense: Counter[int] = Counter()
        experts: Counter[int] = Counter()
        for projection in lora.projections(config):
            layer = projection.parameter.layer
            assert layer is not None, "projections are in decoder layers"
            counted = dense if projection.parameter.expert is None else experts
            counted[layer] += lora.rank * sum(shapes[f"{projection.name}.weight"])
        layers = range(config.num_hidden_layers)
        return AdapterSize(
            by_layer=tuple(dense[layer] for layer in layers),
            experts_by_layer=tuple(experts[layer] for layer in layers),
        )

    @property
    def total(self) -> int:
        return sum(self.by_layer) + sum(self.experts_by_layer)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeCost:
    """Estimated work of a forward pass, for balance between ranks: any unit, the same
    for all fields."""

    token: float = 1.0
    """One token in the layers, without attention to others."""
    pairs: tuple[tuple[int | None, float], ...] = (
        (None, 1 / _UNKNOWN_ATTENTION_TOKENS),
    )
    """(window of attention or None, work of one query with one key over all layers that
    have it)."""
    projection: float = 0.0
    """One row of logits."""

    @staticmethod
    def of_model(folder: Path) -> "ComputeCost":
        """Estimate floating-point operations, from a folder that has passed
        `check_model_folder`."""
        config = read_hf_config(folder)
        size = ModelSize.of(folder, config)
        # A query's product with a key, and the value's with its weight: 2 operations
        # each per dimension.
        pair = 4.0 * config.num_attention_heads * config.head_dim
        layers_by_window = Counter(
            config.attention(layer).window for layer in range(config.num_hidden_layers)
        )
        pairs = tuple(
            (window, pair * count) for window, count in layers_by_window.items()
        )
        return ComputeCost(
            token=2.0 * size.active, pairs=pairs, projection=2.0 * size.vocabulary
        )

    def tokens(self, start: int, end: int) -> float:
        """Return the cost of the tokens [start, end) of a sample, given those before
        them."""
        work = self.token * (end - start)
        for window, pair in self.pairs:
            work += pair * _attended(start, end, window)
        return work


def _attended(start: int, end: int, window: int | None) -> float:
    """Count the keys that the tokens [start, end) of a sample attend to, including
    themselves."""
    if window is None or end <= window:
        return (end - start) * (start + end + 1) / 2
    if start >= window:
        return float((end - start) * window)
    return _attended(start, window, None) + (end - window) * window


UNKNOWN_MODEL = ComputeCost()
