"""From a request to a turn: match, render, sample, commit, deliver.

Dialects hand over a `TurnRequest` and show the `Answer`; everything in between is the same for all of
them. Invariant: a turn joins the forest only when its tokens are durable and whole. Held by `app.py`."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from invrl.errors import SessionError
from invrl.gateway.conversation import Conversation
from invrl.gateway.forest import ForkReason, Message, Node
from invrl.gateway.generation import Engine, Generation, Proposal
from invrl.gateway.rendering import Renderer
from invrl.gateway.sampling import ClientSampling, resolve, sampling_seed
from invrl.gateway.sessions import SessionRecord
from invrl.rollout.sglang_client import GenerateRequest
from invrl.run_store import RunStoreWriter
from invrl.types import Json, Sampling, Turn

_ENGINE_MARGIN = 8
"""Tokens of the context length that SGLang keeps for itself."""
_SHOWN = ("id", "parent_id", "fork_reason", "finish_reason", "prompt_tokens", "cached_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """What every dialect's request comes down to."""

    messages: tuple[Message, ...]
    sampling: ClientSampling
    stop: tuple[str, ...]
    stream: bool
    digest: str
    """Of the request as it came: equal for a retry."""
    retry: bool | None
    """What the client says; None: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a request continues the forest, and the ids it adds there."""

    parent: Node | None
    depth: int
    context_ids: list[int]
    fork: ForkReason | None


