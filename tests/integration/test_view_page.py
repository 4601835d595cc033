"""The page of `invrl view` in a real browser, on a made-up run whose every text is
hostile."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from chromium import chromium, needs_chromium
from recorded_run import record_run
from scripted_viewer import HOSTILE, PAGE, ROWS, ScriptedViewer
from slow_cases import first_quick

from invrl.gateway.types import Message, ToolCall
from invrl.viewer.export import export_runs
from invrl.viewer.viewed_run import ViewedRun, open_runs

pytestmark = needs_chromium

_PLACES = [
    "overview",
    "rollouts",
    "steps",
    "groups",
    "tasks",
    "rollout/s-0005?at=5",
    "rollout/s-0006?view=tokens&colour=gap",
    "processes",
    "ledger",
    "evaluations",
    "weights",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as launched:
        yield launched


@pytest.fixture
def server() -> Iterator[ScriptedViewer]:
    with ScriptedViewer() as serving:
        yield serving


def until(page: Any, expression: str) -> None:
    deadline = time.monotonic() + 15
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"never true: {expression}"
        page.wait_for_timeout(30)


class Reader:
    """A browser's page that keeps what went wrong in it."""

    def __init__(self, browser: Any, server: ScriptedViewer, width: int = 1280) -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 800})
        self.page.set_default_timeout(15_000)
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        self.server = server
        self.page.on(
            "console",
            lambda message: (
                message.type == "error" and self.errors.append(message.text)
            ),
        )
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on(
            "request", lambda request: self.hosts.add(request.url.split("/")[2])
        )

    def open(self, place: str) -> Any:
        self.page.goto("about:blank")
        self.page.goto(f"{self.server.url}#/{place}")
        self.page.wait_for_selector("body[data-ready]", state="attached")
        return self.page

    def wait(self, expression: str) -> None:
        """Until the expression is true. Playwright's own wait needs `eval`, which the
        policy refuses."""
        until(self.page, expression)

    def wait_asked(self, name: str, key: str, value: str) -> None:
        """Until the last question of this name has the value in its query. Rows of the
        question before it may still be on the page."""
        deadline = time.monotonic() + 15
        while True:
            queries = [query for path, query in self.server.questions if path == name]
            if queries and queries[-1].get(key) == [value]:
                return
            assert time.monotonic() < deadline, (
                f"{name} was never asked with {key}={value}: {queries[-3:]}"
            )
            self.page.wait_for_timeout(30)


@pytest.fixture
def reader(browser: Any, server: ScriptedViewer) -> Iterator[Reader]:
    reading = Reader(browser, server)
    yield reading
    reading.page.close()
    assert reading.errors == []
    assert reading.hosts <= {server.url.split("/")[2], ""}


def test_hostile_texts_stay_text_on_every_page(reader: Reader) -> None:
    for place in _PLACES:
        page = reader.open(place)
        page.wait_for_timeout(200)
        for details in page.query_selector_all("details:not([open]) > summary"):
            details.click()
        assert "taken" not in page.title(), place
        elements = "#taken, main script, main style, main link, main img"
        assert page.query_selector(elements) is None, place
        assert page.is_visible("main"), place
        if place not in ("processes", "weights"):
            text = page.inner_text("body").replace("\n", "")
            assert "<script>document.title='taken'</script>" in text, place
        assert reader.errors == [], place


@pytest.mark.parametrize("width", first_quick([400, 1280]))
def test_no_page_is_wider_than_the_window(
    browser: Any, server: ScriptedViewer, width: int
) -> None:
    reader = Reader(browser, server, width)
    for place in _PLACES:
        page = reader.open(place)
        page.wait_for_timeout(100)
        widest = page.evaluate("document.documentElement.scrollWidth")
        assert widest <= width, place
    reader.page.close()


