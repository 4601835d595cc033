"""The adapter that a run's engines serve under the transport `adapter`, and the models
and targets for which SGLang can serve one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from invrl.engines.inside_sglang.adapter_loads import STACKED
from invrl.engines.launch.served_adapter import ServedAdapter
from invrl.errors import ConfigError
from invrl.families.hf_config import read_hf_config
from invrl.weights.config import AdapterWeights

if TYPE_CHECKING:
    from invrl.run.settings.config import Config

_SERVED = frozenset({"o_proj", "down_proj"}.union(*STACKED.values()))
_MLP = frozenset({"gate_proj", "up_proj", "down_proj"})
_MERGED = "leave --weights.transport out: engines then get merged weights"


def served_adapter(config: Config) -> ServedAdapter | None:
    """Return the adapter that engines serve; None if they serve whole weights. Raises
    ConfigError for an adapter that SGLang cannot serve."""
    lora = config.train.lora
    if not isinstance(config.weights, AdapterWeights) or lora is None:
        return None
    model = read_hf_config(config.model.folder)
    projections = lora.projections(model)
    if any(projection.parameter.expert is not None for projection in projections):
        raise ConfigError(
            "weights.transport",
            "adapter",
            "adapters of single experts are not sent to engines yet",
            f"add --lora.experts none, or {_MERGED}",
        )
    kinds = sorted({projection.kind for projection in projections})
    unknown = [kind for kind in kinds if kind not in _SERVED]
    if unknown:
        raise ConfigError(
            "weights.transport",
            "adapter",
            f"SGLang serves no adapter of {unknown[0]} in this model",
            _MERGED,
        )
    if model.experts is not None and not _MLP.isdisjoint(kinds):
        raise ConfigError(
            "lora.targets",
            ",".join(lora.targets),
            "beside experts, SGLang would adapt these too under the names of the MLP's projections",
            f"give --lora.targets q_proj,k_proj,v_proj,o_proj, or {_MERGED}",
        )
    for stacked in STACKED.values():
        missing = [kind for kind in stacked if kind not in kinds]
        if missing and len(missing) < len(stacked):
            raise ConfigError(
                "lora.targets",
                ",".join(lora.targets),
                f"SGLang adapts {', '.join(stacked)} together, and {missing[0]} is not a target",
                f"add it to the targets, or {_MERGED}",
            )
    return ServedAdapter(
        rank=lora.rank,
        targets=tuple(kinds),
        num_versions=config.buffer.max_staleness + 2,
    )
