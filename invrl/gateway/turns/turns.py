"""The way from a request to a turn: match, render, sample, commit, deliver.

A dialect parses a body into a `TurnRequest` and writes an `Answer`; everything in
between is the same for all dialects and is here. Invariant: a turn joins the forest
only when its tokens are durable and complete.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from invrl.engines.client.generation import GenerateRequest
from invrl.errors import SessionError
from invrl.gateway.config import Constrained
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.rendering.replies.parsers import Parsers
from invrl.gateway.rendering.replies.reply_parser import ReplyParser
from invrl.gateway.rendering.tool_calls.shared_tools import SharedTools
from invrl.gateway.session_record import SessionRecord
from invrl.gateway.turns.conversation import Conversation, ResponseSource
from invrl.gateway.turns.generation import Generation, Proposal, Recorded
from invrl.gateway.turns.placement import Placement, Placer
from invrl.gateway.turns.prompt_threads import LARGE_REQUEST, PromptThreads
from invrl.gateway.turns.recorded_response import RecordedResponse
from invrl.gateway.turns.recovery import restore
from invrl.gateway.turns.reply_sampling import Sampler
from invrl.gateway.turns.sampling import TurnSampling, resolve, sampling_seed
from invrl.gateway.turns.tool_choice import check_tool_choice, forcing_field
from invrl.gateway.turns.turn_counts import TurnCounts
from invrl.gateway.types import MatchLevel, Message, Node, TurnRequest
from invrl.store.run_store import RunStore
from invrl.store.run_store_writer import RunStoreWriter
from invrl.types.tasks import Json
from invrl.types.turns import Turn

_log = logging.getLogger(__name__)
_PROMPT_END_TOKENS = 8
"""End of a prompt that shows whether the reply begins inside of thinking."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Results computed from a request before its turn begins."""

    placement: Placement
    constraint: Mapping[str, Json]
    """SGLang's sampling parameters that force the form of the reply; empty if nothing
    does."""


