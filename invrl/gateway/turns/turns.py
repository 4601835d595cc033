"""From a request to a turn: match, render, sample, commit, deliver.

Dialects hand over a `TurnRequest` and show the `Answer`; everything in between is the same for all of
them. Invariant: a turn joins the forest only when its tokens are durable and whole."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from invrl.engines.sglang_client import GenerateRequest
from invrl.errors import SessionError
from invrl.gateway.config import Constrained
from invrl.gateway.rendering.parsers import Parsers
from invrl.gateway.rendering.renderer import PromptTooLong, Renderer, Room
from invrl.gateway.rendering.reply_parser import ReplyParser
from invrl.gateway.rendering.shared_tools import SharedTools
from invrl.gateway.session_record import SessionRecord
from invrl.gateway.turns.conversation import Conversation
from invrl.gateway.turns.forest import advice
from invrl.gateway.turns.generation import Generation, Proposal, Sampler
from invrl.gateway.turns.prompt_threads import LARGE_REQUEST, PromptThreads
from invrl.gateway.turns.recovery import replay, restore
from invrl.gateway.turns.sampling import resolve, sampling_seed
from invrl.gateway.types import (
    Change,
    ForkReason,
    MatchLevel,
    Message,
    Node,
    Prompt,
    TurnRequest,
)
from invrl.store.run_store import RunStore
from invrl.store.run_store_writer import RunStoreWriter
from invrl.types import Json, Sampling, Turn

_log = logging.getLogger(__name__)
_ENGINE_MARGIN = 8
"""Tokens of the context length that SGLang keeps for itself."""
_HEAD_TOKENS = 8
"""The end of a prompt that says whether the reply begins inside of thinking."""
_MOST_IGNORED = 256
"""Names of ignored fields that are counted."""
_SHOWN = (
    "id",
    "parent_id",
    "fork_reason",
    "finish_reason",
    "prompt_tokens",
    "cached_tokens",
    "constrained",
    "started_at",
    "finished_at",
)


class _ContextExceeded(SessionError):
    """A prompt of `tokens` tokens, which are too many."""

    def __init__(self, reason: str, *, tokens: int) -> None:
        super().__init__(reason, status=400, code="context_length_exceeded", param="messages")
        self.tokens = tokens


class _Place(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Where a request continues the forest, and the ids it adds there."""

    parent: Node | None
    depth: int
    context_ids: list[int]
    input_ids_T: NDArray[np.int32]
    """The path's and the context's ids."""
    fork: ForkReason | None
    change: Change | None = None
    """How the request departs from what was recorded."""
    prompt: Prompt
    counted: Mapping[str, int] = msgspec.field(default_factory=dict)
    """What the place costs, for the metrics."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What `Turns.begin` works out of a request, where that was done before."""

    place: _Place
    forced: Mapping[str, Json]
    """Sampling parameters that force the reply's form."""


