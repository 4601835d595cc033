"""The linear projections of a model, which adapters may be added to.

A projection is one tensor of the Hugging Face folder. Megatron may hold several of them
in one parameter; each has an adapter of its own all the same, as in PEFT.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from invrl.errors import ConfigError
from invrl.families.parameter import Parameter, Sharding

ALL_LINEAR = "all-linear"
"""PEFT's name for all projections of the decoder layers."""
_PROJECTION = "_proj"
"""Every family has it in the names of its projections, and in no other."""
_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A matrix W [outputs, inputs] of the model. Its adapter has the factors A [rank,
    inputs] and B [outputs, rank]."""

    name: str
    """Path of its module in the Hugging Face model."""
    parameter: Parameter
    """Megatron's parameter that holds it."""
    place: int
    """Place among the tensors of the parameter."""

    @property
    def kind(self) -> str:
        """Its own name, as a target."""
        return self.name.rpartition(".")[2]

    @property
    def factor_a(self) -> Parameter:
        """The factor A. Ranks that divide the inputs of W divide those of A."""
        is_divided = self.parameter.sharding == "columns"
        return self._factor("lora_A", "columns" if is_divided else "whole")

    @property
    def factor_b(self) -> Parameter:
        """The factor B. Ranks that divide the outputs of W divide those of B."""
        is_divided = self.parameter.sharding == "rows"
        return self._factor("lora_B", "rows" if is_divided else "whole")

    def _factor(self, factor: str, sharding: Sharding) -> Parameter:
        name = f"{self.name}.{factor}{_WEIGHT}"
        return Parameter(
            name,
            (name,),
            sharding=sharding,
            layer=self.parameter.layer,
            expert=self.parameter.expert,
        )


def projections(table: Sequence[Parameter]) -> list[Projection]:
    """Return the projections among the parameters of a model, in sending order."""
    found: list[Projection] = []
    for parameter in table:
        for place, tensor in enumerate(parameter.hugging_face):
            projection = Projection(
                name=tensor.removesuffix(_WEIGHT), parameter=parameter, place=place
            )
            if tensor.endswith(_WEIGHT) and _PROJECTION in projection.kind:
                found.append(projection)
    return found


def targeted(
    table: Sequence[Parameter], targets: Collection[str], *, with_experts: bool
) -> list[Projection]:
    """Return the projections of the kinds that the targets name, in every layer, or all
    of them for `all-linear`. Raises ConfigError for a target that names none of the
    model's."""
    candidates = [
        projection
        for projection in projections(table)
        if with_experts or projection.parameter.expert is None
    ]
    for target in targets:
        if not any(_names(target, projection) for projection in candidates):
            kinds = list(dict.fromkeys(projection.kind for projection in candidates))
            raise ConfigError(
                "lora.targets",
                target,
                "the model has no such linear projection",
                f"choose among {', '.join(kinds)}, or {ALL_LINEAR} for all of them",
            )
    return [
        projection
        for projection in candidates
        if any(_names(target, projection) for target in targets)
    ]


def _names(target: str, projection: Projection) -> bool:
    """Whether a target names the projection. Paths of single modules, which PEFT takes
    too, are no targets: SGLang adapts a kind in every layer."""
    return target in (ALL_LINEAR, projection.kind)
