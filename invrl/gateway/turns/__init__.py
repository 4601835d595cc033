"""A turn: a request is matched with the recorded tokens, the reply is sampled,
committed and delivered.

Start with `turns.py`. `placement.py` and `matching/forest.py` decide which recorded ids a
request continues, `generation.py` samples.
"""