@dataclass(slots=True, kw_only=True, eq=False)
class Turns:
    """All live conversations and how they go on."""

    sampler: Sampler
    renderer: Renderer
    parsers: Parsers = field(default_factory=Parsers)
    store: RunStoreWriter
    reader: RunStore
    """Of the same store: what a worker before this one committed."""
    context_length: int
    run_seed: int | None = None
    match_level: MatchLevel = MatchLevel.REWRITTEN
    constrained: Constrained = "free"
    counts: Counter[str] = field(default_factory=Counter, init=False)
    forks: Counter[str] = field(default_factory=Counter, init=False)
    matches: Counter[str] = field(default_factory=Counter, init=False)
    """Turns that continue another, by the `MatchLevel` that it took."""
    overridden: Counter[str] = field(default_factory=Counter, init=False)
    ignored: Counter[str] = field(default_factory=Counter, init=False)
    """Requests by the fields of theirs that nothing reads."""
    _conversations: dict[str, Conversation] = field(default_factory=dict, init=False)
    _shared_tools: SharedTools = field(default_factory=SharedTools, init=False)
    threads: PromptThreads = field(default_factory=PromptThreads, init=False)

    def open(self, record: SessionRecord) -> None:
        self._conversations[record.session.id] = Conversation(record, self.match_level)

    def conversation(self, record: SessionRecord) -> Conversation:
        """SessionError 401 once the session is being closed."""
        conversation = self.find(record)
        if conversation is None or conversation.closing:
            raise SessionError("the session is closed", status=401, code="session_closed")
        return conversation

    def conversation_to_close(self, record: SessionRecord) -> Conversation:
        conversation = self.find(record)
        assert conversation is not None, "an open session has a conversation"
        return conversation

    def find(self, record: SessionRecord) -> Conversation | None:
        """None once the session's outcome has been handed over. That of a session that a worker before this
        one opened is read from the store when it is first needed."""
        conversation = self._conversations.get(record.session.id)
        if conversation is None and record.top().outcome is None:
            recorded = self.reader.recorded_turns(record.session.id)
            conversation = Conversation(record, self.match_level)
            restore(conversation, recorded, self.renderer, self._shared_tools)
            self._conversations[record.session.id] = conversation
        return conversation

    def is_called(self, record: SessionRecord) -> bool:
        """Whether a request of the session is being answered now."""
        conversation = self._conversations.get(record.session.id)
        return conversation is not None and conversation.is_called

    def close(self, record: SessionRecord) -> None:
        self._conversations.pop(record.session.id, None)

    async def prepare(
        self, conversation: Conversation, request: TurnRequest, *, size: int
    ) -> Prepared | None:
        """Before `begin`: what a large request needs of its session's record, its template and its tokenizer,
        found in a thread, so that no other session waits for it. None for a small one, for which `begin` does
        it by itself. `size`: bytes of the body. SessionError 400 as `begin`."""
        size += conversation.forest.characters
        if size < LARGE_REQUEST and not conversation.matching.locked():
            return None
        work = partial(self._prepared, conversation, request)
        return await self.threads.run(work, size=size, lock=conversation.matching)

    def _prepared(self, conversation: Conversation, request: TurnRequest) -> Prepared:
        self._check_choice(request)
        place = self._place(conversation, request)
        forced = self._constraint(request)  # a grammar, of tools that fit into the context
        self._parser(request, place.context_ids, "")  # what it makes of the tools is kept
        return Prepared(place=place, forced=forced)

    def begin(
        self, conversation: Conversation, request: TurnRequest, prepared: Prepared | None = None
    ) -> tuple[Generation, tuple[str, ...]]:
        """The generation that answers `request`, and the sampling parameters that are overridden for
        the first time in this session. `prepared`: what `prepare` made of the request. SessionError 400 if
        the request cannot be rendered or does not fit."""
        request = msgspec.structs.replace(request, tools=self._shared_tools.share(request.tools))
        earlier = conversation.earlier(request.digest, retry=request.retry)
        if isinstance(earlier, Node):
            earlier = self._replay(conversation, request, earlier)
        if earlier is not None:
            self.counts["retries_answered"] += 1
            return earlier, ()
        record, session = conversation.record, conversation.record.session
        forced = self._constraint(request) if prepared is None else prepared.forced
        if forced:
            record.forced[_forced_by(request)] += 1
        freed = bool(forced) and self.constrained == "free" and session.purpose != "serve"
        if freed:
            forced = {}
        place = self._place(conversation, request) if prepared is None else prepared.place
        if place.parent is not None:  # who goes on from an answer has it, whatever became of its delivery
            self._delivered(conversation, place.parent.turn.id)
        ids_T = place.input_ids_T
        chosen = resolve(session.purpose, conversation.admit(), request.sampling)
        sampling = self._fit(chosen.sampling, len(ids_T))
        if place.fork is not None:
            self.forks[place.fork.value] += 1
        record.counts.update(place.counted)
        for name, count in place.counted.items():
            level = name.removeprefix("matches/")
            (self.counts if level == name else self.matches)[level] += count
        overridden = (*chosen.overridden, *([_forced_by(request)] if freed else ()))
        news = tuple(name for name in overridden if name not in record.overridden)
        record.overridden.update(news)
        self.overridden.update(news)
        extra = {**self._seed(conversation, ids_T), **chosen.extra, **forced}
        turn_id = "turn-" + secrets.token_hex(12)
        generation = Generation(
            Proposal(
                request=GenerateRequest(
                    rid=turn_id,
                    input_ids_T=ids_T,
                    sampling=sampling,
                    stop=request.stop,
                    stop_token_ids=tuple(sorted(self.renderer.end_ids)),
                    extra_sampling=extra,
                    routing_key=session.id,
                    top_logprobs=request.top_logprobs,
                ),
                stream=request.stream,
                parent=place.parent,
                context_ids=ids_T[len(ids_T) - len(place.context_ids) :],
                messages=place.prompt.messages[place.depth :],
                tools=request.tools,
                fork_reason=place.fork.value if place.fork else "",
                digest=request.digest,
                constrained=bool(forced),
                grammar=json.dumps(forced) if forced and self.constrained == "masked" else "",
            ),
            sampler=self.sampler,
            renderer=self.renderer,
            parser=self._parser(request, place.context_ids, turn_id),
            commit=lambda turn, proposal, reply: self._commit(conversation, turn, proposal, reply),
        )
        conversation.start(request.digest, generation)
        if place.change is not None:
            conversation.changes[turn_id] = place.change
        return generation, news

    def count_ignored(self, record: SessionRecord, names: Sequence[str]) -> None:
        """Fields of a request that nothing reads. Clients choose the names, so their number has a limit."""
        for name in names:
            if name in self.ignored or len(self.ignored) < _MOST_IGNORED:
                if name not in self.ignored:
                    _log.info("%r is ignored: no field that this gateway knows (told once)", name)
                self.ignored[name] += 1
                record.ignored[name] += 1

    def _replay(self, conversation: Conversation, request: TurnRequest, node: Node) -> Generation:
        generation = replay(
            node,
            stop=request.stop,
            stream=request.stream,
            renderer=self.renderer,
            parser=self._parser(request, node.turn.context_ids_T.tolist(), node.turn.id),
        )
        conversation.start(request.digest, generation, replay=True)
        return generation

    async def count_tokens(self, conversation: Conversation, request: TurnRequest, *, size: int) -> int:
        """Prompt tokens that `begin` would send for this request, if there were room for any number."""
        size += conversation.forest.characters
        work = partial(self._count, conversation, request)
        return await self.threads.run(work, size=size, lock=conversation.matching)

    def _count(self, conversation: Conversation, request: TurnRequest) -> int:
        try:
            place = self._place(conversation, request, exact=True)
        except _ContextExceeded as error:
            return error.tokens
        return len(place.input_ids_T)

    def deliver(self, conversation: Conversation, generation: Generation) -> None:
        """The answer has left whole: the turn may be trained."""
        generation.delivered = True
        proposal = generation.proposal
        self._delivered(conversation, proposal.request.rid)
        if conversation.frozen:
            return
        node = conversation.forest.turn(proposal.request.rid)
        if node is None or proposal.request.top_logprobs:  # a turn does not hold the latter
            conversation.keep_answer(generation, generation)
        else:
            conversation.keep_answer(generation, node)

    def _delivered(self, conversation: Conversation, turn_id: str) -> None:
        if conversation.frozen:
            self.counts["delivered_too_late"] += 1
        elif turn_id not in conversation.delivered:
            conversation.delivered.add(turn_id)
            self.store.mark_delivered(turn_id)
            self.counts["delivered"] += 1

    async def overview(self, record: SessionRecord) -> list[dict[str, Json]]:
        """One line per turn of a session that is not closed; one that forked says why, and what helps."""
        if (conversation := self.find(record)) is None:
            return []
        if conversation.restored:
            recorded = await asyncio.to_thread(conversation.forest.changes)
            conversation.changes = recorded | conversation.changes
            conversation.restored = False
        return [
            {name: getattr(turn, name) for name in _SHOWN}
            | {"delivered": turn.id in conversation.delivered, "sampled_tokens": len(turn.sampled_ids_T)}
            | _explained(turn, conversation.changes.get(turn.id))
            for turn in conversation.turns
        ]

    def metrics(self) -> Mapping[str, Mapping[str, int]]:
        counted = {"forks": self.forks, "matches": self.matches, "overridden": self.overridden}
        counted["ignored"] = self.ignored
        return {"turns": dict(self.counts), **{name: dict(counts) for name, counts in counted.items()}}

    def _constraint(self, request: TurnRequest) -> Mapping[str, Json]:
        """Sampling parameters that force the reply's form. SessionError 400 for what this model cannot."""
        self._check_choice(request)
        parallel = request.parallel_tool_calls and self.renderer.parallel_calls
        return self.parsers.constraint(
            request.tools, request.tool_choice, parallel=parallel, schema=request.schema
        )

    def _check_choice(self, request: TurnRequest) -> None:
        """SessionError 400 for tools that the model is not shown, and a choice of what is not there."""
        choice, names = request.tool_choice, [tool.name for tool in request.tools]
        if request.tools and choice.mode != "none" and not self.parsers.tool_calls:
            reason = (
                "`tools` need a chat template that shows them, and this model's does not: give one with "
                "--chat-template-path FILE (chatml-tools, for models that speak ChatML, is shipped)"
            )
            raise SessionError(reason, status=400, code="unsupported_parameter", param="tools")
        if choice.mode in ("required", "named") and not names:
            reason = "`tool_choice` asks for a call, `tools` has none"
            raise SessionError(reason, status=400, code="invalid_value", param="tool_choice")
        for name in (choice.name,) if choice.mode == "named" else choice.allowed:
            if name not in names:
                reason = f"`tool_choice` names {name!r}, `tools` has {', '.join(names)}"
                raise SessionError(reason, status=400, code="invalid_value", param="tool_choice")

    def _prompt(self, conversation: Conversation, request: TurnRequest) -> Prompt:
        """With what the request goes on from. SessionError 400 if that is no whole turn of this session."""
        messages = request.messages
        if request.after:
            node = conversation.forest.turn(request.after)
            if node is None or node.raw:
                reason = f"the previous response {request.after!r} is not of this session, or was not whole"
                raise SessionError(
                    reason, status=400, code="previous_response_not_found", param="previous_response_id"
                )
            messages = (*(each for each in node.conversation() if not each.instructions), *messages)
        if request.instructions is not None:
            messages = (Message("system", request.instructions, instructions=True), *messages)
        return Prompt(messages=messages, tools=request.tools, thinking=request.thinking)

    def _place(self, conversation: Conversation, request: TurnRequest, *, exact: bool = False) -> _Place:
        """SessionError 400 if the request cannot be rendered or does not fit. `exact`: the error then
        has the exact number of its tokens."""
        room = Room(tokens=self._most_prompt_tokens, exact=exact)
        try:
            if request.text is not None:
                return self._place_text(conversation, request.text, room)
            return self._place_messages(conversation, request, room)
        except PromptTooLong as error:
            raise self._too_long(error.tokens, exact=error.exact) from None

    def _place_messages(self, conversation: Conversation, request: TurnRequest, room: Room) -> _Place:
        prompt = self._prompt(conversation, request)
        match = conversation.forest.match(prompt.messages, prompt.tools)
        fork, change = match.fork, match.change
        if (node := match.node) is not None:
            recorded = replace(prompt, messages=(*node.conversation(), *match.new))
            path = node.ids()
            tail = self.renderer.render_tail(recorded, match.depth, path, room)
            if tail.fork is None:
                counted = {f"matches/{match.level.name.lower()}": 1}
                if kept := tail.kept_thinking:
                    counted |= {"thinking_kept": 1, "thinking_kept_tokens": kept}
                return _Place(
                    parent=node,
                    depth=match.depth,
                    context_ids=tail.ids,
                    input_ids_T=_ids_T(path, tail.ids),
                    fork=fork,
                    change=change,
                    prompt=recorded,
                    counted=counted,
                )
            fork, change = tail.fork, None
        ids = self.renderer.render_first(prompt, room)
        if fork is ForkReason.NEW_CONVERSATION and conversation.has_root(ids):
            fork = None  # another sample of a first turn departs from nothing
        counted = {"forked_tokens": len(ids)} if fork else {}
        return _Place(
            parent=None,
            depth=0,
            context_ids=ids,
            input_ids_T=_ids_T([], ids),
            fork=fork,
            change=change,
            prompt=prompt,
            counted=counted,
        )

    def _place_text(self, conversation: Conversation, text: str | tuple[int, ...], room: Room) -> _Place:
        """A prompt without a template: what follows the longest recorded text that it begins with."""
        forest, shown = conversation.forest, self.renderer.decode
        node, covered = forest.match_text(text, shown)
        new = text[covered:]
        path = node.ids() if node is not None else []
        if isinstance(new, str):
            ids = self.renderer.encode(new, room, before=len(path))
        elif len(text) > room.tokens:
            raise PromptTooLong(len(text), exact=True)
        else:
            ids = list(new)
        new_root = forest.size > 0 and node is None and not conversation.has_root(ids)
        fork = ForkReason.NEW_CONVERSATION if new_root else None
        prompt = Prompt(messages=(Message("text", new if isinstance(new, str) else shown(ids)),))
        return _Place(
            parent=node,
            depth=0,
            context_ids=ids,
            input_ids_T=_ids_T(path, ids),
            fork=fork,
            prompt=prompt,
        )

    def _parser(self, request: TurnRequest, context_ids: Sequence[int], turn_id: str) -> ReplyParser:
        if request.text is not None:
            return ReplyParser()
        return self.parsers.reply(
            request.tools,
            request.tool_choice,
            parallel=request.parallel_tool_calls and self.renderer.parallel_calls,
            prompt_text=self.renderer.reply_text(context_ids[-_HEAD_TOKENS:], special=True),
            stream=request.stream,
            turn_id=turn_id,
        )

    def _seed(self, conversation: Conversation, ids_T: NDArray[np.int32]) -> Mapping[str, Json]:
        if self.run_seed is None:
            return {}
        prompt, nth = conversation.count_prompt(ids_T)
        return {"sampling_seed": sampling_seed(self.run_seed, conversation.record.session, prompt, nth)}

    def _fit(self, sampling: Sampling, prompt: int) -> Sampling:
        room = self._most_prompt_tokens + 1 - prompt
        if room < 1:
            raise self._too_long(prompt, exact=True)
        return replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))

    @property
    def _most_prompt_tokens(self) -> int:
        """With room for one more."""
        return self.context_length - _ENGINE_MARGIN - 1

    def _too_long(self, tokens: int, *, exact: bool) -> _ContextExceeded:
        limit = f"context length is {self.context_length} tokens (of which {_ENGINE_MARGIN} are the engine's)"
        count = str(tokens) if exact else f"at least {tokens}"
        return _ContextExceeded(
            f"This model's maximum {limit}; your messages resulted in {count} tokens.", tokens=tokens
        )

    def _commit(
        self, conversation: Conversation, turn: Turn, proposal: Proposal, reply: Message
    ) -> asyncio.Future[None]:
        sampled = len(turn.sampled_ids_T)
        self.counts[turn.finish_reason] += 1
        tokens = {"prompt_tokens": turn.prompt_tokens, "cached_tokens": turn.cached_tokens}
        self.counts.update({**tokens, "sampled_tokens": sampled})
        loop = asyncio.get_running_loop()
        if not sampled or conversation.frozen:
            nothing: Future[None] = Future()
            nothing.set_result(None)
            return _in_loop(nothing, loop)
        messages = (*proposal.messages, reply)
        conversation.turns.append(turn)
        shown, tools = msgspec.json.encode(messages), msgspec.json.encode(proposal.tools)
        durable = _in_loop(self.store.add_turn(turn, shown, tools), loop)
        if turn.finish_reason != "abort":
            closed = self.renderer.is_closed(turn.sampled_ids_T.tolist())
            node = Node(
                turn=turn, parent=proposal.parent, messages=messages, closed=closed, tools=proposal.tools
            )
            if durable.done():  # before anybody is told
                _join(conversation, node, durable)
            else:
                durable.add_done_callback(lambda done: _join(conversation, node, done))
        return durable


