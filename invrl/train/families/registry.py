"""The supported model families: `model_type` in config.json -> the family.

This is the only such list: commands that refuse a model look here.
"""

from invrl.train.families import llama, mistral, qwen2, qwen3
from invrl.train.families.parameter import Family

FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
}
