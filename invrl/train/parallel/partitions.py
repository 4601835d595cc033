"""Which parameters of Megatron's model tensor-parallel ranks divide.

Megatron notes this on a parameter when it initializes it, but every weight here is loaded instead. Without
the note a divided weight would count as a copy: the norm of the gradient would leave out the parts of all
ranks but the first. Imported after `device.prepare()`.
"""

from collections.abc import Sequence

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

from invrl.train.families.parameter import Parameter


def note_partitions(model: torch.nn.Module, table: Sequence[Parameter]) -> None:
    """Sets Megatron's attributes on every divided parameter that lacks them. Call it before the optimizer is
    built, which copies them. (Megatron itself sets those of biases.)"""
    model_parameters = dict(model.named_parameters())
    for parameter in table:
        tensor = model_parameters.get(parameter.megatron)
        dimension = parameter.divided_dimension
        if tensor is not None and dimension is not None and not hasattr(tensor, "partition_dim"):
            set_tensor_model_parallel_attributes(tensor, is_parallel=True, dim=dimension, stride=1)
