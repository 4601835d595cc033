"""Calls functions of verl on the tensors in a file, and writes their answers into
another.

    python call_verl.py CALLS ANSWERS

CALLS is a list of (name, keyword arguments). A name is a policy loss that verl
registers ("policy_loss:gspo"; answers with the loss and its gradient with respect to
log_prob), or a function of a module of verl ("core_algos:kl_penalty"; answers with what
it returns).
"""

import importlib
import sys
from typing import Any

import torch


def policy_loss(
    name: str, config: dict[str, Any], **tensors: Any
) -> dict[str, torch.Tensor]:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig, PolicyLossConfig

    log_prob = tensors.pop("log_prob").requires_grad_()
    policy = PolicyLossConfig(loss_mode=name, **config.pop("policy_loss", {}))
    settings = ActorConfig(
        strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, policy_loss=policy, **config
    )
    loss, _ = get_policy_loss_fn(name)(log_prob=log_prob, config=settings, **tensors)
    loss.backward()
    return {"loss": loss.detach(), "gradient": log_prob.grad}


def call(name: str, arguments: dict[str, Any]) -> Any:
    module_name, function = name.split(":")
    if module_name == "policy_loss":
        return policy_loss(function, **arguments)
    module = importlib.import_module(f"verl.trainer.ppo.{module_name}")
    return getattr(module, function)(**arguments)


if __name__ == "__main__":
    _, calls_path, answers_path = sys.argv
    calls = torch.load(calls_path, weights_only=False)
    torch.save([call(name, arguments) for name, arguments in calls], answers_path)