_CHOICES = [
    ("purpose", "train"),
    ("evaluation", "sampled"),
    ("state", "failed"),
    ("drop", "stale"),
    ("failure", "agent"),
    ("fork", "edited_history"),
    ("trained", "1"),
    ("truncated", "0"),
    ("component", "exact"),
]
_RANGED = [
    "reward",
    "tokens",
    "turns",
    "staleness",
    "forks",
    "seconds",
    "advantage",
    "logprob",
    "gap",
    "surprise",
]
_TYPED = [("step", "3"), ("task", "a task"), ("group", "g-3")]
_TYPED += [
    (f"{bound}_{name}", "0.5")
    for name in [*_RANGED, "component"]
    for bound in ("min", "max")
]


@pytest.mark.parametrize(("name", "value"), first_quick(_CHOICES))
def test_each_chosen_filter_is_applied_and_in_the_url(
    reader: Reader, name: str, value: str
) -> None:
    page = reader.open("rollouts")
    page.select_option(f"select[name={name}]", value)
    reader.wait(f"location.hash.includes('{name}={value}')")
    page.wait_for_selector(".chip")
    reader.wait_asked("runs/first/rollouts", name, value)
    reader.wait_asked("runs/first/facets", name, value)
    page.click(".chip")
    reader.wait(f"!location.hash.includes('{name}=')")


@pytest.mark.parametrize(("name", "value"), first_quick(_TYPED))
def test_each_typed_filter_is_sent_to_the_server(
    reader: Reader, name: str, value: str
) -> None:
    page = reader.open("rollouts")
    page.fill(f"input[name={name}]", value)
    page.press(f"input[name={name}]", "Tab")
    page.wait_for_selector(".chip")
    reader.wait_asked("runs/first/rollouts", name, value)


def test_a_url_with_filters_shows_the_same_rows(reader: Reader) -> None:
    page = reader.open("rollouts?run=first&failure=agent&sort=worst")
    assert page.input_value("select[name=failure]") == "agent"
    assert page.input_value("#sort") == "worst"
    assert (
        page.inner_text(".count")
        == f"{sum(row['failure'] == 'agent' for row in ROWS)} rollouts"
    )
    page.click("text=Clear all filters")
    reader.wait("document.querySelector('.count').textContent === '240 rollouts'")


@pytest.mark.parametrize(
    "sort",
    first_quick(["best", "worst", "surprising", "reward", "tokens", "staleness"]),
)
def test_each_sort_order_is_sent_to_the_server(reader: Reader, sort: str) -> None:
    page = reader.open("rollouts")
    page.select_option("#sort", sort)
    reader.wait(f"location.hash.includes('sort={sort}')")
    page.wait_for_selector("table.data tbody tr.link")
    reader.wait_asked("runs/first/rollouts", "sort", sort)


def test_clicking_a_column_sorts_both_ways(reader: Reader) -> None:
    page = reader.open("rollouts")
    page.click("th button:has-text('Reward')")
    page.wait_for_selector("th[aria-sort=descending]:has-text('Reward')")
    page.click("th button:has-text('Reward')")
    page.wait_for_selector("th[aria-sort=ascending]:has-text('Reward')")
    reader.wait_asked("runs/first/rollouts", "order", "asc")


def test_search_text_is_sent_to_the_server(reader: Reader) -> None:
    page = reader.open("rollouts")
    page.keyboard.press("/")
    page.keyboard.type('"two words"')
    reader.wait("location.hash.includes('q=')")
    page.wait_for_selector(".chip")
    reader.wait_asked("runs/first/rollouts", "q", '"two words"')
    assert page.evaluate("document.activeElement.id") == "q"


def test_keys_lead_from_the_table_through_the_rollouts_and_back(reader: Reader) -> None:
    page = reader.open("rollouts?run=first&sort=tokens")
    page.wait_for_selector("table.data tbody tr.link")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.wait_for_selector("tr.selected[aria-rowindex='3']")
    page.keyboard.press("Enter")
    page.wait_for_selector(".neighbours >> text=2 of 240")
    page.keyboard.press("j")
    page.wait_for_selector(".neighbours >> text=3 of 240")
    page.keyboard.press("k")
    page.wait_for_selector(".neighbours >> text=2 of 240")
    page.keyboard.press("v")
    page.wait_for_selector(".tokens.sampled")
    page.keyboard.press("u")
    page.wait_for_selector("table.data")
    assert "sort=tokens" in page.url
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open] >> text=open the rollout")
    page.keyboard.press("Escape")


