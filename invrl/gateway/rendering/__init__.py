"""Conversion between messages and token ids: chat template, tokenizer, tool-call
parsing.

Start with `renderer.py`.
"""
