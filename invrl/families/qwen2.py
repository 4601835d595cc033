"""Qwen2 and Qwen2.5: Llama's names, and biases on q, k and v."""

from dataclasses import replace

from invrl.errors import ConfigError
from invrl.families import llama
from invrl.families.model_config import HuggingFaceConfig


class Qwen2Config(HuggingFaceConfig):
    @property
    def qkv_bias(self) -> bool:
        return True

    def check_served(self) -> None:
        """Refuse head_dim, which SGLang does not read for this family."""
        computed = self.hidden_size // self.num_attention_heads
        if self.head_dim != computed:
            reason = f"SGLang takes hidden_size / num_attention_heads = {computed} for it in this family"
            raise ConfigError(
                "config.json: head_dim", self.head_dim, reason, "use another model"
            )


FAMILY = replace(
    llama.FAMILY,
    model_type="qwen2",
    models="Qwen2, Qwen2.5",
    architecture="Qwen2ForCausalLM",
    sglang_module="qwen2",
    config=Qwen2Config,
)
