"""The adapters that engines serve: the one of a run with the transport `adapter`, and
those of `invrl serve --adapter`. SGLang can serve them for some models and targets."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from invrl.engines.inside_sglang.adapter_loads import NAME_PREFIX, STACKED
from invrl.engines.launch.served_adapter import ServedAdapter
from invrl.errors import ConfigError, TrainError
from invrl.families.hf_config import read_hf_config
from invrl.families.model_config import HuggingFaceConfig
from invrl.families.projections import Projection
from invrl.train.adapters.base_checksum import weights_checksum
from invrl.train.adapters.given_adapter import read_given_adapter
from invrl.train.adapters.peft_folder import check_base, has_base_checksum
from invrl.user_code.model_folder import tensor_shapes
from invrl.weights.config import AdapterWeights

if TYPE_CHECKING:
    from invrl.run.settings.config import Config

_SERVED = frozenset({"o_proj", "down_proj"}.union(*STACKED.values()))
_MLP = frozenset({"gate_proj", "up_proj", "down_proj"})
_FILLED = frozenset({"k_proj", "up_proj"})
"""Projections of a stack that an adapter may lack: SGLang puts zeros in their place."""
_MERGED = "leave --weights.transport out: engines then get merged weights"


def served_adapter(config: Config) -> ServedAdapter | None:
    """Return the adapter that a run's engines serve; None if they serve whole weights.
    Raises ConfigError for an adapter that SGLang cannot serve."""
    lora = config.train.lora
    if not isinstance(config.weights, AdapterWeights) or lora is None:
        return None
    model = read_hf_config(config.model.folder)
    projections = lora.projections(model)
    _check_served(model, projections, ",".join(lora.targets))
    kinds = sorted({projection.kind for projection in projections})
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


def adapters_by_name(config: Config) -> ServedAdapter | None:
    """Return the adapters of `invrl serve --adapter`; None if there are none. Raises
    ConfigError for one that is not of the model, or that SGLang cannot serve."""
    folders = config.model.adapters
    if not folders:
        return None
    base = config.model.folder
    model = read_hf_config(base)
    shapes = tensor_shapes(base)
    ranks: list[int] = []
    kinds: set[str] = set()
    for name, folder in folders.items():
        entry = f"{name}={folder}"
        if name.startswith(NAME_PREFIX):
            reason = (
                f"names that begin with {NAME_PREFIX} are those of a run's versions"
            )
            raise ConfigError("model.adapter", entry, reason, "choose another name")
        try:
            adapter = read_given_adapter(folder, model, shapes)
            _check_served(model, adapter.projections, name)
            _check_stacks(adapter.kinds)
            if has_base_checksum(folder):
                check_base(folder, str(base), _base_checksum(base))
        except (ConfigError, TrainError) as error:
            reason = error.reason if isinstance(error, ConfigError) else str(error)
            fix = "give a PEFT folder with a plain LoRA adapter of this model"
            raise ConfigError("model.adapter", entry, reason, fix) from error
        ranks.append(adapter.rank)
        kinds |= adapter.kinds
    return ServedAdapter(
        rank=max(ranks),
        targets=tuple(sorted(kinds)),
        num_versions=len(folders) + 1,
        folders=folders,
    )


@functools.lru_cache(maxsize=1)
def _base_checksum(base: Path) -> str:
    """Return the checksum of the model, which a process reads once: it checks its
    adapters before it starts, and again when it starts the engines."""
    return weights_checksum(base)


def _check_served(
    model: HuggingFaceConfig, projections: Sequence[Projection], targets: str
) -> None:
    """Raise ConfigError if SGLang cannot serve adapters of these projections, which the
    `targets` name."""
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
            targets,
            "beside experts, SGLang would adapt these too under the names of the MLP's projections",
            f"give --lora.targets q_proj,k_proj,v_proj,o_proj, or {_MERGED}",
        )


def _check_stacks(kinds: Collection[str]) -> None:
    """Raise ConfigError for a part of a stack that SGLang does not complete with
    zeros."""
    for stacked in STACKED.values():
        present = [kind for kind in stacked if kind in kinds]
        missing = [
            kind for kind in stacked if kind not in kinds and kind not in _FILLED
        ]
        if present and missing:
            raise ConfigError(
                "lora.targets",
                ",".join(sorted(kinds)),
                f"SGLang serves {present[0]} only together with {' and '.join(missing)}",
                "",
            )