def test_table_renders_only_visible_rows_and_loads_pages_on_scrolling(
    reader: Reader,
) -> None:
    page = reader.open("rollouts?run=first")
    page.wait_for_selector("table.data tbody tr.link")
    assert page.eval_on_selector_all("table.data tbody tr", "rows => rows.length") < 80
    page.evaluate("document.querySelector('.table').scrollTop = 1e9")
    page.wait_for_selector("tr.link[aria-rowindex='241']")
    reader.wait_asked("runs/first/rollouts", "offset", "200")


def test_task_page_shows_the_last_reply_of_each_step(reader: Reader) -> None:
    page = reader.open(f"tasks/{quote(ROWS[0]['task'], safe='')}?run=first")
    page.wait_for_selector(".columns .card")
    card = page.locator(".card >> nth=0")
    text = card.locator(".text").inner_text()
    assert text.startswith("said <script>document.title='taken'</script>")
    assert len(text) < 300
    card.locator("button:has-text('more')").click()
    assert len(card.locator(".text").inner_text()) > 2_000
    assert "all 9,000 characters" in card.locator(".text").inner_text()
    card.locator("button:has-text('less')").click()
    assert len(card.locator(".text").inner_text()) < 300
    page.click(".card-head >> nth=0")
    page.wait_for_selector(".conversation")


@pytest.mark.parametrize("width", [400, 1280])
def test_columns_of_a_task_scroll_without_the_page(
    browser: Any, server: ScriptedViewer, width: int
) -> None:
    reader = Reader(browser, server, width)
    page = reader.open(f"tasks/{quote(ROWS[0]['task'], safe='')}?run=first")
    page.wait_for_selector(".columns .card")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    columns = "document.querySelector('.columns')"
    assert page.evaluate(f"{columns}.scrollWidth > {columns}.clientWidth")
    assert page.evaluate("document.querySelector('.column').clientWidth") in range(
        200, width
    )
    page.close()


def test_fork_shows_its_reason_and_place(reader: Reader) -> None:
    page = reader.open("rollout/s-0006")
    note = page.inner_text(".fork")
    assert "branches off turn 1; the first 2 of its 3 messages are as there" in note
    assert "Message 3 (assistant): another text <script>" in note
    assert "What helps: Send it as it was" in note
    assert (
        page.locator(".both-texts mark").all_inner_texts()[0].startswith("0 <script>")
    )
    assert (
        page.locator(".both-texts mark").all_inner_texts()[1].startswith("1↵\n<script>")
    )
    assert "2 messages as in turn 1" in page.inner_text("#turn-3 .old")
    assert page.locator(".tree a").count() == 3
    page.click(".tree a >> nth=1")
    reader.wait("document.querySelectorAll('.turn').length === 2")
    assert "a later branch has it" in page.inner_text("#turn-2")


@pytest.mark.parametrize(
    ("colour", "legend"),
    first_quick(
        [
            ("logprob", "engine log-prob"),
            ("advantage", "0.5"),
            ("gap", "0.01"),
            ("version", "version 2"),
            ("trained", "masked (1)"),
            ("number:kl", "0.1"),
        ]
    ),
)
def test_tokens_are_coloured_and_show_their_numbers(
    reader: Reader, colour: str, legend: str
) -> None:
    page = reader.open(f"rollout/s-0006?view=tokens&colour={colour}")
    page.wait_for_selector(".tokens.sampled")
    assert legend in page.inner_text(".tokens-place .legend")
    colours = page.eval_on_selector_all(
        ".sampled .token", "spans => spans.map((span) => span.style.backgroundColor)"
    )
    assert len(set(colours)) > (0 if colour == "number:kl" else 1)
    page.focus(".sampled .token >> nth=0")
    page.keyboard.press("ArrowRight")
    told = re.sub(r"\s+", " ", page.inner_text(".token-detail"))
    assert (
        'token " answer" id 1 place 1 (7 in all) engine log-prob −0.2 (p 0.819) trainer log-prob −0.19'
        in told
    )


