"""Mistral: Llama's names, and attention over a window unless config.json turns it
off."""

from dataclasses import replace

from pydantic import PositiveInt

from invrl.errors import ConfigError
from invrl.families import llama
from invrl.families.model_config import HuggingFaceConfig, LayerAttention


class MistralConfig(HuggingFaceConfig):
    """A config.json without `sliding_window` means 4096, as in transformers; null means
    no window."""

    sliding_window: PositiveInt | None = 4096

    def attention(self, layer: int) -> LayerAttention:
        return LayerAttention(self.rope, self.sliding_window)

    def check_served(self) -> None:
        """Refuse a window, which SGLang does not compute for this family."""
        window = self.sliding_window
        if window is None or window >= self.max_position_embeddings:
            return
        reason = (
            f"a token attends to the last {window} only, and SGLang computes attention over all "
            f"{self.max_position_embeddings} positions of a mistral model"
        )
        fix = (
            f'write "max_position_embeddings": {window} into its config.json (or, if its authors say that '
            'this model has no window, "sliding_window": null)'
        )
        raise ConfigError("config.json: sliding_window", window, reason, fix)


FAMILY = replace(
    llama.FAMILY,
    model_type="mistral",
    models="Mistral",
    architecture="MistralForCausalLM",
    sglang_module="mistral",
    config=MistralConfig,
)
