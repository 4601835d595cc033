"""The output items of a response, built from a reply's deltas, and the events that tell of them. Pure.

Whole and streamed answers are built the same way: one reply is reasoning, a message, function calls, in the
order that they come. Calls stay open to the end, because their arguments may be completed late.
Used by `responses.py`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from invrl.gateway.types import CallDelta, Delta

Event = dict[str, Any]
Logprobs = Sequence[Mapping[str, Any]]
_REASONING, _TEXT = "response.reasoning_text", "response.output_text"
_ITEM_ID = re.compile(r"(rs|msg|fc)_(turn-[0-9a-f]+)(?:_(\d{1,9}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemPlace:
    """What the id of an output item says: the turn that it is of, and which item of that kind."""

    prefix: Literal["rs", "msg", "fc"]
    """Reasoning, message or function call."""
    turn_id: str
    place: int
    """Of a call: its number among the turn's calls. Of others: the item's place in the output."""


def item_place(item_id: str) -> ItemPlace | None:
    """None for an id that no response of ours carries."""
    found = _ITEM_ID.fullmatch(item_id)
    if found is None:
        return None
    prefix = cast(Literal["rs", "msg", "fc"], found[1])
    return ItemPlace(prefix=prefix, turn_id=found[2], place=int(found[3] or 0))


class _Item:
    """One item: `shown` is all of it but its text, `parts` the text so far."""

    def __init__(self, index: int, shown: dict[str, Any]) -> None:
        self.index, self.shown = index, shown
        self.parts: list[str] = []
        self.logprobs: list[Mapping[str, Any]] = []

    def event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self.shown["id"], "output_index": self.index, **fields}

    def part(self) -> dict[str, Any]:
        """The item's content, as far as it is known."""
        text = "".join(self.parts)
        if self.shown["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self.logprobs)}

    def whole(self, status: str) -> dict[str, Any]:
        if self.shown["type"] == "function_call":
            return {**self.shown, "arguments": "".join(self.parts), "status": status}
        return {**self.shown, "content": [self.part()], "status": status}


class ResponseOutput:
    """`add` the reply's deltas, then `close`; both return the events so far untold.

    `functions`: namespace and name, by the name that the model knows, of those that have a namespace."""

    def __init__(self, turn_id: str, functions: Mapping[str, tuple[str, str]]) -> None:
        self._turn_id, self._functions = turn_id, functions
        self.items: list[dict[str, Any]] = []
        """Every item, in its place; whole once it is done."""
        self._calls: list[_Item] = []
        self._current: _Item | None = None
        """The reasoning or the message that is being written."""

    def add(self, delta: Delta, logprobs: Logprobs = ()) -> list[Event]:
        events: list[Event] = []
        if delta.reasoning:
            item = self._writing("reasoning", events)
            item.parts.append(delta.reasoning)
            events.append(item.event(_REASONING + ".delta", content_index=0, delta=delta.reasoning))
        in_message = self._current is not None and self._current.shown["type"] == "message"
        if delta.content or (logprobs and in_message):
            item = self._writing("message", events)
            item.parts.append(delta.content)
            item.logprobs += logprobs
            told = {"content_index": 0, "delta": delta.content, "logprobs": logprobs}
            events.append(item.event(_TEXT + ".delta", **told))
        for call in delta.calls:
            if call.name:
                self._finish(events)
                self._calls.append(self._begin(self._call(call), events))
            item = self._calls[call.index]
            if call.arguments:
                item.parts.append(call.arguments)
                events.append(item.event("response.function_call_arguments.delta", delta=call.arguments))
        return events

    def close(self, *, complete: bool) -> list[Event]:
        """Ends what is open. A reply of nothing is an empty message. `complete`: the reply ended itself."""
        events: list[Event] = []
        if not self.items:
            self._writing("message", events)
        status = "completed" if complete else "incomplete"
        self._finish(events, status)
        for call in self._calls:
            self._done(call, status, events)
        return events

    def _writing(self, kind: str, events: list[Event]) -> _Item:
        """The reasoning or message to write on: the current one, or a new one behind what there is."""
        if self._current is None or self._current.shown["type"] != kind:
            self._finish(events)
            prefix, more = ("msg", {"role": "assistant"})
            if kind == "reasoning":
                prefix, more = ("rs", {"summary": [], "encrypted_content": None})
            place = f"_{len(self.items)}" if self.items else ""
            item = {"type": kind, "id": f"{prefix}_{self._turn_id}{place}", **more}
            self._current = self._begin(item, events)
            part = self._current.part()
            events.append(self._current.event("response.content_part.added", content_index=0, part=part))
        return self._current

    def _call(self, call: CallDelta) -> dict[str, Any]:
        namespace, name = self._functions.get(call.name, ("", call.name))
        item_id = f"fc_{self._turn_id}_{call.index}"
        item = {"type": "function_call", "id": item_id, "call_id": call.id, "name": name}
        return {**item, "namespace": namespace} if namespace else item

    def _begin(self, shown: dict[str, Any], events: list[Event]) -> _Item:
        item = _Item(len(self.items), shown)
        empty = {"arguments": ""} if shown["type"] == "function_call" else {"content": []}
        begun = {**shown, **empty, "status": "in_progress"}
        self.items.append(begun)
        events.append({"type": "response.output_item.added", "output_index": item.index, "item": begun})
        return item

    def _finish(self, events: list[Event], status: str = "completed") -> None:
        """Ends the reasoning or message that is being written."""
        item, self._current = self._current, None
        if item is not None:
            self._done(item, status, events)

    def _done(self, item: _Item, status: str, events: list[Event]) -> None:
        """`status` is the last item's: those before it are complete."""
        last = item.index == len(self.items) - 1
        whole = self.items[item.index] = item.whole(status if last else "completed")
        if item.shown["type"] == "function_call":
            told = {"name": whole["name"], "arguments": whole["arguments"]}
            events.append(item.event("response.function_call_arguments.done", **told))
        else:
            part, place = item.part(), {"content_index": 0}
            told = {name: part[name] for name in ("text", "logprobs") if name in part}
            kind = _REASONING if item.shown["type"] == "reasoning" else _TEXT
            events.append(item.event(kind + ".done", **place, **told))
            events.append(item.event("response.content_part.done", **place, part=part))
        events.append({"type": "response.output_item.done", "output_index": item.index, "item": whole})
