"""What user code finds of the run's keys in a rollout worker, a trainer rank and the
driver, and what a tool finds that it starts there; and that Ray works without its token
in their environments, a second one too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, os, subprocess, sys
from pathlib import Path
from types import SimpleNamespace
from invrl.host.processes.environment_keys import hold_keys, held_key, take_environment_key
hold_keys()
from invrl.host.ray.ray_setup import prepare_ray
prepare_ray()
token = held_key("RAY_AUTH_TOKEN")
import numpy as np
import ray
from invrl.run.processes.ray_session import start_ray
from invrl.run.settings.config import resolve
from invrl.host.ray.actor import ActorOptions, start_actor
from invrl.host.ray.ray_watch import raylet_question
from invrl.rollout.config import RolloutConfig
from invrl.rollout.workers.worker_actor import RolloutWorker, WorkerSettings
from invrl.train.trainer.train_actor import TrainActor

def look():
    return {
        "process": str(dict(os.environ)),
        "proc": Path("/proc/self/environ").read_text(errors="replace"),
        "tool": subprocess.run(["env"], capture_output=True, text=True).stdout,
    }

class Looker(RolloutWorker):
    def look(self):
        return look()

    def pass_on(self, references):
        whole = ray.get(references[0])
        return [ray.put(whole * 2)]

class Rank(TrainActor):
    async def look(self):
        return look()

def work():
    settings = WorkerSettings(gateway_url="http://127.0.0.1:9", model="m", rollout=RolloutConfig())
    make = ray.remote(Looker).options(num_cpus=0)
    first, second = make.remote(settings), make.remote(settings)
    of_rank = SimpleNamespace(visible_gpus=None)
    rank = start_actor("a rank", Rank, ActorOptions(), of_rank).ray_handle
    found = {"driver": look(), "worker": ray.get(first.look.remote(), timeout=200),
             "rank": ray.get(rank.look.remote(), timeout=200)}
    references = [ray.put(np.ones(3_000_000))]
    for worker in (first, second, first):
        references = ray.get(worker.pass_on.remote(references), timeout=200)
    ray.kill(first)
    later = make.remote(settings)
    references = ray.get(later.pass_on.remote([ray.put(np.full(3_000_000, 8.0))]), timeout=200)
    raylet_question(ray._private.worker._global_node, timeout_s=100)()
    return found, float(ray.get(references[0])[0])

env_key = take_environment_key()
found = {"before Ray": {"driver": look()}}  # as engines and gateway are started
totals = []
for name in ("first Ray", "second Ray"):
    with start_ray(resolve(), Path(sys.argv[1])):
        found[name], total = work()
        totals.append(total)
print(json.dumps({"found": found, "keys": [env_key, token], "totals": totals}))
"""


def test_user_code_and_its_tools_do_not_see_the_runs_keys(tmp_path: Path) -> None:
    environment = {**os.environ, "INVRL_ENV_KEY": "env-of-the-user-0123456789"}
    environment.pop("RAY_ADDRESS", None)
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout.splitlines()[-1])
    assert told["totals"] == [16.0, 16.0]
    env_key, token = told["keys"]
    assert env_key == "env-of-the-user-0123456789"
    assert len(token) == 64
    for phase, roles in told["found"].items():
        for role, places in roles.items():
            for place, text in places.items():
                where = f"{phase}, {role}, {place}"
                assert "PATH" in text, where
                assert env_key not in text, where
                assert token not in text, where
