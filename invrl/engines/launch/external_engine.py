"""An engine that others start and end, as `invrl engine` does, reached by its URL and a
key.

It replaces `EngineServer` in the fleet. The run sees no process: it waits until the
engine answers, checks its traits, and never ends it. At the end the run leaves it
running, not paused, with its current weights.

Every call blocks; `stop` ends `wait_ready` from another thread.
"""

import threading
import time
from collections.abc import Mapping
from pathlib import Path

import httpx
import msgspec

from invrl import __version__
from invrl.engines.config import EngineConfig
from invrl.engines.inside_sglang.atomic_weight_load import WEIGHT_LOADER
from invrl.engines.inside_sglang.engine_identity import (
    IDENTITY_PATH,
    EngineIdentity,
    EngineTraits,
    model_traits,
    sampling_key,
)
from invrl.errors import ConfigError, ServerError
from invrl.host.network.direct_connections import direct_client
from invrl.host.processes.environment_keys import ENGINE_KEY

_FIELD = "engine.external_engines"
_POLL_INTERVAL_S = 0.5
_ANSWER_DEADLINE_S = 10.0
_FIRST_TOKEN_DEADLINE_S = 60.0
_LEAVE_DEADLINE_S = 5.0
_OUR_LAUNCHER = "start it with `invrl engine`, of this version of invrl"
_SAME_MODEL = "start it with the run's --model-path, or with a copy of that folder"
_FIXES: Mapping[str, str] = {
    "invrl": _OUR_LAUNCHER,
    "model_type": _SAME_MODEL,
    "vocab_size": _SAME_MODEL,
    "num_layers": _SAME_MODEL,
    "hidden_size": _SAME_MODEL,
    "dtype": "give the engine and the run the same --engine.dtype",
    "tp_size": "give the engine and the run the same --engine.tp-size",
    "weight_loaders": f"{_OUR_LAUNCHER}: its weight loader is {WEIGHT_LOADER}",
    "streams_new_tokens": _OUR_LAUNCHER,
    "shared_experts_fusion": _OUR_LAUNCHER,
    "overlap_schedule": "give the engine --weights.inflight in_place, as the run has it",
    "routed_experts": "give the engine --routing-replay engine, as the run has it",
    "seeded_sampling": "give the engine and the run the same --engine.seeded-sampling",
}


def wanted_traits(
    config: EngineConfig, model_path: Path, *, in_place: bool, record_experts: bool
) -> EngineTraits:
    """Return the traits that a run needs of its engines. `in_place`: requests continue
    in place while weights change."""
    return EngineTraits(
        invrl=__version__,
        **model_traits(model_path),
        dtype=config.dtype,
        tp_size=config.tp_size,
        weight_loaders=[WEIGHT_LOADER],
        streams_new_tokens=True,
        shared_experts_fusion=False,
        overlap_schedule=False if in_place else None,
        routed_experts=True if record_experts else None,
        seeded_sampling=config.seeded_sampling,
    )


