"""One SGLang server as an OS process: its command line, its keys, its start and its
end.

Invariant: it listens on loopback only (except the HTTP process of `invrl engine`, which
has a configurable address), and answers nobody without a key. `api_key` may sample; the
router holds it. `admin_key` may pause the engine and change its weights; the weight
receiver holds it. Keys travel in the environment, which no process listing shows. Files
that the engine's processes put into TMPDIR disappear with them, even if they are
killed. This file has all differences between CPU and GPU in an engine's start.
"""

import contextlib
import ctypes
import math
import os
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import orjson
import psutil

from invrl.engines.config import EngineConfig
from invrl.engines.inside_sglang.atomic_weight_load import WEIGHT_LOADER
from invrl.engines.inside_sglang.engine_identity import START_VARIABLE, sampling_key
from invrl.engines.inside_sglang.engine_instance import NAME_VARIABLE
from invrl.engines.inside_sglang.engine_log import log_environment
from invrl.engines.sglang_models import MODEL_TYPE_VARIABLE
from invrl.errors import ServerError
from invrl.host.files.temporary_folder import TemporaryFolder
from invrl.host.network.ports import ReservedPort
from invrl.host.output.log_lines import LogSettings
from invrl.host.processes.fork_parent import ForkParent
from invrl.host.processes.process import (
    ENDED,
    PYTHON_MODULE,
    ServerProcess,
    process_state,
    process_tree,
    random_key,
)
from invrl.user_code.model_folder import read_model_type

ENGINE_MODULE = "invrl.engines.inside_sglang.launch_sglang"
_PROCESS_NAME = "sglang::"
"""Prefix of the names of the processes that SGLang starts for an engine."""
_FIRST_TOKEN_DEADLINE_S = 60.0
_POLL_INTERVAL_S = 0.5
_CPU_TOTAL_TOKENS = 16384

_CPU_FLAGS = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    # The KV cache is as large as max-total-tokens says; this only has to leave room for
    # what other processes take while the weights load.
    "mem-fraction-static": "0.8",
    # A batch of prompts that begin alike shares nothing within one prefill: the first
    # chunk's prefix serves the next. 32 quickstart prompts took 5.4 CPU-seconds with
    # their ten tokens, and now take 3.6.
    "chunked-prefill-size": "256",
}


def count_gpus() -> int:
    """Return the number of GPUs that the installed torch can use. Asks the driver
    library, as importing torch takes seconds."""
    try:
        if version("torch").endswith("+cpu"):
            return 0
        cuda = ctypes.CDLL("libcuda.so.1")
    except (PackageNotFoundError, OSError):
        return 0
    count = ctypes.c_int(0)
    succeeded = cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if succeeded else 0


