"""A small example on which a user's policy loss or objective is tried before any
process starts.

Imported only for such a function: it needs torch.
"""

import torch

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.length_weights import LENGTH_SLOPE, LENGTH_WEIGHT
from invrl.algorithms.loss_inputs import Denominators, LossInputs, Samples, TopTokens
from invrl.algorithms.objectives import (
    check_outputs,
    is_built_in,
    load_objective,
    objective_needs,
)
from invrl.algorithms.policy_losses import (
    POLICY_LOSSES,
    PolicyLossInputs,
    policy_loss_function,
)
from invrl.algorithms.ratios import RATIOS
from invrl.errors import PluginError
from invrl.types.batches import SOLVED_NUMBER
from invrl.types.top_logprobs import NO_TOKEN

_TOKENS_OF_ROWS = (5, 3, 1)


def try_policy_loss(config: AlgorithmConfig) -> None:
    """Call a user's policy loss once, with three samples of random numbers, and compute
    its gradient.

    Raises PluginError if it raises an exception, or returns the wrong shape, a number
    that is not finite, or a loss without a finite gradient. A KeyError passes, because
    the example lacks the run's own columns.
    """
    name = config.policy_loss
    policy_loss = policy_loss_function(name)
    if name in POLICY_LOSSES:
        return
    inputs = example_inputs()
    assert inputs.old_N is not None
    ratio_N = RATIOS[config.ratio_level](inputs.current_N, inputs.old_N, inputs.samples)
    of = PolicyLossInputs(
        ratio_N=ratio_N, advantages_N=inputs.advantages_N, inputs=inputs, config=config
    )
    fix = "make it work for float32 tensors of one shape [N], as the page on adding a loss shows"
    try:
        losses_N = policy_loss(of).losses_N
        losses_N.sum().backward()
    except PluginError:
        raise
    except KeyError:
        return
    except Exception as error:
        reason = f"called with {len(ratio_N)} random tokens it raised {type(error).__name__}: {error}"
        raise PluginError("policy_loss", name, reason, fix) from error
    gradient_N = inputs.current_N.grad
    if not torch.isfinite(losses_N).all():
        reason = f"for {len(ratio_N)} random tokens it returned {_first_bad(losses_N)}"
        raise PluginError("policy_loss", name, reason, fix)
    if gradient_N is None:
        reason = "what it returned does not depend on the model: it has no gradient"
        raise PluginError(
            "policy_loss",
            name,
            reason,
            "compute it from ratio_N, or from inputs.current_N",
        )
    if not torch.isfinite(gradient_N).all():
        reason = f"for {len(ratio_N)} random tokens it has a gradient of {_first_bad(gradient_N)}"
        raise PluginError("policy_loss", name, reason, fix)


def try_objective(config: AlgorithmConfig) -> None:
    """Call a user's objective once, with three samples of random numbers, and compute its
    gradient. An objective that compares samples is not called: its `couple` needs the
    run's groups.

    Raises PluginError like `try_policy_loss`, and if it does not return a loss.
    """
    name = config.objective
    if is_built_in(name) or objective_needs(config).sample_table:
        return
    needs = objective_needs(config)
    inputs = example_inputs(
        with_top=needs.top_logprobs, with_router_shift=needs.router_shift
    )
    num_tokens = inputs.current_N.numel()
    fix = "make it work for the inputs that the page on adding an objective lists"
    try:
        outputs = load_objective(config)(inputs)
        check_outputs(name, outputs)
        outputs.loss.backward()
    except PluginError:
        raise
    except KeyError:
        return
    except Exception as error:
        reason = f"called with {num_tokens} random tokens it raised {type(error).__name__}: {error}"
        raise PluginError("objective", name, reason, fix) from error
    if not torch.isfinite(outputs.loss):
        reason = f"for {num_tokens} random tokens its loss is {outputs.loss.item()}"
        raise PluginError("objective", name, reason, fix)
    assert inputs.entropy_N is not None
    of_model = [inputs.current_N, inputs.entropy_N]
    if inputs.top is not None:
        of_model.append(inputs.top.current_NK)
    gradients = [tensor.grad for tensor in of_model if tensor.grad is not None]
    if not gradients:
        reason = "its loss does not depend on the model: it has no gradient"
        fix = "compute it from inputs.current_N or inputs.entropy_N"
        raise PluginError("objective", name, reason, fix)
    for gradient in gradients:
        if not torch.isfinite(gradient).all():
            reason = f"for {num_tokens} random tokens it has a gradient of {_first_bad(gradient)}"
            raise PluginError("objective", name, reason, fix)


def example_inputs(
    *, with_top: bool = False, with_router_shift: bool = False
) -> LossInputs:
    """Make samples of `_TOKENS_OF_ROWS` tokens with all log-probs and positive, negative
    and zero advantages. `with_top` adds the likeliest tokens at each position."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(_TOKENS_OF_ROWS)

    def near(center_N: torch.Tensor) -> torch.Tensor:
        return (center_N + 0.2 * torch.randn(num_tokens, generator=generator)).clamp(
            max=-1e-3
        )

    old_N = -4.0 * torch.rand(num_tokens, generator=generator)
    advantages_N = torch.randn(num_tokens, generator=generator)
    advantages_N[0] = 0.0
    sample_N = torch.arange(len(_TOKENS_OF_ROWS)).repeat_interleave(
        torch.tensor(_TOKENS_OF_ROWS)
    )
    num_samples = len(_TOKENS_OF_ROWS)
    solved_R = torch.arange(num_samples) % 2 == 0
    samples = Samples.each_a_rollout(sample_N)
    return LossInputs(
        current_N=near(old_N).requires_grad_(),
        entropy_N=torch.rand(num_tokens, generator=generator).requires_grad_(),
        samples=samples,
        denominators=Denominators(
            tokens=num_tokens,
            samples=num_samples,
            rollouts=num_samples,
            groups=num_samples,
            solved_tokens=float(samples.tokens_R[solved_R].sum()),
        ),
        old_N=old_N,
        rollout_N=near(old_N),
        advantages_N=advantages_N,
        reference_N=near(old_N),
        numbers={
            SOLVED_NUMBER: solved_R.float(),
            LENGTH_WEIGHT: torch.ones(num_samples),
            LENGTH_SLOPE: torch.zeros(num_samples),
        },
        top=_example_top(num_tokens, generator) if with_top else None,
        router_shift_N=torch.rand(num_tokens, generator=generator)
        if with_router_shift
        else None,
    )


def _example_top(num_tokens: int, generator: torch.Generator) -> TopTokens:
    """Return the 3 likeliest of 10 tokens, the first of which is the trained one. At
    the first trained token only one is possible."""
    logits_NV = torch.randn(num_tokens, 10, generator=generator)
    logits_NV[0, 1:] = -torch.inf
    rollout_NK, ids_NK = logits_NV.log_softmax(dim=1).topk(3, dim=1)
    moved_NK = rollout_NK + 0.1 * torch.randn(rollout_NK.shape, generator=generator)
    is_sampled_NK = torch.zeros_like(ids_NK, dtype=torch.bool)
    is_sampled_NK[:, 0] = True
    return TopTokens(
        current_NK=moved_NK.requires_grad_(),
        rollout_NK=rollout_NK,
        ids_NK=ids_NK.where(rollout_NK > -torch.inf, torch.tensor(NO_TOKEN)),
        is_sampled_NK=is_sampled_NK,
    )


def _first_bad(values_N: torch.Tensor) -> float:
    return float(values_N.detach()[~torch.isfinite(values_N)][0])
