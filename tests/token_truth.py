"""Every recorded turn against the wire, and every prompt against the ids before it plus
a re-rendered tail.

Three witnesses that share no code: the store (what the gateway kept), the tap (what
passed between router and engine), and transformers' own `apply_chat_template` and
tokenizer. For each turn:

- `ids`, `logprobs`, `spans`: the store's are the tap's. Of an aborted turn they are a
  beginning of the tap's: what the gateway had read when it was cancelled. Of a turn that
  several engines sampled, they are those of its segments, one behind the other.
- `prompt`: the prompt on the wire is the parent's prompt and reply on the wire, then
  the turn's own context.
- `tail`: that context is what transformers renders and tokenises for the messages that
  are new (for a root: for all of them); control tokens in contents are plain text. A
  template that takes earlier thinking out of
  the history re-writes what came before: then the tail is what it writes behind the
  reply, found by a mark in the reply's place, and all before the mark must be the same
  but for thinking.
- `missing`: a turn that never passed the tap.
- where the client's side is known (`Sent`), `messages`, `text` and `unrecorded`: the
  stored conversation is what the client sent; what it was shown is the text of the ids
  on the wire; a turn it was given whole is stored.

An answer that passed whole and is in no turn is counted (`unrecorded`): only who
cancelled may be its client.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from engine_tap import Generation

_MARK = "judge-mark-5e1f"
"""Stands in a rendering where a reply would: no agent says it."""
_PLAIN = "\ue000"
"""Stands within the control tokens of contents until the text is tokenised."""
_COLUMNS = (
    "id, session_id, parent_id, context_ids, sampled_ids, logprobs, spans, finish_reason, messages, "
    "tool_lists.tools, constrained"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTurn:
    """A row of the store's table, read with sqlite alone."""

    id: str
    session_id: str
    parent_id: str | None
    context_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float]
    spans: list[tuple[int, int, int]]
    finish_reason: str
    messages: list[dict]
    tools: list[dict]
    constrained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One request and its whole answer as the client had them, in the form of chat
    completions."""

    turn_id: str
    messages: Sequence[Mapping]
    tools: Sequence[Mapping]
    text: str
    tool_calls: Sequence[Mapping]
    reasoning: str = ""
    trimmed: bool = False
    """Whitespace around the messages' texts was taken off by the client."""


@dataclass(slots=True, kw_only=True)
class Verdict:
    """What was compared, and what differed: (turn, what, details)."""

    turns: int = 0
    aborted: int = 0
    roots: int = 0
    continued: int = 0
    sampled_tokens: int = 0
    versions: set[int] = field(default_factory=set)
    crossed: int = 0
    """Turns sampled under more than one version."""
    seen_by_clients: int = 0
    unrecorded: int = 0
    constrained: int = 0
    mismatches: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def kinds(self) -> Counter[str]:
        return Counter(what for _, what, _ in self.mismatches)

    def shown(self) -> dict[str, object]:
        names = (
            "turns",
            "aborted",
            "roots",
            "continued",
            "sampled_tokens",
            "crossed",
            "seen_by_clients",
            "unrecorded",
        )
        counts = {name: getattr(self, name) for name in names}
        return {
            **counts,
            "versions": len(self.versions),
            "mismatches": dict(self.kinds),
        }


