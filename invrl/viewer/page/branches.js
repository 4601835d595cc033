// Turns of a rollout as a tree: replies that continue each other, and where the conversation branched.
"use strict";
invrl.branches = (() => {
  const { element } = invrl.element;
  const { number, short } = invrl.format;

  /** Turns from the first that tells the whole conversation to this one. */
  function pathTo(turns, id) {
    const byId = new Map(turns.map((turn) => [turn.id, turn]));
    const path = [];
    const seen = new Set();
    let turn = byId.get(id);
    while (turn && !seen.has(turn.id)) {
      seen.add(turn.id);
      path.unshift(turn);
      if (turn.restarts) break;
      turn = byId.get(turn.parent_id);
    }
    return path;
  }

  /** All messages of the conversation that this turn was sent: those before it, then its own. */
  function conversationOf(turns, id) {
    return pathTo(turns, id).flatMap((turn) => [...turn.messages, turn.reply]);
  }

  /** How many of a fork's messages are the same as those of the reply that it branches off. */
  function sharedMessages(turns, fork) {
    if (!fork.parent_id) return 0;
    const before = conversationOf(turns, fork.parent_id);
    const key = (message) => JSON.stringify([message.role, message.content, (message.tool_calls || []).map((call) => [call.name, call.arguments])]);
    let same = 0;
    while (same < Math.min(before.length, fork.messages.length) && key(before[same]) === key(fork.messages[same])) same += 1;
    return same;
  }

  function turnNumber(turns, id) {
    return turns.findIndex((turn) => turn.id === id) + 1;
  }

  /** The tree as nested lists of links; a straight conversation is one list. */
  function branchTree(turns, active, hrefOf) {
    const children = new Map();
    const ids = new Set(turns.map((turn) => turn.id));
    for (const turn of turns) {
      const parent = ids.has(turn.parent_id) ? turn.parent_id : "";
      if (!children.has(parent)) children.set(parent, []);
      children.get(parent).push(turn);
    }
    const onPath = new Set(pathTo(turns, active).map((turn) => turn.id));
    const list = (members) => {
      const items = [];
      for (const first of members) {
        // A chain of single continuations stays on one level, so that long conversations do not wander to the right.
        let turn = first;
        while (turn) {
          const next = children.get(turn.id) || [];
          items.push(element("li", {}, entry(turn), next.length > 1 ? list(next) : null));
          turn = next.length === 1 ? next[0] : null;
        }
      }
      return element("ul", {}, items);
    };
    function entry(turn) {
      const what = turn.reply.tool_calls && turn.reply.tool_calls.length ? turn.reply.tool_calls.map((call) => `${call.name}()`).join(", ") : turn.reply.content || turn.reply.reasoning;
      return element(
        "a",
        { href: hrefOf(turn), class: onPath.has(turn.id) ? "on-path" : null, "aria-current": turn.id === active ? "true" : null, title: turn.fork_reason ? `Branched: ${turn.fork_reason}` : null },
        element("b", {}, `${turn.fork_reason ? "↳ " : ""}${turnNumber(turns, turn.id)}`),
        ` ${short(what, 40) || "(empty)"}`,
        element("span", { class: "quiet" }, ` ${number(turn.sampled_tokens)}`),
      );
    }
    return element("nav", { class: "tree", "aria-label": "Turns and branches" }, element("h2", {}, "Turns"), list(children.get("") || []));
  }

  return { pathTo, conversationOf, sharedMessages, turnNumber, branchTree };
})();
