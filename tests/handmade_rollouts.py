"""Turns, rollouts and batches with known ids, log-probs and rewards."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from invrl.types.batches import TakenBatch
from invrl.types.groups import Group
from invrl.types.rollouts import Rollout, RolloutSummary
from invrl.types.turns import FinishReason, Trajectory, Turn, VersionSpan
from invrl.types.weights import WeightVersion


def turn(
    id: str,
    parent: str | None,
    context: Sequence[int],
    sampled: Sequence[int],
    *,
    version: int = 0,
    finish: FinishReason = "stop",
    delivered: bool = True,
    temperature: float = 1.0,
) -> Turn:
    """The log-prob of token n is -n/100, so that a row can be checked by its ids."""
    return Turn(
        id=id,
        session_id="s",
        parent_id=parent,
        context_ids_T=np.array(context, np.int32),
        sampled_ids_T=np.array(sampled, np.int32),
        logprobs_T=np.array(sampled, np.float32) / -100,
        spans=(VersionSpan(version=WeightVersion(version), start=0, end=len(sampled)),),
        finish_reason=finish,
        request_digest="",
        delivered=delivered,
        temperature=temperature,
        prompt_tokens=len(context),
        cached_tokens=0,
        fork_reason="",
        started_at=0.0,
        finished_at=1.0,
    )


def summary(
    session_id: str = "s", group_id: str = "g", index: int = 0, reward: float = 1.0
) -> RolloutSummary:
    return RolloutSummary(
        session_id=session_id,
        task_id="t",
        group_id=group_id,
        index=index,
        attempt=2,
        reward=reward,
        num_turns=1,
        prompt_tokens=1,
        cached_tokens=0,
        later_prompt_tokens=0,
        later_cached_tokens=0,
        sampled_tokens=1,
        trained_tokens=1,
        truncated=False,
        oldest_version=WeightVersion(0),
        newest_version=WeightVersion(0),
        forks=0,
        started_at=0.0,
        finished_at=1.0,
    )


def rollout(*paths: Sequence[Turn], of: RolloutSummary | None = None) -> Rollout:
    return Rollout(
        summary=of or summary(),
        trajectories=tuple(Trajectory(turns=tuple(path)) for path in paths),
    )


@st.composite
def forests(draw: st.DrawFn) -> list[Turn]:
    """Random forests of up to 8 turns; every sampled id is unique, so tokens can be
    counted."""
    ids = itertools.count(1)
    turns: list[Turn] = []
    for n in range(draw(st.integers(1, 8))):
        parent = draw(st.sampled_from([None, *(t.id for t in turns)]))
        turns.append(
            turn(
                f"t{n}",
                parent,
                [next(ids) for _ in range(draw(st.integers(1, 3)))],
                [next(ids) for _ in range(draw(st.integers(0, 3)))],
                delivered=draw(st.booleans()),
                finish=draw(st.sampled_from(["stop", "length", "abort"])),
                version=draw(st.integers(0, 3)),
            )
        )
    return turns


def branches(turns: list[Turn]) -> list[list[Turn]]:
    by_id = {t.id: t for t in turns}
    paths = []
    for leaf in turns:
        if any(t.parent_id == leaf.id for t in turns):
            continue
        path = [leaf]
        while (parent := path[0].parent_id) is not None:
            path.insert(0, by_id[parent])
        paths.append(path)
    return paths


def taken(*groups: tuple[str, list[float]]) -> TakenBatch:
    return TakenBatch(
        batch_id=4,
        version=WeightVersion(7),
        groups=tuple(
            Group(
                id=name,
                task_id="t",
                rollouts_G=tuple(
                    summary(f"{name}.{index}", name, index, reward)
                    for index, reward in enumerate(rewards)
                ),
            )
            for name, rewards in groups
        ),
    )