@dataclass(slots=True, kw_only=True, eq=False)
class Turns:
    """All live conversations and how they go on."""

    engine: Engine
    renderer: Renderer
    store: RunStoreWriter
    context_length: int
    run_seed: int | None = None
    counts: Counter[str] = field(default_factory=Counter, init=False)
    forks: Counter[str] = field(default_factory=Counter, init=False)
    overridden: Counter[str] = field(default_factory=Counter, init=False)
    _conversations: dict[str, Conversation] = field(default_factory=dict, init=False)

    def open(self, record: SessionRecord) -> None:
        self._conversations[record.session.id] = Conversation(record)

    def conversation(self, record: SessionRecord) -> Conversation:
        """SessionError 401 once the session is being closed."""
        conversation = self._conversations.get(record.session.id)
        if conversation is None or conversation.closing:
            raise SessionError("the session is closed", status=401, code="session_closed")
        return conversation

    def conversation_to_close(self, record: SessionRecord) -> Conversation:
        return self._conversations[record.session.id]

    def find(self, record: SessionRecord) -> Conversation | None:
        """None once the session's outcome has been handed over."""
        return self._conversations.get(record.session.id)

    def close(self, record: SessionRecord) -> None:
        self._conversations.pop(record.session.id, None)

    def begin(self, conversation: Conversation, request: TurnRequest) -> tuple[Generation, tuple[str, ...]]:
        """The generation that answers `request`, and the sampling parameters that are overridden for
        the first time in this session. SessionError 400 if the request cannot be rendered or fits not."""
        earlier = conversation.retried(request.digest, request.retry)
        if earlier is not None:
            self.counts["retries_answered"] += 1
            return earlier, ()
        record, session = conversation.record, conversation.record.session
        place = self._place(conversation, request.messages)
        input_ids = [*(place.parent.ids() if place.parent else ()), *place.context_ids]
        ids_T = np.asarray(input_ids, np.int32)
        chosen = resolve(session.purpose, conversation.admit(), request.sampling)
        sampling = self._fit(chosen.sampling, len(input_ids))
        if place.fork is not None:
            self.forks[place.fork.value] += 1
        news = tuple(name for name in chosen.overridden if name not in record.overridden)
        record.overridden.update(news)
        self.overridden.update(news)
        generation = Generation(
            Proposal(
                request=GenerateRequest(
                    rid="turn-" + secrets.token_hex(12),
                    input_ids_T=ids_T,
                    sampling=sampling,
                    stop=request.stop,
                    stop_token_ids=tuple(sorted(self.renderer.end_ids)),
                    extra_sampling={**self._seed(conversation, ids_T), **chosen.extra},
                    routing_key=session.id,
                ),
                stream=request.stream,
                parent=place.parent,
                context_ids=place.context_ids,
                messages=request.messages[place.depth :],
                fork_reason=place.fork.value if place.fork else "",
                digest=request.digest,
            ),
            engine=self.engine,
            renderer=self.renderer,
            commit=lambda turn, proposal, text: self._commit(conversation, turn, proposal, text),
        )
        conversation.start(request.digest, generation)
        return generation, news

    def deliver(self, conversation: Conversation, generation: Generation) -> None:
        """The answer has left whole: the turn may be trained."""
        generation.delivered = True
        turn_id = generation.proposal.request.rid
        if conversation.frozen:
            self.counts["delivered_too_late"] += 1
        elif turn_id not in conversation.delivered:
            conversation.delivered.add(turn_id)
            self.store.mark_delivered(turn_id)
            self.counts["delivered"] += 1

    def overview(self, record: SessionRecord) -> list[dict[str, str | int | bool | None]]:
        """One line per turn of a session that is not closed."""
        if (conversation := self._conversations.get(record.session.id)) is None:
            return []
        return [
            {name: getattr(turn, name) for name in _SHOWN}
            | {"delivered": turn.id in conversation.delivered, "sampled_tokens": len(turn.sampled_ids_T)}
            for turn in conversation.turns
        ]

    def metrics(self) -> Mapping[str, Mapping[str, int]]:
        return {"turns": dict(self.counts), "forks": dict(self.forks), "overridden": dict(self.overridden)}

    def _place(self, conversation: Conversation, messages: Sequence[Message]) -> _Place:
        match = conversation.forest.match(messages)
        fork = match.fork
        if match.node is not None:
            tail = self.renderer.tail(messages, match.depth, closed=match.node.closed)
            if tail.fork is None:
                return _Place(parent=match.node, depth=match.depth, context_ids=tail.ids, fork=fork)
            fork = tail.fork
        return _Place(parent=None, depth=0, context_ids=self.renderer.first(messages), fork=fork)

    def _seed(self, conversation: Conversation, ids_T: NDArray[np.int32]) -> Mapping[str, Json]:
        if self.run_seed is None:
            return {}
        prompt = hashlib.blake2b(ids_T.tobytes(), digest_size=16).digest()
        conversation.asked[prompt] += 1
        nth = conversation.asked[prompt]
        return {"sampling_seed": sampling_seed(self.run_seed, conversation.record.session, prompt, nth)}

    def _fit(self, sampling: Sampling, prompt: int) -> Sampling:
        room = self.context_length - _ENGINE_MARGIN - prompt
        if room < 1:
            limit = (
                f"context length is {self.context_length} tokens (of which {_ENGINE_MARGIN} are the engine's)"
            )
            reason = f"This model's maximum {limit}; your messages resulted in {prompt} tokens."
            raise SessionError(reason, status=400, code="context_length_exceeded", param="messages")
        return replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))

    def _commit(
        self, conversation: Conversation, turn: Turn, proposal: Proposal, text: str
    ) -> asyncio.Future[None]:
        sampled = len(turn.sampled_ids_T)
        self.counts[turn.finish_reason] += 1
        tokens = {"prompt_tokens": turn.prompt_tokens, "cached_tokens": turn.cached_tokens}
        self.counts.update({**tokens, "sampled_tokens": sampled})
        loop = asyncio.get_running_loop()
        if not sampled or conversation.frozen:
            done: asyncio.Future[None] = loop.create_future()
            done.set_result(None)
            return done
        messages = (*proposal.messages, Message("assistant", text))
        conversation.turns.append(turn)
        durable = asyncio.wrap_future(self.store.add_turn(turn, msgspec.json.encode(messages)), loop=loop)
        if turn.finish_reason != "abort":
            closed = self.renderer.is_closed(turn.sampled_ids_T.tolist())
            node = Node(turn=turn, parent=proposal.parent, messages=messages, closed=closed)
            durable.add_done_callback(lambda done: _join(conversation, node, done))
        return durable


def _join(conversation: Conversation, node: Node, durable: asyncio.Future[None]) -> None:
    if not durable.cancelled() and durable.exception() is None:
        conversation.forest.add(node)
