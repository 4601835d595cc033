"""A run's own Ray is a local one, whatever address an earlier program has left on the
machine, and its raylet answers whatever becomes of workers."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from slow_cases import first_quick

from invrl.host.files.temporary_folder import remove_abandoned
from invrl.run.settings.config import Source, resolve
from invrl.run.settings.folder import make_run_folder

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from pathlib import Path
from invrl.host.ray.ray_setup import prepare_ray

prepare_ray()
import ray
from invrl.run.processes.ray_session import start_ray
from invrl.run.settings.resolved_config import load_resolved
from invrl.store.run_folder import RunFolder

folder = RunFolder(path=Path(sys.argv[1]))
with start_ray(load_resolved(folder.config_path), folder.ray_logs_path):
    print(ray.get_runtime_context().gcs_address, flush=True)
"""


@pytest.mark.timeout(1200)
def test_start_of_ray_ignores_the_address_left_by_an_earlier_cluster(
    tmp_path: Path,
) -> None:
    """Whoever listens at the address that Ray's file names hears nothing; `ray.init()`
    alone would call."""
    tables = {"run": {"run_root": str(tmp_path), "run_name": "run"}}
    folder = make_run_folder(resolve(Source(name="test", tables=tables)))
    (tmp_path / "ray").mkdir()
    environment = {
        name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"
    }
    environment |= {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "RAY_TMPDIR": str(tmp_path),
    }
    with socket.create_server(("127.0.0.1", 0)) as stale:
        address = f"127.0.0.1:{stale.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        process = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(folder.path)],
            env=environment,
            capture_output=True,
            text=True,
        )
        called, _, _ = select.select([stale], [], [], 0)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() not in ("", address)
    assert not called


WHAT_STRANGERS_SEE = """
import ipaddress, os, stat, sys
from pathlib import Path
from invrl.host.ray.ray_setup import prepare_ray

prepare_ray()
import psutil
import ray
from invrl.run.processes.ray_session import start_ray
from invrl.run.settings.resolved_config import load_resolved
from invrl.store.run_folder import RunFolder

@ray.remote(num_cpus=0)
class Actor:
    def pid(self):
        return os.getpid()

folder = RunFolder(path=Path(sys.argv[1]))
with start_ray(load_resolved(folder.config_path), folder.ray_logs_path):
    actor = Actor.remote()
    ray.get(actor.pid.remote())
    me = psutil.Process()
    listening = [
        (process.name(), connection.laddr.ip)
        for process in (me, *me.children(recursive=True))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 4, listening
    for name, address in listening:
        address = ipaddress.ip_address(address)
        address = getattr(address, "ipv4_mapped", None) or address
        assert address.is_loopback, (name, address)
    own = Path(ray._private.worker._global_node.get_temp_dir_path()).parent
    assert stat.S_IMODE(own.stat().st_mode) == 0o700, own
    assert (own / "r").is_dir()
    print(own, flush=True)
    if "killed" in sys.argv:
        os.kill(os.getpid(), 9)
"""


