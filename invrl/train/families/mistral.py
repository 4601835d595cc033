"""Mistral: Llama's names, and attention over a window unless config.json turns it off."""

from dataclasses import replace

from invrl.train.families import llama

FAMILY = replace(llama.FAMILY, default_window=4096)
