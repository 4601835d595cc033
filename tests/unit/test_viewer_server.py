"""`invrl view` as a process: who may read, what answers carry, live updates, its end,
and its export."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recorded_run import RecordedRun, record_run

from invrl.cli.commands.view import read_request
from invrl.errors import ConfigError
from invrl.viewer.access import access_for
from invrl.viewer.page_server import bind

ROOT = Path(__file__).parents[2]
HOSTILE = "<script>alert(1)</script></script><img src=x onerror=alert(1)>\u2028"


class Served:
    """The command on one run, and a client with its key."""

    def __init__(self, recorded: RecordedRun, cache: Path, *flags: str) -> None:
        command = [
            sys.executable,
            "-m",
            "invrl.cli.main",
            "view",
            str(recorded.folder.path),
            "--no-open",
            *flags,
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "XDG_CACHE_HOME": str(cache),
        }
        self.recorded = recorded
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout
        line = self.process.stdout.readline()
        address = re.search(r"http://(127\.0\.0\.1):(\d+)/\?key=(\S+)", line)
        assert address, line + self.process.communicate()[1]
        self.port = int(address[2])
        self.key = address[3]

    def ask(
        self, path: str, *, method: str = "GET", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=named)
        response = connection.getresponse()
        body = response.read()
        connection.close()
        return (
            response.status,
            {name.lower(): value for name, value in response.getheaders()},
            body,
        )

    def get(self, path: str) -> Any:
        status, _, body = self.ask(path, Authorization=f"Bearer {self.key}")
        assert status == 200, body
        return json.loads(body)

    def wait_for(self, path: str, condition: Any) -> Any:
        deadline = time.monotonic() + 30
        while True:
            status, _, body = self.ask(path, Authorization=f"Bearer {self.key}")
            if status == 200 and condition(json.loads(body)):
                return json.loads(body)
            assert time.monotonic() < deadline, body
            time.sleep(0.05)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    recorded = record_run(tmp_path)
    recorded.add(HOSTILE, HOSTILE, 1.0)
    server = Served(recorded, tmp_path / "cache")
    yield server
    server.end()


def test_viewer_needs_its_key_and_every_response_has_security_headers(
    served: Served,
) -> None:
    for path in ("/", "/api/runs", "/api/events", "/styles.css", "/none"):
        status, headers, body = served.ask(path)
        assert status == 401, path
        assert "open the URL" in json.loads(body)["error"]["fix"]
        assert "default-src 'none'" in headers["content-security-policy"]
    for wrong in ("x", served.key[:-1], served.key + "x", "\xff"):
        assert served.ask("/api/runs", Authorization=f"Bearer {wrong}")[0] == 401
        assert (
            served.ask("/api/runs", Cookie=f"invrl-view-{served.port}={wrong}")[0]
            == 401
        )

    status, headers, _ = served.ask(f"/?key={served.key}")
    assert status == 303
    assert headers["location"] == "./"
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert served.ask("/api/runs", Cookie=cookie.partition(";")[0])[0] == 200
    status, headers, _ = served.ask(f"/api/runs?key={served.key}&a=b")
    assert status == 303
    assert headers["location"] == "./runs?a=b"

    status, headers, _ = served.ask("/api/runs", Authorization=f"Bearer {served.key}")
    policy = headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "script-src 'self'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"
    assert headers["content-type"] == "application/json"


def test_another_host_name_and_other_methods_are_refused(served: Served) -> None:
    right = f"Bearer {served.key}"
    for host in (
        "evil.example",
        f"evil.example:{served.port}",
        "127.0.0.1:1",
        f"127.0.0.1.evil:{served.port}",
    ):
        assert served.ask("/api/runs", Authorization=right, Host=host)[0] == 421, host
    assert (
        served.ask("/api/runs", Authorization=right, Host=f"localhost:{served.port}")[0]
        == 200
    )
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert served.ask("/api/runs", method=method, Authorization=right)[0] == 405, (
            method
        )
    for path in (
        "/../access.py",
        "/..%2faccess.py",
        "/%2e%2e/access.py",
        "//etc/passwd",
        "/page_server.py",
    ):
        assert served.ask(path, Authorization=right)[0] == 404, path


def test_viewer_errors_name_field_value_reason_and_fix(served: Served) -> None:
    right = f"Bearer {served.key}"
    served.wait_for("/api/runs/run/rollouts", lambda page: page["total"] == 1)
    for path, status, field in (
        ("/api/runs/none/steps", 404, "run"),
        ("/api/runs/run/rollouts?sort=x", 400, "sort"),
        ("/api/runs/run/rollouts?min_reward=x", 400, "min_reward"),
        ("/api/runs/run/rollouts/none", 404, ""),
        ("/api/runs/run/turns/none/tokens", 404, ""),
        ("/api/none", 404, ""),
    ):
        status_code, _, body = served.ask(path, Authorization=right)
        error = json.loads(body)["error"]
        assert status_code == status, path
        assert error["field"] == field, path
        assert error["message"]
        assert error["fix"]


def test_hostile_text_is_served_unchanged_as_data(served: Served) -> None:
    [row] = served.wait_for("/api/runs/run/rollouts", lambda page: page["total"] == 1)[
        "rows"
    ]
    assert row["task_id"] == HOSTILE
    detail = served.get(f"/api/runs/run/rollouts/{row['session_id']}")
    assert detail["turns"][0]["reply"]["content"] == HOSTILE
    tokens = served.get(f"/api/runs/run/turns/{detail['turns'][0]['id']}/tokens")
    assert len(tokens["sampled"]["ids"]) == len(tokens["sampled"]["logprobs"])
    assert tokens["sampled"]["texts"] is None
    assert "no text of tokens" in tokens["notes"][0]


def test_page_receives_changes_and_does_not_keep_the_server_alive(
    served: Served,
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    connection.request(
        "GET", "/api/events", headers={"Authorization": f"Bearer {served.key}"}
    )
    response = connection.getresponse()
    assert response.getheader("content-type", "").startswith("text/event-stream")
    served.wait_for("/api/runs", lambda page: page["runs"][0]["index"]["ready"])
    served.recorded.add("later", "more", 0.5)
    with served.recorded.folder.metrics_path.open("a") as file:
        file.write('{"step": 7, "time": 5.0, "rollout/reward_mean": 0.5}\n')
    kinds: set[str] = set()
    while not {"metrics", "rollouts"} <= kinds:
        line = response.readline()
        assert line, "the stream ended"
        if line.startswith(b"data: "):
            change = json.loads(line.removeprefix(b"data: "))
            assert change["run"] == "run"
            kinds |= set(change["kinds"])
    [run] = served.get("/api/runs")["runs"]
    assert run["step"] == 7
    served.wait_for("/api/runs/run/rollouts", lambda page: page["total"] == 2)

    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(15) in (0, -signal.SIGTERM, 143)
    assert response.read() is not None, "the stream ends as a whole answer"


def test_ctrl_c_ends_the_viewer_silently(served: Served) -> None:
    served.get("/api/runs")
    served.process.send_signal(signal.SIGINT)
    _, errors = served.process.communicate(timeout=15)
    assert served.process.returncode in (0, 130, -signal.SIGINT)
    assert "Traceback" not in errors


def test_taken_viewer_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as error:
            bind("127.0.0.1", port)
    assert error.value.field == "--port"
    assert error.value.value == str(port)
    with pytest.raises(ConfigError) as error:
        bind("203.0.113.7", 0)
    assert error.value.field == "--host"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ([], "RUN"),
        (["--port", "1"], "RUN"),
        (["r", "--port", "70000"], "--port"),
        (["r", "--port", "x"], "--port"),
        (["r", "--prot", "1"], "command line"),
        (["r", "--export-rollouts", "-1"], "--export-rollouts"),
    ],
)
def test_wrong_viewer_arguments_are_named(arguments: list[str], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_request(arguments)
    assert error.value.field == field


def test_viewer_on_all_addresses_needs_its_key_under_any_host_name() -> None:
    access = access_for("0.0.0.0", 80)
    assert access.refusal("GET", "any.example", {}, access.key) is None
    refusal = access.refusal("GET", "any.example", {}, "wrong")
    assert refusal is not None
    assert refusal.status == 401
    assert access.key not in repr(access)


def test_an_export_holds_everything_as_scripts(tmp_path: Path) -> None:
    recorded = record_run(tmp_path)
    session_ids = [
        recorded.add(f"task-{number}", HOSTILE, number / 9) for number in range(10)
    ]
    recorded.folder.metrics_path.write_text(
        '{"step": 1, "time": 5.0, "rollout/reward_mean": 0.5}\n'
    )
    target = tmp_path / "export"
    command = [
        sys.executable,
        "-m",
        "invrl.cli.main",
        "view",
        str(recorded.folder.path),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    flags = ["--export", str(target), "--export-rollouts", "4"]
    process = subprocess.run(
        [*command, *flags], env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert (target / "index.html").is_file()

    manifest_text = (target / "data/manifest.js").read_text()
    manifest = json.loads(
        manifest_text.removeprefix("window.invrlExport = ").removesuffix(";\n")
    )
    assert manifest["left_out"] == {"run": 6}
    files = manifest["files"]
    pages = (
        "steps",
        "groups",
        "rollouts",
        "facets",
        "tasks",
        "timeline",
        "ledger",
        "evaluations",
    )
    assert {f"runs/run/{page}" for page in (*pages, "weights")} <= set(files)
    values: dict[str, Any] = {}
    for path, name in files.items():
        script = (target / name).read_text()
        assert "<" not in script, "no text of a model can end a script"
        call = script.removeprefix("window.invrlData(").removesuffix(");\n")
        named, value = json.loads(f"[{call}]")
        assert named == path
        values[path] = value
    assert (
        values["runs/run/rollouts"]["total"]
        == len(values["runs/run/rollouts"]["rows"])
        == 10
    )
    assert values["metrics"]["runs"]["run"]["rollout/reward_mean"] == [[1, 5.0, 0.5]]
    assert values["runs"]["runs"][0]["index"]["ready"]
    exported = [name for name in session_ids if f"runs/run/rollouts/{name}" in values]
    assert len(exported) == 4
    assert session_ids[9] in exported, "the best"
    assert session_ids[0] in exported, "the worst"
    detail = values[f"runs/run/rollouts/{session_ids[9]}"]
    assert detail["turns"][0]["reply"]["content"] == HOSTILE
    assert f"runs/run/turns/{detail['turns'][0]['id']}/tokens" in values
    assert values["runs/run/said"] == {"files": 1, "rollouts": 4}
    assert {name for name, _ in values["runs/run/said/0"]} == set(exported)
    assert (
        values["runs/run/replies/task-9"]["replies"][session_ids[9]]["text"]
        == HOSTILE.strip()
    )

    again = subprocess.run(
        [*command, *flags], env=environment, capture_output=True, text=True, check=False
    )
    assert again.returncode == 2
    assert "not empty" in again.stderr


def test_no_path_or_question_is_an_error_of_the_server(served: Served) -> None:
    """NUL, what no file system takes, what is no Unicode, and numbers that no database
    has."""
    run = served.get("/api/runs")["runs"][0]["id"]
    key = f"Bearer {served.key}"
    odd = (
        "%00",
        "app.js%00",
        "a%00.js",
        "x" * 3000 + ".js",
        "..%2f..%2fetc%2fpasswd",
        "%ff%fe.js",
        "%2f",
        "a%0d%0ab.js",
    )
    pages = [
        f"/api/runs/{run}",
        f"/api/runs/{run}/rollouts",
        f"/api/runs/{run}/turns",
        f"/api/runs/{run}/replies",
        "/api/runs",
        "",
    ]
    paths = [f"{page}/{name}" for page in pages for name in odd]
    paths += [f"/api/runs/{run}/turns/{name}/tokens" for name in odd]
    questions = (
        "page",
        "size",
        "step",
        "sort",
        "search",
        "task",
        "after",
        "group",
        "q",
        "name",
        "runs",
        "full",
    )
    for page in (
        "rollouts",
        "groups",
        "tasks",
        "facets",
        "evaluations",
        "timeline",
    ):
        for name in questions:
            for value in ("%00", "a%00b", "9" * 40, "-1", "nan", "1e999", "%ff", "%22"):
                paths.append(f"/api/runs/{run}/{page}?{name}={value}")
    paths += [f"/api/metrics?{name}=%00" for name in questions]
    statuses = {path: served.ask(path, Authorization=key)[0] for path in paths}
    assert [path for path, status in statuses.items() if status == 500] == []
    assert 404 in statuses.values()