def stored_turns(path: Path) -> list[StoredTurn]:
    """All turns of a run's store, oldest first."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
        sql = f"SELECT {_COLUMNS} FROM turns JOIN tool_lists ON digest=turns.tools ORDER BY seq"
        rows = db.execute(sql).fetchall()
    turns = []
    for (
        turn_id,
        session,
        parent,
        context,
        sampled,
        logprobs,
        spans,
        finish,
        messages,
        tools,
        constrained,
    ) in rows:
        turns.append(
            StoredTurn(
                id=turn_id,
                session_id=session,
                parent_id=parent,
                context_ids=np.frombuffer(context, np.int32).tolist(),
                sampled_ids=np.frombuffer(sampled, np.int32).tolist(),
                logprobs=np.frombuffer(logprobs, np.float32).tolist(),
                spans=[
                    (int(one["version"]), one["start"], one["end"])
                    for one in json.loads(spans)
                ],
                finish_reason=finish,
                messages=json.loads(messages),
                tools=json.loads(tools),
                constrained=bool(constrained),
            )
        )
    return turns


class Reference:
    """A model folder's template and tokenizer as transformers has them."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(str(model))
        self.end = str(self.tokenizer.eos_token)
        self.end_id = int(self.tokenizer.eos_token_id)
        template = str(self.tokenizer.chat_template)
        self.thinks = "</think>" in template
        added = self.tokenizer.added_tokens_decoder.values()
        self._special = [token.content for token in added if token.special]
        self._control = [
            token.content
            for token in added
            if token.special or token.content in template
        ]

    def text(
        self,
        messages: Sequence[Mapping],
        tools: Sequence[Mapping],
        *,
        head: bool,
        thinking: bool | None = None,
    ) -> str:
        options = {} if thinking is None else {"enable_thinking": thinking}
        shown = self.tokenizer.apply_chat_template(
            [self._marked_contents(_shown(message)) for message in messages],
            tools=[_with_marks(_tool(tool), self._control) for tool in tools] or None,
            add_generation_prompt=head,
            tokenize=False,
            **options,
        )
        assert isinstance(shown, str)
        return shown

    def _marked_contents(self, message: dict) -> dict:
        control = self._special if message["role"] == "assistant" else self._control
        return {
            name: value if name == "role" else _with_marks(value, control)
            for name, value in message.items()
        }

    def ids(self, text: str) -> list[int]:
        if _PLAIN not in text:
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        ids: list[int] = []
        added = self.tokenizer.get_added_vocab()
        for part in re.split(f"({_any_of(added)})", text):
            if part in added:
                ids.append(added[part])
            else:
                plain = part.replace(_PLAIN, "")
                ids += self._without_added_tokens.encode(plain).ids
        return ids

    @cached_property
    def _without_added_tokens(self) -> tokenizers.Tokenizer:
        parts = json.loads(self.tokenizer.backend_tokenizer.to_str())
        parts |= {"added_tokens": [], "post_processor": None}
        return tokenizers.Tokenizer.from_str(json.dumps(parts))

    def first_ids(self, text: str) -> list[int]:
        """Ids of a text without a template: the token that begins a sequence comes
        first, once."""
        begin = self.tokenizer.bos_token
        whole = list(self.tokenizer(text)["input_ids"])
        if begin and text.startswith(begin):
            return self.ids(text)
        return whole

    def later_ids(self, text: str, *, closed: bool) -> list[int]:
        """Ids of a text behind others: without the space that some tokenizers begin a
        prompt with, and, if a turn has ended there, without whitespace that its end
        token takes."""
        before = self.end if closed else self.separator
        return self.ids(before + text)[1:]

    @property
    def separator(self) -> str:
        """A special token that takes no whitespace."""
        tokens = self.tokenizer.added_tokens_decoder.values()
        return next(
            t.content for t in tokens if t.special and not (t.lstrip or t.rstrip)
        )

    def tail(
        self,
        messages: Sequence[Mapping],
        depth: int,
        tools: Sequence[Mapping],
        *,
        closed: bool,
        thinking: bool | None = None,
    ) -> list[int]:
        """Ids that follow the reply that is the last of `messages[:depth]`."""
        whole = self.text(messages, tools, head=True, thinking=thinking)
        before = self.text(messages[:depth], tools, head=False)
        if not whole.startswith(before):
            return self._rewritten_tail(
                messages, depth, tools, closed=closed, thinking=thinking
            )
        after_reply = before[
            before.rindex(self.end) + (len(self.end) if closed else 0) :
        ]
        return self.later_ids(after_reply + whole[len(before) :], closed=closed)

    def _rewritten_tail(
        self,
        messages: Sequence[Mapping],
        depth: int,
        tools: Sequence[Mapping],
        *,
        closed: bool,
        thinking: bool | None,
    ) -> list[int]:
        """As `tail`, of a template that shows what came before otherwise once more
        messages follow."""
        marked = [
            *messages[: depth - 1],
            _marked(messages[depth - 1]),
            *messages[depth:],
        ]
        whole = self.text(marked, tools, head=True, thinking=thinking)
        before = self.text(marked[:depth], tools, head=False)
        ends = [text.index(self.end, text.index(_MARK)) for text in (whole, before)]
        shown = [
            _unthinking(text[:end])
            for text, end in zip((whole, before), ends, strict=True)
        ]
        if whole.count(_MARK) != 1 or shown[0] != shown[1]:
            raise ValueError(f"the template re-writes more than thinking: {shown}")
        return self.later_ids(
            whole[ends[0] + (len(self.end) if closed else 0) :], closed=closed
        )


