"""What HTTP clients do that our own do not: compressed bodies, pages in a browser, base
URLs that are a bit wrong, bodies that are no JSON, and no body at all."""

import asyncio
import contextlib
import gzip
import json
import socket
import zlib

import pytest
from gateway_workers import Workers
from running_gateway import ASK, ENV_KEY, Running, running
from sampling_routes import ROUTES, Route

from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.server.http.content_encoding import decompress

every_route = pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path[1:])
CHAT = {"model": "tiny", "messages": [ASK]}


@every_route
async def test_a_compressed_body_is_read(gateway: Running, route: Route):
    [session] = await gateway.open()
    body = json.dumps(route.good).encode()
    for encoding, content in (
        ("gzip", gzip.compress(body)),
        ("deflate", zlib.compress(body)),
    ):
        answer = await gateway.http.post(
            session.base_url + route.path,
            content=content,
            headers={"content-encoding": encoding},
        )
        assert answer.status_code == 200, answer.text


async def test_a_body_that_would_grow_without_end_is_refused(gateway: Running):
    [session] = await gateway.open()
    url = session.base_url + "/chat/completions"
    good = gzip.compress(json.dumps(CHAT).encode())
    refused = [
        (413, "gzip", gzip.compress(b" " * (2**24 + 1))),
        (400, "gzip", good[:-5]),
        (400, "gzip", good + good),
        (400, "gzip", json.dumps(CHAT).encode()),
        (415, "br", good),
        (415, "gzip, gzip", gzip.compress(good)),
    ]
    for status, encoding, content in refused:
        answer = await gateway.http.post(
            url, content=content, headers={"content-encoding": encoding}
        )
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["message"]
    assert gateway.engine.requests == []


def test_no_more_than_the_limit_is_decompressed():
    assert decompress(gzip.compress(b"x" * 100), "gzip", limit=100) == b"x" * 100
    bomb = gzip.compress(b"\0" * 50_000_000)
    decompressor = zlib.decompressobj(31)
    assert len(decompressor.decompress(bomb, 101)) == 101
    with pytest.raises(Exception, match="larger than 100 bytes"):
        decompress(bomb, "gzip", limit=100)


async def test_compressed_body_reaches_the_worker_of_its_session(workers: Workers):
    content = gzip.compress(json.dumps(CHAT).encode())
    [session] = await workers.at[1].open()
    headers = {"content-encoding": "gzip"}
    url = f"{workers.urls[0]}/s/{session.key}/v1/chat/completions"
    answer = await workers.at[0].http.post(url, content=content, headers=headers)
    assert answer.status_code == 200, answer.text
    opening = {
        "task_id": "t",
        "group_id": "g",
        "members": [{"index": 0, "attempt": 0}],
        "request_id": "once",
    }
    ids = set()
    for url in workers.urls:
        answer = await workers.at[0].http.post(
            url + "/sessions",
            content=gzip.compress(json.dumps(opening).encode()),
            headers={**headers, "authorization": f"Bearer {ENV_KEY}"},
        )
        ids.add(answer.json()["sessions"][0]["id"])
    assert len(ids) == 1


async def test_the_jdks_first_request_is_answered(gateway: Running):
    """Over a raw socket, with the headers of `java.net.http`."""
    [session] = await gateway.open()
    body = json.dumps(CHAT).encode()
    head = (
        f"POST /s/{session.key}/v1/chat/completions HTTP/1.1\r\n"
        f"Connection: Upgrade, HTTP2-Settings\r\nContent-Length: {len(body)}\r\nHost: localhost\r\n"
        "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUpgrade: h2c\r\n"
        "User-Agent: Java-http-client/21.0.2\r\nContent-Type: application/json\r\n\r\n"
    )
    port = int(gateway.url.rpartition(":")[2])

    def ask() -> bytes:
        with contextlib.closing(
            socket.create_connection(("127.0.0.1", port), timeout=60)
        ) as connection:
            connection.sendall(head.encode() + body)
            return connection.recv(65_536)

    answer = await asyncio.to_thread(ask)
    assert answer.startswith(b"HTTP/1.1 200 OK"), answer


