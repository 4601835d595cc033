"""Engines that are set aside for evaluation (`eval.engines`): evaluation samples at them
alone, and everything else at the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web
from dying_fleet import Deaths, FakeRouter, FakeServer, eventually, mortal_fleet
from fakes import FakeEngine, random_reply
from running_gateway import ASK, Running, running

from invrl.cli.flags import parse_flags
from invrl.engines.fleet.engine_group import EngineGroup, engine_groups
from invrl.engines.fleet.fleet import Fleet
from invrl.engines.fleet.load_watch import LoadWatch
from invrl.errors import ConfigError, ServerError
from invrl.gateway.rendering.renderer import Renderer
from invrl.host.output.incidents import incidents_shown
from invrl.run.plan.jumping_clock import run_jumping
from invrl.run.settings.config import Config, resolve
from invrl.types.fleet import EngineLoad, FleetSnapshot, LiveSession, TurnPlan
from invrl.types.sessions import Purpose, Session

FLAGS = [
    "--rollout-function-path",
    "m:f",
    "--task-file",
    "tasks.jsonl",
    "--num-engines",
    "3",
    "--eval.tasks",
    "4",
    "--eval.interval",
    "2",
]

# ----------------------------------------------------------------- the settings


def settings(*flags: str) -> Config:
    return resolve(*parse_flags([*FLAGS, *flags]))


@pytest.mark.parametrize(
    ("flags", "reason", "fix"),
    [
        (["--eval.engines", "0"], "greater than 0", "--no-eval.engines"),
        (["--eval.engines", "3"], "no engine would be left", "raise --num-engines"),
        (
            ["--eval.engines", "1", "--no-eval.tasks", "--no-eval.interval"],
            "no held-out tasks",
            "set --eval.tasks",
        ),
        (
            ["--eval.engines", "1", "--no-eval.interval"],
            "nothing to do during training",
            "set --eval.interval",
        ),
        (["--eval.engines", "1", "--colocate"], "colocate", "leave it out"),
        (
            [
                "--eval.engines",
                "1",
                "--debug-train-only",
                "--load-rollout-data",
                "RUN/rollout_data",
            ],
            "there are no engines",
            "leave it out",
        ),
    ],
)
def test_engines_that_would_evaluate_nothing_or_train_nothing_are_refused(
    flags: list[str], reason: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(*flags)
    assert caught.value.field == "eval.engines"
    assert reason in caught.value.reason
    assert fix in caught.value.fix


def test_two_of_three_engines_may_be_set_aside() -> None:
    assert settings("--eval.engines", "2").rollout.eval.engines == 2
    assert settings().rollout.eval.engines is None


def test_external_engines_count_as_engines() -> None:
    flags = ["--eval.engines", "3", "--external-engines", "http://10.0.0.5:30000"]
    by_disk = ["--weights.transport", "disk", "--weights.folder", "/shared"]
    assert settings(*flags, *by_disk).rollout.eval.engines == 3


# ----------------------------------------------------------------- the fleet


class NamedRouter:
    def __init__(self, name: str) -> None:
        self.name = name


def groups_of(names: Sequence[str], eval_engines: int) -> list[EngineGroup]:
    return engine_groups(names, eval_engines, cast("Any", NamedRouter))


def test_the_last_engines_are_set_aside() -> None:
    training, evaluation = groups_of(["engine-0", "engine-1", "external-0"], 2)
    assert list(training.names) == ["engine-0"]
    assert list(evaluation.names) == ["engine-1", "external-0"]
    assert training.router.name == "router"
    assert evaluation.router.name == "eval-router"


def test_one_router_serves_all_sessions_if_no_engine_is_set_aside() -> None:
    [group] = groups_of(["engine-0", "engine-1"], 0)
    assert list(group.names) == ["engine-0", "engine-1"]
    assert group.router.name == "router"


@pytest.fixture
async def divided(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path, tmp_path: Path, deaths: Deaths
) -> AsyncIterator[Fleet]:
    """Two engines for training, and engine-2 for evaluation. All are admitted."""
    async with mortal_fleet(
        monkeypatch, tiny_model, tmp_path, deaths, eval_engines=1
    ) as fleet:
        await fleet.admit()
        fleet.restart_evicted()
        yield fleet


def routed(name: str) -> set[str]:
    """Names of the engines behind the newest router of this name. Their starts have the
    URLs http://NAME-START."""
    newest = [router for router in FakeRouter.made if router.name == name][-1]
    return {url.removeprefix("http://").rpartition("-")[0] for url in newest.urls}


