"""A run folder that tests fill rollout by rollout with what was said in each, as
gateway and buffer would."""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from invrl.buffer.ledger.ledger import LedgerEntry
from invrl.buffer.ledger.ledger_store import LedgerStore
from invrl.buffer.ledger.open_group import RolloutState
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.types import Message, Prompt
from invrl.run.settings.config import Source, resolve
from invrl.run.settings.folder import make_run_folder
from invrl.store.rows import StoredSession
from invrl.store.run_folder import RunFolder
from invrl.store.run_store_writer import RunStoreWriter
from invrl.types.leases import Place
from invrl.types.reasons import DropReason, FailureReason
from invrl.types.rollouts import FailedRollout, Outcome, RolloutSummary
from invrl.types.sessions import Purpose, Sampling, Session
from invrl.types.turns import FinishReason, Segment, Turn, VersionSpan
from invrl.types.weights import WeightVersion


@dataclass
class RecordedRun:
    """The folder, and the two writers of its store."""

    folder: RunFolder
    writer: RunStoreWriter
    ledger: LedgerStore
    sequence: int = 0
    opened: float = 100.0
    renderer: Renderer | None = None
    """Makes the ids of the turns, of texts. None: they are of no text."""

    def add(
        self,
        task: str,
        reply: str | Sequence[str] | Message,
        reward: float,
        *,
        step: int | None = 1,
        index: int = 0,
        group: str = "",
        purpose: Purpose = "train",
        mode: str = "greedy",
        drop: DropReason | None = None,
        failure: FailureReason | None = None,
        detail: str = "",
        ending: FinishReason = "stop",
        version: int | None = None,
        segments: Sequence[Segment] = (),
    ) -> str:
        """A rollout of the step; its session's id. `segments`: of its turns."""
        name = f"ses-{self.sequence:04d}{index}"
        group = group or f"g-{task}-{step}"
        if purpose == "eval":
            group = f"eval/{step}/{mode}/{task}"
        version = version if version is not None else (step or 0) - (purpose == "train")
        session = Session(
            id=name,
            key=f"isk-{name}",
            base_url="",
            task_id=task,
            group_id=group,
            index=index,
            attempt=0,
            purpose=purpose,
            sampling=Sampling(),
        )
        self.opened += 1
        key_hash = hashlib.sha256(name.encode()).digest()
        record = StoredSession(
            session=session, key_hash=key_hash, opened_at=self.opened
        )
        self.writer.open_sessions([record]).result(60)
        replies = [reply] if isinstance(reply, str | Message) else list(reply)
        parent: str | None = None
        conversation: list[Message] = []
        path: list[int] = []
        for number, text in enumerate(replies):
            asked = (
                Message("user", f"What is {task}?")
                if not number
                else Message("user", "Go on.")
            )
            said = text if isinstance(text, Message) else Message("assistant", text)
            turn = self._turn(f"{name}/{number}", name, parent, said, version, ending)
            if self.renderer is not None:
                turn = _with_ids(
                    self.renderer, turn, (*conversation, asked), path, said
                )
                path += [*turn.context_ids_T.tolist(), *turn.sampled_ids_T.tolist()]
            conversation += [asked, said]
            messages = msgspec.json.encode([asked, said])
            self.writer.add_turn(turn, messages, segments=segments).result(60)
            self.writer.mark_delivered(turn.id).result(60)
            parent = turn.id
        summary = self.summary(
            session, reward, len(replies), version, cut=ending == "length"
        )
        outcome: Outcome = summary
        if failure is not None:
            place = {
                each: getattr(summary, each)
                for each in ("session_id", "task_id", "group_id")
            }
            outcome = FailedRollout(
                **place, index=index, attempt=0, reason=failure, detail=detail
            )
        state = "aborted" if failure else "finished"
        self.writer.close_session(
            name, state, outcome, hand_over=purpose == "train"
        ).result(60)
        if purpose == "train":
            self._account(task, Place(group, index, 0), name, step, drop, failure)
        self.sequence += 10
        return name

    def _turn(
        self,
        name: str,
        session: str,
        parent: str | None,
        said: Message,
        version: int,
        ending: FinishReason,
    ) -> Turn:
        ids_T = np.frombuffer(repr(said).encode(), np.uint8).astype(np.int32)
        return Turn(
            id=name,
            session_id=session,
            parent_id=parent,
            context_ids_T=np.array([1, 2], np.int32),
            sampled_ids_T=ids_T,
            logprobs_T=np.zeros(len(ids_T), np.float32),
            spans=(
                VersionSpan(version=WeightVersion(version), start=0, end=len(ids_T)),
            ),
            finish_reason=ending,
            request_digest="",
            delivered=False,
            temperature=1.0,
            prompt_tokens=2,
            cached_tokens=0,
            fork_reason="",
            started_at=self.opened,
            finished_at=self.opened + len(name) / 100,
        )

    def summary(
        self, session: Session, reward: float, turns: int, version: int, *, cut: bool
    ) -> RolloutSummary:
        return RolloutSummary(
            session_id=session.id,
            task_id=session.task_id,
            group_id=session.group_id,
            index=session.index,
            attempt=0,
            reward=reward,
            num_turns=turns,
            prompt_tokens=2,
            cached_tokens=0,
            later_prompt_tokens=0,
            later_cached_tokens=0,
            sampled_tokens=9,
            trained_tokens=9,
            truncated=cut,
            oldest_version=WeightVersion(version),
            newest_version=WeightVersion(version),
            forks=0,
            started_at=0.0,
            finished_at=1.0,
        )

    def _account(
        self,
        task: str,
        place: Place,
        session: str,
        step: int | None,
        drop: DropReason | None,
        failure: FailureReason | None,
    ) -> None:
        """The ledger's entries, from the lease to the end."""
        entries: list[LedgerEntry] = []

        def move(state: RolloutState, **facts: object) -> None:
            values = {
                "sequence": self.sequence + len(entries),
                "place": place,
                "task_id": task,
            }
            entries.append(
                msgspec.convert({**values, "state": state, **facts}, LedgerEntry)
            )

        move(RolloutState.IN_FLIGHT)
        if failure is not None:
            move(
                RolloutState.DROPPED,
                reason=DropReason.REPLACED,
                failure=failure,
                session_id=session,
            )
        else:
            move(RolloutState.FINISHED, session_id=session)
            if drop is not None:
                move(RolloutState.DROPPED, reason=drop)
            elif step is not None:
                move(RolloutState.GROUPED)
                move(RolloutState.TAKEN, batch_id=step - 1)
                move(RolloutState.TRAINED, batch_id=step - 1)
        self.ledger.write(entries)


