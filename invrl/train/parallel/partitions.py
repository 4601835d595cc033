"""Which parameters of the model a rank has, under the names that they have in the whole model, and which of
them tensor-parallel ranks divide.

Imported after `device.prepare()`.
"""

from collections.abc import Mapping, Sequence

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from invrl.train.families.parameter import Parameter

_LAYERS = "decoder.layers."
_EMBEDDING = "embedding.word_embeddings.weight"
_HEAD = "output_layer.weight"


def parameters_of(chunks: Sequence[GPTModel]) -> dict[str, torch.Tensor]:
    """What is saved of a rank's chunks, parameters and buffers, by their names in a model without pipeline
    stages.

    Megatron counts the layers of each chunk from 0. Where the embedding is also the head, the last stage has
    a copy of it, which has the embedding's name here.
    """
    named: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        first_layer = get_transformer_layer_offset(chunk.config, chunk.vp_stage)
        saved = chunk.state_dict()
        tensors: dict[str, torch.Tensor] = dict(chunk.named_parameters())
        tensors |= {name: buffer for name, buffer in chunk.named_buffers() if name in saved}
        for name, tensor in tensors.items():
            if name.startswith(_LAYERS):
                number, _, rest = name.removeprefix(_LAYERS).partition(".")
                name = f"{_LAYERS}{first_layer + int(number)}.{rest}"
            elif name == _HEAD and chunk.share_embeddings_and_output_weights:
                name = _EMBEDDING
            named[name] = tensor
    return named


def note_partitions(parameters: Mapping[str, torch.Tensor], table: Sequence[Parameter]) -> None:
    """Sets Megatron's attributes on every divided parameter that lacks them. Call it before the optimizer is
    built, which copies them.

    Megatron sets them when it initializes a weight, but every weight here is loaded instead. Without them a
    divided weight would count as a copy: the norm of the gradient would leave out the parts of all ranks but
    the first. (On biases Megatron always sets them.)
    """
    for entry in table:
        parameter = parameters.get(entry.megatron)
        dimension = entry.divided_dimension
        if parameter is not None and dimension is not None and not hasattr(parameter, "partition_dim"):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dimension, stride=1)
