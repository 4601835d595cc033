"""What user code in a rollout worker, and a tool that it starts, find of the run's keys; and that Ray works
without its token in their environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, os, subprocess, sys
from pathlib import Path
from invrl.ray_setup import prepare_ray
prepare_ray()
token = os.environ["RAY_AUTH_TOKEN"]
import numpy as np
import ray
from invrl.cluster import start_ray
from invrl.config import resolve
from invrl.environment_keys import take_environment_key
from invrl.rollout.config import RolloutConfig
from invrl.rollout.worker_actor import RolloutWorker, WorkerSettings

class Looker(RolloutWorker):
    def look(self):
        return {
            "worker": str(dict(os.environ)),
            "proc": Path("/proc/self/environ").read_text(errors="replace"),
            "tool": subprocess.run(["env"], capture_output=True, text=True).stdout,
        }

    def pass_on(self, references):
        whole = ray.get(references[0])
        return [ray.put(whole * 2)]

env_key = take_environment_key()
with start_ray(resolve(), Path(sys.argv[1])):
    settings = WorkerSettings(gateway_url="http://127.0.0.1:9", model="m", rollout=RolloutConfig())
    make = ray.remote(Looker).options(num_cpus=0)
    first, second = make.remote(settings), make.remote(settings)
    told = ray.get(first.look.remote(), timeout=200)
    references = [ray.put(np.ones(3_000_000))]
    for worker in (first, second, first):
        references = ray.get(worker.pass_on.remote(references), timeout=200)
    ray.kill(first)
    later = make.remote(settings)
    references = ray.get(later.pass_on.remote([ray.put(np.full(3_000_000, 8.0))]), timeout=200)
    total = float(ray.get(references[0])[0])
print(json.dumps({"told": told, "keys": [env_key, token], "total": total}))
"""


def test_neither_user_code_nor_its_tools_have_the_run_s_keys(tmp_path: Path) -> None:
    environment = {**os.environ, "INVRL_ENV_KEY": "env-of-the-user-0123456789"}
    environment.pop("RAY_ADDRESS", None)
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["total"] == 16.0
    env_key, token = found["keys"]
    assert env_key == "env-of-the-user-0123456789"
    for place, text in found["told"].items():
        assert "PATH" in text, place
        assert env_key not in text, place
        assert token not in text, place