def _with_ids(
    renderer: Renderer,
    turn: Turn,
    messages: tuple[Message, ...],
    path: Sequence[int],
    said: Message,
) -> Turn:
    """The turn with the ids that the gateway would send and a model would sample for
    these texts."""
    prompt = Prompt(messages=messages)
    if path:
        context = renderer.render_tail(prompt, len(messages) - 1, path).ids
    else:
        context = renderer.render_first(prompt)
    sampled = renderer.encode(said.content)
    if turn.finish_reason == "stop":
        sampled.append(renderer.end_of_turn_id or 0)
    return replace(
        turn,
        context_ids_T=np.array(context, np.int32),
        sampled_ids_T=np.array(sampled, np.int32),
        logprobs_T=np.zeros(len(sampled), np.float32),
        spans=(VersionSpan(version=turn.spans[0].version, start=0, end=len(sampled)),),
    )


def record_run(
    root: Path, *, model: Path | None = None, renderer: Renderer | None = None
) -> RecordedRun:
    """An empty one in its first incarnation, at `root`/run. `renderer`: as in
    `RecordedRun`."""
    tables: dict[str, dict[str, str]] = {
        "run": {"run_root": str(root), "run_name": "run"}
    }
    if model is not None:
        tables["model"] = {"model_path": str(model)}
    config = resolve(Source(name="test", tables=tables))
    folder = make_run_folder(config)
    writer = RunStoreWriter(folder.store_path)
    ledger = LedgerStore(folder.store_path)
    ledger.begin(parent=0, step=0, sequence=0)
    return RecordedRun(folder, writer, ledger, renderer=renderer)


def database_rows(path: Path) -> list[str]:
    """Every table and row of a SQLite file, as SQL."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        return list(db.iterdump())
