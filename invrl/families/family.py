"""Contents of a family file: names of models and tensors, what is fused, what is
computed, who serves it.

All family-specific parts of invrl read it from here: the trainer
(`train/model/policy_model.py`, `train/weights/conversion.py`), the engine
(`engines/sglang_models`, `weights/loader/weight_loader.py`), `invrl doctor` and `invrl
prepare-model`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from invrl.families.model_config import HuggingFaceConfig
from invrl.families.parameter import Parameter

EngineFusions = Mapping[str, tuple[str, ...]]
_ENGINE_FUSIONS: EngineFusions = MappingProxyType(
    {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family. Its parameters are listed in sending order; tensors that the
    engine fuses are adjacent."""

    model_type: str
    """Value in config.json, and name of the family's file."""
    models: str
    """Published models of the family, for people."""
    architecture: str
    """Name of the class in transformers, and in SGLang."""
    sglang_module: str
    """Module of `sglang.srt.models` that has the class."""
    not_served_on_cpu: str = ""
    """Reason that SGLang cannot serve it on a CPU; empty: it can."""

    config: type[HuggingFaceConfig] = HuggingFaceConfig
    """Class of its config.json, which also says what its model computes."""

    before: tuple[Parameter, ...]
    low_rank_query: tuple[Parameter, ...] = ()
    """Parameters of a layer with latent attention whose queries also come from a small
    vector."""
    full_rank_query: tuple[Parameter, ...] = ()
    """Parameters of a layer with latent attention whose queries come from the hidden
    state."""
    layer: tuple[Parameter, ...]
    """Parameters of one decoder layer, without its MLP and the groups below."""
    qkv_biases: tuple[Parameter, ...]
    """Parameters of a layer, if the configuration has them."""
    qk_norms: tuple[Parameter, ...]
    """Parameters of a layer, if the configuration has them."""
    mlp: tuple[Parameter, ...]
    """Parameters of the MLP of a layer without experts."""
    router: tuple[Parameter, ...] = ()
    """Parameters of the MLP of a layer with experts that belong to no single expert."""
    expert: tuple[Parameter, ...] = ()
    after: tuple[Parameter, ...]
    head: Parameter
    """Output layer; absent if the embedding is tied."""

    engine_fusions: EngineFusions = field(default_factory=lambda: _ENGINE_FUSIONS)
    """Parameters of SGLang's model that hold the rows of several Hugging Face tensors,
    in this order."""
    engine_experts: EngineFusions = field(default_factory=dict)
    """Parameters of SGLang's model that hold all experts of a layer: the rows of
    several tensors of the first expert, in this order, then those of the next."""

    def parameters(self, config: HuggingFaceConfig) -> list[Parameter]:
        """All parameters of the model, in sending order."""
        table = list(self.before)
        for layer in range(config.num_hidden_layers):
            table += [
                parameter.in_layer(layer) for parameter in self._of_layer(config, layer)
            ]
        table += self.after
        if not config.tie_word_embeddings:
            table.append(self.head)
        return table

    def _of_layer(self, config: HuggingFaceConfig, layer: int) -> list[Parameter]:
        """Return the entries of the tables that the layer has."""
        entries: list[Parameter] = []
        if config.latent_attention is not None:
            has_rank = config.latent_attention.query_rank is not None
            entries += self.low_rank_query if has_rank else self.full_rank_query
        entries += self.layer
        if config.qkv_bias:
            entries += self.qkv_biases
        if config.qk_norm:
            entries += self.qk_norms
        if not config.has_experts(layer):
            return [*entries, *self.mlp]
        assert config.experts is not None
        entries += self.router
        for expert in range(config.experts.count):
            entries += [parameter.in_expert(expert) for parameter in self.expert]
        return entries
