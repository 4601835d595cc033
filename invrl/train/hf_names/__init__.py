"""Model families: which Megatron parameter is made of which Hugging Face tensors.

One file per family; `families.py` lists them.
"""
