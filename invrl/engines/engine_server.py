"""One SGLang server as an OS process: its command line, its keys, its start and its end.

Invariant: all of it listens on loopback, and it answers nobody without a key: `api_key` may sample (the
router holds it), `admin_key` may pause it and change its weights (the weight receiver holds it). Keys travel
in the environment, which no process listing shows. Device differences of the rollout half are here."""

import contextlib
import ctypes
import select
import sys
import time
from collections.abc import Callable, Sequence
from http.client import HTTPConnection, HTTPException
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import orjson
import psutil

from invrl.errors import ServerError
from invrl.host.ports import ReservedPort
from invrl.host.process import ENDED, ServerProcess, family_of, random_key, state_of
from invrl.rollout.config import EngineConfig

WEIGHT_LOADER = "invrl.weights.in_engine.run"
"""The loader that SGLang imports into its scheduler process, by the path it wants."""

_PROCESS_NAME = "sglang::"
"""What the names of the processes begin with that SGLang starts for an engine."""
_FIRST_TOKEN_S = 60.0
_LOOK_EVERY_S = 0.5

_CPU_FLAGS = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    # The KV cache is as large as max-total-tokens says; this only has to leave room for what other
    # processes take while the weights load.
    "mem-fraction-static": "0.8",
    # A batch of prompts that begin alike shares nothing within one prefill: the first chunk's prefix serves
    # the next. 32 quickstart prompts took 5.4 CPU-seconds with their ten tokens, and now take 3.6.
    "chunked-prefill-size": "256",
}


def count_gpus() -> int:
    """GPUs that the installed torch can use: asks the driver library, as importing torch takes seconds."""
    try:
        if version("torch").endswith("+cpu"):
            return 0
        cuda = ctypes.CDLL("libcuda.so.1")
    except (PackageNotFoundError, OSError):
        return 0
    count = ctypes.c_int(0)
    found = cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if found else 0


class EngineServer(ServerProcess):
    """Start it from a thread that lives as long as it should."""

    grace_s = 1.0
    """Its own draining would only wait for requests whose callers are gone."""

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        *,
        model_path: Path,
        run_folder: Path,
        passthrough: Sequence[str] = (),
    ) -> None:
        self.api_key, self.admin_key, self._config = random_key(), random_key(), config
        self._port = ReservedPort()
        self.url = f"http://127.0.0.1:{self._port.number}"
        command = [*_command(config, model_path, self._port.number), *passthrough]  # later flags win
        keys = f"--api-key={self.api_key} --admin-api-key={self.admin_key}"
        env = {"OMP_NUM_THREADS": "1", "INVRL_KEY_FLAGS": keys}
        super().__init__(name, command, log=run_folder / "logs" / f"{name}.log", env=env)

    def processes(self) -> list[psutil.Process]:
        """The HTTP server and the processes that SGLang names: without one of them it is no engine."""
        return engine_processes(self.pid)

    def wait_ready(self) -> None:
        """Until the engine made its first token. Raises ServerError with the log's last lines if a process of
        it died, DeadlineError after `engine_start_timeout_s`."""
        started = _Started(self)
        self.wait_until(
            lambda: started.check() and self._makes_a_token(started),
            deadline_s=self._config.engine_start_timeout_s,
        )

    def lost_its_port(self) -> bool:
        """It has ended, and a program of somebody else listens where it was to: another try may go well."""
        return not self.alive() and self._port.is_listened_on()

    def stop(self) -> None:
        try:
            super().stop()
        finally:
            self._port.close()

    def _makes_a_token(self, started: "_Started") -> bool:
        """One token instead of SGLang's own warm-up: the server counts as up only after it."""
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
        http = HTTPConnection("127.0.0.1", self._port.number, timeout=_FIRST_TOKEN_S)
        try:
            # Refused at once until the HTTP process listens, which it does after the model is loaded.
            status = _post(http, "/generate", self.api_key, orjson.dumps(body), meanwhile=started.check)
            if status != 200:
                return False
            # What was built so far is never garbage. Without this every cache flush (each weight
            # update) walks it all: 0.5 s. SGLang's own call comes too early without its warm-up.
            return _post(http, "/freeze_gc", self.admin_key, b"", meanwhile=started.check) == 200
        except (HTTPException, OSError):
            return False
        finally:
            http.close()


def engine_processes(pid: int) -> list[psutil.Process]:
    """Process `pid` and the ones below it that SGLang has named. What one of these starts carries its name
    from the fork until it is another program, and may end when it likes: that is none of them."""
    family = family_of(pid)
    names: dict[int, str] = {}
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            names[process.pid] = process.name()
    found: list[psutil.Process] = []
    for process in family:
        name = names.get(process.pid, "")
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.pid == pid or (name.startswith(_PROCESS_NAME) and names.get(process.ppid()) != name):
                found.append(process)
    return found


class _Started:
    """The processes of an engine that have been seen while it starts. SGLang's HTTP process takes a while to
    miss one of the others, and does not always."""

    def __init__(self, server: EngineServer) -> None:
        self._server = server
        self._seen: dict[str, psutil.Process] = {}
        """By name and pid, as told while it lived."""

    def check(self) -> bool:
        """True; ServerError once one of them has ended."""
        self._server.check_alive()
        for process in self._server.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                self._seen[f"{process.name()} (pid {process.pid})"] = process
        for name, process in self._seen.items():
            if state_of(process) == ENDED:
                what = f"{name}, a process of {self._server.name}, ended"
                tail = f"Last lines of {self._server.log}:\n{self._server.log_tail()}"
                raise ServerError(f"{what} before the engine was up. {tail}")
        return True


def _post(http: HTTPConnection, path: str, key: str, body: bytes, *, meanwhile: Callable[[], object]) -> int:
    """The answer's status; `meanwhile` is called until the answer begins. Raises TimeoutError or another
    OSError, or HTTPException."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    ends = time.monotonic() + _FIRST_TOKEN_S
    http.request("POST", path, body, headers)
    answer_begins = select.poll()  # select.select refuses descriptors above 1023, and a driver has many
    answer_begins.register(http.sock, select.POLLIN)
    while not answer_begins.poll(1000 * _LOOK_EVERY_S):
        meanwhile()
        if time.monotonic() > ends:
            raise TimeoutError
    with http.getresponse() as answer:
        answer.read()
        return answer.status


def _command(config: EngineConfig, model_path: Path, port: int) -> list[str]:
    flags = {
        "model-path": str(model_path),
        "host": "127.0.0.1",
        "port": str(port),
        "dtype": config.engine_dtype,
        "weight-version": "0",
        "custom-weight-loader": WEIGHT_LOADER,
        # info prints the server's arguments, keys included, and a line per prefill
        "log-level": "warning",
    }
    if on_cpu := not count_gpus():
        flags |= _CPU_FLAGS | {"max-total-tokens": str(config.engine_max_total_tokens)}
    command = [sys.executable, "-m", "invrl.engines.launch_sglang"]
    command += [part for name, value in flags.items() for part in (f"--{name}", value)]
    # Chunks of new tokens only: cumulative log-probs in each chunk would be quadratic.
    command += ["--incremental-streaming-output", "--skip-server-warmup"]
    if on_cpu:
        command.append("--sleep-on-idle")  # otherwise the scheduler spins on a core
    if config.seeded_sampling:
        command.append("--enable-deterministic-inference")  # otherwise SGLang ignores seeds
    return command
