"""Versions of an adapter in one engine: which a request gets, and when they leave."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack

import pytest

from invrl.engines.inside_sglang.served_versions import AdapterError, ServedVersions


class FakeAdapters:
    """Adapters in the order of their loads. The checksum of a version is its folder."""

    def __init__(self, max_versions: int = 3) -> None:
        self.max_versions = max_versions
        self.folders: dict[str, str] = {}
        self.aborted: list[str] = []
        self.requests: dict[str, ExitStack] = {}
        self.unended: Counter[str] = Counter()

    def loaded(self) -> list[str]:
        return list(self.folders)

    async def load(self, version: str, folder: str) -> Mapping[str, str]:
        assert version not in self.folders
        self.folders[version] = folder
        return await self.checksums(version)

    async def checksums(self, version: str) -> Mapping[str, str]:
        return {"A": self.folders[version]}

    async def unload(self, version: str) -> None:
        del self.folders[version]

    def abort(self, version: str) -> None:
        self.aborted.append(version)
        self.requests[version].close()
        self.unended[version] = max(0, self.unended[version] - 1)

    def running(self, version: str) -> int:
        return self.unended[version]


class Engine:
    def __init__(self) -> None:
        self.adapters = FakeAdapters()
        self.versions = ServedVersions()

    def load(self, version: str, folder: str = "") -> Mapping[str, str]:
        folder = folder or version
        return asyncio.run(
            self.versions.load(self.adapters, version, folder, {"A": folder})
        )

    def update(self, version: str) -> None:
        self.load(version)
        self.versions.serve(self.adapters, version)

    def begin_request(self) -> str | None:
        running = ExitStack()
        version = running.enter_context(self.versions.request())
        if version is not None:
            self.adapters.requests[version] = running
        return version


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_a_request_before_the_first_version_gets_the_bare_model(engine: Engine) -> None:
    assert engine.begin_request() is None
    engine.load("0")
    assert engine.begin_request() is None
    engine.update("0")
    assert engine.begin_request() == "0"


def test_a_loaded_version_serves_nobody_until_it_is_the_newest(engine: Engine) -> None:
    engine.update("4")
    assert engine.load("5") == {"A": "5"}
    assert engine.begin_request() == "4"
    engine.versions.serve(engine.adapters, "5")
    assert engine.begin_request() == "5"
    with pytest.raises(AdapterError, match="version 6 is not loaded"):
        engine.versions.serve(engine.adapters, "6")


def test_a_version_stays_until_its_last_request_has_ended(engine: Engine) -> None:
    engine.update("1")
    engine.begin_request()
    engine.update("2")
    engine.load("3")
    assert engine.adapters.loaded() == ["1", "2", "3"]
    engine.adapters.requests["1"].close()
    engine.update("3")
    engine.load("4")
    assert engine.adapters.loaded() == ["3", "4"]
    assert engine.adapters.aborted == []


def test_a_full_engine_ends_the_requests_of_its_oldest_version(engine: Engine) -> None:
    for version in ("9", "10", "11"):
        engine.update(version)
        engine.begin_request()
    assert engine.load("12") == {"A": "12"}
    assert engine.adapters.aborted == ["9"]
    assert engine.adapters.loaded() == ["10", "11", "12"]


def test_a_version_stays_while_sglang_runs_a_request_whose_client_has_left(
    engine: Engine,
) -> None:
    engine.update("1")
    engine.begin_request()
    engine.adapters.requests["1"].close()
    engine.adapters.unended["1"] = 2
    engine.update("2")
    engine.begin_request()
    engine.update("3")
    assert engine.adapters.loaded() == ["1", "2", "3"]
    # There is room for three. The second abort ends the last of its requests.
    engine.load("4")
    assert engine.adapters.aborted == ["1", "1"]
    assert engine.adapters.loaded() == ["2", "3", "4"]


def test_going_back_ends_the_requests_of_the_version_that_is_left(
    engine: Engine,
) -> None:
    engine.update("9")
    engine.begin_request()
    engine.update("10")
    engine.begin_request()
    assert engine.adapters.aborted == []
    engine.versions.serve(engine.adapters, "9")
    assert engine.adapters.aborted == ["10"]
    assert engine.begin_request() == "9"


def test_a_second_load_of_the_same_tensors_changes_nothing(engine: Engine) -> None:
    engine.update("1")
    engine.begin_request()
    assert engine.load("1") == {"A": "1"}
    assert engine.adapters.aborted == []


def test_other_tensors_replace_a_version_that_is_not_served(engine: Engine) -> None:
    engine.update("1")
    engine.load("2")
    assert engine.load("2", folder="retried") == {"A": "retried"}
    engine.versions.serve(engine.adapters, "2")
    with pytest.raises(AdapterError, match="version 2 is served, with other tensors"):
        engine.load("2", folder="again")


def test_requests_that_do_not_end_fail_the_load(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "invrl.engines.inside_sglang.served_versions"
    monkeypatch.setattr(f"{module}._ABORT_DEADLINE_S", 0.0)
    monkeypatch.setattr(engine.adapters, "abort", lambda version: None)
    for version in ("1", "2", "3"):
        engine.update(version)
        engine.begin_request()
    with pytest.raises(AdapterError, match="1 requests of version 1 have not ended"):
        engine.load("4")
    assert engine.begin_request() == "3"
