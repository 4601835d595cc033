"""What a family file says: names of models and tensors, what is fused, what is computed, who serves it.

Every part of invrl that knows a family reads it from here: the trainer (`model.py`, `weights.py`), the engine
(`engines/sglang_models`, `weights/in_engine.py`), `invrl doctor` and `invrl prepare-model`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from invrl.train.families.model_config import HuggingFaceConfig
from invrl.train.families.parameter import Parameter

EngineFusions = Mapping[str, tuple[str, ...]]
_ENGINE_FUSIONS: EngineFusions = MappingProxyType(
    {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family. Its parameters are listed in the order in which they are sent; tensors that the
    engine fuses stand back to back."""

    model_type: str
    """In config.json. The family's file has this name."""
    models: str
    """Published models of the family, for people."""
    architecture: str
    """Name of the class in transformers, and in SGLang."""
    sglang_module: str
    """The module of `sglang.srt.models` that has the class."""
    gguf_architecture: str
    """`general.architecture` in a GGUF file of the family."""

    config: type[HuggingFaceConfig] = HuggingFaceConfig
    """What its config.json may say, and what its model computes."""

    before: tuple[Parameter, ...]
    """Parameters before the decoder layers."""
    layer: tuple[Parameter, ...]
    """Parameters of one decoder layer."""
    after: tuple[Parameter, ...]
    """Parameters after the decoder layers."""
    head: Parameter
    """The output layer; absent where the embedding is tied."""

    engine_fusions: EngineFusions = field(default_factory=lambda: _ENGINE_FUSIONS)
    """Parameters of SGLang's model that hold the rows of several Hugging Face tensors, in this order."""

    engine_has_windows: bool = True
    """Whether SGLang's class computes the windows of `config.attention`."""

    def parameters(self, config: HuggingFaceConfig) -> list[Parameter]:
        """All parameters of the model, in sending order."""
        table = list(self.before)
        for layer in range(config.num_hidden_layers):
            table += [parameter.in_layer(layer) for parameter in self.layer]
        table += self.after
        if not config.tie_word_embeddings:
            table.append(self.head)
        return table