@dataclass(slots=True, kw_only=True, eq=False)
class Turns:
    """Live conversations of a worker, and their turns."""

    sampler: Sampler
    eval_sampler: Sampler
    """Samples in evaluation sessions."""
    renderer: Renderer
    parsers: Parsers = field(default_factory=Parsers)
    store: RunStoreWriter
    reader: RunStore
    """Reader of the same store: it has what an earlier worker committed."""
    context_length: int
    models: Sequence[str]
    """Names under which clients call the model and its adapters."""
    adapters: Sequence[str] = ()
    """Names of the adapters: a request that has one of them is sampled with it."""
    run_seed: int | None = None
    match_level: MatchLevel = MatchLevel.REWRITTEN
    constrained: Constrained = "free"
    recorded_top_logprobs: int = 0
    """Number of the likeliest tokens recorded at each sampled one, in training."""
    engine_return_s: float = 600.0
    """Time that a generation waits for an engine, if there is none."""
    space_wait_s: float = 240.0
    """How long a turn waits to be recorded, if the disk is full."""
    counts: TurnCounts = field(default_factory=TurnCounts, init=False)
    threads: PromptThreads = field(default_factory=PromptThreads, init=False)
    placer: Placer = field(init=False)
    _conversations: dict[str, Conversation] = field(default_factory=dict, init=False)
    _shared_tools: SharedTools = field(default_factory=SharedTools, init=False)

    def __post_init__(self) -> None:
        self.placer = Placer(self.renderer, self.context_length)

    def open(self, record: SessionRecord) -> None:
        self._conversations[record.session.id] = Conversation(record, self.match_level)

    def conversation(self, record: SessionRecord) -> Conversation:
        """Return the conversation. Raises SessionError 401 once the session is being
        closed."""
        conversation = self.find(record)
        if conversation is None or conversation.closing:
            raise SessionError(
                "the session is closed", status=401, code="session_closed"
            )
        return conversation

    def conversation_to_close(self, record: SessionRecord) -> Conversation:
        conversation = self.find(record)
        assert conversation is not None, "an open session has a conversation"
        return conversation

    def find(self, record: SessionRecord) -> Conversation | None:
        """Return the conversation; None once the session's outcome has been handed
        over. The conversation of a session that an earlier worker opened is read from
        the store when it is first needed."""
        conversation = self._conversations.get(record.session.id)
        if conversation is None and record.top().outcome is None:
            session_id = record.session.id
            conversation = Conversation(record, self.match_level)
            restore(
                conversation,
                self.reader.recorded_turns(session_id),
                self.reader.matched_stops(session_id),
                self.renderer,
                self._shared_tools,
            )
            conversation.segments = self.reader.turn_segments(session_id)
            self._conversations[record.session.id] = conversation
        return conversation

    def check_model(self, record: SessionRecord, name: str | None) -> None:
        """Raise SessionError 404 if a serving session asks for a model by an unknown
        name. In training and evaluation the session's key decides the model: any name
        stands for it."""
        if name is None or name in self.models or record.session.purpose != "serve":
            return
        reason = f"The model `{name}` does not exist; this server has {_quoted(self.models)}."
        raise SessionError(reason, status=404, code="model_not_found", param="model")

    def is_called(self, record: SessionRecord) -> bool:
        """Whether a request of the session is being answered."""
        conversation = self._conversations.get(record.session.id)
        return conversation is not None and conversation.is_called

    def close(self, record: SessionRecord) -> None:
        self._conversations.pop(record.session.id, None)

    async def prepare(
        self, conversation: Conversation, request: TurnRequest, *, size: int
    ) -> Prepared | None:
        """Do in a thread, for a large request, what `begin` would do with the session's
        record, the template and the tokenizer, so that no other session waits for it.
        Returns None for a small request, for which `begin` does it. `size` is the bytes
        of the body. Raises SessionError 400 like `begin`."""
        size += conversation.forest.characters
        if size < LARGE_REQUEST and not conversation.matching.locked():
            return None
        work = partial(self._prepare_in_thread, conversation, request)
        return await self.threads.run(work, size=size, lock=conversation.matching)

    def _prepare_in_thread(
        self, conversation: Conversation, request: TurnRequest
    ) -> Prepared:
        prepared = self._prepare(conversation, request)
        # Makes a parser only to fill the caches of what parsers derive from the tools.
        self._parser(request, prepared.placement.context_ids, "")
        return prepared

    def _prepare(self, conversation: Conversation, request: TurnRequest) -> Prepared:
        check_tool_choice(request, shows_tools=bool(self.parsers.tool_calls))
        placement = self.placer.place(conversation, request)
        # last: of tools that fit into the context
        constraint = self._constraint(request)
        return Prepared(placement=placement, constraint=constraint)

    def begin(
        self,
        conversation: Conversation,
        request: TurnRequest,
        prepared: Prepared | None = None,
    ) -> tuple[ResponseSource, tuple[str, ...]]:
        """Begin the turn that answers `request`, or find the answer if the request is a
        retry. Also returns what is overridden for the first time in this session.
        `prepared` is the result of `prepare`. Raises SessionError 400 if the request
        cannot be rendered or does not fit, 403 if the session has used up its turns or
        tokens.

        The order matters. A retry comes first, because it must change nothing: no
        counter, no limit, no seed. Next are checks that can refuse the request itself
        (400), also before anything is changed. That the client forced the reply, and
        that it has received the answer that it continues, are facts about the client:
        they are recorded even if the session admits no further turn. The remaining
        counters and the seed, which counts the generations on one prompt, change only
        once the turn is admitted.
        """
        request = msgspec.structs.replace(
            request, tools=self._shared_tools.share(request.tools)
        )
        existing = self._existing_response(conversation, request)
        if existing is not None:
            return existing, ()
        if prepared is None:
            prepared = self._prepare(conversation, request)
        placement = prepared.placement
        record = conversation.record
        constraint = prepared.constraint
        is_freed = bool(constraint) and self._frees_replies(record)
        if constraint:
            record.forced[forcing_field(request)] += 1
        if is_freed:
            constraint = {}
        if placement.parent is not None:
            # A client that continues an answer has received it, whatever the connection
            # reported.
            self._mark_delivered(conversation, placement.parent.turn.id)
        turn_sampling = self._admit(conversation, request, placement)
        self.counts.add_placement(record, placement)
        overridden = list(turn_sampling.overridden)
        if is_freed:
            overridden.append(forcing_field(request))
        if request.model is not None and request.model not in self.models:
            overridden.append("model")
        newly_overridden = self.counts.add_overridden(record, overridden)
        proposal = self._propose(
            conversation, request, placement, turn_sampling, constraint
        )
        generation = Generation(
            proposal,
            sampler=self._sampler(record),
            renderer=self.renderer,
            parser=self._parser(request, placement.context_ids, proposal.request.rid),
            commit=partial(self._commit, conversation),
            engine_return_s=self.engine_return_s,
            space_wait_s=self.space_wait_s,
        )
        conversation.start(generation)
        if placement.change is not None:
            conversation.changes[generation.turn_id] = placement.change
        return generation, newly_overridden

    def _sampler(self, record: SessionRecord) -> Sampler:
        """Return the engines that serve the session."""
        if record.session.purpose == "eval":
            return self.eval_sampler
        return self.sampler

    def _frees_replies(self, record: SessionRecord) -> bool:
        """Whether replies are sampled without the grammar that a client asks for. (In
        serving they never are.)"""
        return self.constrained == "free" and record.session.purpose != "serve"

    def _admit(
        self, conversation: Conversation, request: TurnRequest, placement: Placement
    ) -> TurnSampling:
        """Return the sampling parameters of one more turn. Raises SessionError 403 if
        the session has used up its turns or tokens, 400 if no token fits after the
        prompt."""
        session_sampling = conversation.admit()
        purpose = conversation.record.session.purpose
        resolved = resolve(purpose, session_sampling, request.sampling)
        limited = self.placer.limit_new_tokens(
            resolved.sampling, len(placement.input_ids_T)
        )
        return replace(resolved, sampling=limited)

    def _propose(
        self,
        conversation: Conversation,
        request: TurnRequest,
        placement: Placement,
        turn_sampling: TurnSampling,
        constraint: Mapping[str, Json],
    ) -> Proposal:
        """Return the turn to sample, with a new id. `constraint` is that of
        `Prepared`."""
        input_ids_T = placement.input_ids_T
        num_path_ids = len(input_ids_T) - len(placement.context_ids)
        seed = self._seed(conversation, input_ids_T)
        is_trained = conversation.record.session.purpose == "train"
        top_recorded = self.recorded_top_logprobs if is_trained else 0
        engine_request = GenerateRequest(
            rid="turn-" + secrets.token_hex(12),
            input_ids_T=input_ids_T,
            sampling=turn_sampling.sampling,
            stop=request.stop,
            stop_token_ids=tuple(sorted(self.renderer.end_ids)),
            extra_sampling={**seed, **turn_sampling.extra, **constraint},
            routing_key=conversation.record.session.id,
            top_logprobs=max(request.top_logprobs, top_recorded),
            path_tokens=num_path_ids,
            adapter=request.model if request.model in self.adapters else None,
        )
        fork_reason = ""
        if placement.fork is not None:
            fork_reason = placement.fork.value
        grammar = ""
        if constraint and self.constrained == "masked":
            grammar = json.dumps(constraint)
        return Proposal(
            request=engine_request,
            stream=request.stream,
            parent=placement.parent,
            context_ids=input_ids_T[num_path_ids:],
            messages=placement.prompt.messages[placement.depth :],
            tools=request.tools,
            fork_reason=fork_reason,
            digest=request.digest,
            constrained=bool(constraint),
            grammar=grammar,
            top_shown=request.top_logprobs,
            top_recorded=top_recorded,
        )

    def _existing_response(
        self, conversation: Conversation, request: TurnRequest
    ) -> ResponseSource | None:
        """Return the answer to a request that is a retry; None if it must be
        sampled."""
        existing = conversation.existing_response(request.digest, retry=request.retry)
        if existing is None:
            return None
        self.counts.turns["retries_answered"] += 1
        if isinstance(existing, Node):
            recorded = RecordedResponse(existing)
            conversation.repeat(recorded)
            return recorded
        return existing

    async def count_tokens(
        self, conversation: Conversation, request: TurnRequest, *, size: int
    ) -> int:
        """Count the prompt tokens that `begin` would send for this request, if there
        were no limit."""
        size += conversation.forest.characters
        work = partial(self.placer.count_tokens, conversation, request)
        return await self.threads.run(work, size=size, lock=conversation.matching)

    def deliver(self, conversation: Conversation, source: ResponseSource) -> None:
        """Mark a completely sent answer as delivered: its turn may be trained."""
        source.delivered = True
        self._mark_delivered(conversation, source.turn_id)
        if conversation.frozen:
            return
        node = conversation.forest.turn(source.turn_id)
        # A turn does not hold the likeliest tokens, so a retry of such a request needs
        # the generation.
        has_top_logprobs = (
            isinstance(source, Generation) and source.proposal.top_shown > 0
        )
        if node is None or has_top_logprobs:
            conversation.keep_response(source, source)
        else:
            conversation.keep_response(source, node)

    def _mark_delivered(self, conversation: Conversation, turn_id: str) -> None:
        if conversation.frozen:
            self.counts.turns["delivered_too_late"] += 1
        elif turn_id not in conversation.delivered:
            conversation.delivered.add(turn_id)
            self.store.mark_delivered(turn_id)
            self.counts.turns["delivered"] += 1

    def _constraint(self, request: TurnRequest) -> Mapping[str, Json]:
        """Return SGLang's sampling parameters that force the form of the reply. Raises
        SessionError 400 if no grammar can be made of the tools."""
        return self.parsers.constraint(
            request.tools,
            request.tool_choice,
            parallel=request.parallel_tool_calls and self.renderer.parallel_calls,
            schema=request.schema,
        )

    def _parser(
        self, request: TurnRequest, context_ids: Sequence[int], turn_id: str
    ) -> ReplyParser:
        if request.text is not None:
            return ReplyParser()
        return self.parsers.reply(
            request.tools,
            request.tool_choice,
            parallel=request.parallel_tool_calls and self.renderer.parallel_calls,
            prompt_text=self.renderer.reply_text(
                context_ids[-_PROMPT_END_TOKENS:], special=True
            ),
            stream=request.stream,
            turn_id=turn_id,
        )

    def _seed(
        self, conversation: Conversation, input_ids_T: NDArray[np.int32]
    ) -> Mapping[str, Json]:
        if self.run_seed is None:
            return {}
        prompt, number = conversation.count_prompt(input_ids_T)
        seed = sampling_seed(self.run_seed, conversation.record.session, prompt, number)
        return {"sampling_seed": seed}

    def _commit(
        self,
        conversation: Conversation,
        turn: Turn,
        proposal: Proposal,
        reply: Message,
        recorded: Recorded,
    ) -> asyncio.Future[None]:
        """Stores a turn. Once it is durable, it is counted and joins the forest, unless
        it was aborted."""
        loop = asyncio.get_running_loop()
        if not len(turn.sampled_ids_T) or conversation.frozen:
            self.counts.add_turn(turn, recorded)
            nothing_to_store: asyncio.Future[None] = loop.create_future()
            nothing_to_store.set_result(None)
            return nothing_to_store
        messages = (*proposal.messages, reply)
        conversation.turns.append(turn)
        stored = self.store.add_turn(
            turn,
            msgspec.json.encode(messages),
            msgspec.json.encode(proposal.tools),
            experts_TLK=recorded.experts_TLK,
            top=recorded.top,
            trace=recorded.trace,
            stop=recorded.stop,
            segments=recorded.segments,
        )
        if recorded.segments:
            conversation.segments[turn.id] = recorded.segments
        durable = _in_loop(stored, loop)
        node = Node(
            turn=turn,
            parent=proposal.parent,
            messages=messages,
            closed=self.renderer.is_closed(turn.sampled_ids_T.tolist()),
            tools=proposal.tools,
            stop=recorded.stop,
        )
        if turn.finish_reason == "abort":
            conversation.forest.add_cancelled(node)
        on_end = partial(self._on_commit_end, conversation, node, recorded)
        if (
            durable.done()
        ):  # as a rule; then the node is there before the answer is sent
            on_end(durable)
        else:
            durable.add_done_callback(on_end)
        return durable

    def _on_commit_end(
        self,
        conversation: Conversation,
        node: Node,
        recorded: Recorded,
        durable: asyncio.Future[None],
    ) -> None:
        if durable.cancelled() or durable.exception() is not None:
            conversation.discard(node.turn)
            return
        self.counts.add_turn(node.turn, recorded)
        if node.turn.finish_reason != "abort":
            conversation.forest.add(node)


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _in_loop(
    stored: Future[None], loop: asyncio.AbstractEventLoop
) -> asyncio.Future[None]:
    """Return the same future for the event loop. It is done immediately if `stored` is
    done."""
    if not stored.done():
        return asyncio.wrap_future(stored, loop=loop)
    durable: asyncio.Future[None] = loop.create_future()
    error = stored.exception()
    if error is not None:
        durable.set_exception(error)
    else:
        durable.set_result(None)
    return durable
