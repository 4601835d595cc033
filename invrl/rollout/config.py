"""Settings of the rollout half: what is run, against how many engines, sampled how."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from invrl.section import COMMA_SEPARATED, Section

EvalMode = Literal["sampled", "greedy"]


class RolloutConfig(Section):
    """User code, tasks, sampling and the workers that run rollouts."""

    rollout_function_path: str = Field(
        "",
        description="module:name of the rollout function: async (task, endpoint) -> reward or RolloutResult",
    )
    external_environments: bool = Field(False, description="environments that you start lease the tasks")
    reward_function_path: str = Field("", description="module:name of (task, result) -> float, the reward")
    task_source_path: str = Field("", description="module:name of (split, seed) -> Tasks; or --task-file")
    task_file: str = Field("", description="JSONL or Parquet (*.parquet) file of tasks, one object each")
    task_id_key: str = Field("id", description="field with the task's id (line or row number if absent)")
    task_label_key: str = Field("label", description="field with the label")
    eval_task_file: str = Field("", description="the same of held-out tasks (else the source's split 'eval')")
    rollout_batch_size: PositiveInt = Field(4, description="groups in one training batch")
    n_samples_per_prompt: PositiveInt = Field(8, description="rollouts in one group")
    rollout_workers: PositiveInt = Field(1, description="Ray actors that run rollout functions")
    rollout_worker_memory_gb: NonNegativeFloat = Field(
        16.0, description="a worker that holds more, its child processes included, is replaced; 0: no limit"
    )
    rollout_concurrency: PositiveInt = Field(32, description="rollouts at a time, over all workers")
    rollout_timeout_s: PositiveFloat = Field(300.0, description="a rollout that takes longer has failed")
    rollout_max_attempts: PositiveInt = Field(3, description="tries at a place in a group")
    temperature: PositiveFloat = Field(1.0, description="sampling temperature of training rollouts")
    max_new_tokens: PositiveInt = Field(512, description="tokens one turn may sample")
    eval_interval: NonNegativeInt = Field(0, description="steps between evaluations; 0: before and after")
    eval_tasks: NonNegativeInt = Field(
        0, description="held-out tasks of each set; 0: no evaluation (`invrl eval`: all of them)"
    )
    eval_samples_per_task: PositiveInt = Field(1, description="samples per held-out task at temperature 1.0")
    eval_sets: Annotated[tuple[str, ...], COMMA_SEPARATED] = Field(
        (), description="held-out sets, each NAME=FILE or NAME=module:source (its split 'eval')"
    )
    eval_modes: Annotated[tuple[EvalMode, ...], COMMA_SEPARATED] = Field(
        ("sampled", "greedy"), min_length=1, description="'sampled' (temperature 1.0), 'greedy' once per task"
    )

    @property
    def runs_rollouts(self) -> bool:
        """Whether our own workers run rollouts. Environments outside run those of training only."""
        return not self.external_environments or self.eval_tasks > 0


class EngineConfig(Section):
    """The fleet of SGLang servers and the router in front of it."""

    num_engines: PositiveInt = Field(1, description="SGLang servers in the fleet")
    engine_dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="of weights and compute")
    seeded_sampling: bool = Field(False, description="each generation by a seed of its own, made from --seed")
    engine_max_total_tokens: PositiveInt = Field(16384, description="KV-cache tokens per engine (CPU)")
    engine_start_timeout_s: PositiveFloat = Field(300.0, description="deadline for an engine to be healthy")
    engine_health_interval_s: PositiveFloat = Field(5.0, description="seconds between our own health checks")
    engine_max_restarts: NonNegativeInt = Field(
        3, description="times one engine that left the fleet is started again, in one life of a run"
    )
    router_start_timeout_s: PositiveFloat = Field(120.0, description="deadline for the router to answer")
