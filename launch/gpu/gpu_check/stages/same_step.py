"""The gradient norms of the trainer in float32 are Hugging Face's, with shared prefixes
and without."""

from benchmarks.training.same_step import SameStepSettings, check_same_step
from gpu_check.random_model import random_model
from gpu_check.result import emit
from gpu_check.settings import CheckSettings
from invrl.train.config import TrainConfig


def run(settings: CheckSettings) -> None:
    """Raises as `check_same_step` does where they are not."""
    train = TrainConfig.model_validate({})
    check_same_step(
        SameStepSettings(model_path=str(random_model(settings, "small")), train=train)
    )
    emit(gradients="equal to Hugging Face's")
