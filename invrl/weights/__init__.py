"""Weight updates: the transaction over all engines, its transports, and the code that runs inside SGLang.

May import `host`. Start with `transaction.py`.

A transport has two ends, chosen by `--weight-transport`:

=========  =======================  ==================================================================
transport  the trainer's end        the engine's end (`engines/weight_receiver.py`)
=========  =======================  ==================================================================
`arena`    `arena.ArenaWriter`      `ArenaReceiver`; `in_engine.py` copies or aliases, in SGLang's scheduler
`bucket`   `buckets.BucketSender`   `BucketReceiver`; SGLang's own code copies
=========  =======================  ==================================================================

With both, `in_engine.py` checks the layout before. With `bucket` it hashes the parameters after each load;
with `arena` the copy itself is hashed, and the parameters are at the first update and every n-th.
"""
