"""The output items of a response, built from the deltas of a reply, and the events that
announce them. Pure.

Whole and streamed answers are built in the same way. A reply is reasoning, messages and
function calls, in the order in which they come. Calls stay open until the end, because
their arguments may be completed late."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from invrl.gateway.dialects.response_calls import (
    CALL_PREFIXES,
    FUNCTION,
    CalledTool,
    CallKind,
)
from invrl.gateway.dialects.wire import Fields
from invrl.gateway.types import CallDelta, Delta

Event = Fields
Logprobs = Sequence[Fields]
TextKind = Literal["reasoning", "message"]
ItemKind = TextKind | CallKind
"""Reasoning and messages have content; calls have a separate kind."""
_REASONING_EVENT = "response.reasoning_text"
_TEXT_EVENT = "response.output_text"
_PREFIXES = "|".join(("rs", "msg", *CALL_PREFIXES))
_ITEM_ID = re.compile(rf"({_PREFIXES})_(turn-[0-9a-f]+)(?:_(\d{{1,9}}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemPlace:
    """Position of an output item, encoded in its id."""

    prefix: str
    """`rs` for reasoning, `msg` for a message, otherwise that of a call."""
    turn_id: str
    place: int
    """Number of a call among the turn's calls; position of any other item in the
    output."""


def item_place(item_id: str) -> ItemPlace | None:
    """Parse an item's id; None if the gateway did not issue it."""
    match = _ITEM_ID.fullmatch(item_id)
    if match is None:
        return None
    prefix, turn_id, place = match.groups()
    return ItemPlace(
        prefix=prefix,
        turn_id=turn_id,
        place=int(place or 0),
    )


