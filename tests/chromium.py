"""The system's Chromium, by Playwright, for what people look at in a browser."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PAGES = (
    "overview",
    "steps",
    "groups",
    "rollouts",
    "tasks",
    "processes",
    "ledger",
    "evaluations",
    "weights",
)
"""Of `invrl view`."""
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def _browser() -> str | None:
    """The path of a browser that runs. Ubuntu's `chromium-browser` may only say that it
    is not installed."""
    for path in filter(None, map(shutil.which, _NAMES)):
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                [path, "--version"], check=True, capture_output=True, timeout=60
            )
            return path
    return None


_PATH = _browser()
needs_chromium = pytest.mark.skipif(
    _PATH is None, reason="no Chromium that runs: apt-get install chromium, as root"
)


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser of its own process."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (extra: dev)"
    )
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=_PATH, args=["--no-sandbox"]
        )
        yield launched
        launched.close()


@dataclass(frozen=True, slots=True)
class View:
    """`invrl view` of a run folder, and a browser's page that keeps what went wrong in
    it."""

    url: str
    page: Any
    errors: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    def open(self, place: str) -> Any:
        self.page.goto("about:blank")
        self.page.goto(f"{self.url.partition('?')[0]}#/{place}")
        self.page.wait_for_selector("body[data-ready]", state="attached")
        return self.page

    def open_all(self) -> None:
        """Every page, with all that unfolds in it."""
        for place in PAGES:
            page = self.open(place)
            page.wait_for_timeout(300)
            for summary in page.query_selector_all(
                "main details:not([open]) > summary"
            ):
                summary.click()
            assert page.query_selector("[role=alert]") is None, (
                place,
                page.inner_text("[role=alert]"),
            )
            assert (
                page.query_selector(
                    "#taken, main script, main style, main link, main img"
                )
                is None
            ), place
            assert "taken" not in page.title(), place
            assert page.is_visible("main"), place

    def wait_for_count(self, count: int) -> None:
        self.page.wait_for_selector(f".count:text-matches('^{count} rollout')")


def invrl_view(*arguments: str, cache: Path) -> subprocess.Popen[str]:
    """The command as a user starts it."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-m", "invrl.cli", "view", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


@contextmanager
def viewed(folder: Path, browser: Any, cache: Path) -> Iterator[View]:
    """At the end nothing was wrong in the console, and no other host was asked."""
    process = invrl_view(str(folder), "--no-open", cache=cache)
    assert process.stdout is not None
    try:
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None, "it printed no URL"
        page = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
        page.set_default_timeout(20_000)
        seen = View(found.group(), page)
        page.on(
            "console",
            lambda message: (
                message.type == "error" and seen.errors.append(message.text)
            ),
        )
        page.on("pageerror", lambda error: seen.errors.append(str(error)))
        page.on("request", lambda request: seen.hosts.add(request.url.split("/")[2]))
        page.goto(seen.url)
        page.wait_for_selector("body[data-ready]", state="attached")
        assert "key=" not in page.url
        yield seen
        page.context.close()
        assert seen.errors == []
        assert seen.hosts <= {seen.url.split("/")[2], ""}
    finally:
        process.terminate()
        process.wait(30)
