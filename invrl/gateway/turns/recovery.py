"""Restores the conversation of a session that an earlier worker opened, from the turns
in the store.

A new worker knows the open sessions immediately; the conversation of each is read when
it is first needed. Invariants: a restored forest holds exactly the committed ids;
aborted turns are never continued; a retry of a request whose turn was committed is
answered with that turn.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.rendering.tool_calls.shared_tools import SharedTools
from invrl.gateway.turns.conversation import Conversation
from invrl.gateway.types import Message, Node, Tool
from invrl.types.turns import Turn


def restore(
    conversation: Conversation,
    recorded: Sequence[tuple[Turn, bytes, bytes]],
    stops: Mapping[str, str],
    renderer: Renderer,
    shared_tools: SharedTools,
) -> None:
    """Restore a conversation. `recorded` are the session's turns in the order of their
    commits, each with its messages and tools. `stops` are the stop strings that ended
    replies, by turn."""
    conversation.restored = bool(recorded)
    nodes: dict[str, Node] = {}
    decoded_tools: dict[bytes, tuple[Tool, ...]] = {}
    for turn, messages, tools in recorded:
        conversation.turns.append(turn)
        conversation.begun += 1
        if turn.delivered:
            conversation.delivered.add(turn.id)
        parent = None
        if turn.parent_id is not None:
            parent = nodes.get(turn.parent_id)
        path_ids: list[int] = []
        if parent is not None:
            path_ids = parent.ids()
        conversation.count_prompt(
            np.asarray([*path_ids, *turn.context_ids_T.tolist()], np.int32)
        )
        if tools not in decoded_tools:
            decoded_tools[tools] = shared_tools.share(
                msgspec.json.decode(tools, type=list[Tool])
            )
        node = Node(
            turn=turn,
            parent=parent,
            messages=tuple(msgspec.json.decode(messages, type=list[Message])),
            closed=renderer.is_closed(turn.sampled_ids_T.tolist()),
            tools=decoded_tools[tools],
            stop=stops.get(turn.id, ""),
        )
        if turn.finish_reason == "abort":
            conversation.forest.add_cancelled(node)
            continue
        nodes[turn.id] = node
        conversation.forest.add(node)
        conversation.restore_response(node)