def test_token_shows_the_alternatives_of_the_engine(reader: Reader) -> None:
    page = reader.open("rollout/s-0006?view=tokens")
    page.focus(".sampled .token >> nth=0")
    page.keyboard.press("ArrowRight")
    listed = [
        re.sub(r"\s+", " ", text)
        for text in page.locator(".candidates li").all_inner_texts()
    ]
    assert listed[0] == '1 " answer" −0.2 (p 0.819) trainer −0.19 sampled'
    assert listed[1].startswith('2 "<script>')
    assert "−3 (p 0.05)" in listed[1]
    assert "2 likeliest tokens here (50 were recorded)" in page.inner_text(
        ".candidates"
    )
    page.keyboard.press("End")
    assert "No candidates were recorded here." in page.inner_text(".token-detail")


def test_raw_ids_can_be_copied(browser: Any, server: ScriptedViewer) -> None:
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto(f"{server.url}#/rollout/s-0006?view=tokens")
    page.click("text=Copy sampled ids")
    page.wait_for_selector("text=Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "[0,1,2,3,4,5,6,7]"
    context.close()


def test_chosen_metric_of_ten_thousand_stays_in_the_url(reader: Reader) -> None:
    page = reader.open("overview")
    page.fill("#metric-search", "many/0777")
    page.wait_for_selector("#metric-found button")
    assert page.locator("#metric-found button").count() == 10
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector("figcaption >> text=many/07770")
    assert "metrics=many%2F07770" in page.url


def test_compared_runs_share_a_chart_and_show_their_different_settings(
    reader: Reader,
) -> None:
    page = reader.open("overview")
    page.wait_for_selector("figure.chart canvas")
    legend = page.inner_text("figure.chart >> nth=0")
    assert "first" in legend
    assert "second" in legend
    assert "algorithm.lr" in page.inner_text("table[aria-label='Settings that differ']")
    page.uncheck("input[type=checkbox] >> nth=1")
    reader.wait("location.hash.includes('runs=first')")
    reader.wait(
        "!document.querySelector('figure.chart').textContent.includes('second')"
    )


def test_reward_of_one_run_has_the_band_of_its_deviation(reader: Reader) -> None:
    reader.server.metric_rows["first"] = {
        f"rollout/reward_{part}": [[step, 0.0, value] for step in (1, 2, 3)]
        for part, value in (("mean", 0.5), ("std", 0.2), ("min", 0.0), ("max", 1.0))
    }
    for runs, has_band in (("first", True), ("first,second", False)):
        page = reader.open(f"overview?runs={runs}")
        page.wait_for_selector("figure.chart canvas")
        caption = page.inner_text("figure.chart figcaption >> nth=0")
        assert ("± standard deviation" in caption) == has_band


def test_gains_changed_settings_and_the_end_of_the_log_are_shown(
    reader: Reader,
) -> None:
    gains = reader.open("evaluations?run=first").inner_text("table[aria-label=Gains]")
    assert "0.5 [0.375, 0.625]" in gains
    page = reader.open("overview?runs=first")
    shown = page.inner_text("table[aria-label='Changed settings of first']")
    assert shown.count(HOSTILE[:20]) == 3
    page.click("summary >> text=The end of its log >> nth=0")
    assert "</pre></body>" in page.inner_text(".outcomes pre >> nth=0")


def test_live_run_updates_charts_and_state(reader: Reader) -> None:
    page = reader.open("overview")
    page.wait_for_selector("#connection >> text=connected")
    reader.server.metric_rows["first"]["rollout/reward_mean"].append([9, 0.0, 0.123])
    reader.server.runs[0] = {**reader.server.runs[0], "step": 9, "state": "running"}
    reader.server.send("first", "metrics", "state")
    page.wait_for_selector("figure.chart >> nth=0 >> text=0.123")
    page.wait_for_selector("table >> text=running")


def test_progress_of_the_index_is_shown(reader: Reader) -> None:
    index = {**reader.server.runs[0]["index"], "ready": False, "turns_indexed": 120}
    reader.server.runs[0] = {**reader.server.runs[0], "index": index}
    page = reader.open("rollouts?run=first")
    assert "120 of 480 turns" in page.inner_text("#progress")
    assert "so far" in page.inner_text(".count")


def test_run_on_a_file_shows_losses_and_one_note_that_it_has_no_rollouts(
    reader: Reader,
) -> None:
    missing = f"run.sqlite: it is missing {HOSTILE}"
    index = {**reader.server.runs[0]["index"], "error": missing, "rollouts": 0}
    reader.server.runs[0] = {
        **reader.server.runs[0],
        "index": index,
        "notes": [missing],
    }
    points = [[step, 0.0, 1.0 / step] for step in range(1, 5)]
    names = ("train/loss", "eval/loss", "time/step_s")
    reader.server.metric_rows["first"] = dict.fromkeys(names, points)
    page = reader.open("overview?runs=first")
    assert page.inner_text("#progress").count(missing) == 1
    titles = page.locator("figure.chart .chart-title").all_inner_texts()
    assert titles == ["Loss", "Held-out loss", "Seconds per phase"]
    reader.server.fail["runs/first/ledger"] = missing
    told = reader.open("ledger?run=first").inner_text("[role=alert]")
    assert told.count(missing) == 1
    reader.errors.clear()  # the browser tells of every 503


def test_error_message_shows_the_fix(browser: Any, server: ScriptedViewer) -> None:
    server.fail["runs/first/ledger"] = "The store is locked."
    reader = Reader(browser, server)
    page = reader.open("ledger?run=first")
    told = page.inner_text("[role=alert]")
    assert "The store is locked." in told
    assert HOSTILE[:20] in told
    page.close()


def test_unknown_runs_and_pages_and_empty_results_show_a_message(
    reader: Reader,
) -> None:
    assert "not served here" in reader.open("rollouts?run=third").inner_text("main")
    assert "no page" in reader.open("nowhere").inner_text("main")
    assert "No rollout passes" in reader.open(
        "rollouts?run=first&state=lost"
    ).inner_text("main")


def test_chosen_theme_is_kept(reader: Reader) -> None:
    page = reader.open("overview")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    page.click("#theme")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert light != dark
    reader.open("overview")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark


def test_the_skip_link_leads_to_the_content(reader: Reader) -> None:
    page = reader.open("ledger")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    assert "#/ledger" in page.url


def test_charts_have_a_text_alternative(reader: Reader) -> None:
    page = reader.open("overview")
    label = page.get_attribute("figure.chart >> nth=0", "aria-label")
    assert "first from 0.1 to 0.8" in label
    page.click("figure.chart summary >> nth=0")
    page.wait_for_selector("figure.chart >> nth=0 >> tbody tr")
    assert page.locator("figure.chart >> nth=0 >> tbody tr").count() == 8


def test_no_page_script_renders_data_as_markup() -> None:
    """`innerHTML` and its like would undo what the other tests see; inline code the
    policy refuses anyway."""
    for path in PAGE.glob("*.js"):
        text = path.read_text()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function",
            text,
        ), path
    index = (PAGE / "index.html").read_text()
    assert not re.search(r"<script>|<style|style=|\son\w+=|https?://", index)


