"""Receivers of weights by transport; the trainer's ends are in
`train/weights/senders.py`."""

from invrl.engines.client.adapter_receiver import AdapterReceiver
from invrl.engines.client.weight_receiver import (
    ArenaReceiver,
    BroadcastReceiver,
    BucketReceiver,
    DeltaReceiver,
    EngineReceiver,
    FolderReceiver,
)

RECEIVERS: dict[str, type[EngineReceiver]] = {
    "adapter": AdapterReceiver,
    "arena": ArenaReceiver,
    "bucket": BucketReceiver,
    "collective": BroadcastReceiver,
    "delta": DeltaReceiver,
    "disk": FolderReceiver,
}
