"""Settings of the rollout half: user code, tasks, sampling and workers."""

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from invrl.environments.config import EnvironmentConfig
from invrl.types.section import COMMA_SEPARATED, Section, Text
from invrl.types.top_logprobs import MAX_TOP_LOGPROBS

EvalMode = Literal["sampled", "greedy"]
SEEDS_PATH = "invrl.rollout.tasks.seed_tasks:seeds"
"""The task source of environments that make a task from a number."""
_CONCURRENCY = 32
_MOST_CONCURRENCY = 1024
"""Most rollouts that run at a time where the load of the engines decides."""
CurriculumScheme = Literal["learnability", "thompson", "prioritized"]


class CurriculumConfig(Section):
    """Picks the next training task by how often the model solved each."""

    kind: CurriculumScheme = Field(
        description="learnability: tasks that it sometimes solves; thompson: the same, with more "
        "exploration; prioritized: hard ones",
    )
    tasks: PositiveInt | None = Field(
        None,
        description="first training tasks among which it picks; left out: all (a source must then end)",
    )
    decay: float = Field(
        0.5,
        ge=0.0,
        le=1.0,
        description="part of what it knows of a task that it keeps at each of the task's groups; 1: it "
        "forgets nothing",
    )


class EvalConfig(Section):
    """Evaluation on held-out tasks."""

    interval: PositiveInt | None = Field(
        None, description="steps between evaluations; left out: only before and after"
    )
    engines: PositiveInt | None = Field(
        None,
        description="last engines of the fleet that serve evaluation only; left out: all engines serve both",
    )
    tasks: PositiveInt | None = Field(
        None,
        description="held-out tasks of each set; left out: no evaluation (`invrl eval`: all of them)",
    )
    samples_per_task: PositiveInt = Field(
        1, description="samples per held-out task at temperature 1.0"
    )
    sets: Annotated[tuple[str, ...], COMMA_SEPARATED] = Field(
        (),
        description="held-out sets, each NAME=FILE or NAME=module:source (the source's split 'eval')",
    )
    modes: Annotated[tuple[EvalMode, ...], COMMA_SEPARATED] = Field(
        ("sampled", "greedy"),
        min_length=1,
        description="'sampled' (temperature 1.0), 'greedy' (once per task), or both",
    )
    task_file: Text | None = Field(
        None,
        description="file of held-out tasks (a task source has its split 'eval' instead)",
    )


class WorkersConfig(Section):
    """The processes that run rollout functions."""

    count: PositiveInt = Field(1, description="Ray actors that run rollout functions")
    memory_gb: PositiveFloat | None = Field(
        16.0,
        description="memory of a worker with its child processes, above which it is replaced",
    )


class RolloutConfig(Section):
    """User code, tasks, sampling, and the workers that run rollouts."""

    rollout_function_path: Text | None = Field(
        None,
        description="module:name of the rollout function: async (task, endpoint) -> reward or RolloutResult",
    )
    external_environments: bool = Field(
        False, description="environments that you start yourself lease the tasks"
    )
    reward_function_path: Text | None = Field(
        None, description="module:name of the reward function: (task, result) -> float"
    )
    task_source_path: Text | None = Field(
        None,
        description="module:name of the task source: (split, seed) -> Tasks; instead of --task-file",
    )
    task_file: Text | None = Field(
        None, description="JSONL or Parquet (*.parquet) file, one task per line or row"
    )
    task_id_key: str = Field(
        "id",
        description="field that holds the task's id (without it, the line or row number)",
    )
    task_label_key: str = Field(
        "label",
        description="field that holds the task's label; where no row has `label`: `answer`, `solution` or "
        "`target`, the first that all rows have",
    )
    workers: WorkersConfig = WorkersConfig.model_validate({})
    eval: EvalConfig = EvalConfig.model_validate({})
    curriculum: CurriculumConfig | None = Field(
        None, description="what picks the next training task"
    )
    environment: EnvironmentConfig | None = Field(
        None,
        description="the environment that the run starts, and that leases the tasks",
    )
    rollout_batch_size: PositiveInt = Field(
        4, description="groups in one training batch"
    )
    n_samples_per_prompt: PositiveInt = Field(8, description="rollouts in one group")
    rollout_concurrency: PositiveInt | Literal["auto"] = Field(
        _CONCURRENCY,
        description="rollouts that run at a time, over all workers; auto: begins with the default, and "
        "follows the load of the engines",
    )
    rollout_timeout_s: PositiveFloat = Field(
        300.0, description="seconds after which a rollout has failed"
    )
    rollout_max_attempts: PositiveInt = Field(
        3, description="attempts at each rollout of a group"
    )
    temperature: PositiveFloat = Field(
        1.0, description="sampling temperature of training rollouts"
    )
    max_new_tokens: PositiveInt = Field(
        512, description="tokens that one turn may sample"
    )
    rollout_top_logprobs: Annotated[int, Field(ge=1, le=MAX_TOP_LOGPROBS)] | None = (
        Field(
            None,
            description="likeliest tokens that are recorded, with their log-probs, in the place of each token of "
            "training rollouts (read by code that needs `top_logprobs`, as invrl.contrib.simko)",
        )
    )

    @model_validator(mode="before")
    @classmethod
    def _lease_to_environment(cls, values: Any) -> Any:
        """Let an environment that the run starts lease the tasks, and where none are
        named, seeds."""
        if not isinstance(values, dict) or not values.get("environment"):
            return values
        complete = {"external_environments": True, **values}
        if not values.get("task_source_path") and not values.get("task_file"):
            complete["task_source_path"] = SEEDS_PATH
        return complete

    @property
    def first_concurrency(self) -> int:
        """Rollouts that run at a time at the start, and in an evaluation."""
        if self.rollout_concurrency == "auto":
            return _CONCURRENCY
        return self.rollout_concurrency

    @property
    def most_concurrency(self) -> int:
        """Most rollouts that ever run at a time."""
        if self.rollout_concurrency == "auto":
            return _MOST_CONCURRENCY
        return self.rollout_concurrency

    @property
    def runs_rollouts(self) -> bool:
        """Whether our own workers run rollouts. External environments only run
        training, never an evaluation."""
        return not self.external_environments or self.eval.tasks is not None
