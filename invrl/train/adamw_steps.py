"""Repairs of Megatron's optimizers where they run over torch's AdamW: each parameter keeps its own step
count through a checkpoint, and an optimizer that has made no step yet can be saved and loaded.

Without TransformerEngine or Apex the optimizer is torch's AdamW, whose state holds a `step` tensor per
parameter. Megatron's template for loading lacks it and Megatron's copy drops it; after a load all parameters
would share one tensor, so that each step would count many times.
"""

from typing import Any

import torch


def complete_states(adamw: torch.optim.AdamW) -> None:
    """Gives each parameter the state that it has before its first step, where it has none.

    torch makes the state in the first step. Until then one of Megatron's plain optimizers would save none,
    and would not find what it expects when it loads.
    """
    for group in adamw.param_groups:
        for parameter in group["params"]:
            state = adamw.state[parameter]
            if "step" not in state:
                step_device = parameter.device if group.get("fused") else torch.device("cpu")
                state["step"] = torch.zeros((), dtype=torch.float32, device=step_device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)


def note_step_of_zero(state: dict[str, Any]) -> None:
    """Completes the state dict that a plain optimizer of Megatron's over torch's AdamW makes for a
    checkpoint: it leaves out a step count of 0."""
    of_adamw = state.get("optimizer", state)
    of_adamw["state"].setdefault("common_step", torch.tensor(0.0))


def repair_distributed_optimizer() -> None:
    """Imports Megatron. Does nothing where TransformerEngine or Apex is installed."""
    import megatron.core.optimizer.distrib_optimizer as module

    if module.HAVE_APEX_OR_TE:
        return
    owner: Any = module.DistributedOptimizer
    state_dict = owner.state_dict
    load_state_dict = owner.load_state_dict
    set_states = owner._set_main_param_and_optimizer_states

    def state_dict_with_steps(self: Any) -> Any:
        complete_states(self.optimizer)
        return state_dict(self)

    def set_states_with_step(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, Any]) -> Any:
        group_index, order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group_index]["params"][order]
        own_step = self.optimizer.state[main_param].get("step")
        return set_states(self, model_param, {**tensors, "step": tensors.get("step", own_step)})

    def load_with_own_steps(self: Any, state: Any) -> None:
        load_state_dict(self, state)
        for own_state in self.optimizer.state.values():
            own_state["step"] = own_state["step"].clone()

    owner.state_dict = state_dict_with_steps
    owner.load_state_dict = load_with_own_steps
    owner._set_main_param_and_optimizer_states = set_states_with_step
