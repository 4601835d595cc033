"""What becomes of a turn whose generation, or whose commit, does not go as it
should."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path

import openai
import pytest
from running_gateway import (
    ASK,
    MORE,
    Running,
    eventually,
)

from invrl.gateway.rendering.renderer import Renderer


async def test_a_reply_to_another_prompt_is_an_error_and_never_trained(
    gateway: Running,
):
    """The engine says how many tokens it has read; they were not those that were
    sent."""
    gateway.engine.prompt_tokens_added = 1
    [session] = await gateway.open()
    with pytest.raises(openai.APIError, match="consumed"):
        await gateway.client(session).chat.completions.create(
            model="tiny", messages=[ASK]
        )
    assert {turn.finish_reason for turn in gateway.turns(session)} == {"abort"}


async def test_a_generation_that_breaks_off_is_not_begun_again(gateway: Running):
    def break_off(count: int) -> bool:
        if count > 3:
            raise ConnectionResetError
        return False

    gateway.engine.holds = break_off
    [session] = await gateway.open()
    with pytest.raises(openai.APIError):
        async for _ in await gateway.client(session).chat.completions.create(
            model="tiny", messages=[ASK], stream=True
        ):
            pass
    assert len(gateway.engine.requests) == 1
    [turn] = gateway.turns(session)
    assert turn.finish_reason == "abort"
    assert len(turn.sampled_ids_T) == 3


async def test_what_was_aborted_is_never_continued(
    gateway: Running, renderer: Renderer
):
    gateway.engine.abort_next = True
    [session] = await gateway.open()
    create = gateway.client(session).chat.completions.create
    with pytest.raises(openai.APIError, match="abort"):
        await create(model="tiny", messages=[ASK])
    [aborted] = gateway.turns(session)
    reply = {
        "role": "assistant",
        "content": renderer.reply_text(aborted.sampled_ids_T.tolist()),
    }
    await create(model="tiny", messages=[ASK, reply, MORE])
    assert gateway.turns(session)[-1].parent_id is None


async def test_a_reply_is_whole_only_when_its_turn_is_in_the_store(
    gateway: Running, tmp_path: Path
):
    [session] = await gateway.open()
    with contextlib.closing(
        sqlite3.connect(tmp_path / "run.db", isolation_level=None)
    ) as other_process:
        other_process.execute("BEGIN IMMEDIATE")
        call = asyncio.create_task(
            gateway.client(session).chat.completions.create(
                model="tiny", messages=[ASK]
            )
        )
        await eventually(lambda: gateway.engine.replies and not gateway.engine.running)
        done, _ = await asyncio.wait([call], timeout=1.0)
        assert not done
        other_process.execute("ROLLBACK")
    await call
    assert len(gateway.turns(session)) == 1
