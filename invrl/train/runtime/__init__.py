"""The machine below the trainer: CPU or CUDA, torch and Megatron as installed.

Start with `device.py`. Imports no other room of the trainer.
"""
