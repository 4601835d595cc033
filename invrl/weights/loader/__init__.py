"""The loader of weights inside SGLang's scheduler process, and its messages.

Start with `weight_loader.py`.
"""
