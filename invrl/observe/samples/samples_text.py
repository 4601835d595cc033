"""`invrl samples RUN`: the model's replies and their rewards, as text for a terminal
and as JSON.

Invariant: `printable` has processed all text for a terminal.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import msgspec

from invrl.host.output.printable import printable, trimmed
from invrl.observe.samples.samples import distinct_replies
from invrl.observe.samples.transcript import message_text, read_transcript

if TYPE_CHECKING:
    from invrl.gateway.types import Message
    from invrl.observe.samples.samples import Sample
    from invrl.observe.samples.transcript import Transcript, TranscriptTurn
    from invrl.store.run_store import RunStore
    from invrl.types.turns import Segment

_MAX_MESSAGE_CHARACTERS = 600
_MAX_DETAIL_LINES = 6


def describe_samples(
    samples: Sequence[Sample],
    store: RunStore,
    *,
    total: Sequence[Sample],
    where: str,
    full: bool,
) -> str:
    """Describe the chosen `samples` below a summary of `total`, from which they were
    chosen. `where` names `total`."""
    parts = [summary_line(total, store, where)]
    previous_opening: tuple[Message, ...] = ()
    for sample in samples:
        transcript = read_transcript(store, sample.identity.session_id)
        parts.append(
            _describe_sample(
                sample, transcript, full=full, previous_opening=previous_opening
            )
        )
        previous_opening = transcript[0].prompt if transcript else ()
    if len(samples) < len(total):
        parts.append(f"{len(samples)} of {len(total)} shown; -n N shows more, -n 0 all")
    return printable("\n\n".join(parts))


def summary_line(total: Sequence[Sample], store: RunStore, where: str) -> str:
    """Describe the number of rollouts and tasks, their rewards, the share that was cut,
    and the number of different replies."""
    tasks = {sample.identity.task_id for sample in total}
    facts = [f"{count_text(len(total), 'rollout')} of {count_text(len(tasks), 'task')}"]
    rewards = [sample.reward for sample in total if sample.reward is not None]
    if rewards:
        mean = sum(rewards) / len(rewards)
        facts.append(
            f"reward mean {mean:.3f} ({min(rewards):.3g} to {max(rewards):.3g})"
        )
    with_turns = [sample for sample in total if sample.num_turns]
    if with_turns:
        cut_share = sum(sample.cut for sample in with_turns) / len(with_turns)
        facts.append(f"cut {cut_share:.0%}")
        replies = distinct_replies(
            store, (sample.identity.session_id for sample in with_turns)
        )
        facts.append(
            f"{count_text(replies, 'distinct reply', 'distinct replies')} of {len(with_turns)}"
        )
    failures = Counter(
        str(sample.failure) for sample in total if sample.failure is not None
    )
    if failures:
        reasons = ", ".join(
            f"{count} {reason}" for reason, count in failures.most_common()
        )
        facts.append(f"failed {failures.total()} ({reasons})")
    return f"{where}: {', '.join(facts)}"


def samples_json(samples: Iterable[Sample], store: RunStore) -> str:
    """Return a JSON list with an object per rollout: its identity, the fields of
    `Sample`, and its `turns` with their texts."""
    return json.dumps([_sample_object(sample, store) for sample in samples], indent=2)


def _sample_object(sample: Sample, store: RunStore) -> dict[str, object]:
    fields = asdict(sample)
    identity = fields.pop("identity")
    rollout_id = identity.pop("session_id")
    turns = read_transcript(store, rollout_id)
    return {
        "rollout_id": rollout_id,
        **identity,
        **fields,
        "turns": msgspec.to_builtins(turns),
    }


def _describe_sample(
    sample: Sample,
    transcript: Transcript,
    *,
    full: bool,
    previous_opening: tuple[Message, ...],
) -> str:
    identity = sample.identity
    heading = f"== task {identity.task_id}, rollout {identity.index} of group {identity.group_id}: "
    lines = [heading + _describe_facts(sample)]
    lines += _describe_conversation(
        transcript, full=full, previous_opening=previous_opening
    )
    if sample.failure is not None:
        lines.append(f"failed: {sample.failure}")
        detail = sample.detail.strip().splitlines()
        if not full:
            detail = detail[-_MAX_DETAIL_LINES:]
        lines += [f"  {line}" for line in detail]
    return "\n".join(lines)


def _describe_facts(sample: Sample) -> str:
    facts = [_describe_reward(sample)]
    if sample.identity.attempt:
        facts.append(f"attempt {sample.identity.attempt}")
    facts.append(_describe_ledger_state(sample))
    if sample.newest_version is not None:
        versions = str(sample.newest_version)
        if sample.oldest_version != sample.newest_version:
            versions = f"{sample.oldest_version} to {sample.newest_version}"
        facts.append(f"weights {versions}")
        facts.append(
            f"{count_text(sample.sampled_tokens, 'token')} in {count_text(sample.num_turns, 'turn')}"
        )
    if sample.cut:
        facts.append("CUT")
    facts.append(sample.identity.session_id)
    return ", ".join(facts)


def _describe_reward(sample: Sample) -> str:
    text = "reward none"
    if sample.reward is not None:
        text = f"reward {sample.reward:.3f}"
    if sample.reward_components:
        named = ", ".join(
            f"{name} {value:.3g}" for name, value in sample.reward_components.items()
        )
        text += f" ({named})"
    return text


def _describe_ledger_state(sample: Sample) -> str:
    """Describe the step that a rollout belongs to, and its fate."""
    if sample.step is None:
        return sample.state
    if sample.purpose == "eval":
        return f"evaluated after step {sample.step} ({sample.evaluation})"
    if sample.state == "trained":
        return f"step {sample.step}"
    return f"step {sample.step} ({sample.state})"


def _describe_conversation(
    transcript: Transcript, *, full: bool, previous_opening: tuple[Message, ...]
) -> list[str]:
    """Return the messages, each beginning a new line. The first prompt is left out if
    it equals `previous_opening`, that of the rollout above."""
    if not transcript:
        return ["(the model was not asked)"]
    lines: list[str] = []
    for number, turn in enumerate(transcript):
        if turn.fork_reason:
            lines.append(f"-- new branch ({turn.fork_reason}):")
        elif turn.keeps_interrupted_reply:
            lines.append("-- keeps the interrupted reply:")
        if number == 0 and turn.prompt and turn.prompt == previous_opening:
            lines.append("(the prompt above)")
        else:
            for message in turn.prompt:
                lines += _message_lines(message.role, message_text(message), full=full)
        reply = message_text(turn.reply) or "(nothing)"
        lines += _message_lines(f"> model{_describe_ending(turn)}", reply, full=full)
    return lines


def _describe_ending(turn: TranscriptTurn) -> str:
    """Describe how the reply ended, if the model did not end it itself, and the engines
    of a moved turn."""
    notes: list[str] = []
    if turn.finish_reason == "length":
        notes.append("length: cut")
    elif turn.finish_reason != "stop":
        notes.append(turn.finish_reason)
    if not turn.delivered:
        notes.append("did not reach the client")
    if turn.segments:
        notes.append(f"moved: {_describe_engines(turn.segments)}")
    if not notes:
        return ""
    return f" [{', '.join(notes)}]"


def _describe_engines(segments: Sequence[Segment]) -> str:
    """Describe which engine sampled how many tokens, in their order."""
    return ", ".join(
        f"{count_text(segment.end - segment.start, 'token')} by "
        f"{segment.engine or 'an engine without a name'}"
        for segment in segments
    )


def _message_lines(label: str, text: str, *, full: bool) -> list[str]:
    if not full:
        text = trimmed(text, _MAX_MESSAGE_CHARACTERS)
    first_line, *more_lines = text.split("\n")
    lines = [f"{label}: {first_line}"]
    for line in more_lines:
        lines.append(f"    {line}")
    return lines


def count_text(number: int, noun: str, plural: str = "") -> str:
    """Return "1 task" or "2 tasks", for example."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {plural or f'{noun}s'}"
