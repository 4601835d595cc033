"""`invrl view` in a real browser, on a run that SGLang, the gateway and Megatron
made."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from chromium import chromium, needs_chromium, viewed

from e2e.runs import DEADLINE_S

pytestmark = needs_chromium


def trained_rollouts(run: Path) -> int:
    with closing(sqlite3.connect(run / "run.sqlite")) as db:
        [[number]] = db.execute("SELECT COUNT(*) FROM ledger WHERE state = 'trained'")
    return number


@pytest.mark.timeout(DEADLINE_S)
def test_every_page_opens_on_a_real_run(learned: Path, tmp_path: Path) -> None:
    """And a rollout's tokens are coloured by the advantage and the gap that the trainer
    recorded."""
    with chromium() as browser, viewed(learned, browser, tmp_path) as view:
        view.open_all()
        page = view.open("rollouts?purpose=train&trained=1&sort=best")
        page.wait_for_selector(".count:text-matches('^[0-9,]+ rollout')")
        number = re.match(r"[0-9,]+", page.inner_text(".count"))
        assert number is not None
        assert int(number[0].replace(",", "")) == trained_rollouts(learned) > 0
        page.click("tr.link a >> nth=0")
        page.wait_for_selector(".conversation .message")
        page.keyboard.press("v")
        page.wait_for_selector(".tokens.sampled .token")
        for colour in ("advantage", "gap"):
            page.goto(re.sub(r"&colour=\w+|$", f"&colour={colour}", page.url, count=1))
            page.wait_for_selector(".tokens-place .legend")
