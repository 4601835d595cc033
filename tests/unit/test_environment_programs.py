"""Environments that invrl starts: installed, tried, run against a gateway, and refused.
The toy environment has no packages; its virtual environment is a real one."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from leasing_gateway import KEY, LeasingGateway, leasing_gateway

from invrl.cli.commands.environment import episode_text
from invrl.cli.main import main
from invrl.environments import episode_process, episodes
from invrl.environments.arguments import read_values
from invrl.environments.config import split_arguments
from invrl.environments.environment_folder import EnvironmentFolder, catalog
from invrl.environments.episode_process import (
    MOST_DEATHS,
    LeasingEnvironment,
    Order,
    play,
)
from invrl.environments.installation import (
    Argument,
    check_installed,
    describe,
    install,
    virtual_environment,
)
from invrl.errors import ConfigError, ServerError

TOY = EnvironmentFolder(Path(__file__).parents[1] / "toy_environment")
pytestmark = pytest.mark.timeout(120)  # of a test; a lost outcome is waited for


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as variables:
        cache = tmp_path_factory.mktemp("cache")
        variables.setenv("XDG_CACHE_HOME", str(cache))
        variables.delenv("INVRL_ENV_KEY", raising=False)
        install(TOY)
        yield


def order(gateway: LeasingGateway, **arguments: Any) -> Order:
    return Order(
        arguments=arguments,
        step_timeout_s=arguments.pop("step_timeout_s", 20.0),
        url=gateway.url,
        key=KEY,
        concurrency=2,
    )


def leasing(gateway: LeasingGateway, **arguments: Any) -> LeasingEnvironment:
    return LeasingEnvironment(
        TOY, order(gateway, **arguments), pause=lambda seconds: None
    )


def test_every_leased_rollout_finishes_once_with_its_reward() -> None:
    with leasing_gateway(groups=5, members=3) as gateway:
        leasing(gateway).run()
    assert len(gateway.ends) == 15
    finish = {"action": "finish", "reward": 1.0, "components": {"part": 0.25}}
    assert all(ends == [finish] for ends in gateway.ends.values())


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        ("nan", "reward is nan, not a finite number"),
        ("too much", "the reward 1.5 is outside of the declared range 0 to 1"),
        ("no number", "could not convert string to float: 'much'"),
        ("part", "part is inf, not a finite number"),
        ("refused", "HTTP 422: too large"),
        ("nothing", "the episode returned None, without a reward"),
        ("import", "No module named 'a_package_that_nobody_has'"),
    ],
)
def test_a_wrong_result_aborts_its_session_with_the_reason(
    behave: str, reason: str
) -> None:
    with leasing_gateway(groups=1) as gateway:
        leasing(gateway, behave=behave).run()
    for ends in gateway.ends.values():
        [end] = ends
        assert end["action"] == "abort"
        assert reason in end["detail"]


@pytest.mark.parametrize(
    ("behave", "place"), [("hang in reset", "(reset)"), ("hang in step", "(step)")]
)
def test_an_environment_that_hangs_is_aborted_at_its_deadline_and_started_again(
    behave: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with leasing_gateway(groups=2) as gateway:
        leasing(gateway, behave=behave, step_timeout_s=0.5).run()
    assert "ended with code 75" in capsys.readouterr().out
    for ends in gateway.ends.values():
        [end] = ends
        assert end["action"] == "abort"
        assert "the environment hangs: 0.5 s " in end["detail"]
        assert place in end["detail"]


def test_open_sessions_of_a_dead_program_are_aborted_and_the_next_life_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with leasing_gateway(groups=3, members=1) as gateway:
        leasing(gateway, behave="die").run()
    assert len(gateway.ends) == 3
    for ends in gateway.ends.values():
        assert [end["action"] for end in ends] == ["abort"]
        assert ends[0]["reason"] == "environment_gone"
        assert "ended with code -9" in ends[0]["detail"]
    assert capsys.readouterr().out.count("it is started again") == 3


def test_deaths_in_a_row_without_a_finished_episode_are_limited() -> None:
    pauses: list[float] = []
    with leasing_gateway(groups=99, members=1) as gateway:
        environment = LeasingEnvironment(
            TOY, order(gateway, behave="die"), pause=pauses.append
        )
        with pytest.raises(ServerError, match=f"died {MOST_DEATHS} times in a row"):
            environment.run()
    assert pauses == [1.0, 2.0, 4.0, 8.0]
    assert gateway.leased == MOST_DEATHS


def test_no_key_is_in_what_the_environment_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with leasing_gateway(groups=2) as gateway:
        leasing(gateway, behave="print keys").run()
    printed = capsys.readouterr().out
    assert printed.count("my key is") == printed.count("from a child:") == 4
    assert not [key for key in (KEY, *gateway.keys) if key in printed]


def test_keys_are_neither_arguments_nor_variables_of_the_program() -> None:
    seen: list[bytes] = []

    def look(report: Any) -> None:
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                with contextlib.suppress(OSError):  # it has ended
                    command = (process / "cmdline").read_bytes()
                    if b"episodes.py" in command and b"toy_environment" in command:
                        seen.append(command + (process / "environ").read_bytes())

    with leasing_gateway(groups=1) as gateway:
        asked = order(gateway, pause_s=0.3)
        code = play(TOY, "run", asked, on_report=look, show=lambda line: None)
    assert code == 0
    assert seen
    assert all(KEY.encode() not in text and b"isk-" not in text for text in seen)


def endpoint_flags(gateway: LeasingGateway) -> list[str]:
    return ["--base-url", f"{gateway.url}/v1", "--model", "toy"]


def test_try_prints_conversation_reward_and_components(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with leasing_gateway(groups=0) as gateway:
        code = main(["environment", "try", str(TOY.path), *endpoint_flags(gateway)])
    assert code == 0
    printed = capsys.readouterr().out
    for number in range(3):
        episode = [
            f"--- episode {number}",
            f"user: task {number}",
            "assistant: a reply",
            "reward: 1",
            "  part: 0.25",
        ]
        assert "\n".join(episode) in printed


def test_try_fails_when_an_episode_has_no_reward(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with leasing_gateway(groups=0) as gateway:
        wrong = ["--environment.args", "behave=nan", "--episodes", "1"]
        code = main(
            ["environment", "try", str(TOY.path), *endpoint_flags(gateway), *wrong]
        )
    assert code == 1
    output = capsys.readouterr()
    assert "FAILED" in output.out
    assert "0 of 1 episodes have a reward" in output.err


def test_try_shows_no_key_of_another_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "plain-text-of-a-key")
    with leasing_gateway(groups=0) as gateway:
        prints = ["--environment.args", "behave=print keys", "--episodes", "1"]
        code = main(
            ["environment", "try", str(TOY.path), *endpoint_flags(gateway), *prints]
        )
    assert code == 0
    printed = capsys.readouterr().out
    assert "my key is (not shown)" in printed
    assert "from a child: (not shown)" in printed
    assert "plain-text-of-a-key" not in printed


def left_behind(command: Path) -> bool:
    """Whether it is the toy's process."""
    with contextlib.suppress(OSError):  # it has ended
        return command.read_bytes() == b"sleep\x00300.25\x00"
    return False