def smallest_gpu_bytes() -> int:
    """Return the memory of the smallest of these GPUs; 0 without one."""
    sizes: list[int] = []
    for index in range(count_gpus()):
        cuda = ctypes.CDLL("libcuda.so.1")
        device = ctypes.c_int(0)
        size = ctypes.c_size_t(0)
        if cuda.cuDeviceGet(ctypes.byref(device), index) == 0:
            cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        sizes.append(size.value)
    return min(sizes, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlace:
    """Address and key of an engine. A restart with the same place keeps both."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: any free port."""
    key: str = ""
    """"": the engine belongs to the run that starts it."""


class EngineServer(ServerProcess):
    """Server of one engine. Start it from a thread that lives as long as the server
    should."""

    grace_s = 1.0
    """Short, because SGLang's draining would only wait for requests whose callers are
    gone."""

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        *,
        model_path: Path,
        run_folder: Path,
        passthrough: Sequence[str] = (),
        api_key: str | None = None,
        index: int = 0,
        place: "EnginePlace | None" = None,
        log: LogSettings | None = None,
        parent: ForkParent | None = None,
    ) -> None:
        """`api_key`: None makes a random one. `index`: among the engines of a run, whose
        ranks share the cores. `place`: None for a free port of loopback and a random
        key. `log`: None for the defaults. `parent`: forks the engine;
        None: it imports SGLang itself.

        Raises OSError if the port of the place is in use.
        """
        place = place or EnginePlace()
        self.admin_key = place.key or random_key()
        start = random_key()
        self.api_key = api_key or sampling_key(self.admin_key, start)
        self._config = config
        self._port = ReservedPort(place.port)
        self._temporary = TemporaryFolder("engine")
        self.url = f"http://{place.host}:{self._port.number}"
        self._own_host = "127.0.0.1" if place.host == "0.0.0.0" else place.host
        command = _command(config, model_path, self._port.number, host=place.host)
        command += passthrough  # a later flag wins
        env = {
            "OMP_NUM_THREADS": "1",
            NAME_VARIABLE: name,
            **_ranks_environment(config, index),
            MODEL_TYPE_VARIABLE: str(read_model_type(model_path)),
            "INVRL_KEY_FLAGS": f"--api-key={self.api_key} --admin-api-key={self.admin_key}",
            **self._temporary.environment(),
            **log_environment(
                log or LogSettings(),
                level=_log_level(command),
                folder=self._temporary.path,
            ),
        }
        if place.key:
            env[START_VARIABLE] = start
        super().__init__(
            name,
            command,
            log=run_folder / "logs" / f"{name}.log",
            env=env,
            parent=parent,
        )

    def processes(self) -> list[psutil.Process]:
        """Return the HTTP server and the processes that SGLang names: the engine needs
        all of them."""
        return engine_processes(self.pid)

    def wait_ready(self) -> None:
        """Wait until the engine has made its first token.

        Raises ServerError with the log's last lines if one of its processes died,
        DeadlineError after `engine.start_timeout_s`.
        """
        processes = _StartingProcesses(self)

        def makes_a_token() -> bool:
            processes.check_alive()
            return self._makes_a_token(processes)

        self.wait_until(makes_a_token, deadline_s=self._config.start_timeout_s)

    def lost_its_port(self) -> bool:
        """Whether it has ended and another program listens on its port: a retry may
        succeed."""
        return not self.alive() and self._port.is_listened_on()

    def stop(self) -> None:
        try:
            super().stop()
        finally:
            self._port.close()
            self._temporary.remove()

    def _makes_a_token(self, processes: "_StartingProcesses") -> bool:
        """Request one token, in place of SGLang's warm-up: only then does the server
        count as up."""
        body = orjson.dumps(
            {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
        )
        check_alive = processes.check_alive
        http = HTTPConnection(
            self._own_host, self._port.number, timeout=_FIRST_TOKEN_DEADLINE_S
        )
        try:
            # Refused at once until the HTTP process listens, which it does after the
            # model is loaded.
            status = _post(http, "/generate", self.api_key, body, meanwhile=check_alive)
            if status != 200:
                return False
            # What was built so far is never garbage. Without this every cache flush
            # (each weight update) walks it all: 0.5 s. SGLang's own call comes too
            # early without its warm-up.
            status = _post(
                http, "/freeze_gc", self.admin_key, b"", meanwhile=check_alive
            )
            return status == 200
        except (HTTPException, OSError):
            return False
        finally:
            http.close()


def engine_processes(pid: int) -> list[psutil.Process]:
    """Return process `pid` and its descendants that SGLang has named.

    A child program, which has its parent's name between fork and exec, is left out: it
    may end at any time.
    """
    family = process_tree(pid)
    names: dict[int, str] = {}
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            names[process.pid] = process.name()
    named_by_sglang: list[psutil.Process] = []
    for process in family:
        name = names.get(process.pid, "")
        with contextlib.suppress(psutil.NoSuchProcess):
            has_own_name = (
                name.startswith(_PROCESS_NAME) and names.get(process.ppid()) != name
            )
            if process.pid == pid or has_own_name:
                named_by_sglang.append(process)
    return named_by_sglang


class _StartingProcesses:
    """Processes of an engine seen while it starts.

    SGLang's HTTP process notices late, and not always, that one of the others has
    ended.
    """

    def __init__(self, server: EngineServer) -> None:
        self._server = server
        self._seen: dict[str, psutil.Process] = {}
        """Processes by name and pid, as read while they lived."""
        self._looked_at = -math.inf

    def check_alive(self) -> None:
        """Raise ServerError once one of the processes has ended."""
        self._server.check_alive()
        # To look for new ones reads all of /proc.
        if time.monotonic() - self._looked_at > _POLL_INTERVAL_S:
            self._looked_at = time.monotonic()
            for process in self._server.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._seen[f"{process.name()} (pid {process.pid})"] = process
        for name, process in self._seen.items():
            if process_state(process) == ENDED:
                raise ServerError(
                    f"{name}, a process of {self._server.name}, ended before the engine was up. "
                    f"Last lines of {self._server.log}:\n{self._server.log_tail()}"
                )


def _post(
    http: HTTPConnection,
    path: str,
    key: str,
    body: bytes,
    *,
    meanwhile: Callable[[], None],
) -> int:
    """Return the response's status. Calls `meanwhile` repeatedly until the response
    begins. httpx does not let go of a request while it waits, and has no socket to
    poll.

    Raises TimeoutError or another OSError, or HTTPException.
    """
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    deadline = time.monotonic() + _FIRST_TOKEN_DEADLINE_S
    http.request("POST", path, body, headers)
    # select.select refuses descriptors above 1023, and a driver has many
    poll = select.poll()
    poll.register(http.sock, select.POLLIN)
    while not poll.poll(1000 * _POLL_INTERVAL_S):
        meanwhile()
        if time.monotonic() > deadline:
            raise TimeoutError
    with http.getresponse() as response:
        response.read()
        return response.status


def max_total_tokens(config: EngineConfig) -> int | None:
    """Return the tokens that an engine's KV cache holds. None: as many as SGLang finds
    room for on a GPU."""
    if config.max_total_tokens:
        return config.max_total_tokens
    return None if count_gpus() else _CPU_TOTAL_TOKENS


def _ranks_environment(config: EngineConfig, index: int) -> dict[str, str]:
    """Return the environment of an engine of several ranks. They send requests to each
    other by their process group: SGLang's queue would leave a file in /dev/shm. On a
    CPU SGLang needs each rank's core: those of engine `index` follow the cores of the
    engine before."""
    if config.tp_size == 1:
        return {}
    no_queue = {"SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "false"}
    if count_gpus():
        return no_queue
    cores = sorted(os.sched_getaffinity(0))
    ranks = range(index * config.tp_size, (index + 1) * config.tp_size)
    core_of_rank = [str(cores[rank % len(cores)]) for rank in ranks]
    return {**no_queue, "SGLANG_CPU_OMP_THREADS_BIND": "|".join(core_of_rank)}


def _log_level(command: Sequence[str]) -> str:
    """Return the log level. The last flag counts, as for SGLang."""
    last = len(command) - 1 - list(reversed(command)).index("--log-level")
    return command[last + 1]


def _command(
    config: EngineConfig, model_path: Path, port: int, *, host: str = "127.0.0.1"
) -> list[str]:
    on_cpu = count_gpus() == 0
    flags = {
        "model-path": str(model_path),
        "host": host,
        "port": str(port),
        "dtype": config.dtype,
        "weight-version": "0",
        "custom-weight-loader": WEIGHT_LOADER,
        # info prints the server's arguments, keys included, and a line per prefill
        "log-level": "warning",
    }
    if config.tp_size > 1:
        flags["tp-size"] = str(config.tp_size)
    if on_cpu:
        flags |= _CPU_FLAGS
    total_tokens = max_total_tokens(config)
    if total_tokens is not None:
        flags["max-total-tokens"] = str(total_tokens)
    command = [*PYTHON_MODULE, ENGINE_MODULE]
    for name, value in flags.items():
        command += [f"--{name}", value]
    command += [
        # Chunks of new tokens only: cumulative log-probs in each chunk would be
        # quadratic.
        "--incremental-streaming-output",
        "--skip-server-warmup",
        # Otherwise a GPU engine keeps a shared expert among the others, where weight
        # updates do not look for it.
        "--disable-shared-experts-fusion",
    ]
    if on_cpu:
        command.append("--sleep-on-idle")  # otherwise the scheduler spins on a core
    if config.seeded_sampling:
        # otherwise SGLang ignores seeds
        command.append("--enable-deterministic-inference")
    return command
