"""Contradictions between an adapter and the other settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from invrl.run.settings.algorithm_contradictions import Contradictions

if TYPE_CHECKING:
    from invrl.run.settings.config import Config


def adapter(config: Config) -> Contradictions:
    """Settings that would train, or keep, other weights than the adapter."""
    if config.train.lora is None:
        return
    if config.model.reference_model_path is not None:
        reason = "the reference of an adapter is the model without it, which needs no memory of its own"
        yield (
            "model.reference_model_path",
            reason,
            "leave --reference-model-path out, or train the whole model: leave [lora] out",
        )
    for name in ("ema", "reset_steps"):
        if getattr(config.algorithm.reference, name) is not None:
            reason = "the reference of an adapter is the model without it, which stays as it is"
            yield f"reference.{name}", reason, "leave it out, or leave [lora] out"
    if config.train.moe_router_bias_update_rate is not None:
        reason = "the biases belong to the model, which [lora] freezes, and checkpoints have the adapter alone"
        yield (
            "train.moe_router_bias_update_rate",
            reason,
            "leave it out, or leave [lora] out",
        )
