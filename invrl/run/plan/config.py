"""Lengths, rates and machine from which a run is planned."""

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from invrl.buffer.config import WhenStale
from invrl.types.section import Section


class PlanConfig(Section):
    """The flags of `invrl plan`."""

    length_mean: PositiveFloat = Field(description="tokens of a rollout")
    length_sigma: NonNegativeFloat = Field(
        1.0, description="deviation of the logarithm of the lengths, half of it by task"
    )
    rollout_batch_size: PositiveInt = Field(16, description="groups of a batch")
    n_samples_per_prompt: PositiveInt = Field(8, description="rollouts of a group")
    num_engines: PositiveInt = Field(1, description="engines now")
    eval_engines: NonNegativeInt = Field(
        0, description="engines set aside for evaluation, not counted in num_engines"
    )
    engine_gpus: PositiveInt = Field(1, description="GPUs of an engine")
    trainer_gpus: PositiveInt = Field(1, description="GPUs of the trainer now")
    token_s: PositiveFloat = Field(
        description="seconds of an engine's step with one request"
    )
    request_s: NonNegativeFloat = Field(
        description="seconds that each further request adds to that"
    )
    training_s: PositiveFloat = Field(
        description="seconds of a training step on the trainer's GPUs now"
    )
    update_s: NonNegativeFloat = Field(
        0.0, description="seconds from the end of training to the engines' new weights"
    )
    when_stale: WhenStale = Field(
        "train", description="what becomes of a token that is too old, as in a run"
    )
