"""The program that runs the episodes of one environment, in the environment's own
Python. Standard library only.

    python episodes.py FOLDER describe   print the environment's arguments, as JSON
    python episodes.py FOLDER run        lease tasks until the run has ended
    python episodes.py FOLDER try        one episode at each of the given endpoints

`FOLDER/environment.py` has a function

    episode(model, task, *, argument: type = default, ...) -> {"reward": x, ...}

`task` is the payload of a task; `model.chat(messages)` asks the model. The result may
have "components" (named numbers). REWARD = (least, most) is the range of rewards. Where
the package calls the model itself, with `model.base_url`, `model.key` and `model.name`,
TIMEOUT_S limits the whole episode, and the result may have "messages" to show.

`run` and `try` read their order, with the keys, as JSON from standard input. Reports
leave as JSON lines on the file descriptor `report_fd`; what the environment prints goes
to standard output.

Invariant: a session that was opened here is finished, or aborted with a reason. A
reward that is not finite, or outside of the range, aborts it.
"""

import http.client
import importlib.util
import inspect
import json
import math
import os
import sys
import threading
import time
import traceback
import urllib.parse
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

HUNG_EXIT = 75
"""Exit code after an episode that hangs: its thread cannot be ended otherwise."""
UNREACHABLE_EXIT = 69
_LEASE_WAIT_S = 10.0
_CALL_TIMEOUT_S = 60.0
_MODEL_TIMEOUT_S = 3600.0
"""Longest wait for a reply of the model. The session's own time ends it earlier."""
_RECONNECT_S = 120.0
"""Longest time without a connection to the gateway, which may be restarting."""
_PASSING = (429, 503)
"""Statuses of a gateway that is full, or not ready."""
_CHAT_PAUSES_S = (1.0, 2.0)
"""Pauses before a call of the model is repeated, as clients of OpenAI's API do."""
_HEARTBEAT_S = 30.0
_WATCH_S = 0.2
_SHOWN = 2000
"""Characters of an error that the run's record keeps."""


