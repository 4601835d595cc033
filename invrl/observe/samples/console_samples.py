"""The rollouts of each step that the console shows while a run trains
(`log.samples`), and those of the table at an experiment tracker
(`wandb.rollouts`): a glance at what the model says. `invrl samples` shows all
rollouts.

Invariant: an error here is logged and ends no run."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from invrl.gateway.types import Message
from invrl.host.output.printable import one_line, printable, trimmed
from invrl.observe.samples.sampled_rollout import SampledRollout
from invrl.observe.samples.transcript import Transcript, message_text, read_transcript
from invrl.store.run_store import RunStore
from invrl.types.batches import TakenBatch
from invrl.types.rollouts import RolloutSummary

_MAX_CHARACTERS = 160
_MAX_CELL_CHARACTERS = 20_000
logger = logging.getLogger(__name__)
DescriptionT = TypeVar("DescriptionT")


def show_samples(
    store_path: Path, count: int | None, step: int, taken: TakenBatch
) -> list[str]:
    """Return a text for each of `count` rollouts of the step's batch."""
    return _describe_each(store_path, count or 0, step, taken, describe_rollout)


def sample_rollouts(
    store_path: Path, count: int, step: int, taken: TakenBatch
) -> list[SampledRollout]:
    """Return `count` rollouts of the step's batch as rows of a table."""
    describe = partial(_sampled_rollout, step)
    return _describe_each(store_path, count, step, taken, describe)


def _describe_each(
    store_path: Path,
    count: int,
    step: int,
    taken: TakenBatch,
    describe: Callable[[RolloutSummary, Transcript], DescriptionT],
) -> list[DescriptionT]:
    """Describe the chosen rollouts by their transcripts; none if one cannot be read."""
    rollouts = choose_rollouts(taken, count, step)
    if not rollouts:
        return []
    try:
        # This may run in another thread, so it opens its own connection.
        with contextlib.closing(RunStore(store_path)) as store:
            return [
                describe(rollout, read_transcript(store, rollout.session_id))
                for rollout in rollouts
            ]
    except Exception:
        logger.exception("the samples of step %d cannot be shown", step)
        return []


def _sampled_rollout(
    step: int, summary: RolloutSummary, transcript: Transcript
) -> SampledRollout:
    reason = "cut" if summary.truncated else ""
    if summary.failure is not None:
        reason = summary.failure.value
    question = _question(transcript)
    return SampledRollout(
        step=step,
        task=_cell(summary.task_id),
        reward=summary.reward,
        prompt=_cell(message_text(question) if question else ""),
        response=_cell("\n\n".join(message_text(turn.reply) for turn in transcript)),
        length=summary.sampled_tokens,
        reason=reason,
        version=summary.newest_version,
    )


def _question(transcript: Transcript) -> Message | None:
    """Return the last message before the first reply."""
    if not transcript or not transcript[0].prompt:
        return None
    return transcript[0].prompt[-1]


def _cell(text: str) -> str:
    """Remove lone surrogates, which no tracker can send, and shorten the text to what a
    person reads."""
    return (
        trimmed(text, _MAX_CELL_CHARACTERS).encode("utf-8", "backslashreplace").decode()
    )


def choose_rollouts(
    taken: TakenBatch, count: int, step: int
) -> Sequence[RolloutSummary]:
    """Choose at most `count` rollouts, evenly over the groups of the batch. Each step
    chooses other members of a group."""
    rollouts = [rollout for group in taken.groups for rollout in group.rollouts_G]
    count = min(count, len(rollouts))
    chosen: list[RolloutSummary] = []
    for number in range(count):
        position = number * len(rollouts) // count + step
        chosen.append(rollouts[position % len(rollouts)])
    return chosen


def describe_rollout(summary: RolloutSummary, transcript: Transcript) -> str:
    """Return three lines: the rollout's identity, the last message of its first prompt,
    and its last reply."""
    heading = f"  sample: task {_shorten(summary.task_id)}, reward {summary.reward:.3f}"
    if summary.num_turns > 1:
        heading += f", {summary.num_turns} turns"
    if summary.truncated:
        heading += ", cut"
    if summary.failure is not None:
        heading += f", failed: {summary.failure}"
    lines = [heading]
    question = _question(transcript)
    if question is not None:
        lines.append(f"    {question.role}: {_shorten(message_text(question))}")
    reply = ""
    if transcript:
        reply = _shorten(message_text(transcript[-1].reply))
    lines.append(f"    model: {reply or '(nothing)'}")
    return printable("\n".join(lines))


def _shorten(text: str) -> str:
    """Return one line."""
    return trimmed(one_line(text), _MAX_CHARACTERS)
