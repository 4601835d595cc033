"""The server of a run's metrics: what it answers and refuses, and that nothing makes it
wait for ever."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from invrl.observe.metrics import metrics_server
from invrl.observe.metrics.metrics_server import MetricsServer
from invrl.observe.metrics.run_exporter import Numbers, RunExporter

LOOPBACK = "127.0.0.1"


@contextmanager
def serving(
    exporter: RunExporter | None = None,
    upstreams: Callable[[], Mapping[str, str]] = dict,
    host: str = LOOPBACK,
    port: int = 0,
) -> Iterator[MetricsServer]:
    server = MetricsServer(
        exporter or RunExporter(), host=host, port=port, upstreams=upstreams
    )
    try:
        yield server
    finally:
        server.stop()


def get(
    server: MetricsServer,
    path: str = "/metrics",
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Status and text of an answer."""
    url = f"http://{LOOPBACK}:{server.port}{path}"
    request = urllib.request.Request(url, method=method, headers=dict(headers or {}))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@contextmanager
def engine(respond: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """A server that answers as told; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            respond(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer((LOOPBACK, 0), Handler)
    server.daemon_threads = True
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    ).start()
    try:
        yield f"http://{LOOPBACK}:{server.server_port}/metrics/"
    finally:
        server.shutdown()
        server.server_close()


def says(text: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def respond(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/plain; version=1")
        handler.end_headers()
        handler.wfile.write(text.encode())

    return respond


def test_metrics_of_run_and_servers_are_served_at_one_port() -> None:
    exporter = RunExporter()
    exporter.step(4, {"rollout/reward_mean": 0.5})
    with engine(says("sglang:num_running_reqs 3\n")) as url:
        upstreams = {"engine-0": url}
        with serving(exporter, lambda: upstreams) as server:
            status, text = get(server)
            assert status == 200
            assert "invrl_reward_mean 0.5\n" in text
            assert get(server, "/metrics/engine-0") == (
                200,
                "sglang:num_running_reqs 3\n",
            )
            assert get(server, "/metrics/engine-1") == (
                404,
                "there are: /metrics, /metrics/engine-0\n",
            )
            upstreams["engine-1"] = url
            assert get(server, "/metrics/engine-1")[0] == 200, (
                "an engine that came later"
            )


@pytest.mark.parametrize(
    "path", ["/", "/metrics/../etc/passwd", "/metricsx", "/metrics/http://x/"]
)
def test_metrics_server_answers_no_other_path_or_method(path: str) -> None:
    with serving() as server:
        assert get(server, path)[0] == 404
        assert get(server, "/metrics", "POST") == (405, "GET only\n")


def test_taken_metrics_port_is_an_error_at_once() -> None:
    with (
        serving() as first,
        pytest.raises(OSError, match="in use"),
        serving(port=first.port),
    ):
        pass


def test_scrape_of_a_hung_engine_ends_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_server, "_UPSTREAM_DEADLINE_S", 0.3)
    over = threading.Event()

    def hangs(_: BaseHTTPRequestHandler) -> None:
        over.wait(20)

    with engine(hangs) as url, serving(None, lambda: {"engine-0": url}) as server:
        hanging: list[tuple[int, str]] = []
        thread = threading.Thread(
            target=lambda: hanging.append(get(server, "/metrics/engine-0"))
        )
        began = time.monotonic()
        thread.start()
        assert get(server)[0] == 200, "the run's own numbers do not wait for it"
        thread.join(10)
        over.set()
        assert time.monotonic() - began < 10
    [(status, text)] = hanging
    assert status == 502
    assert text.startswith("engine-0 does not answer")


def test_scrape_of_an_engine_that_sends_for_ever_ends_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A byte now and then keeps each wait of a socket short."""
    monkeypatch.setattr(metrics_server, "_UPSTREAM_DEADLINE_S", 0.5)
    over = threading.Event()

    def drips(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not over.wait(0.1):
            try:
                handler.wfile.write(b"#")
            except OSError:
                return

    with engine(drips) as url, serving(None, lambda: {"engine-0": url}) as server:
        try:
            status, text = get(server, "/metrics/engine-0")
        finally:
            over.set()
    assert status == 502
    assert "engine-0 does not answer" in text


def test_scrape_of_an_engine_without_metrics_names_the_setting() -> None:
    with engine(lambda handler: handler.send_error(404)) as url:
        upstreams = {"engine-0": url, "router": url}
        with serving(None, lambda: upstreams) as server:
            status, text = get(server, "/metrics/engine-0")
            assert status == 502
            assert "--sglang-enable-metrics" in text
            assert get(server, "/metrics/router") == (502, "router answered 404\n")


def test_scrape_of_a_missing_engine_names_the_engine() -> None:
    with closing(socket.create_server((LOOPBACK, 0))) as closed:
        port = closed.getsockname()[1]
    with closing(socket.create_server((LOOPBACK, 0))) as raw:

        def answer() -> None:
            connection, _ = raw.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"no HTTP\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        upstreams = {
            "engine-0": f"http://{LOOPBACK}:{port}/metrics/",
            "engine-1": f"http://{LOOPBACK}:{raw.getsockname()[1]}/metrics/",
        }
        with serving(None, lambda: upstreams) as server:
            for name in upstreams:
                status, text = get(server, f"/metrics/{name}")
                assert status == 502
                assert text.startswith(f"{name} does not answer")


def test_silent_metrics_client_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "_CLIENT_DEADLINE_S", 0.2)
    with (
        serving() as server,
        socket.create_connection((LOOPBACK, server.port), timeout=10) as client,
    ):
        assert client.recv(1) == b"", "closed by the server"
        assert get(server)[0] == 200


