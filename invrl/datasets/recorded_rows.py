"""Conversion of a recorded conversation to a row of a data file, and the fidelity of
the row to the sampled tokens. Pure.

A run records a reply in two forms: the sampled ids, and the message that the agent got,
which was parsed from their text. A data file holds messages, and the chat template
turns them back into text. The two texts can differ: in the spaces of a call's
arguments, around thinking, in an end of turn that was never sampled. So each row is
read back here as `invrl train --data-path` reads it, and its tokens are compared with
the recorded ones. Invariant: nothing is written as true that was not compared.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from invrl.datasets.rows import Dialogue, read_row
from invrl.datasets.trajectories import TokenizedTrajectory, stretches, trajectories
from invrl.errors import SessionError, UnusableRowError
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.types import Message, Prompt, Tool, ToolCall
from invrl.types.tasks import Json

_THINKING_CHOICES = (None, False, True)
"""Possible requests of a client. The choice is not recorded; the recorded prompt
reveals it."""


class Fidelity(StrEnum):
    """Relation of a written row's tokens to the recorded ones. The first two are true
    to what was sampled; the rest after `OTHER_TEXT` is not written."""

    SAME_TOKENS = "exactly the ids that were sampled"
    SAME_TEXT = "the text that was sampled, in other ids"
    OTHER_TEXT = "the template writes it in another way than it was sampled"
    CUT = "a reply was cut at its token limit"
    UNFINISHED = "its last reply did not reach the agent, or may not be trained"
    COMPLETIONS = "its prompt is text that no template wraps (completions)"
    UNRECORDED = "its messages are not recorded"
    REFUSED = "its messages cannot be trained as a row"


TRUE = frozenset({Fidelity.SAME_TOKENS, Fidelity.SAME_TEXT})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedTrajectory:
    """One trajectory of a rollout, as a run with rollouts trains it: a sample of its
    batch."""

    messages: tuple[Message, ...]
    """Messages as the agent sent them, with the replies as it got them. Empty if they
    are not recorded."""
    tools: tuple[Tool, ...]
    replies: tuple[int, ...]
    """Indices of the messages that were sampled and are trained, ascending."""
    prompt_messages: int
    """Number of messages before the first sampled reply."""
    prompt_ids_T: NDArray[np.int32]
    tokens_T: NDArray[np.int32]
    trained_T: NDArray[np.bool_]
    finished: bool
    """Whether the last turn was delivered and may be trained: nothing is cut off after
    it."""
    cut: bool
    """Whether a reply in it ran out of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredRow:
    """A row of a data file, from one recorded trajectory."""

    fields: Mapping[str, Json]
    fidelity: Fidelity
    detail: str = ""
    """Reason that the row is refused."""
    prompt_messages: int = 0
    dialogue: Dialogue | None = None
    """Trained parts of the row; None if no row can be written."""
    num_samples: int = 0
    """Number of samples that the chat template makes of the row."""


def restore(renderer: Renderer, trajectory: RecordedTrajectory) -> RestoredRow:
    """Return the row of a trajectory, for `--objective sft`. Replies that were not
    sampled, or are not trained in this trajectory, have weight 0. The row states
    whether the client asked for thinking only if the recorded prompt is not the
    template's default."""
    obstacle = _unwritable_reason(trajectory)
    if obstacle is not None:
        return RestoredRow(fields={}, fidelity=obstacle)
    try:
        thinking = _thinking(renderer, trajectory)
        fields = _row_fields(trajectory, thinking)
        [dialogue] = read_row(1, fields, "conversations").sides
        written = trajectories(renderer, dialogue)
    except SessionError as error:
        return RestoredRow(fields={}, fidelity=Fidelity.REFUSED, detail=error.message)
    except UnusableRowError as error:
        return RestoredRow(fields={}, fidelity=Fidelity.REFUSED, detail=error.reason)
    return RestoredRow(
        fields=fields,
        fidelity=_compare(renderer, trajectory, written),
        prompt_messages=trajectory.prompt_messages,
        dialogue=dialogue,
        num_samples=len(written),
    )


def pair_fields(chosen: RestoredRow, rejected: RestoredRow) -> dict[str, Json] | None:
    """Return the fields of a pair, for `--objective dpo` and its family, from two rows
    that can be written. None if the two do not answer the same prompt with the same
    tools, or if a row of pairs would train another part of them than `chosen` and
    `rejected` do."""
    if _first_prompt(chosen) != _first_prompt(rejected):
        return None
    fields: dict[str, Json] = {
        "prompt": _without_weights(chosen, 0, chosen.prompt_messages)
    }
    fields["chosen"] = _without_weights(chosen, chosen.prompt_messages, None)
    fields["rejected"] = _without_weights(rejected, rejected.prompt_messages, None)
    for name in ("tools", "chat_template_kwargs"):
        if name in chosen.fields:
            fields[name] = chosen.fields[name]
    try:
        sides = read_row(1, fields, "pairs").sides
    except UnusableRowError:
        return None
    if sides != (chosen.dialogue, rejected.dialogue):
        return None
    return fields


