"""Rows of a data file: the trained part of each, or its error. Pure; needs no tokenizer
and no template.

| kind | fields of a row |
|---|---|
| conversations | `messages`, or `prompt` and `completion` |
| pairs | `chosen` and `rejected`, with a `prompt` or with the same first messages |
| labels | `messages`, or `prompt` and `completion`; and `label`, true or false |

Messages are OpenAI's, as the gateway takes them. `prompt` may be text, as a
message of the user, and its continuation may be text, as a message of the
assistant. Every row may have `tools` (a list, or its JSON as text) and
`chat_template_kwargs` with `enable_thinking`.

The assistant's messages are trained: all of `messages` (without those of `weight` 0),
otherwise only those after the prompt, or after the common first messages of a pair.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from invrl.datasets.config import Kind
from invrl.errors import ConfigError, SessionError, UnusableRowError
from invrl.gateway.dialects.chat import read_message, read_tool
from invrl.gateway.dialects.joined_messages import JoinedMessages
from invrl.gateway.types import Message, Prompt, Tool
from invrl.store.row_file import read_rows, row_unit
from invrl.types.tasks import Json

Fields = Mapping[str, Json]
_MESSAGES_FIX = (
    'write it as a list of messages: [{"role": "user", "content": "..."}, ...]'
)
_FORMATS: dict[Kind, str] = {
    "conversations": "give each row `messages`, or `prompt` and `completion`",
    "pairs": "give each row `chosen` and `rejected`, with a `prompt` or with the same first messages",
    "labels": "give each row `label` (true or false) and `messages`, or `prompt` and `completion`",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """A whole conversation, and the indices of its trained assistant messages,
    ascending."""

    prompt: Prompt
    trained: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRow:
    """A row that can be trained. `number` is its line in a JSONL file or its row in a
    Parquet file, from 1."""

    number: int
    sides: tuple[Dialogue, ...]
    """Chosen and rejected side of a pair; one dialogue otherwise."""
    label: bool | None = None
    """Verdict of the kind `labels`."""


def load_rows(field: str, file: str, kind: Kind) -> list[DataRow]:
    """Read all rows of the file, at least one. Raises ConfigError for `field`, naming
    the first invalid row."""
    rows = read_rows(field, file, of="rows", each="row")
    read: list[DataRow] = []
    for number, fields in rows:
        try:
            read.append(read_row(number, fields, kind))
        except UnusableRowError as error:
            raise unusable_row(field, file, number, error) from error
    return read


def unusable_row(
    field: str, file: str, number: int, error: UnusableRowError
) -> ConfigError:
    """Return the error for row `number` of the file that the setting `field` names."""
    return ConfigError(
        field, file, f"{row_unit(file)} {number}: {error.reason}", error.fix
    )


def data_file_kind(field: str, file: str) -> Kind:
    """Return the kind that the fields of the first row imply. Raises ConfigError if it
    cannot be read."""
    _, first = read_rows(field, file, of="rows", each="row")[0]
    if "chosen" in first or "rejected" in first:
        return "pairs"
    if "label" in first:
        return "labels"
    return "conversations"


def read_row(number: int, fields: Fields, kind: Kind) -> DataRow:
    """Read a row. Raises UnusableRowError."""
    try:
        if kind == "pairs":
            return DataRow(number=number, sides=_pair(fields))
        label = None
        if kind == "labels":
            label = _label(fields)
        return DataRow(number=number, sides=(_dialogue(fields, kind),), label=label)
    except SessionError as error:
        fix = "write messages, tools and calls as OpenAI's chat completions take them"
        raise UnusableRowError(error.message, fix) from error


def _dialogue(fields: Fields, kind: Kind) -> Dialogue:
    """Read a row with one conversation."""
    if _has(fields, "messages"):
        messages, trained = _conversation(fields["messages"])
    elif _has(fields, "prompt") and "completion" in fields:
        context = _side(fields, "prompt", role="user")
        reply = _side(fields, "completion", role="assistant")
        messages = (*context, *reply)
        trained = _assistant_turns(messages, after=len(context))
        if not trained:
            _refuse(
                "`completion` has no message of the assistant",
                "let the assistant speak in it",
            )
    else:
        _refuse_fields(fields, kind)
    _check_assistant_text(messages, trained)
    return Dialogue(prompt=_prompt(fields, messages), trained=trained)


def _pair(fields: Fields) -> tuple[Dialogue, Dialogue]:
    for name in ("chosen", "rejected"):
        if name not in fields:
            _refuse_fields(fields, "pairs")
        if not fields[name]:
            _refuse(
                f"`{name}` is empty: {fields[name]!r}",
                f"give the {name} reply, or leave the row out",
            )
    context: tuple[Message, ...] = ()
    if _has(fields, "prompt"):
        context = _side(fields, "prompt", role="user")
    elif isinstance(fields["chosen"], str) or isinstance(fields["rejected"], str):
        _refuse(
            "its replies are texts and there is no `prompt`",
            "add `prompt`, a text or a list of messages",
        )
    chosen = (*context, *_side(fields, "chosen", role="assistant"))
    rejected = (*context, *_side(fields, "rejected", role="assistant"))
    if chosen == rejected:
        _refuse(
            "`chosen` and `rejected` are equal",
            "leave the row out: such a pair says nothing",
        )
    num_common = len(context) or _common_beginning(chosen, rejected)
    sides: list[Dialogue] = []
    for name, messages in (("chosen", chosen), ("rejected", rejected)):
        trained = _assistant_turns(messages, after=num_common)
        if not trained:
            reason = f"`{name}` has no message of the assistant behind what both sides begin with"
            _refuse(reason, "let each side end with a reply of its own")
        _check_assistant_text(messages, trained)
        sides.append(Dialogue(prompt=_prompt(fields, messages), trained=trained))
    return sides[0], sides[1]


def _label(fields: Fields) -> bool:
    if "label" not in fields:
        _refuse_fields(fields, "labels")
    label = fields["label"]
    if not isinstance(label, bool):
        _refuse(
            f"`label` is {label!r}",
            "write true for a good reply and false for a bad one",
        )
    return label


def _conversation(value: Json) -> tuple[tuple[Message, ...], tuple[int, ...]]:
    """Return the messages, and the indices of the trained ones."""
    joined = JoinedMessages()
    weights: list[bool] = []
    for entry, message in _messages(value, "messages"):
        has_weight = _weight(entry)
        if joined.continues_reply(message):
            joined.join(message)
            weights[-1] = weights[-1] and has_weight
        else:
            joined.add(message)
            weights.append(has_weight)
    messages = joined.messages()
    turns = _assistant_turns(messages)
    if not turns:
        fix = "add the reply that is to be learned, or leave the row out"
        _refuse("no message is the assistant's, so nothing would be trained", fix)
    trained = tuple(place for place in turns if weights[place])
    if not trained:
        _refuse(
            "all messages of the assistant have weight 0", "give one of them weight 1"
        )
    return messages, trained


def _side(fields: Fields, name: str, *, role: str) -> tuple[Message, ...]:
    """Return the messages of a field that may be text: one message of that role."""
    value = fields[name]
    if isinstance(value, str):
        return (Message(role, value),)
    joined = JoinedMessages()
    for _, message in _messages(value, name):
        if joined.continues_reply(message):
            joined.join(message)
        else:
            joined.add(message)
    return joined.messages()


def _messages(value: Json, name: str) -> Iterator[tuple[Fields, Message]]:
    """Yield each entry of the list with its message."""
    if not isinstance(value, list):
        shown = "text" if isinstance(value, str) else f"{value!r:.60}"
        _refuse(f"`{name}` is {shown}, not a list of messages", _MESSAGES_FIX)
    if not value:
        _refuse(f"`{name}` is an empty list", _MESSAGES_FIX)
    for place, entry in enumerate(value):
        param = f"{name}[{place}]"
        if not isinstance(entry, Mapping):
            _refuse(f"{param} is {entry!r:.60}, not a message", _MESSAGES_FIX)
        yield entry, read_message(_with_arguments_as_text(entry), param)


def _with_arguments_as_text(entry: Fields) -> dict[str, Json]:
    """Return the message with the arguments of its calls as JSON text; files may have
    them as objects."""
    calls = entry.get("tool_calls")
    if not isinstance(calls, list):
        return dict(entry)
    written: list[Json] = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(call, Mapping) and isinstance(function, Mapping):
            arguments = function.get("arguments")
            if isinstance(arguments, Mapping):
                text = json.dumps(arguments, ensure_ascii=False)
                call = {**call, "function": {**function, "arguments": text}}
        written.append(call)
    return {**entry, "tool_calls": written}


def _weight(entry: Fields) -> bool:
    weight = entry.get("weight")
    if weight is None:
        return True
    if weight not in (0, 1):
        _refuse(f"a message has weight {weight!r}", "give 1 (trained) or 0 (context)")
    return bool(weight)


def _prompt(fields: Fields, messages: tuple[Message, ...]) -> Prompt:
    return Prompt(
        messages=messages, tools=_tools(fields.get("tools")), thinking=_thinking(fields)
    )


def _tools(value: Json) -> tuple[Tool, ...]:
    fix = "give a list of tools, each as OpenAI's chat completions take it"
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except ValueError as error:
            _refuse(f"`tools` is text that is not JSON: {error}", fix)
    if not value:
        return ()
    if not isinstance(value, list):
        _refuse(f"`tools` is {value!r:.60}, not a list", fix)
    return tuple(read_tool(tool, f"tools[{place}]") for place, tool in enumerate(value))


def _thinking(fields: Fields) -> bool | None:
    options = fields.get("chat_template_kwargs")
    if not options:
        return None
    fix = "give only enable_thinking, true or false"
    if not isinstance(options, Mapping):
        _refuse(f"`chat_template_kwargs` is {options!r:.60}", fix)
    given = {name: value for name, value in options.items() if value is not None}
    thinking = given.pop("enable_thinking", None)
    if given or not isinstance(thinking, bool | None):
        _refuse(f"`chat_template_kwargs` is {options!r:.60}", fix)
    return thinking


def _assistant_turns(messages: Sequence[Message], *, after: int = 0) -> tuple[int, ...]:
    """Return the indices of the assistant's messages, from `after` on."""
    return tuple(
        place
        for place in range(after, len(messages))
        if messages[place].role == "assistant"
    )


