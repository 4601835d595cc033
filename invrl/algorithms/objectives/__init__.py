"""Objectives by name, and those that are not `rl`: preferences, distillation, sft.

Start with `objectives.py`.
"""