class _Item:
    """One output item. `fields` are all of its fields except its text and its status;
    `index` is its position in the output."""

    def __init__(self, kind: ItemKind, index: int, fields: Fields) -> None:
        self.kind = kind
        self.index = index
        self.fields = fields
        self.texts: list[str] = []
        """Text so far: reasoning, content, or the arguments of a call."""
        self.logprobs: list[Fields] = []

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def event(self, type: str, **fields: Any) -> Event:
        """Return an event about the item's text."""
        return {
            "type": type,
            "item_id": self.fields["id"],
            "output_index": self.index,
            **fields,
        }

    def content_part(self) -> Fields:
        """Return the content of reasoning or a message so far."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": list(self.logprobs),
        }

    def without_text(self) -> Fields:
        """Return the item as it begins."""
        fields = dict(self.fields)
        if isinstance(self.kind, CallKind):
            fields[self.kind.body_field] = self.kind.body("")
        else:
            fields["content"] = []
        fields["status"] = "in_progress"
        return fields

    def whole(self, status: str) -> Fields:
        """Return the item with all of its text."""
        fields = dict(self.fields)
        if isinstance(self.kind, CallKind):
            fields[self.kind.body_field] = self.kind.body(self.text)
            status = self.kind.status(status)
        else:
            fields["content"] = [self.content_part()]
        fields["status"] = status
        return fields


class ResponseOutput:
    """Builds the output. Call `add` with the deltas of the reply, then `close`. Both
    return the new events. `tools` are the client's, by the name that the model knows;
    others are functions of that name."""

    def __init__(self, turn_id: str, tools: Mapping[str, CalledTool]) -> None:
        self._turn_id = turn_id
        self._tools = tools
        self.items: list[Fields] = []
        """All items by position; an item is whole once it is done."""
        self._calls: list[_Item] = []
        self._current: _Item | None = None
        """Reasoning or message that is being written."""
        self._events: list[Event] = []
        """Events that were not returned yet."""

    def add(self, delta: Delta, logprobs: Logprobs = ()) -> list[Event]:
        if delta.reasoning:
            self._add_reasoning(delta.reasoning)
        in_message = self._current is not None and self._current.kind == "message"
        if delta.content or (logprobs and in_message):
            self._add_content(delta.content, logprobs)
        for call in delta.calls:
            self._add_call(call)
        return self._take_events()

    def close(self, *, complete: bool) -> list[Event]:
        """End all open items. An empty reply becomes an empty message. `complete`: the
        model ended the reply."""
        if not self.items:
            self._open_item("message")
        status = "incomplete"
        if complete:
            status = "completed"
        self._finish_current(status)
        for call in self._calls:
            self._finish_item(call, status)
        return self._take_events()

    def _take_events(self) -> list[Event]:
        events = self._events
        self._events = []
        return events

    def _add_reasoning(self, text: str) -> None:
        item = self._open_item("reasoning")
        item.texts.append(text)
        event = item.event(f"{_REASONING_EVENT}.delta", content_index=0, delta=text)
        self._events.append(event)

    def _add_content(self, text: str, logprobs: Logprobs) -> None:
        item = self._open_item("message")
        item.texts.append(text)
        item.logprobs += logprobs
        event = item.event(
            f"{_TEXT_EVENT}.delta",
            content_index=0,
            delta=text,
            logprobs=logprobs,
        )
        self._events.append(event)

    def _add_call(self, call: CallDelta) -> None:
        """Add a piece of a call. The first one has its name, and begins an item."""
        if call.name:
            self._finish_current()
            tool = self._tools.get(call.name, CalledTool(name=call.name))
            item = self._begin_item(tool.kind, self._call_fields(call, tool))
            self._calls.append(item)
        item = self._calls[call.index]
        if call.arguments:
            item.texts.append(call.arguments)
            kind = item.kind
            if isinstance(kind, CallKind) and kind.streams_text:
                event = item.event(
                    "response.function_call_arguments.delta", delta=call.arguments
                )
                self._events.append(event)

    def _open_item(self, kind: TextKind) -> _Item:
        """Return the current item if it is of this kind, or a new one after all
        others."""
        if self._current is not None and self._current.kind == kind:
            return self._current
        self._finish_current()
        item_id = self._turn_id
        if self.items:
            item_id += f"_{len(self.items)}"
        fields: Fields = {"type": kind}
        if kind == "reasoning":
            fields["id"] = f"rs_{item_id}"
            fields["summary"] = []
            fields["encrypted_content"] = None
        else:
            fields["id"] = f"msg_{item_id}"
            fields["role"] = "assistant"
        item = self._begin_item(kind, fields)
        event = item.event(
            "response.content_part.added",
            content_index=0,
            part=item.content_part(),
        )
        self._events.append(event)
        self._current = item
        return item

    def _call_fields(self, call: CallDelta, tool: CalledTool) -> Fields:
        fields = {
            "type": tool.kind.item_type,
            "id": f"{tool.kind.prefix}_{self._turn_id}_{call.index}",
            "call_id": call.id,
        }
        if not tool.kind.tool_name:
            fields["name"] = tool.name
        if tool.namespace:
            fields["namespace"] = tool.namespace
        return fields

    def _begin_item(self, kind: ItemKind, fields: Fields) -> _Item:
        item = _Item(kind, len(self.items), fields)
        item_fields = item.without_text()
        self.items.append(item_fields)
        self._events.append(_item_event("added", item, item_fields))
        return item

    def _finish_current(self, status: str = "completed") -> None:
        """End the reasoning or the message that is being written."""
        item = self._current
        self._current = None
        if item is not None:
            self._finish_item(item, status)

    def _finish_item(self, item: _Item, status: str) -> None:
        """Finish an item. `status` is that of the last item: all items before it are
        complete."""
        if item.index < len(self.items) - 1:
            status = "completed"
        item_fields = item.whole(status)
        self.items[item.index] = item_fields
        self._events.extend(_text_done_events(item))
        self._events.append(_item_event("done", item, item_fields))


def _item_event(change: Literal["added", "done"], item: _Item, fields: Fields) -> Event:
    return {
        "type": f"response.output_item.{change}",
        "output_index": item.index,
        "item": fields,
    }


def _text_done_events(item: _Item) -> list[Event]:
    """Return the events that repeat the whole text of an item."""
    if isinstance(item.kind, CallKind):
        return _call_done_events(item, item.kind)
    if item.kind == "reasoning":
        event = item.event(
            f"{_REASONING_EVENT}.done",
            content_index=0,
            text=item.text,
        )
    else:
        event = item.event(
            f"{_TEXT_EVENT}.done",
            content_index=0,
            text=item.text,
            logprobs=list(item.logprobs),
        )
    part_event = item.event(
        "response.content_part.done",
        content_index=0,
        part=item.content_part(),
    )
    return [event, part_event]


def _call_done_events(item: _Item, kind: CallKind) -> list[Event]:
    """Return the events that carry the whole of a call. What is not the text of its
    arguments is known only now, and is one piece."""
    events = [item.event(**fields) for fields in kind.events(item.text)]
    if kind is FUNCTION:
        events[0]["name"] = item.fields["name"]
    return events
