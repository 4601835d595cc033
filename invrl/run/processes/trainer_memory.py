"""The memory that a trainer rank of a configuration needs (`train/cost`), and the
division of one GPU's memory between a trainer rank and an engine that are both resident
on it. Imports no torch."""

from dataclasses import dataclass

from invrl.algorithms.objectives.objectives import objective_needs
from invrl.errors import ConfigError
from invrl.families.hf_config import read_hf_config
from invrl.families.model_config import HuggingFaceConfig
from invrl.run.processes.gpu_plan import GpuPlan, fix_by_turns
from invrl.run.processes.weight_devices import arena_on_gpu
from invrl.run.settings.config import Config
from invrl.train.cost.memory_budget import MemoryBudget
from invrl.train.cost.memory_estimate import MemoryEstimate
from invrl.weights.config import BucketWeights

_ENGINE_WORK_SHARE = 0.2
"""Share of a divided GPU for an engine's activations, CUDA graphs and libraries. SGLang
leaves it free (`--mem-fraction-static`)."""
_ITEM_BYTES = {"bfloat16": 2, "float32": 4}


def trainer_memory(config: Config, *, gpus: int, gpu_bytes: int) -> MemoryBudget | None:
    """Return the memory of a trainer rank on a machine with `gpus` GPUs, the smallest
    with `gpu_bytes` of memory; None without a model that the trainer computes."""
    if not config.model.model_path:
        return None
    needs = objective_needs(config.algorithm)
    try:
        return MemoryBudget.of(
            config.train,
            config.model.folder,
            frozen_models=config.train.computes_reference(needs)
            + (config.teacher_folder is not None),
            reference_moves=config.algorithm.reference_moves,
            reference_is_averaged=config.algorithm.reference.ema is not None,
            has_critic=needs.values and config.critic_layout is None,
            compares_routers=needs.router_shift,
            served_dtype=config.engine.dtype,
            megatron=config.megatron,
            copies_checkpoints=config.run.checkpoints.background,
            on_cuda=gpus > 0,
            arena_on_gpu=arena_on_gpu(config, gpus=gpus, gpu_bytes=gpu_bytes),
            sends_buckets=isinstance(config.weights, BucketWeights),
        )
    except (ConfigError, LookupError, OSError, ValueError):
        return None


def with_divided_memory(
    config: Config, plan: GpuPlan | None, *, gpu_bytes: int
) -> Config:
    """Return the configuration whose engine leaves the trainer its memory, if both are
    resident on one GPU of `gpu_bytes`: its KV cache has a fixed number of tokens,
    because what SGLang finds free depends on which of the two starts first. A size of
    the cache or a `--sglang-mem-fraction-static` of the user's stays.

    Raises ConfigError if the cache would not hold a reply, with what each part needs.
    """
    if plan is None or not plan.shares or config.run.colocate:
        return config
    options = {name.replace("-", "_") for name in config.sglang}
    if config.engine.max_total_tokens or "mem_fraction_static" in options:
        return config
    parts = DividedGpu.of(config, gpu_bytes=gpu_bytes)
    if parts is None:
        return config
    if parts.cache_tokens <= config.rollout.max_new_tokens:
        raise parts.refusal(config)
    engine = config.engine.model_copy(update={"max_total_tokens": parts.cache_tokens})
    sglang = {**config.sglang, "mem_fraction_static": str(1 - _ENGINE_WORK_SHARE)}
    return config.model_copy(update={"engine": engine, "sglang": sglang})


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedGpu:
    """Memory of a GPU on which a trainer rank and an engine are resident, in bytes."""

    total: float
    trainer: MemoryEstimate
    engine_weights: float
    cached_token: int

    @staticmethod
    def of(config: Config, *, gpu_bytes: int, gpus: int = 1) -> "DividedGpu | None":
        """Read the parts for a GPU of this size, one of `gpus`; None if the model is
        unknown."""
        budget = trainer_memory(config, gpus=gpus, gpu_bytes=gpu_bytes)
        if budget is None:
            return None
        item = _ITEM_BYTES[config.engine.dtype]
        return DividedGpu(
            total=gpu_bytes,
            trainer=budget.largest(),
            engine_weights=budget.size.total * item / config.engine.tp_size,
            cached_token=kv_bytes(read_hf_config(config.model.folder), item),
        )

    @property
    def engine_work(self) -> float:
        return _ENGINE_WORK_SHARE * self.total

    @property
    def engine_by_turns(self) -> float:
        """Bytes that an engine keeps while the trainer makes a step (`--colocate`)."""
        return self.engine_weights + self.engine_work / 2

    @property
    def fits_by_turns(self) -> bool:
        return self.trainer.total + self.engine_by_turns < self.total

    @property
    def cache_tokens(self) -> int:
        """Tokens of KV that fit beside everything else; 0 if nothing does."""
        rest = self.total - self.trainer.total - self.engine_weights - self.engine_work
        return max(0, int(rest // self.cached_token))

    def refusal(self, config: Config) -> ConfigError:
        """Return the error for a cache that does not hold a reply."""
        reply_tokens = config.rollout.max_new_tokens
        reason = (
            f"trainer and engine do not fit on it together: the trainer needs {self.trainer}, the engine "
            f"{self.engine_weights / 1e9:.2f} GB for its weights, {self.engine_work / 1e9:.2f} for its work and "
            f"{self.cached_token * reply_tokens / 1e9:.2f} for the cache of one reply of {reply_tokens} tokens"
        )
        fix = "use a second GPU or a smaller model"
        if self.fits_by_turns:
            fix = fix_by_turns(config)
        fix += "; --engine.max-total-tokens decides in place of the estimate"
        return ConfigError("gpu memory", f"{self.total / 1e9:.1f} GB", reason, fix)


def kv_bytes(model: HuggingFaceConfig, item: int) -> int:
    """Return the bytes of keys and values of a token in all layers, with numbers of
    `item` bytes."""
    latent = model.latent_attention
    if latent is not None:
        return (
            model.num_hidden_layers * item * (latent.key_value_rank + latent.rotary_dim)
        )
    return (
        model.num_hidden_layers * item * 2 * model.num_key_value_heads * model.head_dim
    )
