"""User code of the loss's axes, by import path: an old policy, weights of ratios and of
samples, and what adapts the settings during a run.

Each is loaded with its own table of settings, `[plugin.NAME]`. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from invrl.algorithms.policy_loss.policy_losses import POLICY_LOSSES, load_policy_loss
from invrl.errors import PluginError
from invrl.interfaces import Adaptation, OldPolicy, RatioWeight, SampleWeight
from invrl.user_code.plugins import load_plugin, plugin_name

if TYPE_CHECKING:
    from invrl.algorithms.config import AlgorithmConfig

BUILT_IN_OLD_POLICIES = ("recompute", "engine")
_Whole = TypeVar("_Whole", bound=SampleWeight | Adaptation)


class AxisPlugin(NamedTuple):
    setting: str
    path: str
    plugin: object


def axis_plugins(config: AlgorithmConfig) -> Iterator[AxisPlugin]:
    """Yield all user code of the axes. Raises PluginError."""
    if config.policy_loss not in POLICY_LOSSES:
        yield AxisPlugin("policy_loss", config.policy_loss, load_policy_loss(config))
    if config.old_logprobs not in BUILT_IN_OLD_POLICIES:
        yield AxisPlugin("old_logprobs", config.old_logprobs, load_old_policy(config))
    if config.ratio_weight is not None:
        yield AxisPlugin("ratio_weight", config.ratio_weight, load_ratio_weight(config))
    if config.sample_weight is not None:
        yield AxisPlugin(
            "sample_weight", config.sample_weight, load_sample_weight(config)
        )
    for path, adaptation in zip(
        config.adaptations, load_adaptations(config).values(), strict=True
    ):
        yield AxisPlugin("adaptations", path, adaptation)


def load_old_policy(config: AlgorithmConfig) -> OldPolicy:
    """Load the user's old policy. Raises PluginError."""
    return load_plugin(
        config.old_logprobs,
        "old_logprobs",
        OldPolicy,
        names=BUILT_IN_OLD_POLICIES,
        tables=config.plugin.by_name,
    )


def load_ratio_weight(config: AlgorithmConfig) -> RatioWeight | None:
    """Load the factor of the ratios. Raises PluginError."""
    if config.ratio_weight is None:
        return None
    return load_plugin(
        config.ratio_weight, "ratio_weight", RatioWeight, tables=config.plugin.by_name
    )


def load_sample_weight(config: AlgorithmConfig) -> SampleWeight | None:
    """Load the factor of the samples' losses. Raises PluginError."""
    if config.sample_weight is None:
        return None
    return _load_whole(config.sample_weight, "sample_weight", SampleWeight, config)


def load_adaptations(config: AlgorithmConfig) -> Mapping[str, Adaptation]:
    """Load the adaptations, by name. Raises PluginError, also for two of one name."""
    adaptations: dict[str, Adaptation] = {}
    for path in config.adaptations:
        name = plugin_name(path)
        if name in adaptations:
            reason = f"another adaptation is called {name!r}"
            raise PluginError("adaptations", path, reason, "leave one of them out")
        adaptations[name] = _load_whole(path, "adaptations", Adaptation, config)
    return adaptations


def _load_whole(
    path: str, setting: str, protocol: type[_Whole], config: AlgorithmConfig
) -> _Whole:
    """Load an object that has more than its call."""
    plugin = load_plugin(path, setting, protocol, tables=config.plugin.by_name)
    if not isinstance(plugin, protocol):
        reason = (
            f"it lacks an attribute or a method of the Protocol {protocol.__name__}"
        )
        fix = "see invrl/interfaces.py, and invrl/contrib/lambda_grpo.py for an example"
        raise PluginError(setting, path, reason, fix)
    return plugin