def _check_assistant_text(messages: Sequence[Message], trained: Sequence[int]) -> None:
    for place in trained:
        message = messages[place]
        if not message.characters:
            fix = "give it content or calls, or leave the row out"
            _refuse(f"message {place} (from 0) is the assistant's and is empty", fix)


def _common_beginning(left: Sequence[Message], right: Sequence[Message]) -> int:
    """Count the equal first messages."""
    for place, (of_left, of_right) in enumerate(zip(left, right, strict=False)):
        if of_left != of_right:
            return place
    return min(len(left), len(right))


def _has(fields: Fields, name: str) -> bool:
    """Whether the row has the field. Parquet files have null for absent fields."""
    return fields.get(name) is not None


def _refuse_fields(fields: Fields, kind: Kind) -> NoReturn:
    """Raise UnusableRowError for a row that lacks the fields of its kind."""
    names = ", ".join(sorted(fields)) or "none"
    fix = _FORMATS[kind]
    if kind != "pairs" and "chosen" in fields:
        fix += "; pairs are for --objective dpo, ipo, orpo or simpo"
    if "conversations" in fields:
        fix += " (`from` and `value` become `role` and `content`)"
    needed = {
        "conversations": "neither `messages` nor `prompt` and `completion`",
        "pairs": "not both `chosen` and `rejected`",
        "labels": "not both `label` and a conversation",
    }
    _refuse(f"it has {needed[kind]} (its fields: {names})", fix)


def _refuse(reason: str, fix: str) -> NoReturn:
    raise UnusableRowError(reason, fix)
