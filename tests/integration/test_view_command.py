"""`invrl view` as a user starts it, in a real browser: every page of a run folder,
filters, live, export."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import PAGES, View, chromium, invrl_view, needs_chromium, viewed
from recorded_run import RecordedRun, record_run
from scripted_viewer import HOSTILE

from invrl.gateway.types import Message, ToolCall
from invrl.types.reasons import DropReason, FailureReason

pytestmark = needs_chromium


def _fill(recorded: RecordedRun) -> None:
    call = Message(
        "assistant",
        f"Let me see. {HOSTILE}",
        "",
        (ToolCall("1", HOSTILE, json.dumps({"x": HOSTILE})),),
    )
    recorded.add(HOSTILE, call, 1.0, step=1, group="g", index=0)
    recorded.add(
        HOSTILE,
        ["a first reply", "a second one"],
        0.0,
        step=1,
        group="g",
        index=1,
        ending="length",
    )
    recorded.add("plain", "the walrus sings", 0.5, step=2)
    recorded.add("plain", "stale words", 0.25, step=None, drop=DropReason.STALE)
    recorded.add(
        "broken",
        "never mind",
        0.0,
        failure=FailureReason.EXCEPTION,
        detail=f"ValueError: {HOSTILE}",
    )
    recorded.add("held out", "forty-two", 1.0, purpose="eval", step=0)
    metrics = [
        {"step": s, "time": 100.0 + s, "rollout/reward_mean": s / 4, HOSTILE: 1.0}
        for s in (1, 2)
    ]
    (recorded.folder.path / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in metrics)
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as launched:
        yield launched


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("view")


@pytest.fixture(scope="module")
def recorded(folder: Path) -> RecordedRun:
    """Only `test_live_run_updates_the_page` adds to it, which comes last."""
    run = record_run(folder)
    _fill(run)
    return run


@pytest.fixture(scope="module")
def served(browser: Any, recorded: RecordedRun, folder: Path) -> Iterator[View]:
    with viewed(recorded.folder.path, browser, folder / "cache") as view:
        yield view


@pytest.fixture
def view(served: View) -> Iterator[View]:
    yield served
    assert served.errors == []


def test_every_page_of_view_opens_and_hostile_texts_stay_text(view: View) -> None:
    view.open_all()


def test_conversation_with_hostile_calls_and_its_tokens_are_shown_as_text(
    view: View,
) -> None:
    page = view.open(
        "rollouts?sort=best&task="
        + re.sub("[^a-z]", lambda found: f"%{ord(found[0]):02X}", HOSTILE)
    )
    view.wait_for_count(2)
    page.click("tr.link a >> nth=0")
    page.wait_for_selector(".call")
    assert HOSTILE in page.inner_text(".call-head b")
    page.keyboard.press("v")
    page.wait_for_selector(".tokens.sampled .token")
    for _ in range(5):
        page.keyboard.press("c")
        page.wait_for_selector(".tokens-place .legend, .tokens-place > .quiet")
    page.keyboard.press("j")
    page.wait_for_selector(".neighbours >> text=2 of 2")
    assert page.query_selector("#taken") is None


_FILTERS = [
    ("purpose=eval", 1),
    ("evaluation=greedy", 1),
    ("state=trained", 3),
    ("drop=stale", 1),
    ("failure=exception", 1),
    ("fork=edited_history", 0),
    ("trained=1", 3),
    ("truncated=1", 1),
    ("step=2", 1),
    ("task=plain", 2),
    ("group=g", 2),
    ("min_reward=0.5&max_reward=0.9", 1),
    ("min_tokens=1", 5),
    ("max_tokens=1", 0),
    ("min_turns=2", 1),
    ("max_staleness=0", 3),
    ("min_staleness=1", 0),
    ("min_forks=1", 0),
    ("max_forks=0", 6),
    ("min_seconds=1000", 0),
    ("min_advantage=0", 0),
    ("max_logprob=-1", 0),
    ("min_gap=0", 0),
    ("min_surprise=0.5", 2),
    ("q=walrus", 1),
    ('q="second one"', 1),
    ("q=walrus&task=broken", 0),
]


def test_every_filter_selects_its_rows(view: View) -> None:
    page = view.open("rollouts")
    view.wait_for_count(6)
    for filters, count in _FILTERS:
        page.goto(f"{view.url.partition('?')[0]}#/rollouts?{filters}")
        page.wait_for_timeout(100)
        page.wait_for_selector(".table-place:not([aria-busy])")
        told = page.inner_text(".count")
        assert told.startswith(f"{count} rollout"), (filters, told)
        assert page.locator("tr.link").count() == count, filters
        assert page.locator(".chip").count() >= 1, filters


def test_view_page_is_refused_without_its_key(browser: Any, view: View) -> None:
    page = browser.new_page()
    answer = page.goto(view.url.partition("?")[0])
    assert answer.status == 401
    page.close()


def test_export_of_a_run_opens_from_disk(
    browser: Any, recorded: RecordedRun, tmp_path: Path
) -> None:
    folder = tmp_path / "sent to someone"
    process = invrl_view(
        str(recorded.folder.path), "--export", str(folder), cache=tmp_path / "cache"
    )
    assert process.wait(120) == 0
    page = browser.new_context(
        viewport={"width": 1280, "height": 800}, offline=True
    ).new_page()
    errors: list[str] = []
    page.on(
        "console",
        lambda message: message.type == "error" and errors.append(message.text),
    )
    page.on("pageerror", lambda error: errors.append(str(error)))
    for place in PAGES:
        page.goto("about:blank")
        page.goto(f"{(folder / 'index.html').as_uri()}#/{place}")
        page.wait_for_selector("body[data-ready]", state="attached")
        assert page.query_selector("[role=alert]") is None, (
            place,
            page.inner_text("[role=alert]"),
        )
        assert page.query_selector("#taken") is None, place
    page.goto(f"{(folder / 'index.html').as_uri()}#/rollouts?state=trained&sort=best")
    page.wait_for_selector(".count:text-matches('^3 rollouts')")
    page.click("tr.link a >> nth=0")
    page.wait_for_selector(".conversation .message")
    page.keyboard.press("v")
    page.wait_for_selector(".tokens.sampled .token")
    assert errors == []
    page.context.close()


def test_live_run_updates_the_page(view: View, recorded: RecordedRun) -> None:
    page = view.open("rollouts")
    view.wait_for_count(6)
    # The table leaves its reader that long between two changes.
    page.wait_for_timeout(1600)
    recorded.add("late", "just now", 1.0, step=3)
    view.wait_for_count(7)
    page = view.open("overview")
    page.wait_for_selector("figure.chart >> nth=0 >> text=0.5")
    with (recorded.folder.path / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"step": 3, "time": 104.0, "rollout/reward_mean": 0.875}) + "\n"
        )
    page.wait_for_selector("figure.chart >> nth=0 >> text=0.875")
