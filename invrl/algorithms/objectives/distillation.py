"""On-policy distillation: a teacher scores every token that the student sampled."""

from dataclasses import replace

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.loss_inputs import LossInputs, LossOutputs
from invrl.algorithms.objectives.objectives import TEACHER_COLUMN
from invrl.algorithms.policy_loss.losses import policy_loss
from invrl.algorithms.policy_loss.old_policy import old_logprobs
from invrl.errors import TrainError


def distillation_loss(inputs: LossInputs, config: AlgorithmConfig) -> LossOutputs:
    """The loss of `losses.py`, with its ratio, policy loss, correction, aggregation and
    KL, for

        A_t = log teacher(token_t) - log old(token_t)

    Its expectation over the student's tokens is minus the reverse KL(old || teacher) at
    that position, so this is the policy gradient of the reverse KL from one sample. A
    token gets no credit for later ones (discount 0). Rewards are not read.

    Thinking Machines Lab, "On-Policy Distillation" (2025), in the form of their
    training loop; the on-policy reverse KL of GKD (arXiv 2306.13649, with lambda = 1
    and beta = 1) and MiniLLM (arXiv 2306.08543). GKD sums over the vocabulary instead
    of taking the sampled token; MiniLLM also adds the reverse KL of later tokens, and
    length normalisation. Teacher and student use the temperature of the rollout.

    Raises TrainError without the column `teacher`.
    """
    teacher_N = inputs.columns.get(TEACHER_COLUMN)
    if teacher_N is None:
        if inputs.current_N.numel():
            raise TrainError(
                f"distillation: samples have no column {TEACHER_COLUMN!r} with the teacher's log-probs"
            )
        teacher_N = inputs.rollout_N  # no token
    reverse_kl_N = old_logprobs(inputs, config) - teacher_N
    means = {"reverse_kl": reverse_kl_N, "teacher_logprob": teacher_N}
    return policy_loss(
        replace(inputs, advantages_N=-reverse_kl_N), config, more_means=means
    )