@pytest.mark.timeout(1200)
def test_other_users_and_machines_reach_nothing_of_a_local_ray(tmp_path: Path) -> None:
    """And after kill -9 of the driver, without a supervisor, the next command removes
    its folder."""
    tables = {"run": {"run_root": str(tmp_path), "run_name": "run"}}
    folder = make_run_folder(resolve(Source(name="test", tables=tables)))
    environment = {
        name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"
    }
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    process = subprocess.run(
        [sys.executable, "-c", WHAT_STRANGERS_SEE, str(folder.path), "killed"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert process.returncode == -9, process.stderr
    left = Path(process.stdout.strip())
    assert left.is_dir()
    remove_abandoned()
    assert not left.exists()


STOPPED_ACTOR = """
import os, signal, sys
from pathlib import Path
from invrl.host.ray.ray_setup import prepare_ray

prepare_ray()
import ray
from invrl.run.processes.ray_session import start_ray
from invrl.run.settings.resolved_config import load_resolved
from invrl.host.ray.ray_watch import raylet_question
from invrl.store.run_folder import RunFolder

@ray.remote(num_cpus=0)
class Actor:
    def pid(self):
        return os.getpid()

folder = RunFolder(path=Path(sys.argv[1]))
with start_ray(load_resolved(folder.config_path), folder.ray_logs_path):
    actor = Actor.remote()
    pid = ray.get(actor.pid.remote())
    node = ray._private.worker._global_node
    raylet = node.all_processes["raylet"][0].process.pid
    ask = raylet_question(node, timeout_s=5)
    os.kill(pid, signal.SIGSTOP)
    ask()
    print("the raylet answers beside a stopped actor", flush=True)
    os.kill(pid, signal.SIGKILL)
    os.kill(raylet, signal.SIGSTOP)
    try:
        ask()
    except Exception as error:
        print(error.code().name, flush=True)
    os.kill(raylet, signal.SIGCONT)
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_raylet_answers_while_an_actor_is_stopped(tmp_path: Path) -> None:
    tables = {
        "run": {
            "run_root": str(tmp_path),
            "run_name": "run",
            "heartbeat_timeout_s": 600.0,
        }
    }
    folder = make_run_folder(resolve(Source(name="test", tables=tables)))
    environment = {
        name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"
    }
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run(
        [sys.executable, "-c", STOPPED_ACTOR, str(folder.path)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert lines[0] == "the raylet answers beside a stopped actor"
    assert "DEADLINE_EXCEEDED" in lines, (
        "a raylet that is stopped itself does not answer"
    )


DESCRIPTION = """
import json, os, sys
from pathlib import Path
from invrl.host.ray.ray_setup import prepare_ray

prepare_ray()
import ray
from invrl.run.processes.ray_session import start_ray
from invrl.run.settings.config import resolve
from invrl.host.ray.ray_watch import raylet_question

@ray.remote(num_cpus=0)
class Actor:
    def priority(self):
        return os.getpriority(os.PRIO_PROCESS, 0)

with start_ray(resolve(), Path(sys.argv[1])):
    raylet_question(ray._private.worker._global_node, timeout_s=100)()
    found = {"driver": os.getpriority(os.PRIO_PROCESS, 0), "actor": ray.get(Actor.remote().priority.remote())}
print(json.dumps(found))
"""


def test_actors_have_the_driver_s_priority_and_no_proxy_stands_before_the_raylet(
    tmp_path: Path,
) -> None:
    environment = {
        name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"
    }
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        environment |= {name: "http://127.0.0.1:9", name.upper(): "http://127.0.0.1:9"}
    process = subprocess.run(
        [sys.executable, "-c", DESCRIPTION, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert process.returncode == 0, process.stderr
    priorities = json.loads(process.stdout.splitlines()[-1])
    assert priorities["actor"] == priorities["driver"]


LATE_ONCE = """
import os, sys
from pathlib import Path
from invrl.host.ray.ray_setup import prepare_ray

prepare_ray()
import psutil, ray
from invrl.run.processes import ray_session
from invrl.run.processes.ray_session import start_ray
from invrl.run.settings.resolved_config import load_resolved
from invrl.errors import ServerError
from invrl.store.run_folder import RunFolder

os.getloadavg = lambda: (0.0, 0.0, 0.0)
ray_session._MAX_STARTS = 2
services = ray._private.services
answer = services.get_node
late = int(sys.argv[2])
raylets = []

def get_node(*arguments):
    global late
    if late:
        late -= 1
        for child in psutil.Process().children(recursive=True):
            if "raylet/raylet" in " ".join(child.cmdline()):
                raylets.append(child)
        raise Exception("The current node timed out during startup.\\nlogs\\nof Ray")
    return answer(*arguments)

services.get_node = get_node
folder = RunFolder(path=Path(sys.argv[1]))
try:
    with start_ray(load_resolved(folder.config_path), folder.ray_logs_path):
        print("up:", len(ray.nodes()), "node", flush=True)
except ServerError as error:
    print("refused:", error)
_, alive = psutil.wait_procs(raylets, timeout=60)
print("raylets of the starts that failed:", len(raylets), "alive:", len(alive), flush=True)
"""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("late", first_quick([1, 2]))
def test_start_of_ray_that_times_out_is_retried_and_the_reason_is_reported(
    tmp_path: Path, late: int
) -> None:
    """As on a busy machine: the raylet runs, and is not heard of in time."""
    tables = {"run": {"run_root": str(tmp_path), "run_name": "run"}}
    folder = make_run_folder(resolve(Source(name="test", tables=tables)))
    environment = {
        name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"
    }
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run(
        [sys.executable, "-c", LATE_ONCE, str(folder.path), str(late)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    told = (
        "Ray (one of our own) did not start: The current node timed out during startup"
    )
    lines = process.stdout.splitlines()
    assert lines[0] == f"warning: {told}; it is started again (start 2)"
    assert lines[1] == ("up: 1 node" if late == 1 else f"refused: {told}")
    assert lines[2] == f"raylets of the starts that failed: {late} alive: 0"