async def test_a_page_in_a_browser_may_call_if_its_origin_is_named(
    tmp_path, model, renderer: Renderer
):
    page = {"origin": "https://page.example"}
    asked = {
        **page,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    async with running(
        tmp_path, model, renderer, cors_origins=["https://page.example"]
    ) as served:
        [session] = await served.open()
        url = session.base_url + "/chat/completions"
        preflight = await served.http.options(url, headers=asked)
        assert preflight.status_code == 200, preflight.text
        assert (
            preflight.headers["access-control-allow-origin"] == "https://page.example"
        )
        answer = await served.http.post(url, json=CHAT, headers=page)
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        assert "access-control-allow-credentials" not in answer.headers
        refused = await served.http.options(
            url, headers={**asked, "origin": "https://other.example"}
        )
        assert "access-control-allow-origin" not in refused.headers


async def test_no_page_may_call_by_default(gateway: Running):
    [session] = await gateway.open()
    page = {"origin": "https://page.example"}
    answer = await gateway.http.post(
        session.base_url + "/chat/completions", json=CHAT, headers=page
    )
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]


WRONG_PATHS = [
    "/chat/completions",
    "/v1/chat/completions/",
    "/v1//chat/completions",
    "/v1/v1/messages",
    "/messages",
    "/v1",
    "",
]


@pytest.mark.parametrize("path", WRONG_PATHS)
async def test_a_base_url_that_is_a_bit_wrong_gets_a_hint(gateway: Running, path: str):
    [session] = await gateway.open()
    answer = await gateway.http.post(f"{gateway.url}/s/{session.key}{path}", json=CHAT)
    assert answer.status_code == 404
    assert "http://HOST:PORT/s/KEY/v1" in answer.json()["error"]["message"]
    assert session.key not in answer.text
    unknown = await gateway.http.post(
        f"{gateway.url}/s/{session.key}/v1/embeddings", json=CHAT
    )
    assert "base URL" not in unknown.json()["error"]["message"]


NOT_JSON = {
    b"": "it is empty",
    b"reward=1": "",
    b'{"model": "tiny"': "",
    b'{"detail": "\xff"}': "not UTF-8 (byte 12)",
    b'{"detail": "\xed\xa0\x80"}': "lone surrogate",
}


@every_route
async def test_a_body_that_is_no_json_is_called_so(gateway: Running, route: Route):
    [session] = await gateway.open()
    surrogates = {
        b'{"detail": "\\ud83d\\ude00 \\ud83d"}': "is no character (byte 25)",
        b'{"detail": "\\\\ud83d \\udc00"}': "is no character (byte 20)",
    }
    for body, reason in (NOT_JSON | surrogates).items():
        answer = await gateway.http.post(session.base_url + route.path, content=body)
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400
        assert message.startswith("the body is not valid JSON: ")
        assert reason in message


async def test_the_session_api_calls_it_so_too(gateway: Running):
    [session] = await gateway.open()
    for path in ("reward", "numbers", "abort"):
        for body, reason in NOT_JSON.items():
            if not body:
                continue
            answer = await gateway.http.post(
                f"{gateway.url}/sessions/{session.id}/{path}",
                content=body,
                headers={"authorization": f"Bearer {session.key}"},
            )
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "invalid_json"
            assert answer.json()["error"]["message"].startswith(
                "the body is not valid JSON: "
            )
            assert reason in answer.json()["error"]["message"]
    headers = {"authorization": f"Bearer {session.key}"}
    url = f"{gateway.url}/sessions/{session.id}/abort"
    answer = await gateway.http.post(
        url, content=b'{"detail": "\\ud800"}', headers=headers
    )
    assert answer.json()["error"]["message"] == (
        "detail: a lone surrogate, half of a UTF-16 pair, is no character"
    )


async def test_calls_that_need_no_body_take_none(gateway: Running):
    child_of, finished, aborted = await gateway.open(members=3, purpose="serve")
    await gateway.client(finished).chat.completions.create(model="tiny", messages=[ASK])

    async def call(session, name: str, **options):
        headers = {"authorization": f"Bearer {session.key}"}
        return await gateway.http.post(
            f"{gateway.url}/sessions/{session.id}/{name}", headers=headers, **options
        )

    assert (await call(child_of, "children")).status_code == 201
    ended = await call(finished, "finish")
    assert ended.status_code == 200, ended.text
    assert ended.json()["outcome"] == "finished", ended.text
    ended = await call(aborted, "abort")
    assert ended.status_code == 200, ended.text
    assert ended.json()["reason"] == "aborted", ended.text
    rewarded = await call(child_of, "reward")
    assert rewarded.json()["error"]["param"] == "reward"
    # what curl sends with -d
    form = {"content-type": "application/x-www-form-urlencoded"}
    rewarded = await gateway.http.post(
        f"{gateway.url}/sessions/{child_of.id}/reward",
        content=b'{"reward": 0.5}',
        headers={"authorization": f"Bearer {child_of.key}", **form},
    )
    assert rewarded.status_code == 200, rewarded.text
