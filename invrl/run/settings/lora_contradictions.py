"""Contradictions between an adapter and the other settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from invrl.run.settings.algorithm_contradictions import Contradictions
from invrl.weights.config import AdapterWeights

if TYPE_CHECKING:
    from invrl.run.settings.config import Config


def sent_adapter(config: Config) -> Contradictions:
    """The transport `adapter`, and what it cannot be combined with yet."""
    weights = config.weights
    if not isinstance(weights, AdapterWeights):
        return
    field = "weights.transport"
    if config.train.lora is None:
        reason = "it sends the adapter of [lora], and the run trains the whole model"
        yield field, reason, "add --lora.rank, or leave --weights.transport out"
    if weights.inflight != "retract":
        reason = "requests end with the version that they began with"
        yield "weights.inflight", reason, "leave it out"
    fix = "leave one of the two out"
    if config.engine.external_engines:
        reason = "engines that the run does not start do not serve its adapter"
        yield "engine.external_engines", reason, fix
    if config.engine.tp_size > 1:
        yield "engine.tp_size", "only engines of one process serve an adapter", fix
    if config.run.colocate:
        reason = "engines that give memory back do not serve an adapter"
        yield "run.colocate", reason, fix


def served_by_name(config: Config) -> Contradictions:
    """Adapters that clients choose by their names, and what cannot serve them."""
    if not config.model.adapter:
        return
    if not config.run.debug_rollout_only:
        reason = "only the clients of `invrl serve` choose an adapter; a run has one, the one that it trains"
        fix = "leave it out; --lora.path FOLDER is the adapter to begin with"
        yield "model.adapter", reason, fix
    fix = "leave one of the two out"
    if config.engine.external_engines:
        reason = "engines that this command does not start do not load adapters"
        yield "engine.external_engines", reason, fix
    if config.engine.tp_size > 1:
        yield "engine.tp_size", "only engines of one process serve adapters", fix


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
