"""Names of the checkpoint tensors that SGLang's parameters hold.

An engine keeps the rows of several checkpoint tensors in one parameter, and all experts
of a layer in two. A name means the same in every family.
"""

from __future__ import annotations

import re
from itertools import pairwise

from invrl.families.registry import FAMILIES

FUSED = {
    fused: parts
    for family in FAMILIES.values()
    for fused, parts in family.engine_fusions.items()
}
"""Parameters that hold the rows of several checkpoint tensors, in this order; weights
and biases."""
EXPERTS = {
    fused: parts
    for family in FAMILIES.values()
    for fused, parts in family.engine_experts.items()
}
"""Parameters [expert, rows, ...] of all experts of a layer, likewise."""
_OF_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
_OVER_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
_VOCABULARY_MULTIPLE = 64


def checkpoint_tensors(parameter: str) -> list[str]:
    """Return the checkpoint tensors that a parameter holds, first rows first. Not for
    those in EXPERTS."""
    for fused, parts in FUSED.items():
        if f".{fused}." in parameter:
            return [parameter.replace(fused, part) for part in parts]
    return [parameter]


def expert_tensors(layer: str, expert: int, parameter: str) -> list[str]:
    """Return one expert's checkpoint tensors that a parameter in EXPERTS holds, first
    rows first."""
    return [f"{layer}.experts.{expert}.{part}" for part in EXPERTS[parameter]]


def engine_parameter(tensor: str) -> tuple[str, tuple[int, int]]:
    """Return the parameter that holds this checkpoint tensor in a fully fusing engine,
    and the tensor's place in it: tensors come in ascending order of their places."""
    of_expert = _OF_EXPERT.fullmatch(tensor)
    if of_expert is not None:
        experts, expert, name = of_expert.groups()
        for fused, parts in EXPERTS.items():
            if name in parts:
                return f"{experts}.{fused}", (int(expert), parts.index(name))
    for fused, parts in FUSED.items():
        for index, part in enumerate(parts):
            if f".{part}." in tensor:
                return tensor.replace(f".{part}.", f".{fused}."), (0, index)
    return tensor, (0, 0)


def is_padded(parameter: str) -> bool:
    """Whether SGLang may give the parameter more rows than the vocabulary has. They
    belong to no token."""
    return parameter.endswith(_OVER_VOCABULARY)


def padded_rows(parameter: str, rows: int) -> int:
    """Return the rows of a parameter whose tensors have `rows`: SGLang rounds the
    vocabulary up."""
    if not is_padded(parameter):
        return rows
    return -(-rows // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE


def in_one_call(name: str, next_name: str) -> bool:
    """Whether SGLang's loader needs both tensors in the same call, because it fuses
    them."""
    return any(
        f".{part}." in name and next_name == name.replace(f".{part}.", f".{next_part}.")
        for parts in FUSED.values()
        for part, next_part in pairwise(parts)
    )
