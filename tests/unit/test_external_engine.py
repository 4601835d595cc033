"""Engines that the run has not started: what is refused before anything is trained, and
with which words."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from invrl.cli import main as cli
from invrl.cli.flags import parse_flags
from invrl.engines.config import EngineConfig
from invrl.engines.inside_sglang.engine_identity import (
    IDENTITY_PATH,
    EngineIdentity,
    EngineTraits,
    sampling_key,
)
from invrl.engines.launch.external_engine import ExternalEngine, wanted_traits
from invrl.errors import ConfigError, ServerError
from invrl.run.settings.config import resolve

KEY = "0123456789abcdef"


class ScriptedEngine(ThreadingHTTPServer):
    """Answers as an engine that `invrl engine` has started."""

    identity: EngineIdentity
    identity_status = 200
    key = KEY
    asked: list[str]

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: ScriptedEngine

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.headers["Authorization"] != f"Bearer {self.server.key}":
            self._answer(401, b"{}")
        elif self.path == IDENTITY_PATH:
            self._answer(
                self.server.identity_status, msgspec.json.encode(self.server.identity)
            )

    def do_POST(self) -> None:
        self.server.asked.append(self.path)
        self.rfile.read(int(self.headers["Content-Length"]))
        samples = self.path == "/generate"
        key = (
            sampling_key(self.server.key, self.server.identity.start)
            if samples
            else self.server.key
        )
        self._answer(
            200 if self.headers["Authorization"] == f"Bearer {key}" else 401, b"{}"
        )

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


def traits(
    model: Path, *, in_place: bool = False, record_experts: bool = False
) -> EngineTraits:
    return wanted_traits(
        EngineConfig(dtype="float32"),
        model,
        in_place=in_place,
        record_experts=record_experts,
    )


@pytest.fixture
def scripted(tiny_model: Path) -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine()
    held = msgspec.structs.replace(
        traits(tiny_model), overlap_schedule=True, routed_experts=False
    )
    engine.identity = EngineIdentity(start="first", total_tokens=4096, traits=held)
    thread = threading.Thread(
        target=engine.serve_forever, kwargs={"poll_interval": 0.01}
    )
    thread.start()
    yield engine
    engine.shutdown()
    thread.join()
    engine.server_close()


def external(
    url: str, wanted: EngineTraits, *, tokens: int = 4096, timeout_s: float = 60.0
):
    return ExternalEngine(
        "external-0",
        url,
        key=KEY,
        traits=wanted,
        total_tokens=tokens,
        start_timeout_s=timeout_s,
    )


def test_sampling_key_of_an_external_engine_changes_with_each_start(
    scripted: ScriptedEngine, tiny_model: Path
) -> None:
    """An engine is also freed of what a killed run left: before it is used, and when it
    is left."""
    first = external(scripted.url, traits(tiny_model))
    first.wait_ready()
    assert first.api_key == sampling_key(KEY, "first") != first.admin_key
    freed = ["/end_weight_update", "/continue_generation"]
    assert scripted.asked == [IDENTITY_PATH, *freed, "/generate"]
    scripted.asked.clear()
    first.stop()
    first.stop()
    assert scripted.asked == freed
    scripted.identity = msgspec.structs.replace(scripted.identity, start="second")
    second = external(scripted.url, traits(tiny_model))
    second.wait_ready()
    assert second.api_key == sampling_key(KEY, "second") != sampling_key(KEY, "first")


@pytest.mark.parametrize(
    ("trait", "value", "fix"),
    [
        ("invrl", "0.0.9", "invrl engine"),
        ("model_type", "llama", "--model-path"),
        ("vocab_size", 7, "--model-path"),
        ("num_layers", 48, "--model-path"),
        ("hidden_size", 8, "--model-path"),
        ("dtype", "bfloat16", "--engine.dtype"),
        ("tp_size", 2, "--engine.tp-size"),
        ("weight_loaders", [], "invrl.weights.loader.weight_loader.run"),
        ("streams_new_tokens", False, "invrl engine"),
        ("shared_experts_fusion", True, "invrl engine"),
        ("overlap_schedule", True, "--weights.inflight in_place"),
        ("routed_experts", False, "--routing-replay engine"),
        ("seeded_sampling", True, "--engine.seeded-sampling"),
    ],
)
def test_external_engine_with_different_traits_is_refused(
    scripted: ScriptedEngine, tiny_model: Path, trait: str, value: object, fix: str
) -> None:
    wanted = traits(tiny_model, in_place=True, record_experts=True)
    scripted.identity = EngineIdentity(start="first", total_tokens=4096, traits=wanted)
    external(scripted.url, wanted).wait_ready()
    differing = msgspec.structs.replace(wanted, **{trait: value})
    scripted.identity = EngineIdentity(
        start="first", total_tokens=4096, traits=differing
    )
    with pytest.raises(ConfigError) as raised:
        external(scripted.url, wanted).wait_ready()
    assert raised.value.value == scripted.url
    assert raised.value.reason.startswith(f"{trait} is {value!r} there")
    assert fix in raised.value.fix


def test_every_engine_trait_is_compared(tiny_model: Path) -> None:
    from invrl.engines.launch import external_engine

    assert set(external_engine._FIXES) == {
        field.name for field in msgspec.structs.fields(EngineTraits)
    }


def test_refusal_names_the_external_engine_and_not_its_key(
    scripted: ScriptedEngine, tiny_model: Path
) -> None:
    wanted = traits(tiny_model)

    def refusal(tokens: int = 4096) -> ConfigError:
        with pytest.raises(ConfigError) as raised:
            external(scripted.url, wanted, tokens=tokens).wait_ready()
        assert KEY not in str(raised.value)
        assert scripted.url in str(raised.value)
        return raised.value

    assert "--engine.max-total-tokens 5000" in refusal(tokens=5000).fix
    scripted.identity_status = 404
    assert "not started by invrl" in refusal().reason
    scripted.key = "another"
    assert "INVRL_ENGINE_KEY" in refusal().fix


def test_silent_external_engine_is_named_with_a_fix(
    scripted: ScriptedEngine, tiny_model: Path
) -> None:
    scripted.identity_status = 503
    with pytest.raises(
        ServerError, match=rf"external-0 \({scripted.url}\).*503.*invrl engine"
    ):
        external(scripted.url, traits(tiny_model), timeout_s=0.0).wait_ready()
    with pytest.raises(
        ServerError, match=r"http://127\.0\.0\.1:1.*no answer.*invrl engine"
    ):
        external("http://127.0.0.1:1", traits(tiny_model), timeout_s=0.0).wait_ready()


def test_stopping_ends_the_wait_for_an_external_engine(tiny_model: Path) -> None:
    engine = external("http://127.0.0.1:1", traits(tiny_model), timeout_s=86_400.0)
    errors: list[Exception] = []

    def wait() -> None:
        try:
            engine.wait_ready()
        except ServerError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    engine.stop()
    waiting.join(120)
    assert "not waited for" in str(errors[0])


DISK = ["--weights.transport", "disk"]


@pytest.mark.parametrize(
    ("flags", "field", "words"),
    [
        (["--num-engines", "0"], "engine.num_engines", "external_engines"),
        (
            [*DISK, "--external-engines", "a:30000"],
            "engine.external_engines",
            "http://",
        ),
        (
            [*DISK, "--external-engines", "https://a:30000"],
            "engine.external_engines",
            "http://",
        ),
        (
            [*DISK, "--external-engines", "http://a"],
            "engine.external_engines",
            "no port",
        ),
        (
            [*DISK, "--external-engines", "http://a:99999"],
            "engine.external_engines",
            "range",
        ),
        (
            [*DISK, "--external-engines", "http://k@a:1"],
            "engine.external_engines",
            "environment",
        ),
        (
            [*DISK, "--external-engines", "http://a:1/v1"],
            "engine.external_engines",
            "path",
        ),
        (
            [*DISK, "--external-engines", "http://a:1,http://a:1/"],
            "engine.external_engines",
            "twice",
        ),
        (
            [*DISK, "--external-engines", "http://a:1", "--router", "smg"],
            "engine.router",
            "key",
        ),
        (
            ["--external-engines", "http://a:1"],
            "weights.transport",
            "memory",
        ),
        (
            ["--external-engines", "http://a:1", "--weights.transport", "bucket"],
            "weights.transport",
            "memory",
        ),
        (
            ["--external-engines", "http://a:1", "--weights.transport", "collective"],
            "weights.transport",
            "loopback",
        ),
    ],
)
def test_settings_that_external_engines_cannot_serve_are_refused(
    flags: list[str], field: str, words: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve(*parse_flags(flags))
    assert raised.value.field == field
    assert words in raised.value.reason


@pytest.mark.parametrize(
    "transport",
    [
        ["disk"],
        ["delta"],
        ["delta", "--weights.host", "127.0.0.1"],
        ["collective", "--weights.host", "127.0.0.1"],
    ],
)
def test_fleet_may_consist_of_external_engines_only(transport: list[str]) -> None:
    flags = ["--num-engines", "0", "--external-engines", "http://a:1", "http://b:2"]
    config = resolve(*parse_flags([*flags, "--weights.transport", *transport]))
    assert config.engine.external_engines == ("http://a:1", "http://b:2")
    assert "KEY" not in config.to_toml()


def test_command_that_sends_no_weights_needs_no_weight_transport() -> None:
    from invrl.cli.command_settings import settings_for_command

    for command in ("serve", "eval"):
        flags = parse_flags(["--external-engines", "http://a:1"], command=command)
        config = resolve(*flags, settings_for_command(command).source())
        assert config.engine.external_engines == ("http://a:1",)


@pytest.mark.parametrize("command", ["train", "serve"])
def test_external_engines_need_their_key(
    command: str,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("INVRL_ENGINE_KEY", raising=False)
    flags = [
        "--external-engines",
        "http://a:1",
        "--model-path",
        str(tiny_model),
        "--run-root",
        str(tmp_path),
    ]
    if command == "train":
        flags += [*DISK, "--rollout-function-path", "rollout_fns.calculator:rollout"]
        flags += ["--task-source-path", "rollout_fns.calculator:task_source"]
    assert cli.main([command, *flags]) == 2
    assert "INVRL_ENGINE_KEY" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "flags", "words"),
    [
        ("", [], "answers nobody without a key"),
        ("short", [], "16 or more"),
        ("0123456789 abcdef", [], "letters, digits"),
        ("-0123456789abcdef", [], "letters, digits"),
        (KEY, ["--port", "70000"], "not a port"),
        (KEY, ["--host", "gpu-7"], "not an IP address"),
        (KEY, ["--num-engines", "2"], "invrl engine"),
    ],
)
def test_engine_command_refuses_unsuitable_settings_without_printing_the_key(
    key: str,
    flags: list[str],
    words: str,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("INVRL_ENGINE_KEY", key)
    assert cli.main(["engine", "--model-path", str(tiny_model), *flags]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert key == "" or key not in err


def test_engine_identity_survives_json(tiny_model: Path) -> None:
    """What a run wants may be undecided; what an engine says is not."""
    identity = EngineIdentity(start="s", total_tokens=1, traits=traits(tiny_model))
    as_json = json.loads(msgspec.json.encode(identity))
    assert msgspec.convert(as_json, EngineIdentity) == identity
