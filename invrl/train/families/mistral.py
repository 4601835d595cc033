"""Mistral: Llama's names, and attention over a window unless config.json turns it off."""

from dataclasses import replace

from pydantic import PositiveInt

from invrl.train.families import llama
from invrl.train.families.model_config import HuggingFaceConfig, LayerAttention


class MistralConfig(HuggingFaceConfig):
    """A config.json without `sliding_window` means 4096, as in transformers; null means no window."""

    sliding_window: PositiveInt | None = 4096

    def attention(self, layer: int) -> LayerAttention:
        return LayerAttention(self.rope, self.sliding_window)


FAMILY = replace(
    llama.FAMILY,
    model_type="mistral",
    models="Mistral",
    architecture="MistralForCausalLM",
    sglang_module="mistral",
    gguf_architecture="llama",
    config=MistralConfig,
    engine_has_windows=False,
)
