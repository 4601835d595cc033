"""`python -m benchmarks.training.even_model SOURCE TARGET`: a model folder like
another, but with random weights and with heads that two ranks can divide."""

import json
import shutil
import sys
from pathlib import Path

from invrl.families.hf_config import read_hf_config

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.gguf")


def even_heads(heads: int, key_value_heads: int) -> tuple[int, int]:
    """At most as many of both, if there are two: numbers that two ranks divide, and the
    second the first."""
    heads = max(2, heads - heads % 2)
    candidates = range(2, max(2, key_value_heads) + 1, 2)
    return heads, max(number for number in candidates if heads % number == 0)


def make_even_model(source: Path, target: Path) -> None:
    """`target` must not exist yet."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = read_hf_config(source)
    heads, key_value_heads = even_heads(
        shape.num_attention_heads, shape.num_key_value_heads
    )
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*_WEIGHTS))
    config_file = target / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["num_attention_heads"] = heads
    config["num_key_value_heads"] = key_value_heads
    if shape.latent_attention is None:
        config["head_dim"] = shape.head_dim
    config_file.write_text(json.dumps(config), encoding="utf-8")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(target))
    model.save_pretrained(target)
    # transformers has written other names of the same fields.
    config_file.write_text(json.dumps(config), encoding="utf-8")


if __name__ == "__main__":
    source_folder, target_folder = sys.argv[1:]
    make_even_model(Path(source_folder), Path(target_folder))
