"""One weight update of the whole fleet: the transaction and its proofs.

Start with `transaction.py`.
"""
