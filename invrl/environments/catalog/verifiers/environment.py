"""verifiers (its v1 API): tasksets, harnesses and rewards of its own, unmodified.

    taskset  id of an installed taskset; "sums", of this file, is an example
    config   the taskset's own settings, as JSON
    harness  the agent program: "null" (chat, with the taskset's tools), "bash", ...
    runtime  where the harness runs: "subprocess" (no isolation), "docker", ...

The task's seed picks a task of the taskset. Reward: the sum of its rewards. Components:
each reward and each metric. The harness runs in a process of its own, by uv, which
fetches its packages at the first episode.
"""

import asyncio
import json
import math
import os
import random
import sys
import uuid
from itertools import islice

TIMEOUT_S = 900.0
REWARD = (-math.inf, math.inf)
_LISTED_TASKS = 10_000
"""Tasks of an endless taskset among which a seed picks."""


def episode(
    model,
    task,
    *,
    taskset: str = "sums",
    config: str = "{}",
    harness: str = "null",
    runtime: str = "subprocess",
):
    import verifiers.v1 as vf
    from verifiers.v1.utils.loaders import load_environment

    if taskset == "sums":
        _define_sums()
    settings = vf.SingleAgentEnvConfig(
        taskset={"id": taskset, **json.loads(config)},
        agent={"harness": {"id": harness}, "runtime": {"type": runtime}},
    )
    environment = load_environment(settings)
    return asyncio.run(_play(environment, model, task["seed"]))


async def _play(environment, model, seed: int) -> dict:
    import verifiers.v1 as vf

    tasks = list(islice(environment.taskset, _LISTED_TASKS))
    # verifiers reads a key from a variable, and many episodes share this process
    variable = f"MODEL_KEY_{uuid.uuid4().hex}"
    os.environ[variable] = model.key
    client = vf.EvalClientConfig(base_url=model.base_url, api_key_var=variable)
    context = vf.ModelContext(model=model.name, client=client)
    try:
        async with environment.serving():
            played = await environment.run_episode(tasks[seed % len(tasks)], context)
    finally:
        del os.environ[variable]
    if not played.ok:
        errors = [*played.errors, *(e for t in played.traces for e in t.errors)]
        raise RuntimeError("; ".join(f"{e.type}: {e.message}" for e in errors))
    [trace] = played.traces
    rewards = {name: reward.value for name, reward in trace.rewards.items()}
    messages = [message.model_dump(exclude_none=True) for message in trace.messages]
    return {
        "reward": trace.reward,
        "components": {**trace.metrics, **rewards},
        "messages": messages,
    }


def _define_sums() -> None:
    """Define the example as a module that verifiers finds by its name."""
    if "sums" in sys.modules:
        return
    import types

    import verifiers.v1 as vf

    class SumData(vf.TaskData):
        total: int

    class Sum(vf.Task[SumData]):
        @vf.reward
        async def is_right(self, trace) -> float:
            return float(trace.last_reply.strip().endswith(str(self.data.total)))

        @vf.metric
        async def reply_characters(self, trace) -> float:
            return float(len(trace.last_reply))

    class Sums(vf.Taskset[Sum]):
        def load(self):
            source = random.Random(0)
            for _ in range(1000):
                first, second = source.randrange(10), source.randrange(10)
                prompt = f"{first} + {second} = ? Answer with the number alone."
                yield Sum(SumData(prompt=prompt, total=first + second))

    module = types.ModuleType("sums")
    module.Sums = Sums
    module.__all__ = ["Sums"]
    sys.modules["sums"] = module
