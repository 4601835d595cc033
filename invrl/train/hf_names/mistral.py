"""Mistral: Llama's names, and attention over a window unless config.json says that there is none."""

from dataclasses import replace

from invrl.train.hf_names import llama

FAMILY = replace(llama.FAMILY, default_window=4096)
