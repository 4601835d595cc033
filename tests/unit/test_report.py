"""`invrl report`: the exported pages in the run's folder, of a run that is alive,
ended, failed or damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from recorded_run import record_run

from invrl.cli import main as cli


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def reported(folder: Path) -> dict[str, Any]:
    """The values of the written pages by their names."""
    assert cli.main(["report", str(folder)]) == 0
    pages = folder / "report" / "pages"
    assert (pages / "index.html").is_file()
    values: dict[str, Any] = {}
    for script in sorted((pages / "data").glob("0*.js")):
        call = script.read_text().strip()
        arguments = call.removeprefix("window.invrlData(").removesuffix(");")
        name, value = json.loads(f"[{arguments}]")
        values[name] = value
    return values


def test_report_writes_the_pages_anew_and_prints_where_and_what_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = record_run(tmp_path)
    session_id = recorded.add("a", "a reply", 1.0)
    folder = recorded.folder.path
    assert f"runs/run/rollouts/{session_id}" in reported(folder)
    out = capsys.readouterr().out
    assert out.startswith(f"written: {folder}/report/pages/index.html\n")
    assert "samples" in out.partition("next (in ")[2]
    other_id = recorded.add("b", "another reply", 0.0)
    assert f"runs/run/rollouts/{other_id}" in reported(folder)
    assert {path.name for path in (folder / "report").iterdir()} == {"pages"}


def test_report_of_a_run_that_failed_at_once_shows_the_end_of_its_log(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.resolved.toml").write_text("[run]\nnum_steps = 7\n")
    (tmp_path / "logs").mkdir()
    lines = "".join(f"line {number}\n" for number in range(40))
    (tmp_path / "logs" / "driver.log").write_bytes(
        lines.encode() + b"no GPU\xff <script>alert(1)</script>\n"
    )
    values = reported(tmp_path)
    [run] = values["runs"]["runs"]
    assert (run["state"], run["step"], run["num_steps"]) == ("interrupted", 0, 7)
    log_end = run["log_end"].splitlines()
    assert log_end[0] == "line 16"
    assert log_end[-1] == "no GPU\ufffd <script>alert(1)</script>"
    [changed] = values["config"]["changed"].values()
    assert changed == [{"key": "run.num_steps", "value": 7, "default": 100}]


def test_report_of_a_damaged_store_and_settings_of_another_version_has_a_note(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.resolved.toml").write_text("[run]\nno_such_setting = 1\n")
    (tmp_path / "run.sqlite").write_bytes(b"no database" * 100)
    values = reported(tmp_path)
    [run] = values["runs"]["runs"]
    assert any("run.sqlite" in note for note in run["notes"])
    [changed] = values["config"]["changed"].values()
    assert changed == [{"key": "run.no_such_setting", "value": 1, "default": None}]