def is_divided() -> bool:
    at_training = routed("router") == {"engine-0", "engine-1"}
    return at_training and routed("eval-router") == {"engine-2"}


async def die(fleet: Fleet, deaths: Deaths, *names: str) -> None:
    dead = [fleet.engines[name] for name in names]
    for engine in dead:
        deaths.future(engine.server).set_result("it is dead")
    await eventually(lambda: not [one for one in fleet.engines.values() if one in dead])


async def test_each_engine_is_behind_the_router_of_its_group(divided: Fleet) -> None:
    assert is_divided()
    assert {name: router.name for name, router in divided.routers.items()} == {
        "router": "router",
        "eval-router": "eval-router",
    }


async def test_engine_that_comes_back_is_behind_the_same_router(
    divided: Fleet, deaths: Deaths
) -> None:
    for name in ("engine-2", "engine-0"):
        await die(divided, deaths, name)
        await eventually(lambda name=name: name in divided.engines)
        await eventually(is_divided)
    assert len(FakeServer.made) == 5


async def test_routers_that_start_again_get_the_engines_of_their_group(
    divided: Fleet, deaths: Deaths
) -> None:
    deaths.future(FakeRouter.made[1]).set_result("they hang")
    await eventually(lambda: len(FakeRouter.made) == 4)
    await eventually(is_divided)
    divided.check()


async def test_evaluation_waits_for_its_engine_while_the_others_train(
    divided: Fleet, deaths: Deaths
) -> None:
    lines: list[str] = []
    FakeServer.may_be_ready.clear()
    with incidents_shown(lines.append):
        await die(divided, deaths, "engine-2")
        await eventually(lambda: len(FakeServer.made) == 4)
    divided.check()
    assert routed("router") == {"engine-0", "engine-1"}
    assert routed("eval-router") == set()
    waits = "no engine is left for evaluation: requests wait for engine-2 (restart 1"
    assert any(waits in line for line in lines)
    FakeServer.may_be_ready.set()
    await eventually(is_divided)


@pytest.mark.parametrize(
    ("names", "sessions"),
    [(["engine-2"], "evaluation"), (["engine-0", "engine-1"], "training")],
)
async def test_the_run_ends_once_no_engine_of_a_group_may_come_back(
    divided: Fleet,
    deaths: Deaths,
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
    sessions: str,
) -> None:
    def broken_start(server: FakeServer) -> None:
        raise ServerError(f"{server.name} ended at once")

    monkeypatch.setattr(FakeServer, "wait_ready", broken_start)
    await die(divided, deaths, *names)
    for name in names:
        await eventually(divided._replacements[name].done)
    with pytest.raises(ServerError, match=f"no engine is left for {sessions}: engine"):
        divided.check()


# ----------------------------------------------------------------- the load


class Loaded:
    async def load(self, *, deadline_s: float) -> EngineLoad:
        return EngineLoad(running=1)


class Silent:
    async def load(self, *, deadline_s: float) -> EngineLoad:
        raise ServerError("it has no such route")


def test_load_of_training_leaves_out_the_engines_that_are_set_aside() -> None:
    clients = {
        "engine-0": Loaded(),
        "engine-1": Silent(),
        "engine-2": Loaded(),
        "engine-3": Silent(),
    }
    watch = LoadWatch(lambda: clients, eval_engines=["engine-2", "engine-3"])

    async def follow() -> None:
        following = asyncio.create_task(watch.follow())
        await asyncio.sleep(0.5)
        following.cancel()

    run_jumping(follow())
    training = watch.snapshot.serving(evaluation=False)
    assert (list(training.engines), training.silent) == (["engine-0"], ("engine-1",))
    evaluation = watch.snapshot.serving(evaluation=True)
    assert (list(evaluation.engines), evaluation.silent) == (
        ["engine-2"],
        ("engine-3",),
    )


def test_load_of_training_is_that_of_all_engines_if_none_is_set_aside() -> None:
    fleet = FleetSnapshot(engines={"engine-0": EngineLoad()}, silent=("engine-1",))
    assert fleet.serving(evaluation=False) == fleet


# ----------------------------------------------------------------- the gateway


class EvalEngine(FakeEngine):
    """Behind a router that has no engine while `is_away`."""

    is_away = False

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if self.is_away:
            self.requests.append(await request.json())
            return web.Response(status=503, text="no_available_workers")
        return await super()._generate(request)