def test_every_file_of_the_page_is_loaded_once() -> None:
    loaded = re.findall(r'<script src="([\w/.]+)"', (PAGE / "index.html").read_text())
    assert sorted(name for name in loaded if "/" not in name) == sorted(
        path.name for path in PAGE.glob("*.js")
    )


def test_export_of_the_page_opens_from_disk(
    browser: Any, server: ScriptedViewer, tmp_path: Path
) -> None:
    """The files as an export lays them out, with two runs, opened without a server."""
    folder = write_export(server, tmp_path / "it is #1")
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    errors: list[str] = []
    page.on(
        "console",
        lambda message: message.type == "error" and errors.append(message.text),
    )
    page.on("pageerror", lambda error: errors.append(str(error)))
    for place in [
        "overview",
        "steps",
        "groups",
        "tasks",
        "processes",
        "ledger",
        "evaluations",
        "weights",
    ]:
        page.goto("about:blank")
        page.goto(f"{(folder / 'index.html').as_uri()}#/{place}")
        page.wait_for_selector("body[data-ready]", state="attached")
        assert page.query_selector("[role=alert]") is None, place
    page.goto(f"{(folder / 'index.html').as_uri()}#/rollouts?run=first")
    page.wait_for_selector("table.data tbody tr.link")
    page.select_option("select[name=failure]", "agent")
    failed = sum(row["failure"] == "agent" for row in ROWS)
    until(page, f"document.querySelector('.count').textContent === '{failed} rollouts'")
    page.click("table.data tbody tr.link a >> nth=0")
    page.wait_for_selector(".conversation")
    page.keyboard.press("j")
    page.wait_for_selector("text=not in this export")
    assert errors == []
    page.close()


