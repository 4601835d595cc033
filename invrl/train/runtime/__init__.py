"""The machine below the trainer: CPU or CUDA, torch and Megatron as they are installed.

Start with `device.py`. Imports no other room of the trainer.
"""
