"""A proxy in the environment serves user code; our own processes are reached without
it."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from urllib.error import URLError
from urllib.request import urlopen

import grpc
import httpx
import pytest

from invrl.host.network.direct_connections import (
    THIS_MACHINE,
    bypass_proxies,
    direct_client,
)

DEAD_PROXY = "http://127.0.0.1:9"
PROXY_VARIABLES = (
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
)


class _Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"direct")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server of this machine, in an environment whose proxy is
    dead."""
    for name in (*PROXY_VARIABLES, "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in PROXY_VARIABLES:
        monkeypatch.setenv(name, DEAD_PROXY)
    # urlopen keeps the proxies that its first call has found
    monkeypatch.setattr(urllib.request, "_opener", None)
    monkeypatch.setenv("no_proxy", "")  # so that it is restored after the test
    monkeypatch.setenv("NO_PROXY", "")
    with http.server.HTTPServer(("127.0.0.1", 0), _Answer) as server:
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_our_own_client_ignores_the_proxy(url: str) -> None:
    with pytest.raises(URLError):
        urlopen(url, timeout=10)
    with direct_client(url, timeout_s=10) as http:
        assert http.get("/").text == "direct"


def test_clients_of_user_code_reach_this_machine_without_the_proxy(url: str) -> None:
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)
    bypass_proxies(*THIS_MACHINE)
    assert httpx.get(url).text == "direct"
    assert urlopen(url, timeout=10).read() == b"direct"
    child = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=10).read())"
    process = subprocess.run(
        [sys.executable, "-c", child, url], capture_output=True, text=True, timeout=60
    )
    assert process.stdout.strip() == "b'direct'"


def test_the_user_s_proxy_and_exceptions_stay(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("no_proxy", "example.org, 10.0.0.7")
    monkeypatch.setenv("NO_PROXY", "example.com")
    for _ in range(2):
        bypass_proxies("127.0.0.1", "10.0.0.7")
    for name in ("no_proxy", "NO_PROXY"):
        assert os.environ[name] == "example.org,10.0.0.7,example.com,127.0.0.1"
    assert {os.environ[name] for name in PROXY_VARIABLES} == {DEAD_PROXY}


def test_grpc_reaches_this_machine_also_with_a_list_of_its_own(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    name = "no_grpc_proxy"
    bypass_proxies("127.0.0.1")
    assert name not in os.environ, "it would hide the others' list"
    monkeypatch.setenv(name, "example.org")
    for _ in range(2):
        bypass_proxies("127.0.0.1", "10.0.0.7")
    assert os.environ.get(name) == "example.org,127.0.0.1,10.0.0.7"
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        channel = grpc.insecure_channel(f"127.0.0.1:{server.getsockname()[1]}")
        call = channel.unary_unary("/any/call").future(b"", timeout=60)  # connects
        connection, _ = server.accept()
        connection.close()
        call.cancel()
        channel.close()


def test_an_exception_for_every_host_stays_one(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    bypass_proxies("127.0.0.1")
    assert urlopen(url, timeout=10).read() == b"direct"
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == "*"
