"""A teacher over HTTP: which tokens it is asked for, what is made of its answers, and
how it can fail."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import make_tiny_model
from tokenizers import Tokenizer

from invrl.errors import ConfigError, DeadlineError, ServerError
from invrl.run.loop import teacher as teacher_module
from invrl.run.loop.teacher import Teacher
from invrl.types.batches import GrammarSpan, TrainBatch, TrainSample
from invrl.types.weights import WeightVersion

KEY = "a-key-of-the-teacher"
Answer = Callable[[dict[str, Any]], Any]


class TeacherServer:
    """Answers as SGLang does: the log-prob of a token is -id / 100, the first entry has
    none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.requests: list[dict[str, Any]] = []
        self.generate: Answer = self.scores
        self.tokens: Answer = self.tokenized
        self.failures = 0
        self.at_once = 0
        self.most_at_once = 0
        lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer({"model_path": "a-teacher"})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/v1/tokenize":
                    self._answer(server.tokens(body))
                    return
                with lock:
                    server.requests.append(body)
                    server.at_once += 1
                    server.most_at_once = max(server.most_at_once, server.at_once)
                try:
                    if server.failures:
                        server.failures -= 1
                        self.send_error(503)
                        return
                    self._answer(server.generate(body))
                finally:
                    with lock:
                        server.at_once -= 1

            def _answer(self, answer: Any) -> None:
                if self.headers.get("Authorization") != f"Bearer {KEY}":
                    self.send_error(401)
                    return
                data = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(
            target=self._http.serve_forever,
            kwargs={"poll_interval": 0.01},
            daemon=True,
        ).start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def scores(self, body: dict[str, Any]) -> Any:
        start = body["logprob_start_len"]
        entries: list[list[Any]] = [
            [-token / 100, token, None] for token in body["input_ids"][start:]
        ]
        entries[0][0] = None
        return {"meta_info": {"input_token_logprobs": entries}}

    def tokenized(self, body: dict[str, Any]) -> Any:
        encodings = self.tokenizer.encode_batch(
            body["prompt"], add_special_tokens=body["add_special_tokens"]
        )
        return {"tokens": [encoding.ids for encoding in encodings]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    model = make_tiny_model(tmp_path_factory.mktemp("model") / "qwen3")
    return Tokenizer.from_file(str(Path(model) / "tokenizer.json"))


@pytest.fixture
def server(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TeacherServer]:
    monkeypatch.setattr(teacher_module, "_PAUSE_S", 0.01)
    server = TeacherServer(tokenizer)
    yield server
    server.stop()


def teacher_at(
    url: str, *, key: str = KEY, timeout_s: float = 60.0, concurrency: int = 2
) -> Teacher:
    return Teacher(url, key=key, timeout_s=timeout_s, concurrency=concurrency)


def batch_of(*rows: tuple[list[int], list[int]], **fields: Any) -> TrainBatch:
    """Rows of ids and of the places that are trained."""
    samples: list[TrainSample] = []
    for tokens, places in rows:
        mask_T = np.isin(np.arange(len(tokens)), places)
        values: dict[str, Any] = {
            "tokens_T": np.array(tokens, np.int32),
            "loss_mask_T": mask_T,
            "rollout_logprobs_T": np.zeros(len(tokens), np.float32),
            "versions_T": np.where(mask_T, 0, -1).astype(np.int32),
            "reward": 0.0,
            "temperature": 1.0,
            "group_id": "g",
            "rollout_id": "r",
            "attempt": 0,
            "turn_ids": (),
            **fields,
        }
        samples.append(TrainSample(**values))
    zeros = tuple(np.zeros(len(sample.tokens_T), np.float32) for sample in samples)
    return TrainBatch(
        batch_id=0, version=WeightVersion(0), samples=tuple(samples), advantages=zeros
    )


async def test_each_trained_token_gets_its_teacher_logprob(
    server: TeacherServer,
) -> None:
    batch = batch_of(([5, 6, 7, 8, 9, 10], [2, 4]), ([1, 2, 3], [1, 2]), ([4, 5], []))
    scored = await teacher_at(server.url).score(batch)
    columns = [sample.columns["teacher"].tolist() for sample in scored.samples]
    expected = [
        [0, 0, -0.07, 0, -0.09, 0],
        [0, -0.02, -0.03],
        [0, 0],
    ]
    for column, values in zip(columns, expected, strict=True):
        assert column == pytest.approx(values)
    sent = sorted(server.requests, key=lambda body: len(body["input_ids"]))
    assert [(body["input_ids"], body["logprob_start_len"]) for body in sent] == [
        ([1, 2, 3], 0),
        ([5, 6, 7, 8, 9], 1),  # what comes after the last trained token is not sent
    ]
    assert all(body["sampling_params"]["max_new_tokens"] == 0 for body in sent)


async def test_temporary_failure_of_the_teacher_is_retried(
    server: TeacherServer,
) -> None:
    server.failures = 2
    scored = await teacher_at(server.url).score(batch_of(([1, 2], [1])))
    assert scored.samples[0].columns["teacher"].tolist() == pytest.approx([0, -0.02])
    server.failures = 3
    with pytest.raises(ServerError, match="answered /generate with 503"):
        await teacher_at(server.url).score(batch_of(([1, 2], [1])))


async def test_teacher_scores_at_most_the_set_number_of_samples_at_once(
    server: TeacherServer,
) -> None:
    scores = server.generate

    def slowly(body: dict[str, Any]) -> Any:
        time.sleep(0.02)
        return scores(body)

    server.generate = slowly
    await teacher_at(server.url, concurrency=3).score(batch_of(*[([1, 2], [1])] * 12))
    assert len(server.requests) == 12
    assert server.most_at_once <= 3


async def test_hung_teacher_ends_at_the_deadline(server: TeacherServer) -> None:
    released = threading.Event()
    server.generate = lambda body: released.wait(60)
    try:
        with pytest.raises(DeadlineError, match="the teacher at"):
            await teacher_at(server.url, timeout_s=0.2).score(batch_of(([1, 2], [1])))
    finally:
        released.set()


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([[None, 1, None]], "scored 0 tokens of a sample, not 1"),
        ([[None, 1, None], [-1.0, 3, None]], "its vocabulary is another one"),
        ([[None, 1, None], [None, 2, None]], "scored token 2 with None"),
        (None, "scored no tokens"),
    ],
)
async def test_teacher_reply_that_does_not_fit_the_sample_is_an_error(
    server: TeacherServer, entries: Any, reason: str
) -> None:
    server.generate = lambda body: {"meta_info": {"input_token_logprobs": entries}}
    with pytest.raises(ServerError, match=reason):
        await teacher_at(server.url).score(batch_of(([1, 2], [1])))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"temperature": 0.7}, "at temperature 0.7"),
        (
            {"grammars": (GrammarSpan(start=1, end=2, grammar="{}"),)},
            "a grammar constrained",
        ),
    ],
)
async def test_samples_sampled_from_a_changed_distribution_are_refused(
    server: TeacherServer, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        await teacher_at(server.url).score(batch_of(([1, 2], [1]), **fields))
    assert not server.requests


# ----------------------------------------------------------------- before the start


async def test_teacher_with_the_same_tokenizer_is_accepted(
    server: TeacherServer, tokenizer: Tokenizer
) -> None:
    assert await teacher_at(server.url).check(tokenizer) == "a-teacher"


async def test_teacher_with_another_tokenizer_is_refused(
    server: TeacherServer, tokenizer: Tokenizer
) -> None:
    tokenized = server.tokens

    def others(body: dict[str, Any]) -> Any:
        answer = tokenized(body)
        answer["tokens"][7] = [1, 1]
        return answer

    server.tokens = others
    with pytest.raises(
        ConfigError, match=r"its tokens are others: .* is \[1, 1\] there"
    ):
        await teacher_at(server.url).check(tokenizer)


async def test_wrong_teacher_key_and_missing_teacher_are_config_errors(
    server: TeacherServer, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ConfigError, match="with 401") as refusal:
        await teacher_at(server.url, key="another-key").check(tokenizer)
    assert "another-key" not in str(refusal.value)
    server.stop()
    with pytest.raises(ConfigError, match="cannot connect"):
        await teacher_at(server.url).check(tokenizer)
