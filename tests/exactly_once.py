"""Whether a run has trained nothing twice and lost nothing without a reason, by SQL over
its store. Nothing of the product is imported, so an error in how it reads its own ledger
cannot hide one in how it writes it."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

_LINEAGE = """
WITH RECURSIVE lineage (incarnation, below) AS (
  SELECT MAX(incarnation), 9223372036854775807 FROM incarnations
  UNION ALL
  SELECT child.parent, MIN(child.sequence, lineage.below)
  FROM lineage JOIN incarnations AS child USING (incarnation) WHERE child.parent > 0),
kept AS (
  SELECT ledger.* FROM ledger JOIN lineage USING (incarnation) WHERE sequence < below),
trained AS (SELECT * FROM kept WHERE state = 'trained'),
finished AS (SELECT * FROM kept WHERE state = 'finished')
"""
"""Each incarnation from the last one back, and the entry from which its own are lost."""

_VIOLATIONS = {
    "places trained twice": """
SELECT 1 FROM trained GROUP BY group_id, "index" HAVING COUNT(*) > 1""",
    "sessions trained at two places": """
SELECT 1 FROM trained JOIN finished USING (group_id, "index", attempt)
GROUP BY finished.session_id HAVING COUNT(*) > 1""",
    "attempts that ended twice": """
SELECT 1 FROM kept WHERE state IN ('trained', 'dropped')
GROUP BY group_id, "index", attempt HAVING COUNT(*) > 1""",
    "attempts that did not end": """
SELECT 1 FROM kept GROUP BY group_id, "index", attempt
HAVING SUM(state IN ('trained', 'dropped')) = 0""",
    "drops without a reason": """
SELECT 1 FROM kept WHERE state = 'dropped' AND COALESCE(reason, '') = ''""",
    "trained places that had not finished": """
SELECT 1 FROM trained LEFT JOIN finished USING (group_id, "index", attempt)
WHERE finished.session_id IS NULL""",
    "trained sessions without a turn": """
SELECT 1 FROM trained JOIN finished USING (group_id, "index", attempt)
WHERE NOT EXISTS (SELECT 1 FROM turns WHERE turns.session_id = finished.session_id)""",
    "continued turns whose segments are not their tokens": """
SELECT 1 FROM turn_segments JOIN turns ON turns.id = turn_segments.turn_id
GROUP BY turn_id
HAVING MIN(start) <> 0 OR SUM("end" - start) <> LENGTH(sampled_ids) / 4""",
    "outcomes of which no ledger knows": """
SELECT 1 FROM outbox JOIN sessions ON sessions.id = outbox.session_id
WHERE sessions.purpose = 'train' AND NOT EXISTS (
  SELECT 1 FROM ledger WHERE ledger.group_id = sessions.group_id
  AND ledger."index" = sessions."index" AND ledger.attempt = sessions.attempt)""",
    "batches of another size": """
SELECT 1 FROM trained GROUP BY batch_id HAVING COUNT(*) <> (
  SELECT MAX(size) FROM (SELECT COUNT(*) AS size FROM trained GROUP BY batch_id))""",
}
_COUNTS = {
    "batches_trained": "SELECT COUNT(DISTINCT batch_id) FROM trained",
    "sessions_trained": """
SELECT COUNT(DISTINCT finished.session_id)
FROM trained JOIN finished USING (group_id, "index", attempt)""",
    "turns_continued": "SELECT COUNT(DISTINCT turn_id) FROM turn_segments WHERE start > 0",
    "turns_moved_to_another_engine": """
SELECT COUNT(*) FROM (
  SELECT 1 FROM turn_segments GROUP BY turn_id HAVING COUNT(DISTINCT engine) > 1)""",
}


class NotExactlyOnce(Exception):
    """Names each violation and how often there is one."""


def check_exactly_once(store_path: Path) -> dict[str, int]:
    """Return counts to report. Raises NotExactlyOnce. The run must have ended."""
    with contextlib.closing(sqlite3.connect(store_path)) as store:
        found = {name: _count(store, sql) for name, sql in _VIOLATIONS.items()}
        violations = [f"{count} {name}" for name, count in found.items() if count]
        if violations:
            raise NotExactlyOnce(", ".join(violations))
        counts: dict[str, int] = {}
        for name, sql in _COUNTS.items():
            (counts[name],) = store.execute(_LINEAGE + sql).fetchone()
        reasons = store.execute(
            _LINEAGE
            + "SELECT reason, COUNT(*) FROM kept WHERE state = 'dropped' GROUP BY reason"
        )
        return counts | {f"dropped_{reason}": count for reason, count in reasons}


def _count(store: sqlite3.Connection, sql: str) -> int:
    return len(store.execute(_LINEAGE + sql).fetchall())