class Refused(Exception):
    """The server refused a call with this HTTP status. Nothing is wrong here if the
    session is over."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text[:_SHOWN]}")
        self.status = status


def post(
    url: str,
    key: str,
    body: dict,
    *,
    timeout_s: float = _CALL_TIMEOUT_S,
    retries: int = 0,
) -> dict:
    """Post JSON and return the reply's. `retries`: how often it was posted before, which
    the gateway answers with what it has sampled. Raises Refused, OSError."""
    parts = urllib.parse.urlsplit(url)
    connect = http.client.HTTPConnection
    if parts.scheme == "https":
        connect = http.client.HTTPSConnection
    connection = connect(parts.netloc, timeout=timeout_s)
    headers = {
        "Authorization": f"Bearer {key}",
        "Content-Type": "application/json",
        "X-Stainless-Retry-Count": str(retries),
    }
    try:
        connection.request("POST", parts.path, json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read().decode("utf-8", "replace")
    except http.client.HTTPException as error:
        raise OSError(f"{url}: {error!r}") from error
    finally:
        connection.close()
    if response.status >= 400:
        raise Refused(response.status, text)
    return json.loads(text)


def post_again(url: str, key: str, body: dict) -> dict:
    """Post as `post` does, also again while the gateway cannot be reached or has no
    place. Raises OSError after `_RECONNECT_S`."""
    give_up_at = time.monotonic() + _RECONNECT_S
    while True:
        try:
            return post(url, key, body)
        except (Refused, OSError) as error:
            is_final = isinstance(error, Refused) and error.status not in _PASSING
            if is_final or time.monotonic() > give_up_at:
                raise
        time.sleep(1.0)


def post_to_model(url: str, key: str, body: dict) -> dict:
    """Post a call of the model as `post` does, also again while the server is restarted
    or full."""
    retries = 0
    while True:
        try:
            return post(url, key, body, timeout_s=_MODEL_TIMEOUT_S, retries=retries)
        except (Refused, OSError) as error:
            is_final = isinstance(error, TimeoutError) or (
                isinstance(error, Refused) and error.status not in _PASSING
            )
            if is_final or retries == len(_CHAT_PAUSES_S):
                raise
        time.sleep(_CHAT_PAUSES_S[retries])
        retries += 1


class Environment:
    """The functions and limits in `environment.py` of a folder."""

    def __init__(self, folder: Path) -> None:
        path = folder / "environment.py"
        spec = importlib.util.spec_from_file_location("environment", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["environment"] = module
        spec.loader.exec_module(module)
        self.module = module
        self.episode = module.episode
        self.reward_range = getattr(module, "REWARD", (-math.inf, math.inf))
        self.timeout_s = getattr(module, "TIMEOUT_S", None)

    def describe(self) -> dict:
        signature = inspect.signature(self.episode, eval_str=True)
        return {
            "about": inspect.getdoc(self.module) or "",
            "reward": [str(bound) for bound in self.reward_range],
            "arguments": {
                parameter.name: {
                    "type": parameter.annotation.__name__,
                    "default": parameter.default,
                }
                for parameter in signature.parameters.values()
                if parameter.kind is inspect.Parameter.KEYWORD_ONLY
            },
        }

    def checked(self, result: object) -> dict:
        """Return the result of an episode with plain numbers. Raises ValueError for one
        that must not be trained on."""
        if not isinstance(result, dict) or "reward" not in result:
            raise ValueError(f"the episode returned {result!r:.200}, without a reward")
        least, most = self.reward_range
        reward = _finite("reward", result["reward"])
        if not least <= reward <= most:
            text = f"the reward {reward:g} is outside of the declared range"
            raise ValueError(f"{text} {least:g} to {most:g}")
        components = {
            str(name): _finite(name, value)
            for name, value in result.get("components", {}).items()
        }
        return {"reward": reward, "components": components}


def _finite(name: str, value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}, not a finite number")
    return number


class Model:
    """The model of one session, for the environment."""

    def __init__(self, endpoint: dict) -> None:
        self.base_url = endpoint["base_url"]
        self.key = endpoint["key"]
        self.name = endpoint["model"]
        self.messages: list[dict] = []
        """The last conversation, with the last reply."""
        self.working_since: float | None = time.monotonic()
        """Since when the environment computes. None: it waits for the model."""

    def chat(self, messages: list[dict], **options: object) -> str:
        """Return the text of the model's reply. `options`: more fields of the chat
        completion, which a run must allow."""
        body = {"model": self.name, "messages": messages, **options}
        self.working_since = None
        try:
            url = f"{self.base_url}/chat/completions"
            reply = post_to_model(url, self.key, body)
        finally:
            self.working_since = time.monotonic()
        message = reply["choices"][0]["message"]
        self.messages = [*messages, message]
        return message.get("content") or ""


class Episode(threading.Thread):
    """One episode, in a thread."""

    def __init__(
        self,
        environment: Environment,
        order: dict,
        endpoint: dict,
        task: dict,
        then: Callable[["Episode"], None] = lambda episode: None,
    ) -> None:
        """`then` is called in the thread when the episode has ended."""
        super().__init__(daemon=True)
        self.environment = environment
        self.id = endpoint.get("id", "")
        self.model = Model(endpoint)
        self.started_at = time.monotonic()
        self._then = then
        self._arguments = order["arguments"]
        self._step_timeout_s = order["step_timeout_s"]
        self._task = task
        self.outcome: dict = {}
        """Reward and components, or "failure"."""

    def run(self) -> None:
        try:
            result = self.environment.episode(self.model, self._task, **self._arguments)
            self.outcome = self.environment.checked(result)
            self.model.messages = result.get("messages", self.model.messages)
        except BaseException as error:
            lines = "".join(traceback.format_exception(error))
            self.outcome = {"failure": f"{error!r}\n{lines[-_SHOWN:]}"}
        self._then(self)

    def overdue(self) -> str:
        """Return what took too long; "" if nothing has, or the episode has ended."""
        if self.outcome:
            return ""
        now = time.monotonic()
        limit_s = self.environment.timeout_s
        if limit_s is not None:
            if now - self.started_at > limit_s:
                return f"the episode has taken more than {limit_s:g} s"
            return ""
        since = self.model.working_since
        if since is None or now - since <= self._step_timeout_s:
            return ""
        place = "before its first call of the model (reset)"
        if self.model.messages:
            place = "after a reply of the model (step)"
        return f"the environment hangs: {self._step_timeout_s:g} s {place}"


class Reports:
    """JSON lines to the process that started this one."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._file = os.fdopen(descriptor, "w", encoding="utf-8")
        self._lock = threading.Lock()

    def send(self, **report: object) -> None:
        with self._lock:
            self._file.write(json.dumps(report, default=str) + "\n")
            self._file.flush()