@pytest.mark.parametrize("request_so_far", [b"", b"GET /metrics HTTP/1.1\r\nX-Long: "])
def test_slowly_sending_metrics_client_is_disconnected(
    monkeypatch: pytest.MonkeyPatch, request_so_far: bytes
) -> None:
    """A byte now and then keeps each wait of a socket short."""
    monkeypatch.setattr(metrics_server, "_CLIENT_DEADLINE_S", 0.5)
    with (
        serving() as server,
        socket.create_connection((LOOPBACK, server.port), timeout=0.05) as client,
    ):
        client.sendall(request_so_far)
        ends_at = time.monotonic() + 10
        answer = None
        while answer is None and time.monotonic() < ends_at:
            try:
                client.sendall(b"x")
                answer = client.recv(1)
            except TimeoutError:
                continue
            except ConnectionError:  # it was closed while a byte was on its way
                answer = b""
        assert answer == b"", "closed by the server"
        assert get(server)[0] == 200


def test_silent_metrics_clients_hold_no_threads_above_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_server, "_MAX_CONNECTIONS", 2)
    monkeypatch.setattr(metrics_server, "_CLIENT_DEADLINE_S", 20)
    with serving() as server, contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(
                socket.create_connection((LOOPBACK, server.port), timeout=10)
            )
            for _ in range(3)
        ]
        assert silent[2].recv(1) == b"", "closed at once"
        silent[0].close()
        status = 0
        ends_at = time.monotonic() + 10
        # the thread of a closed connection ends soon
        while status != 200 and time.monotonic() < ends_at:
            with contextlib.suppress(OSError):
                status, _ = get(server)
        assert status == 200


def test_too_many_concurrent_scrapes_are_refused() -> None:
    entered = threading.Semaphore(0)
    over = threading.Event()

    def waits() -> Numbers:
        entered.release()
        over.wait(20)
        return {}

    exporter = RunExporter()
    exporter.attach({"slow": waits})
    with serving(exporter) as server:
        answers: list[int] = []
        threads = [
            threading.Thread(target=lambda: answers.append(get(server)[0]))
            for _ in range(metrics_server._MAX_SCRAPES)
        ]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert entered.acquire(timeout=10)
        assert get(server) == (
            503,
            f"{metrics_server._MAX_SCRAPES} scrapes at a time\n",
        )
        over.set()
        for thread in threads:
            thread.join(10)
        assert answers == [200] * len(threads)
        assert get(server)[0] == 200


def test_end_of_the_run_frees_the_metrics_port_despite_a_hung_scrape() -> None:
    entered = threading.Event()
    over = threading.Event()

    def hangs() -> Numbers:
        entered.set()
        over.wait(20)
        return {}

    exporter = RunExporter()
    exporter.attach({"slow": hangs})
    with serving(exporter) as server:
        threading.Thread(target=lambda: _scrape(server), daemon=True).start()
        assert entered.wait(10)
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < 3
        with pytest.raises(urllib.error.URLError):
            get(server)
        with serving(port=server.port) as next_incarnation:
            assert get(next_incarnation)[0] == 200
        over.set()


def _scrape(server: MetricsServer) -> None:
    try:
        get(server)
    except OSError:
        return


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost:81", "LOCALHOST", "[::1]:81", "127.9.9.9:81"]
)
def test_who_asks_for_loopback_is_answered(host: str) -> None:
    with serving() as server:
        assert get(server, headers={"Host": host})[0] == 200


@pytest.mark.parametrize("path", ["/metrics", "/metrics/router", "/"])
@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:81",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "8.8.8.8",
        ":",
    ],
)
def test_a_site_whose_name_points_here_is_refused(host: str, path: str) -> None:
    with serving() as server:
        status, text = get(server, path, headers={"Host": host})
        assert status == 421
        assert "invrl_" not in text


def test_a_server_for_other_machines_is_asked_by_any_name() -> None:
    with serving(host="0.0.0.0") as server:
        assert get(server, headers={"Host": "node-7:81"})[0] == 200
