"""The output items of a response, built from the deltas of a reply, and the events that announce them. Pure.

Whole and streamed answers are built in the same way. A reply is reasoning, messages and function calls, in
the order in which they come. Calls stay open until the end, because their arguments may be completed late."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from invrl.gateway.types import CallDelta, Delta

Event = dict[str, Any]
Logprobs = Sequence[Mapping[str, Any]]
ItemPrefix = Literal["rs", "msg", "fc"]
"""What the id of an item begins with: reasoning, message, function call."""
_REASONING_EVENT = "response.reasoning_text"
_TEXT_EVENT = "response.output_text"
_ARGUMENTS_EVENT = "response.function_call_arguments"
_ITEM_ID = re.compile(r"(rs|msg|fc)_(turn-[0-9a-f]+)(?:_(\d{1,9}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemPlace:
    """Where an output item belongs, as its id says."""

    prefix: ItemPrefix
    turn_id: str
    place: int
    """The number of a call among the turn's calls; the place of any other item in the output."""


def item_place(item_id: str) -> ItemPlace | None:
    """None for an id that the gateway did not issue."""
    match = _ITEM_ID.fullmatch(item_id)
    if match is None:
        return None
    prefix, turn_id, place = match.groups()
    return ItemPlace(prefix=cast(ItemPrefix, prefix), turn_id=turn_id, place=int(place or 0))


class _Item:
    """One output item. `fields` are all of its fields except its text."""

    def __init__(self, index: int, fields: dict[str, Any]) -> None:
        self.index = index
        self.fields = fields
        self.texts: list[str] = []
        """The text so far: reasoning, content, or the arguments of a call."""
        self.logprobs: list[Mapping[str, Any]] = []

    @property
    def kind(self) -> str:
        """reasoning, message or function_call."""
        return self.fields["type"]

    def event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self.fields["id"], "output_index": self.index, **fields}

    def content_part(self) -> dict[str, Any]:
        """The content of reasoning or a message, as far as it is known."""
        text = "".join(self.texts)
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self.logprobs)}

    def begun(self) -> dict[str, Any]:
        """The item before its first text."""
        if self.kind == "function_call":
            return {**self.fields, "arguments": "", "status": "in_progress"}
        return {**self.fields, "content": [], "status": "in_progress"}

    def whole(self, status: str) -> dict[str, Any]:
        """The item with all of its text."""
        if self.kind == "function_call":
            return {**self.fields, "arguments": "".join(self.texts), "status": status}
        return {**self.fields, "content": [self.content_part()], "status": status}


class ResponseOutput:
    """Call `add` with the deltas of the reply, then `close`. Both return the new events. `functions` has the
    namespace and the name of each function in a namespace, by the name that the model knows."""

    def __init__(self, turn_id: str, functions: Mapping[str, tuple[str, str]]) -> None:
        self._turn_id = turn_id
        self._functions = functions
        self.items: list[dict[str, Any]] = []
        """All items, each in its place; an item is whole once it is done."""
        self._calls: list[_Item] = []
        self._current: _Item | None = None
        """The reasoning or the message that is being written."""

    def add(self, delta: Delta, logprobs: Logprobs = ()) -> list[Event]:
        events: list[Event] = []
        if delta.reasoning:
            item = self._open_item("reasoning", events)
            item.texts.append(delta.reasoning)
            events.append(item.event(f"{_REASONING_EVENT}.delta", content_index=0, delta=delta.reasoning))
        in_message = self._current is not None and self._current.kind == "message"
        if delta.content or (logprobs and in_message):
            item = self._open_item("message", events)
            item.texts.append(delta.content)
            item.logprobs += logprobs
            event = item.event(
                f"{_TEXT_EVENT}.delta", content_index=0, delta=delta.content, logprobs=logprobs
            )
            events.append(event)
        for call in delta.calls:
            if call.name:
                self._finish_current(events)
                self._calls.append(self._begin_item(self._call_fields(call), events))
            item = self._calls[call.index]
            if call.arguments:
                item.texts.append(call.arguments)
                events.append(item.event(f"{_ARGUMENTS_EVENT}.delta", delta=call.arguments))
        return events

    def close(self, *, complete: bool) -> list[Event]:
        """Ends all open items. An empty reply becomes an empty message. `complete`: the model ended the
        reply."""
        events: list[Event] = []
        if not self.items:
            self._open_item("message", events)
        status = "completed" if complete else "incomplete"
        self._finish_current(events, status)
        for call in self._calls:
            self._finish_item(call, status, events)
        return events

    def _open_item(self, kind: Literal["reasoning", "message"], events: list[Event]) -> _Item:
        """The current item if it is of this kind, or a new one behind all others."""
        if self._current is not None and self._current.kind == kind:
            return self._current
        self._finish_current(events)
        place = ""
        if self.items:
            place = f"_{len(self.items)}"
        fields: dict[str, Any]
        if kind == "reasoning":
            item_id = f"rs_{self._turn_id}{place}"
            fields = {"type": kind, "id": item_id, "summary": [], "encrypted_content": None}
        else:
            fields = {"type": kind, "id": f"msg_{self._turn_id}{place}", "role": "assistant"}
        item = self._begin_item(fields, events)
        part = item.content_part()
        events.append(item.event("response.content_part.added", content_index=0, part=part))
        self._current = item
        return item

    def _call_fields(self, call: CallDelta) -> dict[str, Any]:
        namespace, name = self._functions.get(call.name, ("", call.name))
        item_id = f"fc_{self._turn_id}_{call.index}"
        fields = {"type": "function_call", "id": item_id, "call_id": call.id, "name": name}
        if namespace:
            fields["namespace"] = namespace
        return fields

    def _begin_item(self, fields: dict[str, Any], events: list[Event]) -> _Item:
        item = _Item(len(self.items), fields)
        begun = item.begun()
        self.items.append(begun)
        events.append({"type": "response.output_item.added", "output_index": item.index, "item": begun})
        return item

    def _finish_current(self, events: list[Event], status: str = "completed") -> None:
        """Ends the reasoning or the message that is being written."""
        item = self._current
        self._current = None
        if item is not None:
            self._finish_item(item, status, events)

    def _finish_item(self, item: _Item, status: str, events: list[Event]) -> None:
        """`status` is the status of the last item: all items before it are complete."""
        is_last = item.index == len(self.items) - 1
        whole = item.whole(status if is_last else "completed")
        self.items[item.index] = whole
        if item.kind == "function_call":
            event = item.event(f"{_ARGUMENTS_EVENT}.done", name=whole["name"], arguments=whole["arguments"])
            events.append(event)
        else:
            self._finish_content(item, events)
        events.append({"type": "response.output_item.done", "output_index": item.index, "item": whole})

    def _finish_content(self, item: _Item, events: list[Event]) -> None:
        part = item.content_part()
        if item.kind == "reasoning":
            event = item.event(f"{_REASONING_EVENT}.done", content_index=0, text=part["text"])
        else:
            event = item.event(
                f"{_TEXT_EVENT}.done", content_index=0, text=part["text"], logprobs=part["logprobs"]
            )
        events.append(event)
        events.append(item.event("response.content_part.done", content_index=0, part=part))