def judge(
    turns: Iterable[StoredTurn],
    wire: Iterable[Generation],
    reference: Reference,
    *,
    sent: Iterable[Sent] = (),
    all_turns: bool = True,
    unthinking: Collection[str] = (),
) -> Verdict:
    """The verdict over `turns`, which come with their parents. `all_turns`: there are
    no others. `unthinking`: the sessions whose requests all refuse thinking."""
    verdict = Verdict()
    stored = {turn.id: turn for turn in turns}
    seen: dict[str, list[Generation]] = {}
    for generation in wire:
        _, rid = _attempt_at(generation.rid)
        seen.setdefault(rid, []).append(generation)
    passed = {rid: _joined(segments) for rid, segments in seen.items()}
    for turn in stored.values():
        thinking = False if turn.session_id in unthinking else None
        _judge_turn(verdict, turn, stored, passed, reference, thinking)
    if all_turns:
        whole = [rid for rid, one in passed.items() if one.finish in ("stop", "length")]
        verdict.unrecorded = sum(
            rid.startswith("turn-") and rid not in stored for rid in whole
        )
    for reply in sent:
        _judge_sent(verdict, reply, stored, passed, reference)
    return verdict


def _judge_turn(
    verdict: Verdict,
    turn: StoredTurn,
    stored: Mapping[str, StoredTurn],
    passed: Mapping[str, Generation],
    reference: Reference,
    thinking: bool | None,
) -> None:
    def differ(what: str, detail: object = "") -> None:
        verdict.mismatches.append((turn.id, what, str(detail)[:2000]))

    verdict.turns += 1
    verdict.constrained += turn.constrained
    verdict.sampled_tokens += len(turn.sampled_ids)
    verdict.versions.update(version for version, _, _ in turn.spans)
    verdict.crossed += len(turn.spans) > 1
    wire = passed.get(turn.id)
    if wire is None:
        return differ("missing")
    count = len(turn.sampled_ids)
    if aborted := turn.finish_reason == "abort":
        verdict.aborted += 1
    elif turn.finish_reason != wire.finish:
        differ("finish", (turn.finish_reason, wire.finish))
    kept = count if aborted else len(wire.ids)
    if turn.sampled_ids != wire.ids[:kept]:
        differ("ids", (turn.sampled_ids, wire.ids[:kept]))
    if not np.array_equal(
        np.array(turn.logprobs, np.float32), np.array(wire.logprobs[:kept], np.float32)
    ):
        differ("logprobs", (turn.logprobs, wire.logprobs[:kept]))
    spans = [
        (version, start, min(end, kept))
        for version, start, end in wire.spans
        if start < kept
    ]
    if turn.spans != spans:
        differ("spans", (turn.spans, spans))
    path = _path(turn, stored)
    before: list[int] = []
    if turn.parent_id is None:
        verdict.roots += 1
    else:
        verdict.continued += 1
        parent = passed.get(turn.parent_id)
        if parent is None:
            return differ("prompt", "the parent never passed")
        before = parent.input_ids + parent.ids
    if wire.input_ids != before + turn.context_ids:
        differ("prompt", (wire.input_ids, before + turn.context_ids))
    _judge_tail(turn, path, before, reference, thinking, differ)
    return None


def _judge_tail(
    turn: StoredTurn,
    path: Sequence[StoredTurn],
    before: Sequence[int],
    reference: Reference,
    thinking: bool | None,
    differ: Any,
):
    """The turn's own context against transformers' rendering."""
    # the last one is the reply
    messages = [message for one in path for message in one.messages][:-1]
    tools = path[0].tools
    try:
        if (
            turn.messages[0]["role"] == "text"
        ):  # a completion: no template, the text that is new
            text = turn.messages[0]["content"]
            expected = reference.first_ids(text)
            if before:
                expected = reference.later_ids(
                    text, closed=before[-1] == reference.end_id
                )
        elif turn.parent_id is None:
            expected = reference.ids(
                reference.text(messages, tools, head=True, thinking=thinking)
            )
        else:
            depth = len(messages) + 1 - len(turn.messages)
            closed = before[-1] == reference.end_id
            expected = reference.tail(
                messages, depth, tools, closed=closed, thinking=thinking
            )
    except Exception as error:  # templates raise what they like
        return differ("tail", repr(error))
    if turn.context_ids != expected:
        differ("tail", (turn.context_ids, expected))
    return None