@pytest.fixture
async def eval_engine() -> AsyncIterator[EvalEngine]:
    async with EvalEngine(random_reply()) as engine:
        yield engine


async def opened(gateway: Running, purpose: Purpose) -> Session:
    [session] = await gateway.open(purpose=purpose, group_id=purpose)
    return session


async def ask(gateway: Running, session: Session, *, stream: bool = False) -> int:
    body = {"model": "tiny", "messages": [ASK], "stream": stream}
    url = session.base_url + "/chat/completions"
    answer = await gateway.http.post(url, json=body)
    assert "error" not in answer.text
    return answer.status_code


@pytest.mark.parametrize("stream", [False, True])
async def test_evaluation_samples_at_its_engines_and_everything_else_at_the_others(
    tmp_path: Path,
    model: Path,
    renderer: Renderer,
    eval_engine: EvalEngine,
    stream: bool,
) -> None:
    async with running(tmp_path, model, renderer, eval_engine=eval_engine) as gateway:
        for purpose in ("train", "serve"):
            session = await opened(gateway, purpose)
            assert await ask(gateway, session, stream=stream) == 200
        assert (len(gateway.engine.requests), len(eval_engine.requests)) == (2, 0)
        session = await opened(gateway, "eval")
        assert await ask(gateway, session, stream=stream) == 200
        assert (len(gateway.engine.requests), len(eval_engine.requests)) == (2, 1)


async def test_all_sessions_sample_at_all_engines_if_none_is_set_aside(
    gateway: Running,
) -> None:
    for purpose in ("train", "eval"):
        assert await ask(gateway, await opened(gateway, purpose)) == 200
    assert len(gateway.engine.requests) == 2


async def test_evaluation_waits_for_its_engines_and_does_not_go_to_the_others(
    tmp_path: Path, model: Path, renderer: Renderer, eval_engine: EvalEngine
) -> None:
    eval_engine.is_away = True
    async with running(tmp_path, model, renderer, eval_engine=eval_engine) as gateway:
        evaluating = asyncio.create_task(ask(gateway, await opened(gateway, "eval")))
        await eventually(lambda: len(eval_engine.requests) == 2)
        assert await ask(gateway, await opened(gateway, "train")) == 200
        assert not evaluating.done()
        eval_engine.is_away = False
        assert await evaluating == 200
        assert len(gateway.engine.requests) == 1


async def test_training_does_not_go_to_the_engines_of_evaluation(
    tmp_path: Path, model: Path, renderer: Renderer, eval_engine: EvalEngine
) -> None:
    async with running(
        tmp_path, model, renderer, eval_engine=eval_engine, engine_return_s=0.1
    ) as gateway:
        session = await opened(gateway, "train")
        gateway.engine.drop_connections = 10
        body = {"model": "tiny", "messages": [ASK]}
        url = session.base_url + "/chat/completions"
        answer = await gateway.http.post(url, json=body)
        assert answer.status_code == 503
        assert eval_engine.requests == []


seen_by_policy: list[tuple[set[str], set[str]]] = []
"""Engines and groups of the sessions that a policy saw."""


def seeing(
    fleet: FleetSnapshot, sessions: Sequence[LiveSession]
) -> Mapping[str, TurnPlan]:
    seen_by_policy.append(
        (set(fleet.engines), {session.group_id for session in sessions})
    )
    return {}


async def test_each_group_of_engines_has_a_gate_that_sees_its_own_sessions(
    tmp_path: Path, model: Path, renderer: Renderer, eval_engine: EvalEngine
) -> None:
    seen_by_policy.clear()
    fleet = FleetSnapshot(
        engines={"engine-0": EngineLoad(), "engine-1": EngineLoad()},
        eval_engines=("engine-1",),
    )
    async with running(
        tmp_path,
        model,
        renderer,
        eval_engine=eval_engine,
        read_fleet=lambda: fleet,
        gate={"policy": f"{__name__}:seeing"},
    ) as gateway:
        sessions = [await opened(gateway, purpose) for purpose in ("train", "eval")]
        for session in sessions:
            assert await ask(gateway, session) == 200
        metrics = (await gateway.env("/metrics")).json()
    assert seen_by_policy == [({"engine-0"}, {"train"}), ({"engine-1"}, {"eval"})]
    assert metrics["workers"]["0"]["gate"] == {"turns_held": 0, "seconds_held": 0.0}
