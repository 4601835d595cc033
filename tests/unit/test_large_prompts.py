"""A large prompt is tokenised beside the event loop: other sessions and /health do not wait for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from test_gateway_turns import (
    ASK,
    MORE,
    eventually,
    model,  # noqa: F401 - a fixture
    renderer,  # noqa: F401 - a fixture
    running,
)

from invrl.gateway.model_folder import _FastTokenizer
from invrl.gateway.rendering import Renderer

LARGE = "word " * 10_000


@pytest.mark.parametrize("path", ["/chat/completions", "/completions"])
async def test_others_are_served_while_a_large_prompt_is_tokenised(
    tmp_path: Path,
    model: Path,  # noqa: F811
    renderer: Renderer,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    path: str,
):
    encode = _FastTokenizer.encode
    begun, may_end = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def slow(self: _FastTokenizer, text: str) -> list[int]:
        if len(text) >= len(LARGE):
            threads.append(threading.current_thread())
            begun.set()
            assert may_end.wait(60)
        return encode(self, text)

    monkeypatch.setattr(_FastTokenizer, "encode", slow)
    async with running(tmp_path, model, renderer, context_length=60_000) as gateway:
        [session, other] = await gateway.open(members=2)
        first = (await gateway.http.post(f"{session.base_url}/chat/completions", json=body(ASK))).json()
        history = [ASK, first["choices"][0]["message"]]
        large = {"role": "user", "content": LARGE}
        asked = body(*history, large) if path == "/chat/completions" else {"model": "tiny", "prompt": LARGE}
        call = asyncio.create_task(gateway.http.post(session.base_url + path, json=asked))
        await eventually(begun.is_set)
        assert (await gateway.http.get(gateway.url + "/health")).status_code == 200
        answer = await gateway.http.post(f"{other.base_url}/chat/completions", json=body(MORE))
        assert answer.status_code == 200
        assert not call.done()
        may_end.set()
        assert (await call).status_code == 200
        assert len(threads) == 1
        assert threads[0] is not threading.main_thread()
        sent = gateway.engine.requests[-1]["input_ids"]
        assert renderer.shown(sent).count("word ") == 10_000
        if path == "/chat/completions":
            assert gateway.turns(session)[1].parent_id == gateway.turns(session)[0].id


def body(*messages: object) -> dict[str, object]:
    return {"model": "tiny", "messages": list(messages), "max_tokens": 20}


def test_the_ids_of_a_large_text_are_those_of_its_tokenizer(renderer: Renderer):  # noqa: F811
    def whole(text: str) -> Sequence[int]:
        return renderer._tokenizer._backend.encode(text, add_special_tokens=False).ids  # type: ignore[attr-defined]

    for text in (LARGE, "<|im_start|>user\n" + LARGE + "ünï 🙂<|im_end|>"):
        assert renderer.encode(text) == whole(text)
