"""Repairs of Megatron's optimizers over torch's AdamW: each parameter keeps its own
step count through a checkpoint, and an optimizer without a step yet, or without a
parameter on this rank, can be saved and loaded.

Without TransformerEngine or Apex the optimizer is torch's AdamW, whose state holds a
`step` tensor per parameter. Megatron's template for loading lacks it and Megatron's
copy drops it; after a load all parameters would share one tensor, so that each step
would count many times.
"""

from collections.abc import Sequence
from typing import Any

import torch


def complete_states(adamw: torch.optim.AdamW) -> None:
    """Give each parameter without a state the one before its first step.

    torch makes the state in the first step. Until then one of Megatron's plain
    optimizers would save none, and would not find what it expects when it loads.
    """
    for group in adamw.param_groups:
        for parameter in group["params"]:
            state = adamw.state[parameter]
            if "step" not in state:
                step_device = (
                    parameter.device if group.get("fused") else torch.device("cpu")
                )
                state["step"] = torch.zeros((), dtype=torch.float32, device=step_device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)


def steps_made(optimizers: Sequence[torch.optim.Optimizer]) -> float:
    """Return the steps that this rank's parameters have made; 0 for optimizers without
    a parameter."""
    counts = [0.0]
    for optimizer in optimizers:
        counts += [
            float(state["step"])
            for state in optimizer.state.values()
            if "step" in state
        ]
        counts += [
            float(group["step"]) for group in optimizer.param_groups if "step" in group
        ]
    return max(counts)


def write_steps(state: dict[str, Any], steps: float, *, is_distributed: bool) -> None:
    """Write the steps that the parameters of all ranks have made into the state dict
    that one of Megatron's optimizers makes for a checkpoint.

    A plain one leaves out a count of 0. And a checkpoint has only the step counts of
    rank 0: if that rank has no parameter of the optimizer, like a pipeline stage
    without experts, it has no count either.
    """
    of_adamw = state.get("optimizer", state)
    if not is_distributed:
        of_adamw["state"]["common_step"] = torch.tensor(steps)
        return
    for group in of_adamw["param_groups"]:
        own = group.get("step")
        group["step"] = steps if isinstance(own, float) else int(steps)


def repair_distributed_optimizer() -> None:
    """Repair Megatron's distributed optimizer, which is imported. Does nothing if
    TransformerEngine or Apex is installed."""
    import megatron.core.optimizer.distrib_optimizer as module

    if module.HAVE_APEX_OR_TE:
        return
    owner: Any = module.DistributedOptimizer
    state_dict = owner.state_dict
    load_state_dict = owner.load_state_dict
    set_states = owner._set_main_param_and_optimizer_states

    def state_dict_with_steps(self: Any) -> Any:
        complete_states(self.optimizer)
        if self.optimizer.state:
            return state_dict(self)
        # This rank has no parameter of the optimizer, and Megatron would not find a
        # step count.
        self.optimizer.state["no parameter"] = {"step": torch.tensor(0.0)}
        try:
            return state_dict(self)
        finally:
            del self.optimizer.state["no parameter"]

    def set_states_with_step(
        self: Any, model_param: torch.nn.Parameter, tensors: dict[str, Any]
    ) -> Any:
        group_index, order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group_index]["params"][order]
        own_step = self.optimizer.state[main_param].get("step")
        return set_states(
            self, model_param, {**tensors, "step": tensors.get("step", own_step)}
        )

    def load_with_own_steps(self: Any, state: Any) -> None:
        load_state_dict(self, state)
        for own_state in self.optimizer.state.values():
            own_state["step"] = own_state["step"].clone()

    owner.state_dict = state_dict_with_steps
    owner.load_state_dict = load_with_own_steps
    owner._set_main_param_and_optimizer_states = set_states_with_step
