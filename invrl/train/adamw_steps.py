"""A repair of Megatron's distributed optimizer where it runs over torch's AdamW: each parameter keeps its own
step count through a checkpoint.

Without TransformerEngine or Apex the optimizer is torch's AdamW, whose state holds a `step` tensor per
parameter. Megatron's template for loading lacks it and Megatron's copy drops it; after a load all parameters
would share one tensor, so that each step would count many times.
"""

from typing import Any

import torch


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
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state[parameter]
                if "step" not in state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
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
