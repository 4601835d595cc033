"""One turn: match the request with the recorded tokens, sample the reply, commit it, deliver it.

Start with `turns.py`; `forest.py` decides which recorded ids a request continues.
"""
