"""What user code of a rollout worker leaves behind, under a real Ray: it ends with the
worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from invrl.host.processes.process import still_running

pytestmark = pytest.mark.slow

USER_CODE = """
async def rollout(task, endpoint):
    return 0.0
"""
PROGRAM = """
import json, os, signal, subprocess, sys
from pathlib import Path
from invrl.host.ray.ray_setup import prepare_ray
prepare_ray()
import psutil
import ray
from invrl.run.processes.ray_session import start_ray
from invrl.run.settings.config import resolve
from invrl.host.processes.process import still_running
from invrl.rollout.config import RolloutConfig
from invrl.rollout.workers.worker_actor import RolloutWorker, WorkerSettings

WAIT = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(10**6)"

class Leaver(RolloutWorker):
    def leave(self):
        "A program in a session of its own, a daemon that is a program, and one that is only forked."
        reader, writer = os.pipe()
        first = subprocess.Popen([sys.executable, "-c", WAIT], stdout=writer)
        daemon = f"import os; os.fork() and os._exit(0); {WAIT}"
        subprocess.run([sys.executable, "-c", daemon], stdout=writer)
        if os.fork() == 0:
            if os.fork():
                os._exit(0)
            os.setsid()
            os.write(writer, f"{os.getpid()}\\n".encode())
            while True:
                signal.pause()
        text = b""
        while text.count(b"\\n") < 3:
            text += os.read(reader, 100)
        return os.getpid(), [int(line) for line in text.split()]

settings = WorkerSettings(
    gateway_url="http://127.0.0.1:9", model="m", rollout=RolloutConfig(rollout_function_path="leaves:rollout")
)
with start_ray(resolve(), Path(sys.argv[1])):
    worker = ray.remote(Leaver).options(num_cpus=0).remote(settings)
    ray.get(worker.ready.remote(), timeout=300)
    pid, pids = ray.get(worker.leave.remote(), timeout=300)
    left = [psutil.Process(one) for one in pids]
    outside = [os.getsid(one) == one for one in pids]
    os.kill(pid, signal.SIGKILL)
    alive = [one.pid for one in still_running(left, within_s=200)]
    # Not to stdout: Ray prints there too, in the middle of a line if it must.
    Path(sys.argv[1], "seen.json").write_text(json.dumps({"outside": outside, "alive": alive, "pids": pids}))
"""


def test_daemon_started_by_user_code_ends_with_its_ray_worker(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(USER_CODE)
    environment = {
        name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=(tmp_path / "errors").open("w"),
        timeout=1000,
    )
    assert run.returncode == 0, (tmp_path / "errors").read_text()
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["outside"] == [True, True, True]
    assert seen["alive"] == []
    left = [psutil.Process(pid) for pid in seen["pids"] if psutil.pid_exists(pid)]
    assert not still_running(left, within_s=0)
