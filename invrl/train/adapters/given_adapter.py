"""An adapter that was trained elsewhere: what it adapts, and whether it fits a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from invrl.errors import ConfigError
from invrl.families.model_config import HuggingFaceConfig
from invrl.families.projections import Projection, projections
from invrl.families.registry import FAMILIES
from invrl.train.adapters.peft_folder import factor_shapes, read_peft_config

_FIX = "give an adapter of this model"


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenAdapter:
    """A plain LoRA adapter of a model."""

    rank: int
    projections: tuple[Projection, ...]
    """The projections that it adapts."""

    @property
    def kinds(self) -> frozenset[str]:
        """Names of the adapted projections."""
        return frozenset(projection.kind for projection in self.projections)


def read_given_adapter(
    folder: Path, model: HuggingFaceConfig, shapes: Mapping[str, Sequence[int]]
) -> GivenAdapter:
    """Read what a PEFT folder adapts. `shapes` are those of the model's tensors. Raises
    ConfigError unless it has both factors, of the model's shapes, of each kind of
    projection in every layer, and names these kinds as its targets."""
    rank = read_peft_config(folder).r
    found = factor_shapes(folder)
    own = projections(FAMILIES[model.model_type].parameters(model))
    by_name = {projection.name: projection for projection in own}
    kinds: set[str] = set()
    for name in found:
        module = name.partition(".lora_")[0]
        if module not in by_name:
            known = ", ".join(dict.fromkeys(projection.kind for projection in own))
            reason = f"it adapts {module}, and the model has no such projection. It has {known}"
            raise ConfigError("lora.targets", module, reason, _FIX)
        kinds.add(by_name[module].kind)
    _check_targets(folder, kinds)
    adapted = tuple(projection for projection in own if projection.kind in kinds)
    for projection in adapted:
        outputs, inputs = shapes[f"{projection.name}.weight"]
        for factor, shape in (
            (projection.factor_a.megatron, (rank, inputs)),
            (projection.factor_b.megatron, (outputs, rank)),
        ):
            if found.get(factor) != shape:
                held = "missing" if factor not in found else f"{found[factor]}"
                reason = (
                    f"{factor} is {held}; for this model and rank {rank} it is {shape}"
                )
                raise ConfigError("lora.path", str(folder), reason, _FIX)
    return GivenAdapter(rank=rank, projections=adapted)


def _check_targets(folder: Path, kinds: set[str]) -> None:
    """Raise ConfigError unless the configuration of an adapter names the kinds that its
    tensors have: an engine makes room by it."""
    targets = read_peft_config(folder).target_modules
    if isinstance(targets, str) or set(targets) != kinds:
        reason = (
            f"target_modules is {targets!r}, and its tensors are of {sorted(kinds)}"
        )
        raise ConfigError("lora.targets", str(folder), reason, _FIX)