def _judge_sent(
    verdict: Verdict,
    sent: Sent,
    stored: Mapping[str, StoredTurn],
    passed: Mapping[str, Generation],
    reference: Reference,
) -> None:
    verdict.seen_by_clients += 1
    turn = stored.get(sent.turn_id)
    if turn is None:
        return verdict.mismatches.append((sent.turn_id, "unrecorded", ""))
    kept = [message for one in _path(turn, stored) for message in one.messages][:-1]
    asked = [_shown(_flat(message)) for message in sent.messages]
    shown = [_shown(message) for message in kept]
    if sent.trimmed:
        asked, shown = (
            [{**one, "content": one["content"].strip()} for one in each]
            for each in (asked, shown)
        )
    for one, recorded in zip(asked, shown, strict=False):
        if (
            "reasoning_content" not in one
        ):  # the client may leave thinking out of what it sends back
            recorded.pop("reasoning_content", None)
    tools = [_tool(tool) for tool in _path(turn, stored)[0].tools]
    if shown != asked or tools != [_tool(tool) for tool in sent.tools]:
        pairs = zip(shown, asked, strict=False)
        first = next(
            ((kept, given) for kept, given in pairs if kept != given),
            (len(shown), len(asked)),
        )
        verdict.mismatches.append((turn.id, "messages", f"{first} {tools}"))
    wire = passed.get(turn.id)
    if wire is None:
        return None  # `missing`
    ids = wire.ids[:-1] if wire.ids and wire.ids[-1] == reference.end_id else wire.ids
    # As SGLang does: with tools, special tokens are shown, for calls may be made of
    # them.
    text = reference.tokenizer.decode(ids, skip_special_tokens=not sent.tools)
    text = text.partition(wire.matched)[0] if isinstance(wire.matched, str) else text
    if reference.thinks:
        thought, text = _with_thinking(text)
        if sent.reasoning.strip() != thought.strip():
            verdict.mismatches.append(
                (turn.id, "text", f"{sent.reasoning!r} {thought!r}")
            )
    if sent.tool_calls or "<tool_call>" in text:
        shown, calls = _with_calls(text)
        functions = [call["function"] for call in sent.tool_calls]
        sent_calls = [
            (function["name"], _arguments(function["arguments"]))
            for function in functions
        ]
        ended = wire.finish == "length" or isinstance(wire.matched, str)
        if (
            ended and sent_calls and isinstance(sent_calls[-1][1], str)
        ):  # streamed, and cut short
            whole, rest = text[: (at := text.rindex("<tool_call>"))], text[at:]
            told = sent_calls[-1][0] in rest and sent_calls[-1][1].strip() in rest
            shown, calls = _with_calls(whole)
            if not told or (sent.text.strip(), sent_calls[:-1]) != (
                shown.strip(),
                calls,
            ):
                verdict.mismatches.append(
                    (turn.id, "text", f"{(sent.text, sent_calls)} {text}")
                )
        elif (sent.text.strip(), sent_calls) != (shown.strip(), calls):
            verdict.mismatches.append(
                (turn.id, "text", f"{(sent.text, sent_calls)} {(shown, calls)}")
            )
    elif sent.text != text:
        verdict.mismatches.append((turn.id, "text", f"{sent.text!r} {text!r}"))
    return None


def _with_calls(text: str) -> tuple[str, list[tuple[str, dict]]]:
    """Hermes' form, read on our own: whole calls, and the text outside of them (what is
    no call is text)."""
    calls: list[tuple[str, dict]] = []

    def taken(block: re.Match) -> str:
        try:
            call = json.loads(block[1])
            calls.append((call["name"], call["arguments"]))
        except (ValueError, KeyError, TypeError):
            return block[0]
        return ""

    return re.sub(r"<tool_call>(.*?)</tool_call>", taken, text, flags=re.DOTALL), calls


