"""The HTML report in a real browser, from a disk, with hostile texts in every place."""

from __future__ import annotations

from pathlib import Path

import pytest
from chromium import chromium, needs_chromium
from hostile_report import HOSTILE_CONTENTS
from scripted_viewer import HOSTILE

from invrl.observe.report_page import page

pytestmark = needs_chromium


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_report_opens_from_disk_and_hostile_texts_stay_inert(
    tmp_path: Path, width: int, scheme: str
) -> None:
    path = tmp_path / "report.html"
    path.write_text(page(HOSTILE_CONTENTS))
    with chromium() as browser:
        shown = browser.new_page(
            viewport={"width": width, "height": 800}, color_scheme=scheme
        )
        complaints: list[str] = []
        requests: list[str] = []
        shown.on("console", lambda message: complaints.append(message.text))
        shown.on("pageerror", lambda error: complaints.append(str(error)))
        shown.on("request", lambda request: requests.append(request.url))
        shown.goto(path.as_uri())
        assert shown.title() == " ".join(HOSTILE.split())
        assert shown.locator("body").is_visible()
        assert shown.locator("#taken").count() == 0
        assert requests == [path.as_uri()]
        assert complaints == []  # its own style sheet is allowed
        assert shown.evaluate("document.documentElement.scrollWidth") <= width
        background = shown.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == (
            "rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 28)"
        )
        shown.locator("summary").first.click()
        assert shown.locator("details pre").first.is_visible()