class ExternalEngine:
    """Part of `EngineServer` that a fleet uses."""

    def __init__(
        self,
        name: str,
        url: str,
        *,
        key: str,
        traits: EngineTraits,
        total_tokens: int | None,
        start_timeout_s: float,
    ) -> None:
        """`key`: of the engine. `total_tokens`: required size of its KV cache, if the
        run assumes one."""
        self.name = name
        self.url = url
        self.admin_key = key
        self.api_key = ""
        """Key that samples. Known once `wait_ready` has returned."""
        self._traits = traits
        self._total_tokens = total_tokens or 0
        self._start_timeout_s = start_timeout_s
        self._stopped = threading.Event()

    def processes(self) -> None:
        """None: its processes are not visible to us."""

    def lost_its_port(self) -> bool:
        return False

    def wait_ready(self) -> None:
        """Wait until the engine answers, fits the run, and has made a token.

        Raises ConfigError for an engine that refuses the key or does not fit the run,
        ServerError after `start_timeout_s` without an answer.
        """
        identity = self._wait_identity()
        _check(self.url, identity, self._traits, self._total_tokens)
        self.api_key = sampling_key(self.admin_key, identity.start)
        self._free(deadline_s=_ANSWER_DEADLINE_S)
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
        response = self._call(
            "POST",
            "/generate",
            body,
            key=self.api_key,
            deadline_s=_FIRST_TOKEN_DEADLINE_S,
        )
        if response.status_code != 200:
            raise ServerError(
                f"{self._called} answered its first request with {response.status_code}"
            )

    def stop(self) -> None:
        """Leave the engine running and not paused. Idempotent. An engine that does not
        answer is left as it is: its next user resumes it."""
        self._stopped.set()
        if self.api_key:
            self.api_key = ""
            self._free(deadline_s=_LEAVE_DEADLINE_S)

    @property
    def _called(self) -> str:
        return f"{self.name} ({self.url})"

    def _wait_identity(self) -> EngineIdentity:
        give_up_at = time.monotonic() + self._start_timeout_s
        while True:
            try:
                return self._ask_identity()
            except ServerError as error:
                if time.monotonic() > give_up_at:
                    raise ServerError(
                        f"{self._called} has not answered for {self._start_timeout_s:g} s: {error}. "
                        "Start it with `invrl engine`, or take it out of --external-engines"
                    ) from error
            if self._stopped.wait(_POLL_INTERVAL_S):
                raise ServerError(f"{self._called} is not waited for any more")

    def _ask_identity(self) -> EngineIdentity:
        """Request the identity. Raises ServerError if it does not answer (yet),
        ConfigError if it never will."""
        response = self._call("GET", IDENTITY_PATH, deadline_s=_ANSWER_DEADLINE_S)
        if response.status_code in (401, 403):
            fix = f"give both the same {ENGINE_KEY} in their environments"
            raise ConfigError(_FIELD, self.url, "the engine refuses the key", fix)
        if response.status_code == 404:
            raise ConfigError(
                _FIELD,
                self.url,
                "the server there was not started by invrl",
                _OUR_LAUNCHER,
            )
        if response.status_code != 200:
            raise ServerError(f"it answers {IDENTITY_PATH} with {response.status_code}")
        try:
            return msgspec.json.decode(response.content, type=EngineIdentity)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            reason = f"it answers as another version of invrl would: {error}"
            raise ConfigError(_FIELD, self.url, reason, _OUR_LAUNCHER) from error

    def _free(self, *, deadline_s: float) -> None:
        """End the remains of a killed run: an open weight update and its pause."""
        calls: tuple[tuple[str, dict[str, object]], ...] = (
            ("/end_weight_update", {}),  # refused if none is open
            ("/continue_generation", {"torch_empty_cache": False}),
        )
        for path, body in calls:
            try:
                self._call("POST", path, body, deadline_s=deadline_s)
            except ServerError:
                return

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        key: str = "",
        deadline_s: float,
    ) -> httpx.Response:
        """Send a request. `key`: the engine's by default. Raises ServerError if there
        is no response."""
        headers = {"Authorization": f"Bearer {key or self.admin_key}"}
        try:
            with direct_client(self.url, timeout_s=deadline_s, headers=headers) as http:
                return http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise ServerError(f"no answer to {path} ({error!r})") from error


def _check(
    url: str, identity: EngineIdentity, wanted: EngineTraits, total_tokens: int
) -> None:
    """Raise ConfigError unless the engine fits the run."""
    for name, fix in _FIXES.items():
        needed = getattr(wanted, name)
        found = getattr(identity.traits, name)
        if needed is not None and found != needed:
            raise ConfigError(
                _FIELD,
                url,
                f"{name} is {found!r} there, and {needed!r} in this run",
                fix,
            )
    if identity.total_tokens < total_tokens:
        reason = f"its KV cache holds {identity.total_tokens} tokens, and the run counts on {total_tokens}"
        fix = f"give the engine --engine.max-total-tokens {total_tokens}, or the run fewer"
        raise ConfigError(_FIELD, url, reason, fix)
    if not identity.start:
        raise ConfigError(
            _FIELD, url, "it was not started by `invrl engine`", _OUR_LAUNCHER
        )
