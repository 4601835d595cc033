"""The model families the trainer knows: `model_type` in config.json -> its name file."""

from invrl.train.hf_names import llama, qwen2, qwen3
from invrl.train.hf_names.parameter import Family

FAMILIES: dict[str, Family] = {"llama": llama.FAMILY, "qwen2": qwen2.FAMILY, "qwen3": qwen3.FAMILY}
