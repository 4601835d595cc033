"""The model families that are supported: `model_type` in config.json -> its name file. The only such
list: commands that refuse a model ask it."""

from invrl.train.hf_names import llama, mistral, qwen2, qwen3
from invrl.train.hf_names.parameter import Family

FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
}
