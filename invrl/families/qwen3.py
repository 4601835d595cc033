"""Qwen3: Llama's names, and a norm on each head of q and k."""

from dataclasses import replace

from invrl.families import llama
from invrl.families.model_config import HuggingFaceConfig


class Qwen3Config(HuggingFaceConfig):
    @property
    def qk_norm(self) -> bool:
        return True


FAMILY = replace(
    llama.FAMILY,
    model_type="qwen3",
    models="Qwen3 (dense)",
    architecture="Qwen3ForCausalLM",
    sglang_module="qwen3",
    config=Qwen3Config,
)
