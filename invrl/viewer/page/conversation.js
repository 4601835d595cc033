// Messages, tool calls and replies as a reader expects them, turn by turn.
"use strict";
invrl.conversation = (() => {
  const { element } = invrl.element;
  const { number, duration, short } = invrl.format;
  const { sharedMessages, originOf, turnNumber } = invrl.branches;
  const { copyButton } = invrl.copy;

  const LONG = 6000;

  /** One turn: why it branched, what the agent sent, what the model replied. */
  function turnSection(turns, turn, toolLists, tools, replyView = null) {
    const shared = sharedMessages(turn);
    const old = turn.messages.slice(0, shared);
    return element(
      "section",
      { class: "turn", id: `turn-${turnNumber(turns, turn.id)}`, "aria-label": `Turn ${turnNumber(turns, turn.id)}` },
      turnHead(turns, turn, tools),
      turn.fork_reason ? forkNote(turns, turn) : null,
      turn.kept_reply ? element("div", { class: "fork", role: "note" }, element("p", {}, `${turn.kept_reply}.`)) : null,
      old.length ? element("details", { class: "old" }, element("summary", {}, `${old.length} ${old.length === 1 ? "message" : "messages"} as in turn ${turnNumber(turns, originOf(turn)) || "before"}`), old.map((message) => messageBlock(message))) : null,
      turn.messages.slice(shared).map((message) => messageBlock(message)),
      turn.tools !== null && turn.tools !== undefined && toolLists[turn.tools] ? toolList(toolLists[turn.tools]) : null,
      replyView || messageBlock(turn.reply, true),
    );
  }

  function turnHead(turns, turn, tools) {
    const versions = [...new Set(turn.spans.map((span) => span.version))];
    const facts = [
      `${number(turn.sampled_tokens)} sampled`,
      `${number(turn.context_tokens)} in context, ${number(turn.cached_tokens)} cached`,
      `${versions.length > 1 ? "versions" : "version"} ${versions.join(", ") || "–"}`,
      duration(turn.finished_at - turn.started_at),
      `temperature ${number(turn.temperature)}`,
      turn.logprob_mean !== null ? `log-prob ${number(turn.logprob_mean)}` : null,
      turn.reward !== null ? `reward ${number(turn.reward)}` : null,
      turn.constrained ? "constrained" : null,
      turn.segments.length ? `moved: ${turn.segments.map((segment) => `${number(segment.end - segment.start)} by ${segment.engine || "an engine without a name"}`).join(", ")}` : null,
    ].filter(Boolean);
    return element(
      "header",
      { class: "turn-head" },
      element("h3", {}, `Turn ${turnNumber(turns, turn.id)}`),
      turn.finish_reason === "stop" ? null : element("span", { class: "mark warn" }, turn.finish_reason === "length" ? "truncated" : turn.finish_reason),
      turn.delivered ? null : element("span", { class: "mark warn", title: "The agent never received this reply" }, "not delivered"),
      trainedMark(turn),
      element("span", { class: "facts" }, facts.join(" · ")),
      tools,
    );
  }

  function trainedMark(turn) {
    if (turn.why_not_trained) return element("span", { class: "mark", title: turn.why_not_trained }, `not trained: ${short(turn.why_not_trained, 60)}`);
    if (turn.trained === true) return element("span", { class: "mark good" }, "trained");
    if (turn.trained === false) return element("span", { class: "mark" }, "not trained");
    return null;
  }

  /** Why this turn departs from what was said before, what differs there, and what to do about it. */
  function forkNote(turns, turn) {
    const origin = turnNumber(turns, originOf(turn));
    const fork = turn.fork || { shared: 0, messages: turn.messages.length, what: "", change: null };
    const where = origin ? `branches off turn ${origin}; the first ${fork.shared} of its ${fork.messages} messages are as there` : "starts a branch of its own";
    return element(
      "div",
      { class: "fork", role: "note" },
      element("p", {}, element("b", {}, `↳ ${turn.fork_reason}`), `: this conversation ${where}.`),
      fork.what ? element("p", {}, `${fork.what}.`) : null,
      fork.change ? bothTexts(fork.change) : null,
      turn.fork_advice ? element("p", {}, element("b", {}, "What helps: "), `${turn.fork_advice}.`) : null,
    );
  }

  /** The two texts below each other, from their first different character on marked, with their whitespace. */
  function bothTexts({ recorded, sent }) {
    let same = 0;
    while (same < Math.min(recorded.length, sent.length) && recorded[same] === sent[same]) same += 1;
    const seen = (text) => text.replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t");
    const row = (name, text) => [
      element("dt", {}, name),
      element("dd", {}, text ? [seen(text.slice(0, same)), text.length > same ? element("mark", {}, seen(text.slice(same))) : null] : element("span", { class: "quiet" }, "(nothing)")),
    ];
    return element("dl", { class: "both-texts" }, row("recorded", recorded), row("sent", sent));
  }

  function toolList(tools) {
    return element(
      "details",
      { class: "tools" },
      element("summary", {}, `${tools.length} ${tools.length === 1 ? "tool" : "tools"}: ${short(tools.map((tool) => tool.name).join(", "), 100)}`),
      tools.map((tool) => element("div", { class: "tool" }, element("b", {}, tool.name), element("p", {}, tool.description || ""), element("pre", {}, pretty(tool.parameters)))),
    );
  }

  /** A message: its role, reasoning folded, text, calls. */
  function messageBlock(message, isReply = false) {
    const role = message.role || "?";
    const known = ["system", "developer", "user", "assistant", "tool"].includes(role) ? role : "other";
    return element(
      "article",
      { class: `message role-${known}${isReply ? " reply" : ""}` },
      element(
        "header",
        {},
        element("span", { class: "role" }, isReply ? `${role} · this turn's reply` : role),
        message.tool_call_id ? element("code", { class: "quiet" }, short(message.tool_call_id, 40)) : null,
        message.instructions ? element("span", { class: "mark" }, "instructions") : null,
        message.cut ? element("span", { class: "mark warn" }, `cut: ${number(message.characters)} characters in all`) : null,
      ),
      message.reasoning ? element("details", { class: "reasoning", open: isReply }, element("summary", {}, "Reasoning"), longText(message.reasoning)) : null,
      message.content ? longText(message.content) : null,
      (message.tool_calls || []).map(callBlock),
      !message.content && !message.reasoning && !(message.tool_calls || []).length ? element("p", { class: "quiet" }, "(empty)") : null,
    );
  }

  function callBlock(call) {
    return element(
      "div",
      { class: "call" },
      element("div", { class: "call-head" }, element("span", { "aria-hidden": "true" }, "ƒ "), element("b", {}, call.name || "(no name)"), element("code", { class: "quiet" }, short(call.id || "", 40)), copyButton("Copy", () => call.arguments || "")),
      element("pre", {}, pretty(call.arguments)),
    );
  }

  /** Text as it was written; a very long one is folded first. */
  function longText(text) {
    if (text.length <= LONG) return element("div", { class: "text" }, text);
    const place = element("div", { class: "text" }, text.slice(0, LONG));
    const more = element("button", { class: "button small", on: { click: all } }, `Show all ${number(text.length)} characters`);
    function all() {
      place.textContent = text;
      more.remove();
    }
    return element("div", {}, place, more);
  }

  /** JSON with line breaks; what is no JSON stays as it is. */
  function pretty(text) {
    if (text === null || text === undefined) return "";
    if (typeof text !== "string") return JSON.stringify(text, null, 2);
    try {
      return JSON.stringify(JSON.parse(text), null, 2);
    } catch (error) {
      return text;
    }
  }

  return { turnSection, messageBlock, pretty };
})();
