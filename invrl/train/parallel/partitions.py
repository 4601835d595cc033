"""A rank's parameters, under their names in the whole model: which of them
tensor-parallel ranks divide, and which belong to experts.

Imported after `device.prepare()`.
"""

import re
from collections.abc import Mapping, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from invrl.families.parameter import Parameter

_LAYERS = "decoder.layers."
_LOCAL_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")
_EMBEDDING = "embedding.word_embeddings.weight"
_ADAPTER = "adapter."
HEAD = "output_layer.weight"
"""The projection to the vocabulary, or the value head of a critic: Megatron expects one
of this name."""


def chunk_parameters(chunks: Sequence[GPTModel]) -> dict[str, torch.Tensor]:
    """Return the saved tensors of a rank's chunks, parameters and buffers, by their
    names in a model on one rank. Those of an adapter are left out.

    Megatron counts the layers of each chunk and the experts of each rank from 0. If the
    embedding is also the head, the last stage has a copy of it, which has the
    embedding's name here.
    """
    named: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        first_layer = get_transformer_layer_offset(chunk.config, chunk.vp_stage)
        saved = chunk.state_dict()
        tensors: dict[str, torch.Tensor] = dict(chunk.named_parameters())
        tensors |= {
            name: buffer for name, buffer in chunk.named_buffers() if name in saved
        }
        for name, tensor in tensors.items():
            if name.startswith(_ADAPTER):
                continue
            if name.startswith(_LAYERS):
                number, _, rest = name.removeprefix(_LAYERS).partition(".")
                name = f"{_LAYERS}{first_layer + int(number)}.{_with_expert_number(rest, chunk.config)}"
            elif name == HEAD and chunk.share_embeddings_and_output_weights:
                name = _EMBEDDING
            named[name] = tensor
    return named


def _with_expert_number(name: str, config: TransformerConfig) -> str:
    """Return the name of a layer's parameter, with its expert's number in the whole
    layer."""
    if config.num_moe_experts is None:
        return name
    experts_of_rank = (
        config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    )
    first_expert = parallel_state.get_expert_model_parallel_rank() * experts_of_rank
    return _LOCAL_EXPERT.sub(lambda number: str(first_expert + int(number[0])), name)


def note_partitions(
    parameters: Mapping[str, torch.Tensor], table: Sequence[Parameter]
) -> None:
    """Set Megatron's attributes on every divided parameter that lacks them. Call it
    before DDP and the optimizer are built, which read them.

    Megatron sets them when it initializes a weight, but every weight here is loaded
    instead. Without them a divided weight would count as a copy: the norm of the
    gradient would leave out the parts of all ranks but the first. (On biases Megatron
    always sets them.)

    The gradient of an expert's parameter is summed over the ranks that have this
    expert, which differ from those that have the rest of the layer. Megatron 0.16.1
    notes this (`allreduce`) only where ranks divide the experts: where tensor-parallel
    ranks have the same experts, their gradients would not be summed. It is noted here
    for all layouts, so that their optimizers and checkpoints are alike.
    """
    for entry in table:
        parameter = parameters.get(entry.megatron)
        if parameter is None:
            continue
        dimension = entry.divided_dimension
        if entry.expert is not None:
            dimension = 0  # not divided, but never a copy of what the first tensor-parallel rank counts
            parameter.allreduce = False  # pyright: ignore[reportAttributeAccessIssue]
        if dimension is not None and not hasattr(parameter, "partition_dim"):
            set_tensor_model_parallel_attributes(
                parameter, is_parallel=True, dim=dimension, stride=1
            )
