"""What tests share: tiny models, and ONE real fp32 engine behind the real router per
session.

`tiny_fleet` takes 10 to 60 s to start; its weights and versions change as weight tests
run, so a test that uses it assumes neither.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import pytest
from hypothesis import HealthCheck, Phase, settings
from left_behind import LeftBehind
from tiny_model import make_tiny_model

from invrl.engines.client.sglang_client import SglangClient
from invrl.engines.config import EngineConfig
from invrl.engines.fleet.fleet import Fleet
from invrl.engines.launch.engine_server import ENGINE_MODULE
from invrl.engines.router.router_server import RouterAddress, RouterServer
from invrl.engines.router.smg import Smg, find_smg
from invrl.errors import ConfigError
from invrl.host.processes.fork_parent import ForkParent

settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "first failure",  # for `mutate.py`, which does not look for the smallest example that fails
    settings.get_profile("any machine"),
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile("any machine")  # a busy one must not fail what is right


def pytest_configure(config: pytest.Config) -> None:
    """Says at the end what is left behind, and takes signals as a user's shell has
    them.

    A script's background jobs ignore interrupts, what `nohup` starts the end of its
    terminal, and so does all that they start. Tests send these signals to what they
    start, so it must not inherit that."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        # no program that is started inherits a handler
        signal.signal(signal.SIGHUP, lambda *_: None)
    config.pluginmanager.register(LeftBehind())
    gc.disable()  # until everything is imported


def pytest_collection_finish() -> None:
    """The collector leaves out what was imported: to look through that took a second
    each time."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A report says which tests are slow."""
    for item in items:
        if item.get_closest_marker("slow") is not None:
            item.user_properties.append(("slow", True))


_LONGEST_CASE_NAME = 60
"""Longer values are counted instead: their cases are `flags0`, `flags1` and so on."""


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """The name of a case whose value is a collection: `--lr 0.1` instead of
    `flags3`."""
    if not isinstance(val, list | tuple | dict):
        return None
    if not val:
        return f"no {argname}"
    words = case_words(val)
    if words is None or len(words) > _LONGEST_CASE_NAME or not words.isprintable():
        return None
    return words


def case_words(value: object, depth: int = 3) -> str | None:
    """The parts of a value with spaces between. None if one of them has no short name,
    or lies deeper."""
    if isinstance(value, str | int | float | bool | None):
        return str(value)
    if depth == 0 or not isinstance(value, list | tuple | dict):
        return None
    names = (
        [f"{key}=" for key in value] if isinstance(value, dict) else [""] * len(value)
    )
    words: list[str] = []
    for name, part in zip(
        names, value.values() if isinstance(value, dict) else value, strict=True
    ):
        part_words = case_words(part, depth - 1)
        if part_words is None:
            return None
        words.append(name + part_words)
    return " ".join(words)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fp32 Qwen3 with ChatML; as many KV heads as heads, so that q and k can be
    mistaken; room for the prompts of unmodified agents."""
    return make_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny-qwen3",
        kv_heads=4,
        max_positions=16_000,
    )


@pytest.fixture(scope="session")
def engine_parent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkParent]:
    """Imports SGLang once for all tests of the session whose engines it forks."""
    parent = ForkParent(
        ENGINE_MODULE, log=tmp_path_factory.mktemp("engines") / "engine-parent.log"
    )
    yield parent
    parent.stop()


@pytest.fixture(scope="session")
async def tiny_fleet(
    tiny_model: Path,
    engine_parent: ForkParent,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Fleet]:
    """One real SGLang server and the real router. Nothing looks at its health: between
    tests the event loop stands still, and an answer that nobody could read in time is
    not the engine's fault."""
    config = EngineConfig(
        dtype="float32",
        start_timeout_s=500.0,
        health_interval_s=86_400.0,
    )
    fleet = Fleet(
        config, tiny_model, tmp_path_factory.mktemp("fleet"), parent=engine_parent
    )
    await fleet.start()
    await fleet.admit()
    try:
        yield fleet
    finally:
        await fleet.stop()


@pytest.fixture(scope="session")
def installed_smg() -> Smg:
    """A test that asks for it is skipped where smg is not installed."""
    try:
        return find_smg("")
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
async def smg_router(
    installed_smg: Smg, tiny_fleet: Fleet, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RouterServer]:
    """smg in front of the engine of `tiny_fleet`, beside the fleet's router."""
    engine = tiny_fleet.engines["engine-0"].server
    address = RouterAddress()
    address.api_key = engine.api_key
    router = RouterServer(
        run_folder=tmp_path_factory.mktemp("smg"),
        start_timeout_s=240.0,
        address=address,
        installed_smg=installed_smg,
    )
    try:
        await asyncio.to_thread(router.wait_ready)
        await asyncio.to_thread(router.register, engine.url, api_key=engine.api_key)
        yield router
    finally:
        await asyncio.to_thread(router.stop)
        address.close()


@pytest.fixture
async def router_client(tiny_fleet: Fleet) -> AsyncIterator[SglangClient]:
    """What the gateway holds: the router's address and key."""
    async with SglangClient(
        tiny_fleet.router.url,
        limits=tiny_fleet.limits,
        api_key=tiny_fleet.router.api_key,
        name="router",
    ) as client:
        yield client