@pytest.mark.parametrize(
    ("search", "found"),
    first_quick(
        [
            ('"second answer"', {"b"}),
            ("zurich", {"a"}),
            ("seco", {"b"}),
            ('"answer second"', set()),
            ("first second", set()),
            ("first rep", {"b"}),
            ("y", {"c"}),
            ("x", {"c", "d"}),
            ("x y", {"c"}),
            ("TAKEN", {"d"}),
            ("document.tit", {"d"}),
            ("none-of-it", set()),
        ]
    ),
)
def test_export_is_searched_like_the_run(
    browser: Any,
    searchable_export: tuple[ViewedRun, Path],
    search: str,
    found: set[str],
) -> None:
    run, folder = searchable_export
    with run.queries() as queries:
        served = queries.rollouts({"q": [search]})["rows"]
    assert {row["task"] for row in served} == found
    page = browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{(folder / 'index.html').as_uri()}#/rollouts?q={quote(search)}")
    count = f"{len(found)} {'rollout' if len(found) == 1 else 'rollouts'}"
    until(page, f"document.querySelector('.count')?.textContent.startsWith('{count}')")
    shown = page.locator("table.data tbody tr.link td:first-child").all_inner_texts()
    assert set(shown) == found
    assert "what was said is here of 4 of 5, ids of all" in page.inner_text(".count")
    assert errors == []
    page.close()


@pytest.fixture(scope="module")
def searchable_export(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[ViewedRun, Path]:
    """A run with four rollouts that say something, exported with these, and without a
    fifth."""
    root = tmp_path_factory.mktemp("said")
    recorded = record_run(root)
    call = ToolCall(
        id="1", name="search_web", arguments='{"query": "Z\u00fcrich weather"}'
    )
    recorded.add("e", "nothing of note", 0.4)
    recorded.add(
        "a", Message("assistant", "let me look", "thinking hard", (call,)), 1.0
    )
    recorded.add("b", ["first reply", "second answer"], 0.9)
    recorded.add("c", "x marks y", 0.1)
    recorded.add("d", HOSTILE, 0.0)
    recorded.writer.close()
    [run] = open_runs([recorded.folder.path], root / "cache")
    export_runs([run], root / "export", rollouts=4, say=lambda _: None)
    return run, root / "export"


def write_export(server: ScriptedViewer, folder: Path) -> Path:
    shutil.copytree(PAGE, folder)
    (folder / "data").mkdir()
    kinds = (
        "steps groups rollouts facets tasks timeline ledger evaluations weights".split()
    )
    names = ["runs", "config", "metric-names", "metrics"]
    names += [f"runs/{run['id']}/{kind}" for run in server.runs for kind in kinds]
    newest = max(
        (row for row in ROWS if row["failure"] == "agent"),
        key=lambda row: row["opened_at"],
    )["session_id"]
    names += [
        f"runs/first/rollouts/{newest}",
        *(f"runs/first/turns/t-{number}/tokens" for number in range(3)),
    ]
    files = {}
    for number, name in enumerate(names):
        files[name] = f"data/{number:05d}.js"
        value = server.value(name, {"limit": "1000"})
        (folder / files[name]).write_text(
            f"window.invrlData({json.dumps(name)}, {json.dumps(value)});"
        )
    manifest = {
        "created": 1.0,
        "version": "0",
        "files": files,
        "left_out": {"first": 239},
    }
    (folder / "data" / "manifest.js").write_text(
        f"window.invrlExport = {json.dumps(manifest)};"
    )
    return folder
