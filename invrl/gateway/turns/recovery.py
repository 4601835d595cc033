"""Recorded turns, told again: after the death of a worker, to its successor, and to a client's retry.

Open sessions are known at once; a conversation is read when it is first asked for. Invariants: a restored
forest holds exactly the committed ids; aborted turns are never continued; the retry of a request whose turn
was committed is answered with that turn."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import msgspec
import numpy as np

from invrl.engines.sglang_client import GenerateChunk, GenerateRequest, GenerateResult
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.rendering.reply_parser import ReplyParser
from invrl.gateway.rendering.shared_tools import SharedTools
from invrl.gateway.turns.conversation import Conversation
from invrl.gateway.turns.generation import Generation, Proposal
from invrl.gateway.types import CallDelta, Delta, Message, Node, Tool
from invrl.types import Sampling, Turn


def restore(
    conversation: Conversation,
    recorded: Sequence[tuple[Turn, bytes, bytes]],
    renderer: Renderer,
    shared_tools: SharedTools,
) -> None:
    """`recorded`: the session's turns in the order of their commits, each with its messages and tools."""
    nodes: dict[str | None, Node] = {}
    conversation.restored = bool(recorded)
    decoded: dict[bytes, tuple[Tool, ...]] = {}
    for turn, messages, tools in recorded:
        conversation.turns.append(turn)
        conversation.begun += 1
        if turn.delivered:
            conversation.delivered.add(turn.id)
        parent = nodes.get(turn.parent_id)
        path = parent.ids() if parent else []
        conversation.count_prompt(np.asarray([*path, *turn.context_ids_T.tolist()], np.int32))
        if turn.finish_reason != "abort":
            if tools not in decoded:
                decoded[tools] = shared_tools.share(msgspec.json.decode(tools, type=list[Tool]))
            node = Node(
                turn=turn,
                parent=parent,
                messages=tuple(msgspec.json.decode(messages, type=list[Message])),
                closed=renderer.is_closed(turn.sampled_ids_T.tolist()),
                tools=decoded[tools],
            )
            nodes[turn.id] = node
            conversation.forest.add(node)
            conversation.restore_answer(node)


def replay(
    node: Node, *, stop: tuple[str, ...], stream: bool, renderer: Renderer, parser: ReplyParser
) -> Generation:
    """The recorded turn of `node` as the generation that a retry joins."""
    turn, prompt = node.turn, [*(node.parent.ids() if node.parent else ()), *node.turn.context_ids_T.tolist()]
    sampling = Sampling(temperature=turn.temperature, top_p=1.0, max_new_tokens=len(turn.sampled_ids_T))
    ids_T, of = np.asarray(prompt, np.int32), turn.session_id
    proposal = Proposal(
        request=GenerateRequest(rid=turn.id, input_ids_T=ids_T, sampling=sampling, stop=stop, routing_key=of),
        stream=stream,
        parent=node.parent,
        context_ids=turn.context_ids_T.tolist(),
        messages=node.messages[:-1],
        tools=node.tools,
        constrained=turn.constrained,
        grammar=turn.grammar,
        fork_reason=turn.fork_reason,
        digest=turn.request_digest,
    )
    text = renderer.reply_text(turn.sampled_ids_T.tolist(), special=parser.special)
    matched = next((each for each in stop if each in text), None) if turn.finish_reason == "stop" else None
    told = _Told(node.messages[-1], special=parser.special)
    generation = Generation(
        proposal, sampler=_Recorded(turn, matched), renderer=renderer, parser=told, commit=_committed
    )
    generation.started_at, generation.finished_at = turn.started_at, turn.finished_at
    return generation


class _Told(ReplyParser):
    """Tells a reply as it was recorded: read in other pieces, its text may be taken apart otherwise."""

    def __init__(self, reply: Message, *, special: bool) -> None:
        super().__init__()
        self._reply, self._special = reply, special

    @property
    def special(self) -> bool:
        return self._special

    def push(self, text: str) -> Delta:
        return Delta()

    def finish(self) -> tuple[Delta, ...]:
        calls = enumerate(self._reply.tool_calls)
        told = tuple(CallDelta(index=n, id=c.id, name=c.name, arguments=c.arguments) for n, c in calls)
        return (Delta(content=self._reply.content, reasoning=self._reply.reasoning, calls=told),)


class _Recorded:
    """The engine of a turn that was sampled before: says it again, at once."""

    def __init__(self, turn: Turn, matched_stop: str | None) -> None:
        self._turn, self._matched_stop = turn, matched_stop

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        turn = self._turn
        return GenerateResult(
            ids_T=turn.sampled_ids_T,
            logprobs_T=turn.logprobs_T,
            spans=turn.spans,
            finish_reason=turn.finish_reason,
            matched_stop=self._matched_stop,
            prompt_tokens=turn.prompt_tokens,
            cached_tokens=turn.cached_tokens,
        )

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk | GenerateResult, None]:
        whole = await self.generate(request)
        yield GenerateChunk(
            ids_T=whole.ids_T,
            logprobs_T=whole.logprobs_T,
            spans=whole.spans,
            cached_tokens=whole.cached_tokens,
        )
        yield whole


def _committed(turn: Turn, proposal: Proposal, reply: Message) -> asyncio.Future[None]:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    return done
