"""`invrl samples RUN`: what the model said and what it got for it, as text for a terminal and as JSON.

Invariant: what is shown for a terminal has passed `printable`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import msgspec

from invrl.host.printable import for_stdout, trimmed
from invrl.observe.samples import distinct_replies
from invrl.observe.transcript import message_text, read_transcript

if TYPE_CHECKING:
    from invrl.gateway.types import Message
    from invrl.observe.samples import Change, Sample
    from invrl.observe.transcript import Transcript, TranscriptTurn
    from invrl.store.run_store import RunStore

_MESSAGE_CHARACTERS = 600
_DETAIL_LINES = 6
_MODEL = "model"
_NOTHING = "(nothing)"


def describe_samples(
    samples: Sequence[Sample], store: RunStore, *, total: Sequence[Sample], where: str, full: bool
) -> str:
    """The chosen `samples` below a summary of all that they were chosen `where` from."""
    parts = [summary_line(total, store, where)]
    shown_before: tuple[Message, ...] = ()
    for sample in samples:
        transcript = read_transcript(store, sample.rollout_id)
        parts.append(_describe(sample, transcript, full=full, shown_before=shown_before))
        shown_before = transcript.opening
    if len(samples) < len(total):
        parts.append(f"{len(samples)} of {len(total)} shown; -n N shows more, -n 0 all")
    return for_stdout("\n\n".join(parts))


def summary_line(total: Sequence[Sample], store: RunStore, where: str) -> str:
    """How many rollouts of how many tasks, their rewards, the share that was cut, how many replies differ."""
    tasks = len({one.task_id for one in total})
    facts = [f"{_count(len(total), 'rollout')} of {_count(tasks, 'task')}"]
    rewards = [one.reward for one in total if one.reward is not None]
    if rewards:
        mean = sum(rewards) / len(rewards)
        facts.append(f"reward mean {mean:.3f} ({min(rewards):.3g} to {max(rewards):.3g})")
    said_something = [one for one in total if one.num_turns]
    if said_something:
        cut = sum(one.cut for one in said_something) / len(said_something)
        facts.append(f"cut {cut:.0%}")
        replies = distinct_replies(store, (one.rollout_id for one in said_something))
        facts.append(_distinct(replies, len(said_something)))
    failures = Counter(str(one.failure) for one in total if one.failure is not None)
    if failures:
        reasons = ", ".join(f"{count} {reason}" for reason, count in failures.most_common())
        facts.append(f"failed {sum(failures.values())} ({reasons})")
    return f"{where}: {', '.join(facts)}"


def describe_changes(found: Sequence[Change], store: RunStore, *, total: int, full: bool) -> str:
    """Each task's prompt once, and what was said before and after."""
    parts = [
        f"{_count(total, 'task')} changed between the first and the last time that they were run "
        "(held-out ones count once per mode)"
    ]
    for change in found:
        of = f"held out ({change.evaluation})" if change.evaluation else "training"
        lines = [
            f"== task {change.task_id}, {of}: reward {change.reward_before:.3f} -> {change.reward_after:.3f}"
            f" ({change.gain:+.3f}), replies {change.likeness:.0%} alike"
        ]
        prompt: tuple[Message, ...] = ()
        for title, sample in (("before", change.before), ("after", change.after)):
            transcript = read_transcript(store, sample.rollout_id)
            lines.append(f"{title}: {_facts(sample)}")
            lines += _conversation(transcript, full=full, shown_before=prompt)
            prompt = transcript.opening
        parts.append("\n".join(lines))
    if len(found) < total:
        parts.append(f"{len(found)} of {total} shown; -n N shows more, -n 0 all")
    return for_stdout("\n\n".join(parts))


def samples_json(samples: Iterable[Sample], store: RunStore) -> str:
    """A JSON list with an object per rollout: the fields of `Sample`, and its `turns` with their texts."""
    return json.dumps([_object(sample, store) for sample in samples], indent=2)


