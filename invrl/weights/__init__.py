"""Weight updates: the transaction over all engines, its transports, and the code that
runs inside SGLang.

May import `host`. The rooms from the ground up: `tensors`, `checksums`, `transports`,
`loader` (inside SGLang) and `update`. Start with `update/transaction.py`.

A transport has two ends, chosen by `--weights.transport`:

- `arena`: `arena.ArenaWriter` and `ArenaReceiver`; `weight_loader.py` copies or aliases
  in SGLang's process.
- `bucket`: `buckets.BucketSender` and `BucketReceiver`; SGLang's own code copies.
- `disk`: `train/weights/` and `FolderReceiver`; `weight_loader.py` copies from a file.
- `delta`: `train/weights/` and `DeltaReceiver`; `weight_loader.py` applies differences
  from files.
- `collective`: `broadcaster.Broadcaster` and `BroadcastReceiver`; `weight_loader.py`
  receives it.
- `adapter`: `train/adapters/` and `AdapterReceiver`; SGLang's own code loads it.

The senders are chosen in `train/weights/senders.py`. The receivers are in
`engines/client/weight_receiver.py`, that of `adapter` in `adapter_receiver.py`. With `collective`, and with
`bucket` on a GPU, both ends run at the same time: `broadcast_loads.py` and
`bucket_loads.py` bring them together. `weight_loader.py` checks the layout first with
every transport. With `arena` the copy itself is hashed, and the parameters are at the
first update and every n-th; with the others the parameters are hashed after each load.
"""