class Leases:
    """Leases tasks of a run and plays their episodes until the run has ended."""

    def __init__(self, environment: Environment, order: dict, reports: Reports) -> None:
        self._environment = environment
        self._order = order
        self._reports = reports
        self._playing: dict[str, Episode] = {}
        """Session id -> its episode, until the session has ended."""
        self._ending: set[str] = set()
        """Sessions that a thread ends, or has ended."""
        self._lock = threading.Lock()
        self._heartbeat_at = time.monotonic()
        self._hung = False

    def run(self) -> int:
        """Return the exit code of the program."""
        threading.Thread(target=self._watch_forever, daemon=True).start()
        while True:
            with self._lock:
                playing = len(self._playing)
            if self._hung and not playing:
                return HUNG_EXIT
            if self._hung or playing >= self._order["concurrency"]:
                time.sleep(_WATCH_S)
            elif self._lease():
                return 0

    def _call(self, path: str, body: dict) -> dict:
        return post_again(self._order["url"] + path, self._order["key"], body)

    def _lease(self) -> bool:
        """Play a lease, if there is one. Returns whether the run has ended."""
        reply = self._call("/tasks/lease", {"wait_s": _LEASE_WAIT_S})
        lease = reply["lease"]
        if lease is None:
            return reply["ended"]
        opening = {
            "task_id": lease["task"]["id"],
            "group_id": lease["group_id"],
            "members": lease["members"],
            "request_id": uuid.uuid4().hex,
        }
        try:
            sessions = self._call("/sessions", opening)["sessions"]
        except Refused as refusal:
            # The run has dropped the group, or it has ended, or it is full: the lease
            # runs out, and is leased again.
            if refusal.status not in (409, 410, *_PASSING):
                raise
            return False
        self._reports.send(opened=[session["id"] for session in sessions])
        for session in sessions:
            task = lease["task"]["payload"]
            episode = Episode(
                self._environment, self._order, session, task, self._ended
            )
            with self._lock:
                self._playing[session["id"]] = episode
            episode.start()
        return False

    def _watch_forever(self) -> None:
        try:
            while True:
                time.sleep(_WATCH_S)
                self._watch()
        except BaseException:
            _exit_with_traceback()

    def _watch(self) -> None:
        """Abort the sessions whose episodes hang, and keep the others alive."""
        with self._lock:
            playing = list(self._playing.values())
        for episode in playing:
            late = episode.overdue()
            if late and episode.is_alive():
                self._hung = True
                self._end(episode.id, {"failure": late})
        if time.monotonic() - self._heartbeat_at > _HEARTBEAT_S:
            self._heartbeat_at = time.monotonic()
            for episode in playing:
                self._session_call(episode.id, "heartbeat", {})

    def _ended(self, episode: Episode) -> None:
        try:
            self._end(episode.id, episode.outcome)
        except BaseException:
            _exit_with_traceback()

    def _end(self, session_id: str, outcome: dict) -> None:
        """End the session, unless another thread does."""
        with self._lock:
            if session_id in self._ending or session_id not in self._playing:
                return
            self._ending.add(session_id)
        failure = outcome.get("failure", "")
        if not failure:
            # Refused: too large, too many components; or the session is over, and an
            # abort has no effect.
            failure = self._session_call(session_id, "finish", outcome)
        if failure:
            print(f"episode {session_id} failed: {failure}", flush=True)
            self._session_call(session_id, "abort", {"detail": failure})
        self._reports.send(ended=session_id, finished=not failure)
        with self._lock:
            del self._playing[session_id]
            self._ending.discard(session_id)

    def _session_call(self, session_id: str, action: str, body: dict) -> str:
        """Call an action of a session, which may be over already. Returns the reason of
        a refusal, or ""."""
        try:
            self._call(f"/sessions/{session_id}/{action}", body)
        except Refused as refusal:
            return f"{action}: {refusal}"
        return ""


def _exit_with_traceback() -> None:
    """End the whole program from any thread."""
    traceback.print_exc()
    os._exit(UNREACHABLE_EXIT)


def try_episodes(environment: Environment, order: dict, reports: Reports) -> int:
    """Play one episode after another, each at an endpoint of its own."""
    for endpoint in order["endpoints"]:
        episode = Episode(environment, order, endpoint, endpoint["task"])
        episode.start()
        late = ""
        while episode.is_alive() and not late:
            episode.join(_WATCH_S)
            late = episode.overdue()
        outcome = episode.outcome
        if episode.is_alive():
            outcome = {"failure": late}
        reports.send(messages=episode.model.messages, **outcome)
        if episode.is_alive():
            return HUNG_EXIT
    return 0


def main(folder: str, mode: str) -> int:
    if mode == "describe":
        print(json.dumps(Environment(Path(folder)).describe()))
        return 0
    order = json.load(sys.stdin)
    reports = Reports(order["report_fd"])
    environment = Environment(Path(folder))
    if mode == "try":
        return try_episodes(environment, order, reports)
    return Leases(environment, order, reports).run()


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # not sys.exit: threads of packages, or of a hung episode, may run on
    os._exit(code)