def fits_pair(row: RestoredRow) -> bool:
    """Whether everything that the assistant says after the prompt was sampled and is
    trained, in one sample: a side of a pair has no weights."""
    if row.dialogue is None or row.num_samples != 1:
        return False
    messages = row.dialogue.prompt.messages
    places = range(row.prompt_messages, len(messages))
    return row.dialogue.trained == tuple(
        place for place in places if messages[place].role == "assistant"
    )


def _first_prompt(row: RestoredRow) -> Prompt | None:
    """Return the prompt of the first reply; None for a row that cannot be written."""
    if row.dialogue is None:
        return None
    prompt = row.dialogue.prompt
    messages = prompt.messages[: row.prompt_messages]
    return Prompt(messages=messages, tools=prompt.tools, thinking=prompt.thinking)


def _unwritable_reason(trajectory: RecordedTrajectory) -> Fidelity | None:
    """Return the reason that no row can be written, as far as it is known without a
    template."""
    if not trajectory.messages:
        return Fidelity.UNRECORDED
    if trajectory.messages[0].role == "text":
        return Fidelity.COMPLETIONS
    if not trajectory.finished:
        return Fidelity.UNFINISHED
    if trajectory.cut:
        return Fidelity.CUT
    return None


# ----------------------------------------------------------------- fields


def _row_fields(
    trajectory: RecordedTrajectory, thinking: bool | None
) -> dict[str, Json]:
    messages: list[Json] = []
    for place, message in enumerate(trajectory.messages):
        messages.append(_message_fields(message, trained=place in trajectory.replies))
    fields: dict[str, Json] = {"messages": messages}
    if trajectory.tools:
        fields["tools"] = [_tool_fields(tool) for tool in trajectory.tools]
    if thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": thinking}
    return fields


def _message_fields(message: Message, *, trained: bool) -> dict[str, Json]:
    fields: dict[str, Json] = {"role": message.role, "content": message.content}
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [_call_fields(call) for call in message.tool_calls]
    if message.role == "tool":
        fields["tool_call_id"] = message.tool_call_id
    if message.role == "assistant" and not trained:
        fields["weight"] = 0
    return fields


def _call_fields(call: ToolCall) -> dict[str, Json]:
    function: dict[str, Json] = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _tool_fields(tool: Tool) -> dict[str, Json]:
    function: dict[str, Json] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        function["parameters"] = json.loads(tool.parameters)
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _without_weights(row: RestoredRow, begin: int, end: int | None) -> list[Json]:
    messages = row.fields["messages"]
    assert isinstance(messages, list), "`restore` has written a list of objects"
    without: list[Json] = []
    for message in messages[begin:end]:
        assert isinstance(message, Mapping)
        without.append(
            {name: value for name, value in message.items() if name != "weight"}
        )
    return without


def _thinking(renderer: Renderer, trajectory: RecordedTrajectory) -> bool | None:
    """Return the client's choice: the first with which the template writes the recorded
    prompt. None, the template's default, if there is no such choice. Raises
    SessionError."""
    messages = trajectory.messages[: trajectory.prompt_messages]
    recorded = trajectory.prompt_ids_T.tolist()
    for thinking in _THINKING_CHOICES:
        prompt = Prompt(messages=messages, tools=trajectory.tools, thinking=thinking)
        if renderer.encode(renderer.text(prompt)) == recorded:
            return thinking
    return None


# ----------------------------------------------------------------- comparison


def _compare(
    renderer: Renderer,
    trajectory: RecordedTrajectory,
    written: Sequence[TokenizedTrajectory],
) -> Fidelity:
    if len(written) == 1:
        row = written[0]
        same_tokens = np.array_equal(row.tokens_T, trajectory.tokens_T)
        if same_tokens and np.array_equal(row.trained_T, trajectory.trained_T):
            return Fidelity.SAME_TOKENS
        if _texts(renderer, row.tokens_T, row.trained_T) == _texts(
            renderer, trajectory.tokens_T, trajectory.trained_T
        ):
            return Fidelity.SAME_TEXT
    return Fidelity.OTHER_TEXT


def _texts(
    renderer: Renderer, tokens_T: NDArray[np.int32], trained_T: NDArray[np.bool_]
) -> list[tuple[str, bool]]:
    """Return the text of each stretch, and whether it is trained."""
    return [
        (renderer.decode(tokens_T[place].tolist()), bool(trained_T[place.start]))
        for place in stretches(trained_T)
    ]
