"""From rewards to advantages: shaping, comparison, credit of tokens and whitening.

Start with `advantages.py`.
"""