def test_run_takes_its_key_from_the_environment_and_leaves_nothing_behind() -> None:
    with leasing_gateway(groups=2) as gateway:
        command = ["environment", "run", str(TOY.path), "--base-url", gateway.url]
        command += ["--environment.args", "behave=leave a process"]
        process = subprocess.run(
            [sys.executable, "-m", "invrl.cli", *command],
            env={**os.environ, "INVRL_ENV_KEY": KEY},
            timeout=60,
        )
    assert process.returncode == 0
    assert len(gateway.ends) == 4
    assert not [path for path in Path("/proc").glob("*/cmdline") if left_behind(path)]


URL = "--base-url http://127.0.0.1:9 --model m"


@pytest.mark.parametrize(
    ("command", "texts"),
    [
        ("try gymnasim", ["did you mean gymnasium?"]),
        ("try verbose", ["no environment has this name", "use one of: gymnasium,"]),
        ("try ./nowhere", ["there is no", "nowhere/environment.py"]),
        (
            "try gymnasium",
            ["not installed", "run: invrl environment install gymnasium"],
        ),
        ("try", ["the environment's name is missing"]),
        ("tri", ["write one of: list, install, try, run"]),
        (f"try TOY {URL} --environment.args behav=x", ["did you mean behave?"]),
        (f"try TOY {URL} --environment.args pause_s=x", ["not of the type float"]),
        (f"try TOY {URL} --environment.args play", ["write name=value"]),
        (f"try TOY {URL} --environment.step-timeout-s 0", ["seconds above 0"]),
        (f"try TOY {URL} --lr 1", ["no such flag"]),
        ("try TOY --base-url http://h", ["the model's name is missing"]),
        ("run TOY --base-url host", ["it is not the URL of a gateway"]),
        ("run TOY --base-url http://h", ["the run's key is missing"]),
    ],
)
def test_bad_input_is_refused_with_its_fix(
    command: str, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = command.replace("TOY", str(TOY.path)).split()
    assert main(["environment", *words]) == 2
    printed = capsys.readouterr().err
    assert "bad input; nothing was started" in printed
    for text in texts:
        assert text in printed


def copy_of_toy(folder: Path, **files: str) -> EnvironmentFolder:
    for name in ("environment.py", "requirements.txt", ".python-version"):
        text = TOY.path.joinpath(name).read_text()
        folder.joinpath(name).write_text(files.get(name.lstrip(".")[:6], text))
    return EnvironmentFolder(folder)


def test_a_missing_python_is_refused_with_the_command_that_installs_it(
    tmp_path: Path,
) -> None:
    environment = copy_of_toy(tmp_path, python="3.99\n")
    with pytest.raises(ConfigError) as caught:
        install(environment)
    assert "needs Python 3.99, and uv finds none" in caught.value.reason
    assert caught.value.fix == "run: uv python install 3.99"


def test_other_pins_need_another_installation(tmp_path: Path) -> None:
    assert copy_of_toy(tmp_path).digest == TOY.digest
    assert copy_of_toy(tmp_path, requir="numpy==2.4.6\n").digest != TOY.digest


def test_description_has_the_arguments_with_types_and_defaults() -> None:
    description = describe(TOY)
    assert description.arguments == {
        "behave": Argument("str", "play"),
        "pause_s": Argument("float", 0.0),
    }
    assert list(description.reward) == ["0.0", "1.0"]


def test_values_may_hold_commas_and_equals_signs() -> None:
    config = json.dumps({"low": 1, "high": 2})
    texts = split_arguments(f"game=a=b, config={config},fast=true,n=3")
    known = {
        "game": Argument("str", ""),
        "config": Argument("str", ""),
        "fast": Argument("bool", False),
        "n": Argument("int", 1),
    }
    values = read_values("--environment.args", known, texts)
    assert values == {"game": "a=b", "config": config, "fast": True, "n": 3}


def test_catalog_pins_every_package_and_imports_nothing_of_ours() -> None:
    folders = catalog()
    assert folders
    for folder in folders:
        assert all("==" in line for line in folder.requirements), folder.name
        assert folder.summary
        program = folder.path.joinpath("environment.py").read_text()
        assert "invrl" not in program


def test_a_call_of_the_model_is_repeated_while_its_server_is_restarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[int] = []

    def post(url: str, key: str, body: object, *, timeout_s: float, retries: int):
        tries.append(retries)
        if retries == 0:
            raise ConnectionResetError
        if retries == 1:
            raise episodes.Refused(503, "no engine")
        return {"choices": []}

    monkeypatch.setattr(episodes, "post", post)
    monkeypatch.setattr(episodes, "_CHAT_PAUSES_S", (0.0, 0.0))
    assert episodes.post_to_model("http://h", "key", {}) == {"choices": []}
    assert tries == [0, 1, 2]


@pytest.mark.parametrize("error", [episodes.Refused(410, "over"), TimeoutError()])
def test_a_call_that_is_refused_for_good_is_not_repeated(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def post(url: str, key: str, body: object, *, timeout_s: float, retries: int):
        tries.append(retries)
        raise error

    monkeypatch.setattr(episodes, "post", post)
    with pytest.raises(type(error)):
        episodes.post_to_model("http://h", "key", {})
    assert tries == [0]


def test_an_interrupt_aborts_the_sessions_that_are_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object, on_report: Any, **__: object) -> int:
        on_report({"opened": ["g0-0", "g0-1"]})
        on_report({"ended": "g0-0", "finished": True})
        raise KeyboardInterrupt

    monkeypatch.setattr(episode_process, "play", interrupted)
    with leasing_gateway(groups=1) as gateway, pytest.raises(KeyboardInterrupt):
        leasing(gateway).run()
    [[end]] = gateway.ends.values()
    assert list(gateway.ends) == ["g0-1"]
    assert end["reason"] == "environment_gone"


def test_an_episode_that_waits_for_its_finish_does_not_hang() -> None:
    environment = episodes.Environment(TOY.path)
    asked = {"arguments": {}, "step_timeout_s": 1e-9}
    endpoint = {"base_url": "http://h", "key": "k", "model": "m"}
    episode = episodes.Episode(environment, asked, endpoint, {"seed": 1})
    assert "hangs" in episode.overdue()
    episode.outcome = {"reward": 1.0, "components": {}}
    assert episode.overdue() == ""


def test_try_shows_messages_and_calls_of_any_form() -> None:
    messages = [
        {"role": "assistant", "tool_calls": [{"name": "add", "arguments": "{}"}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "sub"}}]},
        "a message of another form",
    ]
    text = episode_text(0, {"messages": messages, "reward": 1.0, "components": {}})
    assert "calls {'name': 'add'" in text
    assert "calls {'name': 'sub'}" in text
    assert "a message of another form\nreward: 1" in text


def test_an_environment_whose_python_is_gone_is_not_installed(tmp_path: Path) -> None:
    environment = copy_of_toy(tmp_path, requir="# others\nabsent==1\n")
    folder = virtual_environment(environment)
    (folder / "bin").mkdir(parents=True)
    (folder / "installed").touch()
    (folder / "bin" / "python").symlink_to(tmp_path / "removed")
    with pytest.raises(ConfigError, match="bin/python"):
        check_installed("NAME", environment)
