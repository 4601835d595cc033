"""The trajectories of a stored rollout with their messages and tokens: what a run with
rollouts trains of it.

Which trajectories and turns these are is decided where batches are made
(`buffer/samples/training_samples.py`), so that a file of conversations trains what the
run would have trained, with one exception: auxiliary conversations (titles, summaries)
are always left out, whatever `session.train_auxiliary_roots` says."""

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from invrl.buffer.samples.training_samples import rollout_samples
from invrl.datasets.recorded_rows import RecordedTrajectory
from invrl.gateway.sessions.conversation_roots import auxiliary_roots
from invrl.gateway.types import Message, Tool
from invrl.store.run_store import RunStore
from invrl.types.batches import TrainSample
from invrl.types.turns import Turn

_Recorded = Mapping[str, tuple[Turn, bytes, bytes]]
"""Turn by id, with its messages and its tools as JSON."""


def recorded_trajectories(store: RunStore, session_id: str) -> list[RecordedTrajectory]:
    """Return the trajectories of a finished rollout and its child sessions, without
    auxiliary conversations; empty if none may be trained. Raises KeyError as
    `RunStore.rollout` does."""
    rollout = store.rollout(session_id)
    recorded: dict[str, tuple[Turn, bytes, bytes]] = {}
    for member in (session_id, *rollout.summary.child_rewards):
        for turn, messages, tools in store.recorded_turns(member):
            recorded[turn.id] = (turn, messages, tools)
    turns = [turn for turn, _, _ in recorded.values()]
    auxiliary = auxiliary_roots(turns, {turn.id for turn in turns if turn.delivered})
    untrained_roots = (*rollout.summary.untrained_roots, *auxiliary)
    of_main = replace(
        rollout, summary=replace(rollout.summary, untrained_roots=untrained_roots)
    )
    continued = {turn.parent_id for turn in turns}
    trajectories: list[RecordedTrajectory] = []
    for row in rollout_samples(of_main):
        is_whole = row.turn_ids[-1] not in continued
        trajectories.append(_trajectory(row, recorded, finished=is_whole))
    return trajectories


def _trajectory(
    row: TrainSample, recorded: _Recorded, *, finished: bool
) -> RecordedTrajectory:
    first_turn, first_messages, tools = recorded[row.turn_ids[0]]
    messages: list[Message] = []
    replies: list[int] = []
    all_recorded = True
    is_cut = False
    end = 0
    for turn_id in row.turn_ids:
        turn, encoded_messages, _ = recorded[turn_id]
        of_turn = msgspec.json.decode(encoded_messages, type=list[Message])
        all_recorded = all_recorded and bool(of_turn)
        is_cut = is_cut or turn.finish_reason == "length"
        messages += of_turn
        begin = end + len(turn.context_ids_T)
        end = begin + len(turn.sampled_ids_T)
        if row.loss_mask_T[begin:end].any():
            replies.append(len(messages) - 1)
    if not all_recorded:
        messages = []
    return RecordedTrajectory(
        messages=tuple(messages),
        tools=tuple(msgspec.json.decode(tools, type=list[Tool])),
        replies=tuple(replies),
        prompt_messages=len(msgspec.json.decode(first_messages, type=list[Message]))
        - 1,
        prompt_ids_T=first_turn.context_ids_T,
        tokens_T=row.tokens_T,
        trained_T=row.loss_mask_T,
        finished=finished,
        cut=is_cut,
    )
