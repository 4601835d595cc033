"""`invrl serve --adapter`: the model and two adapters on one engine, chosen by name by
OpenAI's client."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from adapter_folders import adapted_model, make_adapter
from tiny_model import make_tiny_model
from transformers import AutoModelForCausalLM

from e2e.recorded_turns import RecordedTurn, logprobs, recorded_turns
from e2e.runs import DEADLINE_S, ROOT

QV = ("q_proj", "v_proj")


class Server:
    """`invrl serve` on the tiny model, with an adapter of all projections and a smaller
    one of q and v."""

    def __init__(self, folder: Path) -> None:
        self.model = folder / "model"
        make_tiny_model(self.model)
        self.run = folder / "served"
        self.adapters = {
            "all": make_adapter(folder / "all a", self.model, rank=8, seed=1),
            "v1/qv": make_adapter(folder / "qv", self.model, targets=QV, seed=2),
        }
        self._log = folder / "serve.log"
        flags = ["--model-path", str(self.model), "--engine.dtype", "float32"]
        flags += ["--run-root", str(folder), "--run-name", self.run.name]
        for name, adapter in self.adapters.items():
            flags += ["--adapter", f"{name}={adapter}"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "invrl.cli", "serve", *flags],
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
            )

    def wait(self) -> openai.AsyncOpenAI:
        """Wait until it serves. Returns a client of its first session."""
        deadline = time.monotonic() + DEADLINE_S / 2
        while "INVRL_ENV_KEY=" not in (text := self._log.read_text()):
            assert self._process.poll() is None, text
            assert time.monotonic() < deadline, text
            time.sleep(0.1)
        values = dict(re.findall(r"(OPENAI_\w+)=(\S+)", text))
        assert "serving model, all, v1/qv" in text
        return openai.AsyncOpenAI(
            base_url=values["OPENAI_BASE_URL"],
            api_key=values["OPENAI_API_KEY"],
            max_retries=0,
        )

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(120)
        finally:
            self._process.kill()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    started = Server(tmp_path)
    try:
        yield started
    finally:
        started.stop()


async def ask(client: openai.AsyncOpenAI, model: str, question: str) -> list[float]:
    """Return the log-probs of a reply by this model."""
    reply = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=8,
        temperature=1.0,
        logprobs=True,
    )
    assert reply.model == model
    sampled = reply.choices[0].logprobs
    assert sampled is not None
    return [token.logprob for token in sampled.content or ()]


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S)
async def test_a_name_chooses_the_model_or_an_adapter_on_one_engine(
    server: Server,
) -> None:
    client = server.wait()
    names = ["model", *server.adapters]
    # One prompt: what the engine has cached of it is of another model each time.
    asked = [(name, "say fox") for _ in range(2) for name in names]
    shown = [await ask(client, *question) for question in asked]
    # Then all in one batch.
    batch = [(name, f"say {word}") for word in ("dog", "cat") for name in names]
    shown += await asyncio.gather(*(ask(client, *question) for question in batch))
    with pytest.raises(openai.NotFoundError, match="`model`, `all`, `v1/qv`"):
        await ask(client, "qv", "say fox")
    turns = recorded_turns(server.run)
    models: dict[str, torch.nn.Module] = {
        "model": AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.float32)
    }
    for name, adapter in server.adapters.items():
        models[name] = adapted_model(server.model, adapter)
    for (name, _), seen in zip([*asked, *batch], shown, strict=True):
        turn = turn_shown(turns, seen)
        for other, model in models.items():
            gap = np.abs(logprobs(model, turn) - turn.logprobs_T).max()
            if other == name:
                assert gap < 1e-4, (name, gap)
            else:
                assert gap > 1e-2, (name, other, gap)


def turn_shown(turns: list[RecordedTurn], seen: list[float]) -> RecordedTurn:
    """Return the recorded turn of a reply, by its log-probs."""
    [turn] = [
        turn
        for turn in turns
        if len(turn.sampled) >= len(seen)
        and np.allclose(turn.logprobs_T[: len(seen)], seen, atol=1e-6)
    ]
    return turn
