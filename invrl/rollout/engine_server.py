"""One SGLang server as an OS process: its command line, its keys, its start and its end.

Invariant: it listens on loopback and answers nobody without a key: `api_key` may sample (the router holds
it), `admin_key` may pause it and change its weights (the weight receiver holds it). Keys travel in the
environment, which no process listing shows. Device differences of the rollout half are here."""

import ctypes
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import httpx

from invrl.process import ServerProcess, free_port, random_key
from invrl.rollout.config import EngineConfig

WEIGHT_LOADER = "invrl.rollout.weight_loader.run"
"""The loader that SGLang imports into its scheduler process, by the path it wants."""

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
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [*_command(config, model_path, port), *passthrough]  # later flags win
        keys = f"--api-key={self.api_key} --admin-api-key={self.admin_key}"
        env = {"OMP_NUM_THREADS": "1", "INVRL_KEY_FLAGS": keys}
        super().__init__(name, command, log=run_folder / "logs" / f"{name}.log", env=env)

    def wait_ready(self) -> None:
        """Until the engine made its first token. Raises ServerError with the log's last lines if it died,
        DeadlineError after `engine_start_timeout_s`."""
        self.wait_until(self._makes_a_token, deadline_s=self._config.engine_start_timeout_s)

    def _makes_a_token(self) -> bool:
        """One token instead of SGLang's own warm-up: the server counts as up only after it."""
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
        try:
            # A client that verifies nothing reads no certificates: that took 22 ms each time.
            timeout = httpx.Timeout(60.0, connect=1.0)
            with httpx.Client(base_url=self.url, timeout=timeout, verify=False, trust_env=False) as http:
                # Refused at once until the HTTP process listens, which it does after the model is loaded.
                answer = http.post("/generate", json=body, headers=_bearer(self.api_key))
                if answer.status_code != 200:
                    return False
                # What was built so far is never garbage. Without this every cache flush (each weight
                # update) walks it all: 0.5 s. SGLang's own call comes too early without its warm-up.
                frozen = http.post("/freeze_gc", headers=_bearer(self.admin_key))
        except httpx.HTTPError:
            return False
        return frozen.status_code == 200


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
    command = [sys.executable, "-m", "invrl.rollout.launch_sglang"]
    command += [part for name, value in flags.items() for part in (f"--{name}", value)]
    # Chunks of new tokens only: cumulative log-probs in each chunk would be quadratic.
    command += ["--incremental-streaming-output", "--skip-server-warmup"]
    if on_cpu:
        command.append("--sleep-on-idle")  # otherwise the scheduler spins on a core
    if config.seeded_sampling:
        command.append("--enable-deterministic-inference")  # otherwise SGLang ignores seeds
    return command


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