def _ids_T(path: Sequence[int], context: Sequence[int]) -> NDArray[np.int32]:
    """Both, one behind the other. (numpy takes twice as long as `array` to read a list.)"""
    return np.array(array("i", [*path, *context]), np.int32)


def _explained(turn: Turn, change: Change | None) -> dict[str, Json]:
    """Why a turn forked and what helps; of one that goes on from a reply that came back altered, how."""
    explained: dict[str, Json] = {}
    if turn.fork_reason:
        explained["advice"] = advice(ForkReason(turn.fork_reason), change)
    if change is not None:
        explained["changed"] = {
            "message": change.message,
            "role": change.role,
            "part": change.part,
            "recorded": change.recorded,
            "sent": change.sent,
        }
    return explained


def _forced_by(request: TurnRequest) -> str:
    """The field that wants the reply's form forced."""
    mode = request.tool_choice.mode
    return f"tool_choice={mode}" if mode in ("required", "named") else "response_format"


def _in_loop(commit: Future[None], loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
    """For `await`; done if the commit is."""
    if not commit.done():
        return asyncio.wrap_future(commit, loop=loop)
    done: asyncio.Future[None] = loop.create_future()
    if error := commit.exception():
        done.set_exception(error)
    else:
        done.set_result(None)
    return done


def _join(conversation: Conversation, node: Node, durable: asyncio.Future[None]) -> None:
    if not durable.cancelled() and durable.exception() is None:
        conversation.forest.add(node)
