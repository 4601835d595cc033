"""A small example on which a user's policy loss or objective is tried before any
process starts.

Imported only for such a function: it needs torch.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.loss_inputs import Denominators, LossInputs, Samples, TopTokens
from invrl.algorithms.objectives.objectives import (
    STALENESS_COLUMN,
    Needs,
    check_outputs,
    is_built_in,
    load_objective,
    objective_needs,
)
from invrl.algorithms.policy_loss.axis_plugins import (
    BUILT_IN_OLD_POLICIES,
    load_old_policy,
    load_ratio_weight,
    load_sample_weight,
)
from invrl.algorithms.policy_loss.policy_losses import (
    POLICY_LOSSES,
    PolicyLossInputs,
    policy_loss_function,
)
from invrl.algorithms.policy_loss.ratios import RATIOS
from invrl.errors import PluginError
from invrl.interfaces import SampleWeight
from invrl.types.batches import SOLVED_NUMBER, TrainedCounts
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
    policy_loss = policy_loss_function(config)
    if name in POLICY_LOSSES:
        return
    inputs = example_inputs_of(objective_needs(config))
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
    """Call a user's objective once, with three samples of random numbers, and compute
    its gradient. An objective that compares samples is not called: its `couple` needs
    the run's groups.

    Raises PluginError like `try_policy_loss`, and if it does not return a loss.
    """
    name = config.objective
    if is_built_in(name) or objective_needs(config).sample_table:
        return
    inputs = example_inputs_of(objective_needs(config))
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


def try_axes(config: AlgorithmConfig) -> None:
    """Call a user's old policy and weights once, with three samples of random numbers.

    Raises PluginError if one raises an exception, or returns something else than one
    number for each token, or sample. A KeyError passes, as for a policy loss.
    """
    inputs = example_inputs_of(objective_needs(config))
    num_tokens = inputs.current_N.numel()
    if config.old_logprobs not in BUILT_IN_OLD_POLICIES:
        old_policy = load_old_policy(config)
        _try_axis(
            "old_logprobs", config.old_logprobs, lambda: old_policy(inputs), num_tokens
        )
    ratio_weight = load_ratio_weight(config)
    if ratio_weight is not None:
        _try_axis(
            "ratio_weight",
            config.ratio_weight,
            lambda: ratio_weight(inputs).log_weights_N,
            num_tokens,
        )
    sample_weight = load_sample_weight(config)
    if sample_weight is not None:
        weight_R = torch.full_like(inputs.samples.tokens_R, 1.0 / num_tokens)
        _try_axis(
            "sample_weight",
            config.sample_weight,
            lambda: (
                sample_weight(
                    with_sample_numbers(inputs, sample_weight),
                    weight_R,
                    inputs.current_N.detach(),
                ).weights_R
            ),
            len(weight_R),
        )


def _try_axis(
    setting: str, path: str | None, call: Callable[[], torch.Tensor], size: int
) -> None:
    try:
        values = call()
    except KeyError:
        return
    except Exception as error:
        reason = f"called with random tokens it raised {type(error).__name__}: {error}"
        fix = "make it work for the inputs that the page on adding a loss shows"
        raise PluginError(setting, path or "", reason, fix) from error
    shape = getattr(values, "shape", None)
    if shape != (size,):
        reason = f"it returned {type(values).__name__} of shape {shape}, not [{size}]"
        fix = "return a tensor with one number for each token (of a sample weight: each sample)"
        raise PluginError(setting, path or "", reason, fix)
    if not torch.isfinite(values).all():
        reason = f"for random tokens it returned {_first_bad(values)}"
        raise PluginError(setting, path or "", reason, "return finite numbers")


def with_sample_numbers(inputs: LossInputs, sample_weight: SampleWeight) -> LossInputs:
    """Add the numbers of a sample weight, for samples that are one rollout each."""
    tokens = [int(tokens) for tokens in inputs.samples.tokens_R.tolist()]
    names = [str(sample) for sample in range(len(tokens))]
    trained = TrainedCounts(
        tokens_of_rollout=dict(zip(names, tokens, strict=True)),
        tokens_of_group={"group": sum(tokens)},
        group_of_rollout=dict.fromkeys(names, "group"),
        samples=len(tokens),
    )
    numbers = sample_weight.numbers(trained)
    of_samples = {
        name: torch.tensor([numbers[sample][name] for sample in names])
        for name in numbers[names[0]]
    }
    return replace(inputs, numbers={**inputs.numbers, **of_samples})


def example_inputs_of(needs: Needs) -> LossInputs:
    """Make the example with what these needs name."""
    return example_inputs(
        with_top=needs.top_logprobs, with_router_shift=needs.router_shift
    )


def example_inputs(
    *, with_top: bool = False, with_router_shift: bool = False
) -> LossInputs:
    """Make samples of `_TOKENS_OF_ROWS` tokens with all log-probs and positive,
    negative and zero advantages. `with_top` adds the likeliest tokens at each
    position."""
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
        numbers={SOLVED_NUMBER: solved_R.float()},
        columns={STALENESS_COLUMN: torch.arange(num_tokens).float() % 3},
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
