"""Weight updates: the transaction over all engines, its transports, and the code that runs inside
SGLang.

May import `host`. Start with `transaction.py`. The engine's side of the requests is
`engines/weight_receiver.py`.
"""
