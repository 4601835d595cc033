"""The HTML report in a real browser, from a disk, with hostile texts in every place."""

from __future__ import annotations

from pathlib import Path

import pytest
from hostile_report import HOSTILE_CONTENTS
from scripted_viewer import HOSTILE

from invrl.observe.report_page import page

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra: dev)")
_CHROMIUM = next(
    (path for path in ("/usr/bin/chromium", "/usr/bin/chromium-browser") if Path(path).exists()), None
)
pytestmark = pytest.mark.skipif(_CHROMIUM is None, reason="no Chromium: apt-get install chromium")


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_opens_from_a_disk_and_hostile_texts_do_nothing(tmp_path: Path, width: int, scheme: str) -> None:
    path = tmp_path / "report.html"
    path.write_text(page(HOSTILE_CONTENTS))
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
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
        assert background == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 28)")
        shown.locator("summary").first.click()
        assert shown.locator("details pre").first.is_visible()
        browser.close()
