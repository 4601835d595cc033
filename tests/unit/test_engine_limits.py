"""How long a conversation an engine takes, and how large its KV cache is, on CPU and on
a GPU."""

import json
from pathlib import Path

import pytest

from invrl.engines.client.sglang_client import EngineLimits, SglangClient
from invrl.engines.config import EngineConfig
from invrl.engines.launch import engine_server
from invrl.errors import SessionError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = {"model_type": "llama", "vocab_size": 512, "max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_ranks_of_cpu_engines_take_the_cores_in_turn(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_server.os, "sched_getaffinity", lambda _: {3, 5})
    several = EngineConfig(tp_size=3)
    no_queue = {"SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "false"}
    for gpus, index, expected in (
        (0, 0, {**no_queue, "SGLANG_CPU_OMP_THREADS_BIND": "3|5|3"}),
        (0, 1, {**no_queue, "SGLANG_CPU_OMP_THREADS_BIND": "5|3|5"}),
        (1, 1, no_queue),
    ):
        monkeypatch.setattr(engine_server, "count_gpus", lambda gpus=gpus: gpus)
        assert engine_server._ranks_environment(several, index) == expected
        assert engine_server._ranks_environment(EngineConfig(), index) == {}
        command = engine_server._command(several, model, 1)
        assert command[command.index("--tp-size") + 1] == "3"
        assert "--tp-size" not in engine_server._command(EngineConfig(), model, 1)


@pytest.mark.parametrize(
    ("token", "is_sent"),
    [
        (0, True),
        (511, True),
        (512, False),
        (-1, False),
    ],
)
async def test_an_id_outside_of_the_vocabulary_is_never_sent(
    token: int, is_sent: bool
) -> None:
    limits = EngineLimits(vocab_size=512, context_length=2048)
    async with SglangClient("http://127.0.0.1:1", limits=limits) as client:
        if is_sent:
            client.validate([token], 1)
        else:
            with pytest.raises(SessionError, match="vocabulary"):
                client.validate([token], 1)


@pytest.mark.parametrize(
    ("max_total_tokens", "context_length"),
    [
        (None, 2048),
        (4096, 2048),
        (1000, 936),
    ],
)
def test_context_length_is_bounded_by_model_and_cache(
    model: Path, max_total_tokens: int | None, context_length: int
) -> None:
    limits = EngineLimits.of(model, max_total_tokens=max_total_tokens)
    assert limits == EngineLimits(vocab_size=512, context_length=context_length)


@pytest.mark.parametrize(
    ("gpus", "setting", "expected"),
    [
        (0, None, 16384),
        (0, 900, 900),
        (1, None, None),
        (1, 900, 900),
    ],
)
def test_cache_size_is_the_setting_or_sglangs_choice_on_a_gpu(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    setting: int | None,
    expected: int | None,
) -> None:
    monkeypatch.setattr(engine_server, "count_gpus", lambda: gpus)
    config = EngineConfig(max_total_tokens=setting)
    assert engine_server.max_total_tokens(config) == expected
    command = engine_server._command(config, model, 1)
    asked = [
        command[index + 1]
        for index, word in enumerate(command)
        if word == "--max-total-tokens"
    ]
    assert asked == ([] if expected is None else [str(expected)])
