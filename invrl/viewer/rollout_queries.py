"""The page's queries of the index: every filter and sort, and their SQL."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from invrl.errors import ConfigError
from invrl.viewer.index_file import TURN_BITS, meta_number

MAX_ROWS = 1_000
"""Most rows of one response."""
_DEFAULT_ROWS = 50

_TEXT_FILTERS = {
    "group": "group_id",
    "session": "session_id",
    "purpose": "purpose",
    "evaluation": "evaluation",
    "state": "state",
    "drop": "reason",
    "failure": "failure",
}
_SWITCH_FILTERS = ("truncated", "trained", "ended")
_NUMBERS = {
    "reward": "reward",
    "tokens": "sampled_tokens",
    "turns": "turns",
    "forks": "forks",
    "staleness": "staleness",
    "seconds": "seconds",
    "advantage": "advantage",
    "logprob": "logprob",
    "gap": "gap",
    "surprise": "surprise",
}
"""Numbers that can be bounded and sorted by, with their columns."""
_SORTS = {
    **_NUMBERS,
    "opened_at": "opened_at",
    "step": "step",
    "index": '"index"',
    "task": "task",
    "state": "state",
}
_ORDERED_SORTS = {
    "best": "reward DESC NULLS LAST, surprise DESC NULLS LAST",
    "worst": "reward ASC NULLS LAST, surprise DESC NULLS LAST",
    "surprising": "surprise DESC NULLS LAST",
}
_FACETS = ("purpose", "evaluation", "state", "drop", "failure", "truncated", "trained")
_RANGES = ("reward", "tokens", "turns", "staleness", "seconds")
_INTERNAL_COLUMNS = (
    "id",
    "ended",
    "trained",
    "turns_read",
    "logprob_sum",
    "logprob_count",
)
"""Columns of `rollouts` that no page shows."""
_REWARD_SPREAD = (
    "AVG(reward) AS reward_mean, MIN(reward) AS reward_min, MAX(reward) AS reward_max"
)
_REWARD_STD = "SQRT(MAX(0, AVG(reward*reward) - AVG(reward)*AVG(reward))) AS reward_std"

Parameters = Mapping[str, Sequence[str]]
"""Query of a URL: each name with its values."""
Row = dict[str, Any]


@dataclass(slots=True)
class Selection:
    """Condition on the rows of `rollouts`, with its values."""

    conditions: list[str] = field(default_factory=list)
    values: list[object] = field(default_factory=list)
    is_search: bool = False

    @property
    def where(self) -> str:
        if not self.conditions:
            return ""
        return "WHERE " + " AND ".join(self.conditions)

    def require(self, condition: str, *values: object) -> None:
        self.conditions.append(condition)
        self.values += values

    def require_any(
        self, condition: str, parameters: Parameters, name: str, repeats: int = 1
    ) -> None:
        """Require one of the values of this name, if it has any. `condition` has `{}`
        in place of the list of values, `repeats` times."""
        chosen = [value for value in parameters.get(name, ()) if value]
        if chosen:
            marks = ",".join("?" * len(chosen))
            self.require(condition.replace("{}", f"({marks})"), *chosen * repeats)


@dataclass(frozen=True, slots=True)
class Page:
    """Range of the rows of a response."""

    limit: int
    """-1: all, as in SQL."""
    offset: int


EVERY_ROW = Page(limit=-1, offset=0)
"""Page with every row, for an export; no URL can request it."""


def read_selection(parameters: Parameters) -> Selection:
    """Return the filters of a URL. Raises ConfigError for an invalid value. Unknown
    names are ignored."""
    selection = Selection()
    for name, column in _TEXT_FILTERS.items():
        selection.require_any(f"{column} IN {{}}", parameters, name)
    selection.require_any("(task IN {} OR task_id IN {})", parameters, "task", 2)
    for value in filter(None, parameters.get("step", ())):
        _whole("step", value)
    selection.require_any("step IN {}", parameters, "step")
    in_forks = "id IN (SELECT rollout FROM forks WHERE reason IN {})"
    selection.require_any(in_forks, parameters, "fork")
    for name in _SWITCH_FILTERS:
        value = _first(parameters, name)
        if value:
            selection.require(f"{name}=?", int(_switch(name, value)))
    for name, column in _NUMBERS.items():
        _bound(selection, parameters, name, column)
    _require_component(selection, parameters)
    _require_words(selection, _first(parameters, "q"))
    return selection


def _bound(
    selection: Selection, parameters: Parameters, name: str, column: str
) -> None:
    low = _first(parameters, f"min_{name}")
    high = _first(parameters, f"max_{name}")
    if low:
        selection.require(f"{column}>=?", _number(f"min_{name}", low))
    if high:
        selection.require(f"{column}<=?", _number(f"max_{name}", high))


def _require_component(selection: Selection, parameters: Parameters) -> None:
    component = _first(parameters, "component")
    if not component:
        return
    inner = Selection()
    inner.require("name=?", component)
    _bound(inner, parameters, "component", "value")
    selection.require(
        f"id IN (SELECT rollout FROM component_values {inner.where})", *inner.values
    )


def _require_words(selection: Selection, text: str) -> None:
    """Require that all words occur in one turn, or that the text is an id."""
    if not text.strip():
        return
    selection.is_search = True
    query = match_expression(text)
    by_id = "task_id=? OR task=? OR session_id=?"
    ids = (text.strip(),) * 3
    if not query:
        selection.require(f"({by_id})", *ids)
        return
    said = f"SELECT rowid >> {TURN_BITS} FROM said WHERE said MATCH ?"
    selection.require(f"(id IN ({said}) OR {by_id})", query, *ids)


def match_expression(text: str) -> str:
    """Convert user input into an expression of FTS5: words are prefixes, "quoted text"
    is a phrase, and a single letter is a word. None of it is an operator. "" if there
    is no word in it."""
    terms: list[str] = []
    for position, part in enumerate(text.split('"')):
        is_phrase = position % 2 == 1
        words = [part] if is_phrase else part.split()
        for word in words:
            if not any(character.isalnum() for character in word):
                continue
            quoted = f'"{word.strip()}"'.replace("\0", " ")
            # A prefix of one letter would match nearly everything, slowly.
            terms.append(quoted if is_phrase or len(word) == 1 else f"{quoted}*")
    return " AND ".join(terms)


def read_page(parameters: Parameters) -> Page:
    """Return the page of a URL. Raises ConfigError for a limit or an offset that is not
    a number."""
    limit = _whole("limit", _first(parameters, "limit") or str(_DEFAULT_ROWS))
    offset = _whole("offset", _first(parameters, "offset") or "0")
    return Page(limit=min(max(limit, 0), MAX_ROWS), offset=max(offset, 0))


def read_order(parameters: Parameters, sorts: Mapping[str, str], default: str) -> str:
    """Return the ORDER BY of a URL; nulls are last. Raises ConfigError for an unknown
    sort."""
    name = _first(parameters, "sort") or default
    if name not in sorts:
        raise ConfigError("sort", name, "no such order", f"one of: {', '.join(sorts)}")
    direction = _first(parameters, "order") or "desc"
    if direction not in ("asc", "desc"):
        raise ConfigError("order", direction, "no such direction", "asc or desc")
    return f"{sorts[name]} {direction.upper()} NULLS LAST"


class RolloutQueries:
    """Queries on one connection to the index."""

    def __init__(self, index: sqlite3.Connection) -> None:
        self._index = index

    def rollouts(self, parameters: Parameters, page: Page | None = None) -> Row:
        """`page`: replaces the URL's."""
        selection = read_selection(parameters)
        page = page or read_page(parameters)
        order = _ORDERED_SORTS.get(_first(parameters, "sort"))
        if order is None:
            known = {**_SORTS, **dict.fromkeys(_ORDERED_SORTS, "")}
            order = read_order(parameters, known, "opened_at")
        # Only the page's rows are read completely.
        sql = f"SELECT id FROM rollouts {selection.where}"
        self._keep_found(sql, selection)
        [total] = self._index.execute("SELECT COUNT(*) FROM found").fetchone()
        page_sql = (
            "SELECT * FROM rollouts WHERE id IN ("
            f"SELECT id FROM rollouts WHERE id IN (SELECT id FROM found) ORDER BY {order}, id DESC "
            f"LIMIT ? OFFSET ?) ORDER BY {order}, id DESC"
        )
        rows = self._dicts(page_sql, (page.limit, page.offset))
        searched = None
        if selection.is_search:
            searched = {"turns_indexed": meta_number(self._index, "turn_seq")}
        return {
            "total": total,
            "rows": [_rollout_row(row) for row in rows],
            "searched": searched,
        }

    def _keep_found(self, sql: str, selection: Selection) -> None:
        """Store the ids of the selected rows in a temporary table of this
        connection."""
        self._index.execute("PRAGMA query_only=0")
        self._index.execute("PRAGMA temp_store=MEMORY")
        self._index.execute("DROP TABLE IF EXISTS temp.found")
        self._index.execute(f"CREATE TEMP TABLE found AS {sql}", selection.values)
        self._index.execute("PRAGMA query_only=1")

    def facets(self, parameters: Parameters) -> Row:
        selection = read_selection(parameters)
        columns = [
            f"{_TEXT_FILTERS.get(name, name)} AS f{n}" for n, name in enumerate(_FACETS)
        ]
        sql = f"SELECT id, {', '.join(columns)} FROM rollouts {selection.where}"
        self._keep_found(sql, selection)
        [total] = self._index.execute("SELECT COUNT(*) FROM found").fetchone()
        page: Row = {"total": total}
        combined = ", ".join(f"f{n}" for n in range(len(_FACETS)))
        counts = self._index.execute(
            f"SELECT {combined}, COUNT(*) FROM found GROUP BY {combined}"
        ).fetchall()
        for number, name in enumerate(_FACETS):
            of_value: Counter[str] = Counter()
            for row in counts:
                if row[number] not in (None, ""):
                    of_value[str(row[number])] += row[-1]
            page[name] = dict(of_value.most_common())
        sql = (
            "SELECT reason, COUNT(*) FROM forks WHERE rollout IN (SELECT id FROM found) "
            "GROUP BY reason ORDER BY 2 DESC"
        )
        page["fork"] = dict(self._index.execute(sql))
        page["components"] = self._component_names()
        bounds = ", ".join(
            f"MIN({_NUMBERS[name]}), MAX({_NUMBERS[name]})" for name in _RANGES
        )
        row = self._index.execute(
            f"SELECT {bounds} FROM rollouts WHERE id IN (SELECT id FROM found)"
        ).fetchone()
        page["ranges"] = {
            name: _range(row[2 * number], row[2 * number + 1])
            for number, name in enumerate(_RANGES)
        }
        return page

    def _component_names(self) -> list[str]:
        """Return the component names, from the primary key instead of the rows."""
        sql = (
            "WITH RECURSIVE names(name) AS (SELECT MIN(name) FROM component_values UNION ALL "
            "SELECT (SELECT MIN(name) FROM component_values WHERE name > names.name) FROM names "
            "WHERE names.name IS NOT NULL LIMIT 1000) SELECT name FROM names WHERE name IS NOT NULL"
        )
        return [name for (name,) in self._index.execute(sql)]

    def steps(self) -> Row:
        sql = (
            "SELECT step, COUNT(DISTINCT group_id) AS groups, COUNT(*) AS rollouts, "
            f"SUM(sampled_tokens) AS sampled_tokens, SUM(truncated) AS truncated, {_REWARD_SPREAD}, "
            f"{_REWARD_STD}, MAX(staleness) AS staleness_max, AVG(seconds) AS seconds_mean, "
            "MIN(opened_at) AS first_at, MAX(opened_at + seconds) AS last_at FROM rollouts "
            "WHERE purpose='train' AND step IS NOT NULL GROUP BY step ORDER BY step"
        )
        evaluations = (
            "SELECT step, evaluation, COUNT(*) AS rollouts, COUNT(failure) AS failed, "
            "AVG(reward) AS reward_mean FROM rollouts WHERE purpose='eval' AND state!='repeated' "
            "AND step IS NOT NULL GROUP BY step, evaluation ORDER BY step, evaluation"
        )
        return {"steps": self._dicts(sql), "evaluations": self._dicts(evaluations)}

    def groups(self, parameters: Parameters, page: Page | None = None) -> Row:
        selection = read_selection(parameters)
        page = page or read_page(parameters)
        names = (
            "opened_at",
            "step",
            "task",
            "rollouts",
            "trained",
            "dropped",
            "failed",
            "truncated",
            "reward_mean",
            "reward_min",
            "reward_max",
            "reward_std",
            "sampled_tokens",
        )
        order = read_order(parameters, {name: name for name in names}, "opened_at")
        key = "group_id, purpose"
        counted = f"SELECT COUNT(*) FROM (SELECT 1 FROM rollouts {selection.where} GROUP BY {key})"
        [total] = self._index.execute(counted, selection.values).fetchone()
        sql = (
            "SELECT group_id, MIN(task_id) AS task_id, MIN(task) AS task, purpose, "
            "MIN(evaluation) AS evaluation, MAX(step) AS step, COUNT(*) AS rollouts, "
            "SUM(trained) AS trained, SUM(state='dropped') AS dropped, COUNT(failure) AS failed, "
            "SUM(truncated) AS truncated, GROUP_CONCAT(DISTINCT reason) AS reasons, "
            f"{_REWARD_SPREAD}, {_REWARD_STD}, COALESCE(SUM(sampled_tokens), 0) AS sampled_tokens, "
            "MIN(oldest_version) AS oldest_version, MIN(opened_at) AS opened_at "
            f"FROM rollouts {selection.where} GROUP BY {key} ORDER BY {order} LIMIT ? OFFSET ?"
        )
        rows = self._dicts(sql, [*selection.values, page.limit, page.offset])
        for row in rows:
            row["reasons"] = row["reasons"].split(",") if row["reasons"] else []
        return {"total": total, "rows": rows}

    def tasks(self, parameters: Parameters, page: Page | None = None) -> Row:
        page = page or read_page(parameters)
        names = ("rollouts", "reward_mean", "gain", "task", "trained", "failed")
        order = read_order(parameters, {name: name for name in names}, "rollouts")
        text = _first(parameters, "q")
        pattern = f"%{_like(text)}%"
        # First and last: the mean reward at the task's first and last step.
        sql = (
            "WITH at_step AS (SELECT task, purpose, step, COUNT(*) AS rollouts, SUM(trained) AS trained, "
            "COUNT(failure) AS failed, SUM(reward) AS total, COUNT(reward) AS rewards, "
            "MIN(reward) AS low, MAX(reward) AS high FROM rollouts WHERE task LIKE ? ESCAPE '\\' "
            "GROUP BY task, purpose, step), "
            "ends AS (SELECT task, MIN(step) AS first_step, MAX(step) AS last_step FROM at_step "
            "GROUP BY task) "
            "SELECT task, SUM(rollouts) AS rollouts, SUM(trained) AS trained, SUM(failed) AS failed, "
            "GROUP_CONCAT(DISTINCT purpose) AS purposes, SUM(total)/NULLIF(SUM(rewards), 0) AS reward_mean, "
            "MIN(low) AS reward_min, MAX(high) AS reward_max, "
            "SUM(total) FILTER (WHERE step=first_step) / "
            "NULLIF(SUM(rewards) FILTER (WHERE step=first_step), 0) AS reward_first, "
            "SUM(total) FILTER (WHERE step=last_step) / "
            "NULLIF(SUM(rewards) FILTER (WHERE step=last_step), 0) AS reward_last, "
            "CASE WHEN last_step>first_step THEN "
            "SUM(total) FILTER (WHERE step=last_step) / "
            "NULLIF(SUM(rewards) FILTER (WHERE step=last_step), 0) - "
            "SUM(total) FILTER (WHERE step=first_step) / "
            "NULLIF(SUM(rewards) FILTER (WHERE step=first_step), 0) END AS gain, "
            "first_step, last_step FROM at_step JOIN ends USING (task) "
            f"GROUP BY task ORDER BY {order} LIMIT ? OFFSET ?"
        )
        counted = (
            "SELECT COUNT(DISTINCT task) FROM rollouts WHERE task LIKE ? ESCAPE '\\'"
        )
        [total] = self._index.execute(counted, (pattern,)).fetchone()
        rows = self._dicts(sql, [pattern, page.limit, page.offset])
        for row in rows:
            row["purposes"] = row["purposes"].split(",")
        return {"total": total, "rows": rows}

    def held_out_rewards(self) -> dict[tuple[str, str], dict[str, list[float | None]]]:
        """Return, by task and name of the evaluation: step -> rewards of its
        samples."""
        sql = (
            "SELECT task_id, evaluation, step, reward FROM rollouts WHERE purpose='eval' "
            "AND state='evaluated' AND step IS NOT NULL ORDER BY step, \"index\""
        )
        rewards: dict[tuple[str, str], dict[str, list[float | None]]] = {}
        for task_id, name, step, reward in self._index.execute(sql):
            rewards.setdefault((task_id, name), {}).setdefault(str(step), []).append(
                reward
            )
        return rewards

    def row(self, session_id: str) -> Row | None:
        """Return the row of the rollout that has this session, or a child session of
        this id."""
        sql = (
            "SELECT * FROM rollouts WHERE session_id=? OR "
            "id=(SELECT rollout FROM children WHERE session_id=?)"
        )
        rows = self._dicts(sql, (session_id, session_id))
        return _rollout_row(rows[0]) if rows else None

    def group_members(self, group_id: str, purpose: str) -> list[Row]:
        sql = (
            'SELECT session_id, "index", attempt, reward, state FROM rollouts '
            'WHERE group_id=? AND purpose=? ORDER BY "index", attempt, id LIMIT 1000'
        )
        return self._dicts(sql, [group_id, purpose])

    def failures(self) -> list[tuple[str, str]]:
        """Return session id and reason of every failed rollout, newest first."""
        sql = "SELECT session_id, failure FROM rollouts WHERE failure IS NOT NULL ORDER BY id DESC"
        return self._index.execute(sql).fetchall()

    def _dicts(self, sql: str, values: Sequence[object] = ()) -> list[Row]:
        cursor = self._index.execute(sql, values)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]


def _rollout_row(columns: Row) -> Row:
    """Return the row of a rollout as the page gets it."""
    row = {name: columns[name] for name in columns if name not in _INTERNAL_COLUMNS}
    row["components"] = json.loads(row["components"])
    row["fork_reasons"] = json.loads(row["fork_reasons"])
    row["truncated"] = bool(row["truncated"])
    return row


def _range(low: float | None, high: float | None) -> list[float] | None:
    if low is None or high is None:
        return None
    return [low, high]


def _like(text: str) -> str:
    return text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")


def _first(parameters: Parameters, name: str) -> str:
    values = parameters.get(name, ())
    if not values:
        return ""
    return values[0]


def _whole(name: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise ConfigError(name, text, "not a whole number", f"write {name}=1") from None
    if abs(number) > 2**62:
        raise ConfigError(name, text, "too large", f"write {name}=1")
    return number


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(name, text, "not a number", f"write {name}=0.5") from None


def _switch(name: str, text: str) -> bool:
    if text not in ("0", "1", "true", "false"):
        raise ConfigError(name, text, "neither 0 nor 1", f"write {name}=1")
    return text in ("1", "true")
