"""The shape of a model, from its config.json: what the trainer computes, and what it
refuses.

A family subclasses `HuggingFaceConfig`, adds its own fields, and overrides what its
model computes differently. Invariant: a `HuggingFaceConfig` describes a model that
`train/model/policy_model.py` computes exactly; a feature that it would compute
differently is refused by name. Imports neither torch nor transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from invrl.families.rope import Rope, partial_rotary, read_rope
from invrl.types.tasks import Json

Activation = Literal["silu", "gelu_pytorch_tanh"]


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Differences between the attentions of two layers."""

    rope: Rope
    window: int | None = None
    """A token attends to this many tokens, the last of which is itself. None: to all
    before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of a layer, and how its router chooses among them."""

    count: int
    chosen: int
    """Number of them that compute a token."""
    intermediate_size: int
    normalized: bool
    """Whether the weights of a token's chosen experts are divided by their sum."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Function of the router's logits; the chosen experts' scores are their weights."""
    has_bias: bool = False
    """Whether a bias is added to the scores for the choice, but not to the weights."""
    scale: float = 1.0
    """The factor of the weights."""
    groups: int = 1
    chosen_groups: int = 1
    """Number of best groups that experts are chosen from; groups are ranked by their
    best experts."""
    shared_size: int | None = None
    """Intermediate size of the experts that compute every token, together; None: there
    are none."""
    router_in_float32: bool = False
    """Whether the router's logits are computed in float32, whatever dtype the model
    has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Attention in which the keys and values of all heads come from one small vector of
    each token (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    query_rank: int | None
    """Size of the vector that queries come from; None: they come from the hidden state
    itself."""
    key_value_rank: int
    plain_dim: int
    """Dimensions of a query and a key without rotary positions."""
    rotary_dim: int
    """Dimensions with rotary positions. A key's are the same for all heads."""
    value_dim: int
    norm_eps: float
    """Epsilon of the norms of both vectors."""


class HuggingFaceConfig(BaseModel):
    """A decoder with grouped-query attention, rotary positions, RMS norms and gated
    MLPs.

    Fields have the names of config.json, with the documented defaults.
    """

    model_config = ConfigDict(frozen=True, strict=True, protected_namespaces=())

    model_type: str
    vocab_size: PositiveInt
    num_hidden_layers: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt = Field(
        default_factory=lambda fields: fields["num_attention_heads"]
    )
    head_dim: PositiveInt = Field(
        default_factory=lambda fields: (
            fields["hidden_size"] // fields["num_attention_heads"]
        )
    )
    max_position_embeddings: PositiveInt
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    # The trainer computes only these values of the fields below.
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    use_sliding_window: Literal[False] = False
    attention_dropout: float = Field(0.0, le=0)
    partial_rotary_factor: float = Field(1.0, ge=1, le=1)
    # Not a field of config.json: `read` makes it of several.
    rope: Rope

    # What a family's model computes beyond this. A family overrides them, as a constant
    # or as a property.
    zero_centered_norms: ClassVar[bool] = False
    """Whether a norm multiplies by 1 + weight."""
    post_norms: ClassVar[bool] = False
    """Whether the outputs of attention and MLP are normalised before they are added to
    the residual."""
    activation: ClassVar[Activation] = "silu"
    """Activation of the MLP's gate."""

    @classmethod
    def read(cls, config: Mapping[str, Json]) -> Self:
        """Read the whole config.json. Raises pydantic's ValidationError for a field
        that is missing or has another value than the trainer computes, ConfigError for
        fields that contradict each other."""
        fields: dict[str, object] = dict(config)
        fields["rope"] = read_rope(config)
        fields.update(partial_rotary(config))
        return cls.model_validate(fields)

    def differences(self, other: "HuggingFaceConfig") -> list[str]:
        """Return the fields in which another model computes something else with its
        weights. (`max_position_embeddings` alone changes nothing, and base models often
        have another one.)"""
        if self.model_type != other.model_type:
            return ["model_type"]
        names = type(self).model_fields.keys() - {"max_position_embeddings"}
        return sorted(
            name for name in names if getattr(self, name) != getattr(other, name)
        )

    def check_served(self) -> None:
        """Raise ConfigError if SGLang computes another model than config.json says and
        the trainer computes."""

    def attention(self, layer: int) -> LayerAttention:
        """Return the attention of the layer, counted from 0."""
        return LayerAttention(self.rope)

    @property
    def qkv_bias(self) -> bool:
        """Whether q, k and v have biases."""
        return False

    @property
    def qk_norm(self) -> bool:
        """Whether each head of q and k is normalised."""
        return False

    @property
    def latent_attention(self) -> LatentAttention | None:
        """None: queries, keys and values are projections of the hidden state."""
        return None

    @property
    def experts(self) -> Experts | None:
        """None: no layer has experts."""
        return None

    def has_experts(self, layer: int) -> bool:
        """Whether the layer, counted from 0, has experts instead of one MLP."""
        return False

    @property
    def smallest_head_dim(self) -> int:
        """Smallest head dimension of queries or values."""
        if self.latent_attention is None:
            return self.head_dim
        return min(self.head_dim, self.latent_attention.value_dim)

    @property
    def rotary_dim(self) -> int:
        """Number of first dimensions of a head with rotary positions."""
        return int(self.head_dim * self.partial_rotary_factor)

    def leaves_out(self, name: str) -> bool:
        """Whether the model does not use this tensor of its folder."""
        return self.tie_word_embeddings and name == "lm_head.weight"

    @property
    def attention_scale(self) -> float:
        """Factor of a query's products with the keys, before the softmax."""
        return self.head_dim**-0.5

    @property
    def embedding_scale(self) -> float | None:
        """Factor of the embeddings; None: unchanged."""
        return None

    @property
    def logit_softcap(self) -> float | None:
        """c, if logits x become c tanh(x / c); None: unchanged."""
        return None
