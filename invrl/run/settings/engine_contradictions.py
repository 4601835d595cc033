"""Contradictions between settings of the engines: their router, their weights, the GPUs
that they share with the trainer.

`contradictions.py` runs them. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from invrl.run.settings.algorithm_contradictions import Contradictions, url_fault
from invrl.weights.config import (
    ArenaWeights,
    CollectiveWeights,
    FileWeights,
    WeightsConfig,
)

if TYPE_CHECKING:
    from invrl.run.settings.config import Config

_SEEDED_BACKENDS = {
    "attention_backend": ("torch_native", "fa3", "fa4", "flashinfer", "triton"),
    "sampling_backend": ("pytorch",),
}
"""Backends in which SGLang can sample by seed; torch_native by `host/sglang_on_cpu.py`,
on CPU."""


def _engines(config: Config) -> Contradictions:
    rollout = config.rollout
    gateway = config.gateway
    capacity = config.engine.max_total_tokens
    if capacity and rollout.max_new_tokens >= capacity:
        reason = f"an engine's KV cache holds {capacity} tokens, prompt included"
        yield (
            "rollout.max_new_tokens",
            reason,
            "lower --max-new-tokens or raise --engine.max-total-tokens",
        )
    if rollout.most_concurrency > gateway.session.max_open:
        reason = f"the gateway admits {gateway.session.max_open} open sessions at most"
        fix = "lower --rollout-concurrency or raise --session.max-open"
        if rollout.rollout_concurrency == "auto":
            fix = f"raise --session.max-open to {rollout.most_concurrency}, or give a number"
        yield "rollout.rollout_concurrency", reason, fix
    if rollout.workers.count > rollout.first_concurrency:
        reason = f"only {rollout.first_concurrency} rollouts run at a time"
        yield (
            "workers.count",
            reason,
            "lower --workers.count or raise --rollout-concurrency",
        )
    if config.engine.smg_environment and config.engine.router != "smg":
        yield (
            "engine.smg_environment",
            "only smg is started from it",
            "add --router smg, or leave it out",
        )
    yield from _grammar_masks(config)
    if config.engine.seeded_sampling:
        yield from _seeded_backends(config)


def _external_engines(config: Config) -> Contradictions:
    """Engines that the run does not start."""
    engine = config.engine
    if not engine.external_engines:
        if not engine.num_engines and not config.run.debug_train_only:
            fix = "set --num-engines to 1 or more, or give --external-engines"
            yield (
                "engine.num_engines",
                "nothing would sample: there are no external_engines either",
                fix,
            )
        return
    field = "engine.external_engines"
    for url in engine.external_engines:
        reason = _engine_url_fault(url)
        if reason:
            yield (
                field,
                f"{url}: {reason}",
                "give the URL that `invrl engine` prints, as http://10.0.0.5:30000",
            )
    if len({url.rstrip("/") for url in engine.external_engines}) < len(
        engine.external_engines
    ):
        yield field, "an engine occurs twice", "give each URL once"
    if engine.router == "smg":
        reason = "smg sends all engines one key, and an external engine has a new one with each start"
        yield "engine.router", reason, "leave --router out, or --external-engines"
    weights = config.weights
    means = "the memory of the trainer's machine"
    if isinstance(weights, CollectiveWeights):
        means = "" if weights.host else "an address of loopback"
    if isinstance(weights, FileWeights):
        means = ""
    if means and not config.run.debug_rollout_only:
        reason = f"its weights go by {means}, which an engine that the run does not start may not reach"
        fix = (
            "add --weights.transport disk (or delta), with a --weights.folder that all engines see or with "
            "--weights.host; or --weights.transport collective with --weights.host"
        )
        yield "weights.transport", reason, fix


def _eval_engines(config: Config) -> Contradictions:
    """Engines that are set aside for evaluation."""
    evaluation = config.rollout.eval
    if evaluation.engines is None:
        return
    field = "eval.engines"
    if config.run.debug_train_only:
        yield field, "with debug_train_only there are no engines", "leave it out"
    if not evaluation.tasks:
        reason = "there are no held-out tasks to evaluate on (eval.tasks is not set)"
        yield field, reason, "set --eval.tasks and --eval.interval, or leave it out"
    if not evaluation.interval:
        reason = (
            "they would have nothing to do during training (eval.interval is not set)"
        )
        yield field, reason, "set --eval.interval, or leave it out"
    if config.run.colocate:
        reason = "with colocate no rollout for training runs during an evaluation"
        yield field, reason, "leave it out, or --colocate"
    if evaluation.engines >= config.engine.total_engines:
        reason = f"no engine would be left for training: the run has {config.engine.described}"
        yield field, reason, "lower --eval.engines or raise --num-engines"


def _engine_url_fault(url: str) -> str:
    """Return what is wrong with the URL of an engine; "" if nothing is."""
    fault = url_fault(url, "http")
    if fault:
        return fault
    parts = urlsplit(url)
    if parts.port is None:
        return "it has no port"
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        return "it has a path; an engine is called at its root"
    return ""


def _seeded_backends(config: Config) -> Contradictions:
    for name, value in config.sglang.items():
        option = name.replace("-", "_")
        if option in _SEEDED_BACKENDS and value not in _SEEDED_BACKENDS[option]:
            reason = "SGLang cannot sample by seed with it, and seeded_sampling is on"
            fix = f"use one of: {', '.join(_SEEDED_BACKENDS[option])}; or --no-engine.seeded-sampling"
            yield f"sglang.{name}", reason, fix


def _grammar_masks(config: Config) -> Contradictions:
    """Grammar masks: the trainer computes a grammar's allowed tokens as SGLang does
    with its default settings."""
    if config.gateway.constrained != "masked":
        return
    for name, value in config.sglang.items():
        option = name.replace("-", "_")
        if option.startswith("constrained_json") or (
            option == "grammar_backend" and value != "xgrammar"
        ):
            reason = (
                "--gateway.constrained masked needs the default grammar options: with this one the engines allow "
                "other tokens than the trainer assumes"
            )
            yield (
                f"sglang.{name}",
                reason,
                "leave it out, or use --gateway.constrained free",
            )


def _weights(config: Config) -> Contradictions:
    weights = config.weights
    is_divided = config.engine.tp_size > 1
    slices = "the processes of an engine take their slices of the weights from the arena, and copy them"
    if is_divided and not isinstance(weights, ArenaWeights):
        yield "weights.transport", slices, "leave it out, or --engine.tp-size"
    if isinstance(weights, ArenaWeights):
        if is_divided and weights.arena_mode != "copy":
            yield "weights.arena_mode", slices, "leave it out, or --engine.tp-size"
        if weights.arena_device == "cuda":
            yield from _arena_on_gpu(weights)
    default_s = WeightsConfig.model_fields["drain_timeout_s"].default
    if weights.drain_timeout_s != default_s and weights.inflight != "drain":
        reason = f"with weights.inflight = {weights.inflight!r} nothing drains"
        fix = "add --weights.inflight drain, or leave it out"
        yield "weights.drain_timeout_s", reason, fix


def _arena_on_gpu(weights: ArenaWeights) -> Contradictions:
    if weights.arena_mode == "alias":
        reason = (
            "SGLang's CUDA graphs compute with the memory that they were captured with"
        )
        fix = "leave it out: engines copy within the GPU"
        yield "weights.arena_mode", reason, fix


def _colocate(config: Config) -> Contradictions:
    """Engines and trainer on the same GPUs, in turns."""
    if not config.run.colocate:
        return
    for name in ("debug_train_only", "debug_rollout_only"):
        if getattr(config.run, name):
            yield (
                "run.colocate",
                f"with {name} there are not both engines and a trainer",
                "leave it out",
            )
    if config.engine.external_engines:
        reason = (
            "engines that the run does not start use other GPUs, or give no memory back"
        )
        yield "engine.external_engines", reason, "leave it out, or --colocate"
    if config.critic_layout is not None:
        reason = "a critic with ranks of its own gives no memory back"
        yield "critic.data_parallel_size", reason, "leave it out, or --colocate"
    weights = config.weights
    if weights.update == "rolling":
        reason = (
            "all engines give their caches' memory back before the trainer makes a step"
        )
        yield "weights.update", reason, "leave it out, or --colocate"
    if weights.inflight == "in_place":
        reason = "engines give their caches' memory back, so running requests cannot keep their cache"
        yield (
            "weights.inflight",
            reason,
            "use retract or drain, or leave --colocate out",
        )
    if config.gateway.constrained != "free":
        reason = "SGLang ends an engine that gives memory back while a request waits for its grammar"
        yield (
            "gateway.constrained",
            reason,
            "use --gateway.constrained free, or leave --colocate out",
        )


ENGINES = (_engines, _external_engines, _eval_engines)
WEIGHTS = (_weights, _colocate)
"""Checks for a run with rollouts."""