def changes_json(found: Iterable[Change], store: RunStore) -> str:
    """A JSON list with an object per task: the fields of `Change`, `before` and `after` as `samples_json` has
    them."""
    rows = []
    for change in found:
        row = asdict(change) | {"gain": change.gain}
        row |= {"before": _object(change.before, store), "after": _object(change.after, store)}
        rows.append(row)
    return json.dumps(rows, indent=2)


def _object(sample: Sample, store: RunStore) -> dict[str, object]:
    turns = read_transcript(store, sample.rollout_id).turns
    return asdict(sample) | {"turns": msgspec.to_builtins(turns)}


def _describe(
    sample: Sample, transcript: Transcript, *, full: bool, shown_before: tuple[Message, ...]
) -> str:
    lines = [f"== task {sample.task_id}, rollout {sample.index} of group {sample.group_id}: {_facts(sample)}"]
    lines += _conversation(transcript, full=full, shown_before=shown_before)
    if sample.failure is not None:
        detail = sample.detail.strip().splitlines()
        lines.append(f"failed: {sample.failure}")
        lines += [f"  {line}" for line in (detail if full else detail[-_DETAIL_LINES:])]
    return "\n".join(lines)


def _facts(sample: Sample) -> str:
    facts = [f"reward {_reward(sample)}"]
    if sample.reward_components:
        named = ", ".join(f"{name} {value:.3g}" for name, value in sample.reward_components.items())
        facts[0] += f" ({named})"
    if sample.attempt:
        facts.append(f"attempt {sample.attempt}")
    if sample.step is None:
        facts.append(sample.state)
    elif sample.purpose == "eval":
        facts.append(f"evaluated after step {sample.step} ({sample.evaluation})")
    else:
        facts.append(f"step {sample.step}" + ("" if sample.state == "trained" else f" ({sample.state})"))
    if sample.newest_version is not None:
        several = sample.oldest_version != sample.newest_version
        versions = f"{sample.oldest_version} to {sample.newest_version}" if several else sample.newest_version
        facts.append(f"weights {versions}")
        facts.append(f"{_count(sample.sampled_tokens, 'token')} in {_count(sample.num_turns, 'turn')}")
    if sample.cut:
        facts.append("CUT")
    return ", ".join([*facts, sample.rollout_id])


def _conversation(transcript: Transcript, *, full: bool, shown_before: tuple[Message, ...]) -> list[str]:
    """Every message on lines of its own; the opening only where it is not that of the rollout above."""
    if not transcript.turns:
        return ["(the model was not asked)"]
    lines: list[str] = []
    for at, turn in enumerate(transcript.turns):
        if turn.fork_reason:
            lines.append(f"-- a branch of its own ({turn.fork_reason}):")
        if at == 0 and turn.prompt and turn.prompt == shown_before:
            lines.append("(the prompt above)")
        else:
            for message in turn.prompt:
                lines += _message(message.role, message_text(message), full=full)
        lines += _message(f"> {_MODEL}{_ending(turn)}", message_text(turn.reply) or _NOTHING, full=full)
    return lines


def _ending(turn: TranscriptTurn) -> str:
    """How the reply ended, where the model did not end it by itself."""
    notes = [] if turn.finish_reason == "stop" else [turn.finish_reason]
    if turn.cut:
        notes = ["length: cut"]
    if not turn.delivered:
        notes.append("did not reach the client")
    return f" [{', '.join(notes)}]" if notes else ""


def _message(label: str, text: str, *, full: bool) -> list[str]:
    first, *others = (text if full else trimmed(text, _MESSAGE_CHARACTERS)).split("\n")
    return [f"{label}: {first}", *(f"    {line}" for line in others)]


def _reward(sample: Sample) -> str:
    return "none" if sample.reward is None else f"{sample.reward:.3f}"


def _distinct(replies: int, rollouts: int) -> str:
    return f"{_count(replies, 'distinct reply', 'distinct replies')} of {rollouts}"


def _count(number: int, name: str, several: str = "") -> str:
    return f"{number:,} {name if number == 1 else several or name + 's'}"
