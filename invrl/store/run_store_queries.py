"""The SQL with which `run_store.py` reads the run's store."""

from invrl.store.rows import (
    EXPERTS_COLUMNS,
    SESSION_COLUMNS,
    TOP_COLUMNS,
    TURN_COLUMNS,
)

LIVE_SESSIONS = f"""
    WITH RECURSIVE live(id) AS (
        SELECT id FROM sessions
        WHERE state IN ('open', 'unrewarded') AND id GLOB ? AND parent_id = ''
        UNION ALL
        SELECT child.id FROM live JOIN sessions AS child ON child.parent_id = live.id
        WHERE child.parent_id != ''  -- makes SQLite use the index of child sessions
    )
    SELECT {SESSION_COLUMNS} FROM sessions WHERE id IN live ORDER BY rowid
"""
OPEN_SESSIONS = f"""
    SELECT {SESSION_COLUMNS} FROM sessions
    WHERE state IN ('open', 'unrewarded') AND group_id = ? AND purpose = 'train' AND parent_id = ''
"""
ENDED_SESSIONS = f"""
    SELECT {SESSION_COLUMNS} FROM sessions WHERE outcome IS NOT NULL AND parent_id = '' ORDER BY rowid
"""
SESSION_TIMES = """
    SELECT opened, session_times.reward_deadline, sessions.reward_deadline
    FROM session_times JOIN sessions ON sessions.id = session_id
    WHERE session_id = ?
"""
FAMILY = """
    WITH RECURSIVE family(id) AS (
        SELECT ?
        UNION ALL
        SELECT child.id FROM family JOIN sessions AS child ON child.parent_id = family.id
        WHERE child.parent_id != ''
    )
    SELECT id FROM sessions WHERE id IN family ORDER BY rowid
"""
RECORDED_TURNS = f"""
    SELECT {TURN_COLUMNS}, messages, tools FROM turns
    WHERE session_id IN (SELECT value FROM json_each(?)) ORDER BY seq
"""
TOOLS = """
    SELECT digest, tools FROM tool_lists
    WHERE digest IN (SELECT tools FROM turns WHERE session_id IN (SELECT value FROM json_each(?)))
"""
OUTBOX = """
    SELECT outbox.seq, outbox.session_id, outbox.outcome, sessions.outcome, checksum
    FROM outbox
        LEFT JOIN sessions ON sessions.id = outbox.session_id
        LEFT JOIN checksums ON item = 'outcome/' || outbox.session_id
    WHERE outbox.seq > ? ORDER BY outbox.seq LIMIT ?
"""
OUTCOME = """
    SELECT sessions.outcome, outbox.outcome, checksum
    FROM sessions
        LEFT JOIN outbox ON outbox.session_id = sessions.id
        LEFT JOIN checksums ON item = 'outcome/' || sessions.id
    WHERE sessions.id = ? AND sessions.outcome IS NOT NULL
"""
WHOLE_TURNS = f"""
    SELECT {TURN_COLUMNS}, messages, tools FROM turns WHERE session_id = ? ORDER BY seq
"""
CHECKSUMS_OF_TURNS = """
    SELECT item, checksum FROM json_each(?) AS turn JOIN checksums ON item = 'turn/' || turn.value
    UNION ALL
    SELECT item, checksum FROM json_each(?) AS turn
        JOIN checksums ON item > 'turn/' || turn.value || '/' AND item < 'turn/' || turn.value || '0'
"""
ROUTED_EXPERTS = f"""
    SELECT {EXPERTS_COLUMNS} FROM routed_experts
    WHERE turn_id IN (SELECT id FROM turns WHERE session_id IN (SELECT value FROM json_each(?)))
"""
TOKEN_NUMBERS = """
    SELECT turn_id, name, numbers FROM token_numbers
    WHERE turn_id IN (SELECT id FROM turns WHERE session_id IN (SELECT value FROM json_each(?)))
"""
TOP_LOGPROBS = f"""
    SELECT {TOP_COLUMNS} FROM top_logprobs
    WHERE turn_id IN (SELECT id FROM turns WHERE session_id IN (SELECT value FROM json_each(?)))
"""
MATCHED_STOPS = """
    SELECT turn_id, stop FROM matched_stops
    WHERE turn_id IN (SELECT id FROM turns WHERE session_id IN (SELECT value FROM json_each(?)))
"""
TURN_SEGMENTS = """
    SELECT turn_id, engine, start, "end" FROM turn_segments
    WHERE turn_id IN (SELECT id FROM turns WHERE session_id IN (SELECT value FROM json_each(?)))
    ORDER BY turn_id, start
"""
SILENT_SESSIONS = """
    -- id and time of the last sign of each open session of a group, the most silent first
    SELECT sessions.id, MAX(opened_at, COALESCE(MAX(turns.finished_at), 0))
    FROM sessions LEFT JOIN turns ON turns.session_id = sessions.id
    WHERE state = 'open' AND purpose = 'train' AND sessions.parent_id = '' AND group_id = ?
    GROUP BY sessions.id
    ORDER BY 2
"""
SAMPLED_SO_FAR = """
    WITH RECURSIVE family(id, group_id, "index", attempt) AS (
        -- the running rollouts of the groups
        SELECT id, group_id, "index", attempt
        FROM sessions
        WHERE state IN ('open', 'unrewarded')
            AND purpose = 'train'
            AND parent_id = ''
            AND group_id IN (SELECT value FROM json_each(?))
        UNION ALL
        -- their child sessions, which count for the rollout unless they were given up
        SELECT child.id, family.group_id, family."index", family.attempt
        FROM family JOIN sessions AS child ON child.parent_id = family.id
        WHERE child.parent_id != ''
            AND child.state NOT IN ('aborted', 'expired')
    )
    SELECT group_id, "index", attempt, MIN(json_extract(span.value, '$.version'))
    FROM family
        JOIN turns ON turns.session_id = family.id
        JOIN json_each(CAST(turns.spans AS TEXT)) AS span
    WHERE delivered
        AND is_trainable(finish_reason, constrained, grammar != '')
        -- a span of no tokens says nothing about the age of tokens
        AND json_extract(span.value, '$.end') > json_extract(span.value, '$.start')
    GROUP BY group_id, "index", attempt
"""
ENDED_TURNS = """
    SELECT seq, finished_at - started_at, prompt_tokens, cached_tokens, LENGTH(sampled_ids)
    FROM turns WHERE seq > ? ORDER BY seq
"""
