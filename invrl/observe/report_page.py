"""The report of a run as one HTML file without scripts, which opens from a disk,
offline. Pure.

Invariant: texts of models, tasks and exceptions are hostile. Each passes `_text`, which
makes control characters visible and escapes HTML, and a content security policy lets
the page load nothing: only its own style sheet, by its hash."""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from invrl.host.printable import printable, trimmed
from invrl.observe.report_chart import Chart, svg

_MAX_DETAIL_CHARACTERS = 3000
_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1d2330; --dim: #5a6372; --edge: #d5d9e0;
  --box: #f5f6f8; --c0: #1f6feb; --c1: #c2570c; --c2: #1a7f37; --c3: #8250df; --c4: #b02a5b; --c5: #6b6f00; }
@media (prefers-color-scheme: dark) { :root { --back: #14171c; --text: #e3e7ee; --dim: #9aa4b2;
  --edge: #363c47; --box: #1d2128; --c0: #6cb0ff; --c1: #f0a35e; --c2: #5fc97a; --c3: #bd9bff; --c4: #f08bb0;
  --c5: #c9c95a; } }
body { margin: 0 auto; max-width: 1200px; padding: 16px; background: var(--back); color: var(--text);
  font: 15px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 22px; margin: 0; } h2 { font-size: 17px; margin: 28px 0 8px; }
h3 { font-size: 14px; margin: 0 0 4px; }
p { margin: 4px 0; } .dim { color: var(--dim); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 16px; }
figure { margin: 0; padding: 10px; border: 1px solid var(--edge); border-radius: 6px; min-width: 0; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--dim); font-size: 12px; }
.grid { stroke: var(--edge); } .line { fill: none; stroke-width: 1.8; } .band { opacity: .18; stroke: none; }
.bar { stroke-width: 6; opacity: .4; }
ul.legend { list-style: none; padding: 0; margin: 4px 0 0; font-size: 13px; }
ul.legend li::before { content: "\\25A0"; margin-right: 6px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; vertical-align: top; padding: 4px 10px 4px 0;
  border-bottom: 1px solid var(--edge); }
.scroll table { min-width: 480px; } th { overflow-wrap: normal; color: var(--dim); font-weight: 600; }
pre { margin: 4px 0; padding: 8px; background: var(--box); border-radius: 6px; white-space: pre-wrap;
  font-size: 13px; } summary { cursor: pointer; }
""" + "".join(
    f".line.c{number}, .bar.c{number} {{ stroke: var(--c{number}); }} "
    f".band.c{number}, .dot.c{number} {{ fill: var(--c{number}); }} "
    f"li.c{number}::before {{ color: var(--c{number}); }}\n"
    for number in range(6)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What training gained on a held-out set. Intervals are 95 %; None where they are
    not known."""

    name: str
    first_step: int
    last_step: int
    before: float
    after: float
    after_interval: tuple[float, float] | None
    gain_interval: tuple[float, float] | None
    """Of `after - before`, over the same tasks."""
    num_tasks: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureExample:
    task_id: str
    count: int
    """How many failures end with the same line."""
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedReason:
    reason: str
    count: int
    examples: Sequence[FailureExample]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedSetting:
    name: str
    value: str
    default: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportContents:
    """Everything on the page, as plain values."""

    title: str
    subtitle: str
    state: str
    """A sentence: how far the run came."""
    notes: Sequence[str]
    charts: Sequence[Chart]
    gains: Sequence[Gain]
    failures: Sequence[FailedReason]
    settings: Sequence[ChangedSetting]
    versions: Sequence[tuple[str, str]]
    commands: Sequence[tuple[str, str]]
    """Command and purpose."""
    log_end: str
    """The last lines of the driver's log, for a run that did not reach its end."""


def page(contents: ReportContents) -> str:
    """The whole HTML file."""
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        f"<title>{_text(contents.title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{_text(contents.title)}</h1>",
        f'<p class="dim">{_text(contents.subtitle)}</p><p>{_text(contents.state)}</p>',
    ]
    parts += [f"<p>note: {_text(note)}</p>" for note in contents.notes]
    parts += _gains(contents.gains)
    parts += _charts(contents.charts)
    parts += _failures(contents.failures)
    if contents.log_end:
        parts.append(f"<h2>The end of its log</h2><pre>{_text(contents.log_end)}</pre>")
    parts += _settings(contents.settings)
    if contents.commands:
        parts.append("<h2>Next commands</h2>")
        parts += [
            f"<p>{_text(purpose)}</p><pre>{_text(text)}</pre>"
            for text, purpose in contents.commands
        ]
    rows = [[_text(name), _text(version)] for name, version in contents.versions]
    parts += [
        "<h2>Versions</h2>",
        *_table(["installed where this was written", ""], rows),
    ]
    parts.append("</body></html>\n")
    return "\n".join(parts)


