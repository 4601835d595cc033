"""A request of our weight loader is a whole weight update of SGLang's, and one step of
the scheduler.

SGLang takes weights only between two requests of their own, which visit every module of
the model: a begin undoes what was packed in place, an end packs it again. Generation is
paused meanwhile, so here the scheduler takes these steps itself, before and after the
load. A module whose weights SGLang serves as they were loaded is not moved to and from
the device for them.

Weights that come in several requests, as buckets do, are between the two requests as
before.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

WEIGHT_LOADER = "invrl.weights.loader.weight_loader.run"
"""Import path of the loader that SGLang imports into its scheduler process."""


def load_in_one_step() -> None:
    """Make a load one step, in the scheduler's process or in the one that forks it.
    Imports SGLang."""
    from sglang.srt.managers.io_struct import (
        BeginWeightUpdateReqInput,
        EndWeightUpdateReqInput,
    )
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager,
    )

    update = SchedulerWeightUpdaterManager.update_weights_from_tensor

    def update_whole(self: SchedulerWeightUpdaterManager, recv_req: Any) -> Any:
        if recv_req.load_format != WEIGHT_LOADER:
            return update(self, recv_req)
        # Whoever began an update before may have been killed before its end. Without
        # one this is refused, and does nothing.
        self.end_weight_update(EndWeightUpdateReqInput())
        self.begin_weight_update(BeginWeightUpdateReqInput())
        try:
            return update(self, recv_req)
        finally:
            self.end_weight_update(EndWeightUpdateReqInput())

    SchedulerWeightUpdaterManager.update_weights_from_tensor = update_whole


def leave_unpacked_modules() -> None:
    """Leave modules where they are that SGLang does not pack. Call it where
    `load_in_one_step` is called."""
    from sglang.srt.layers.quantization.unquant import (
        UnquantizedEmbeddingMethod,
        UnquantizedLinearMethod,
    )
    from sglang.srt.model_loader import loader

    move = loader.device_loading_context
    unpacked = (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)

    def move_packed(
        module: torch.nn.Module, target_device: torch.device
    ) -> AbstractContextManager[torch.nn.Module]:
        """SGLang packs the weights of the other methods there. Those of a CPU it
        packs where they are."""
        if type(getattr(module, "quant_method", None)) in unpacked:
            return nullcontext(module)
        return move(module, target_device)

    loader.device_loading_context = move_packed
