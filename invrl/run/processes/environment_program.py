"""The environment of a run (`--environment`): `invrl environment run`, as a process of
the driver, with its log in the run folder.

It starts the environment's own process, also again, and ends with code 0 once the
gateway has said that the run is over.
"""

import asyncio

from invrl.environments.config import EnvironmentConfig
from invrl.host.processes.environment_keys import ENVIRONMENT_KEY
from invrl.host.processes.process import PYTHON_MODULE, ServerProcess
from invrl.run.processes.serving import Serving
from invrl.store.run_folder import RunFolder

LOG_NAME = "environment"
_POLL_INTERVAL_S = 0.5


class EnvironmentProgram:
    """Started when made; `concurrency`: episodes at a time."""

    def __init__(
        self,
        environment: EnvironmentConfig,
        serving: Serving,
        folder: RunFolder,
        *,
        concurrency: int,
    ) -> None:
        command = [
            *PYTHON_MODULE,
            "invrl.cli",
            "environment",
            "run",
            environment.kind,
            f"--base-url={serving.gateway.url}",
            f"--concurrency={concurrency}",
            f"--environment.step-timeout-s={environment.step_timeout_s}",
        ]
        if environment.args:
            command.append(f"--environment.args={','.join(environment.args)}")
        self._process = ServerProcess(
            f"environment {environment.kind}",
            command,
            log=folder.log_path(LOG_NAME),
            env={ENVIRONMENT_KEY: serving.env_key},
        )

    async def watch(self) -> None:
        """Raise ServerError when the environment has died for good."""
        while self._process.exit_code in (None, 0):
            await asyncio.sleep(_POLL_INTERVAL_S)
        self._process.check_alive()

    def stop(self) -> None:
        self._process.stop()