def _text(text: str) -> str:
    return escape(printable(text), quote=True)


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """`heads`: texts. `rows`: cells of HTML."""
    head = "".join(f"<th>{_text(name)}</th>" for name in heads)
    lines = [
        "<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows
    ]
    return [f'<div class="scroll"><table><tr>{head}</tr>', *lines, "</table></div>"]


def _gains(gains: Sequence[Gain]) -> list[str]:
    if not gains:
        return []
    rows: list[list[str]] = []
    for gain in gains:
        change = ""
        if gain.last_step != gain.first_step:
            change = f"{gain.after - gain.before:+.3f}{_interval(gain.gain_interval, sign='+')}"
        tasks = "" if gain.num_tasks is None else str(gain.num_tasks)
        rows.append(
            [
                _text(gain.name),
                f"{gain.before:.3f} (step {gain.first_step})",
                f"{gain.after:.3f}{_interval(gain.after_interval)} (step {gain.last_step})",
                change,
                tasks,
            ]
        )
    heads = [
        "accuracy of",
        "first",
        "last, 95 % interval",
        "gain, 95 % interval",
        "tasks",
    ]
    return ["<h2>Held-out tasks</h2>", *_table(heads, rows)]


def _interval(interval: tuple[float, float] | None, sign: str = "") -> str:
    if interval is None:
        return ""
    low, high = interval
    return f" [{low:{sign}.3f}, {high:{sign}.3f}]"


def _charts(charts: Sequence[Chart]) -> list[str]:
    parts: list[str] = []
    for chart in charts:
        picture = svg(chart)
        if not picture:
            continue
        entries = [
            f'<li class="c{number % 6}">{_text(line.label)}</li>'
            for number, line in enumerate(chart.lines)
        ]
        legend = f'<ul class="legend">{"".join(entries)}</ul>'
        parts.append(f"<figure><h3>{_text(chart.title)}</h3>{picture}{legend}</figure>")
    if not parts:
        return ["<h2>Curves</h2><p>The run has made no step.</p>"]
    return ['<h2>Curves over steps</h2><div class="charts">', *parts, "</div>"]


def _failures(failures: Sequence[FailedReason]) -> list[str]:
    if not failures:
        return []
    parts = ["<h2>Failed rollouts</h2>"]
    for failed in failures:
        parts.append(f"<h3>{_text(failed.reason)}: {failed.count}</h3>")
        for example in failed.examples:
            line = example.detail.strip().rpartition("\n")[2] or "(no message)"
            summary = f"{example.count} × {trimmed(line, 200)}, such as task {trimmed(example.task_id, 120)}"
            detail = trimmed(example.detail.strip(), _MAX_DETAIL_CHARACTERS)
            parts.append(
                f"<details><summary>{_text(summary)}</summary><pre>{_text(detail)}</pre></details>"
            )
    return parts


def _settings(settings: Sequence[ChangedSetting]) -> list[str]:
    rows = [[_text(row.name), _text(row.value), _text(row.default)] for row in settings]
    return [
        "<h2>Settings that differ from their defaults</h2>",
        *_table(["setting", "value", "default"], rows),
    ]
