"""The trainer's end of each weight transport; the engines' ends are in
`engines/client/weight_receivers.py`."""

from pathlib import Path

from invrl.interfaces import WeightLayout
from invrl.train.rank_settings import RankSettings
from invrl.train.runtime import device
from invrl.train.weights.delta_staging import DeltaFolders
from invrl.train.weights.disk_staging import WeightFolders
from invrl.weights.config import (
    AdapterWeights,
    ArenaWeights,
    BucketWeights,
    CollectiveWeights,
    DeltaWeights,
    DiskWeights,
)
from invrl.weights.transports.arena import ArenaWriter
from invrl.weights.transports.broadcaster import Broadcaster
from invrl.weights.transports.buckets import GPU_BUCKET_BYTES, BucketSender

Sender = ArenaWriter | BucketSender | WeightFolders | DeltaFolders | Broadcaster


def make_sender(settings: RankSettings, layout: WeightLayout) -> Sender:
    """Allocate the memory that the rank needs which sends. An adapter is sent
    by `TrainedAdapter.folders`."""
    folder = Path(settings.weight_folder)
    match settings.weights:
        case AdapterWeights():
            raise AssertionError("an adapter is sent by TrainedAdapter.folders")
        case BucketWeights() if device.on_cuda():
            return BucketSender(
                layout, bucket_bytes=GPU_BUCKET_BYTES, device=device.device()
            )
        case BucketWeights():
            return BucketSender(layout)
        case DiskWeights():
            return WeightFolders(layout, folder)
        case DeltaWeights(full_every=full_every):
            return DeltaFolders(layout, folder, full_every=full_every)
        case CollectiveWeights(bucket_timeout_s=timeout_s):
            return Broadcaster(
                layout,
                host=settings.broadcast_host,
                timeout_s=timeout_s,
                device=device.device() if settings.broadcast_on_gpu else None,
            )
        case ArenaWeights():
            return ArenaWriter(
                layout,
                checksums_add_up=settings.engine_ranks > 1,
                device=device.device() if settings.arena_on_gpu else None,
            )