def _with_thinking(text: str) -> tuple[str, str]:
    """The thinking that a reply begins with, which may have been cut short, and the
    rest."""
    if not text.startswith("<think>"):
        return "", text
    thought, _, rest = text.removeprefix("<think>").partition("</think>")
    return thought, rest.lstrip("\n")


def _unthinking(text: str) -> str:
    """Without thinking, and without whitespace: templates trim it beside thinking as
    they please."""
    return "".join(re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL).split())


def _marked(reply: Mapping) -> dict:
    """A reply that shows the mark once: as its text, or as the name of its last
    call."""
    calls = [{**call, "arguments": "{}"} for call in reply.get("tool_calls") or ()]
    if not calls:
        return {**reply, "content": _MARK}
    calls[-1]["name"] = _MARK
    return {**reply, "content": "", "tool_calls": calls}


def _flat(message: Mapping) -> dict:
    """A message of chat completions in the store's form."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return {**message, "tool_calls": calls}


def _path(turn: StoredTurn, stored: Mapping[str, StoredTurn]) -> list[StoredTurn]:
    path = [turn]
    while path[-1].parent_id is not None:
        path.append(stored[path[-1].parent_id])
    return path[::-1]


def _attempt_at(rid: str) -> tuple[int, str]:
    """The number of the attempt and the turn's id."""
    if not rid.startswith("again-"):
        return 0, rid
    _, number, turn_id = rid.split("-", 2)
    return int(number), turn_id


def _joined(segments: Sequence[Generation]) -> Generation:
    """The requests of one turn as one. Each prompt says how many tokens before it were
    kept."""
    ordered = sorted(segments, key=lambda one: _attempt_at(one.rid))
    first, *later = ordered
    whole = first
    for segment in later:
        kept = len(segment.input_ids) - len(first.input_ids)
        ids = whole.ids[:kept]
        same = segment.input_ids == first.input_ids + ids
        assert same, f"{segment.rid} does not continue what was sampled"
        spans = [
            (version, start, min(end, kept))
            for version, start, end in whole.spans
            if start < kept
        ]
        for version, start, end in segment.spans:
            begin = kept + start
            if spans and spans[-1][0] == version:
                begin = spans.pop()[1]
            spans.append((version, begin, kept + end))
        whole = replace(
            segment,
            input_ids=first.input_ids,
            ids=ids + segment.ids,
            logprobs=whole.logprobs[:kept] + segment.logprobs,
            spans=spans,
        )
    return whole


def _any_of(texts: Iterable[str]) -> str:
    """A pattern of the texts, the longest first."""
    return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))


def _with_marks(value: object, control: Sequence[str]) -> object:
    """The value with a mark in each control token of its texts."""
    if isinstance(value, str):
        return re.sub(
            _any_of(control),
            lambda found: f"{found[0][0]}{_PLAIN}{found[0][1:]}",
            value,
        )
    if isinstance(value, Mapping):
        return {name: _with_marks(part, control) for name, part in value.items()}
    if isinstance(value, list):
        return [_with_marks(part, control) for part in value]
    return value


def _shown(message: Mapping) -> dict:
    """A stored message as transformers wants it."""
    shown: dict = {"role": message["role"], "content": message.get("content") or ""}
    if reasoning := message.get("reasoning") or message.get("reasoning_content"):
        shown["reasoning_content"] = reasoning
    if message.get("tool_call_id"):
        shown["tool_call_id"] = message["tool_call_id"]
    if message.get("tool_calls"):
        calls = [
            {"name": call["name"], "arguments": _arguments(call["arguments"])}
            for call in message["tool_calls"]
        ]
        shown["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    return shown


def _arguments(text: str) -> object:
    """As an object, or as they are where they are no JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _tool(tool: Mapping) -> dict:
    if "function" in tool:
        return dict(tool)
    parameters = tool.get("parameters")
    parameters = (
        json.loads(parameters or "null") if isinstance(parameters, str) else parameters
    )
    parameters = (
        {"type": "object", "properties": {}} if parameters is None else parameters
    )
    function = {
        "name": tool["name"],
        "description": tool.get("description", ""),
        "parameters": parameters,
    }
    return {"type": "function", "function": function}
