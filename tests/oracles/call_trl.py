"""Calls the losses of TRL's trainers on the tensors in a file, and writes their answers
into another.

    python call_trl.py CALLS ANSWERS

CALLS is a list of (name, keyword arguments). A name is a function of this module. Each
makes a trainer without its constructor, gives it the settings that the loss reads, and
calls the trainer's own method, with a model that returns the given log-probs. An answer
is the loss and its gradient with respect to these.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

Answer = dict[str, Tensor]


def trainer_without_model(kind: Any, settings: dict[str, Any]) -> Any:
    """One process on the CPU, no auxiliary loss, and these attributes."""
    trainer = kind.__new__(kind)
    trainer.accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        sync_gradients=True,
        gather=lambda tensor: tensor,
        gather_for_metrics=lambda tensor: tensor,
        reduce=lambda tensor, reduction: tensor,
    )
    trainer.model = SimpleNamespace(training=True)
    trainer.aux_loss_enabled = False
    trainer._metrics = defaultdict(lambda: defaultdict(list))
    trainer._total_train_tokens = 0
    trainer._tp_size = 1
    for name, value in settings.items():
        setattr(trainer, name, value)
    return trainer


def model_that_returns(*logprobs_BT: Tensor) -> Callable[..., SimpleNamespace]:
    """A model whose calls return these log-probs, one after the other."""
    answers: Iterator[Tensor] = iter(logprobs_BT)

    def call(**_: Any) -> SimpleNamespace:
        logprobs_BT = next(answers)
        nothing_BT = torch.zeros_like(logprobs_BT.detach())
        return SimpleNamespace(
            log_probs=logprobs_BT,
            entropy=nothing_BT,
            mean_logits=nothing_BT,
            is_top1=nothing_BT > 0,
        )

    return call


def ids_and_masks(mask_BT: Tensor, prefix: str = "") -> dict[str, Tensor]:
    """Rows with one token of a prompt before the answer's, as TRL's collator has
    them."""
    prompt_B1 = torch.zeros(len(mask_BT), 1)
    completion = torch.cat([prompt_B1, mask_BT.float()], dim=1)
    ids = torch.zeros_like(completion, dtype=torch.int64)
    return {
        f"{prefix}input_ids": ids,
        f"{prefix}attention_mask": torch.ones_like(ids),
        f"{prefix}completion_mask": completion,
    }


def answered(loss: Tensor, *logprobs: Tensor) -> Answer:
    gradients = torch.autograd.grad(loss, logprobs)
    return {"loss": loss.detach(), "gradient": torch.cat(gradients)}


def dpo(
    loss_type: str, beta: float, logprobs: Tensor, reference: Tensor, mask: Tensor
) -> Answer:
    """`logprobs`, `reference` [2 P, T]: the chosen rows, then the rejected.
    `loss_type`: sigmoid or ipo."""
    settings = {
        "beta": beta,
        "loss_types": [loss_type],
        "loss_weights": [1.0],
        "ld_alpha": None,
        "f_divergence_type": "reverse_kl",
        "use_weighting": False,
        "precompute_ref_logps": True,
    }
    logprobs.requires_grad_()
    chosen_P, rejected_P = (reference * mask).sum(1).chunk(2)
    inputs = {
        **ids_and_masks(mask),
        "ref_chosen_logps": chosen_P,
        "ref_rejected_logps": rejected_P,
    }
    trainer = trainer_without_model(DPOTrainer, settings)
    return answered(
        trainer._compute_loss(model_that_returns(logprobs * mask), inputs, False),
        logprobs,
    )


def kto(
    settings: dict[str, Any],
    labels: Tensor,
    logprobs: Tensor,
    reference: Tensor,
    mask: Tensor,
    mismatched_logprobs: Tensor,
    mismatched_reference: Tensor,
    mismatched_mask: Tensor,
) -> Answer:
    """The gradient is of `logprobs`; none goes through the mismatched rows."""
    settings = {
        **settings,
        "loss_type": "kto",
        "calculate_KL": True,
        "precompute_ref_logps": True,
    }
    logprobs.requires_grad_()
    inputs = {
        **ids_and_masks(mask),
        **ids_and_masks(mismatched_mask, "KL_"),
        "label": labels,
        "ref_logps": (reference * mask).sum(1),
        "ref_KL_logps": (mismatched_reference * mismatched_mask).sum(1),
    }
    model = model_that_returns(mismatched_logprobs * mismatched_mask, logprobs * mask)
    trainer = trainer_without_model(KTOTrainer, settings)
    return answered(trainer._compute_loss(model, inputs, False), logprobs)


def simpo(settings: dict[str, Any], chosen: Tensor, rejected: Tensor) -> Answer:
    """`chosen`, `rejected` [P]: log-probs per token. The gradient is of the chosen,
    then of the rejected."""
    trainer = trainer_without_model(
        CPOTrainer, {"loss_type": "simpo", "alpha": 0.0, **settings}
    )
    losses_P, *_ = trainer.cpo_loss(chosen.requires_grad_(), rejected.requires_grad_())
    return answered(losses_P.mean(), chosen, rejected)


def orpo_odds(weight: float, chosen: Tensor, rejected: Tensor) -> Answer:
    """As `simpo`. Without the NLL, which the trainer adds: loss = NLL - mean of
    these."""
    trainer = trainer_without_model(ORPOTrainer, {"beta": weight})
    losses_P, *_ = trainer.odds_ratio_loss(
        chosen.requires_grad_(), rejected.requires_grad_()
    )
    return answered(-losses_P.mean(), chosen, rejected)


def grpo(
    settings: dict[str, Any], args: dict[str, Any], mask: Tensor, **tensors: Tensor
) -> Answer:
    """A loss of any type that `GRPOTrainer` has. `tensors`: logprobs, entropies, the
    trainer's inputs."""
    logprobs = tensors.pop("logprobs").requires_grad_()
    entropies = tensors.pop("entropies")
    defaults = {
        "beta": 0.0,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "use_vllm": False,
        "current_gradient_accumulation_steps": 1,
        "_entropy_bonus_enabled": False,
        "args": SimpleNamespace(
            **{
                "delta": None,
                "use_bias_correction_kl": False,
                "steps_per_generation": 1,
                **args,
            }
        ),
    }
    trainer = trainer_without_model(GRPOTrainer, {**defaults, **settings})
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
        logprobs,
        entropies,
        None,
    )
    ids = torch.zeros_like(mask, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": mask,
        "num_items_in_batch": mask.sum(),
        **tensors,
    }
    return answered(trainer._compute_loss(None, inputs), logprobs)


FUNCTIONS = {
    "dpo": dpo,
    "kto": kto,
    "simpo": simpo,
    "orpo_odds": orpo_odds,
    "grpo": grpo,
}

if __name__ == "__main__":
    _, calls_path, answers_path = sys.argv
    calls = torch.load(calls_path, weights_only=False)
    torch.save(
        [FUNCTIONS[name](**arguments) for name, arguments in calls], answers_path
    )
