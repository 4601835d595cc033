"""Qwen2 and Qwen2.5: Llama's names, and biases on q, k and v."""

from dataclasses import replace

from invrl.train.families import llama
from invrl.train.families.model_config import HuggingFaceConfig


class Qwen2Config(HuggingFaceConfig):
    @property
    def qkv_bias(self) -> bool:
        return True


FAMILY = replace(
    llama.FAMILY,
    model_type="qwen2",
    models="Qwen2, Qwen2.5",
    architecture="Qwen2ForCausalLM",
    sglang_module="qwen2",
    gguf_architecture="qwen2",
    config=Qwen2Config,
)
