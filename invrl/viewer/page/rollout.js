// One rollout: what was said, its tokens, its branches, its numbers, and how it ended.
"use strict";
invrl.rollout = (() => {
  const { element, replaceChildren } = invrl.element;
  const { get, pathOf, isExport } = invrl.api;
  const { change, currentRoute, go, link } = invrl.route;
  const { filtersOf } = invrl.filters;
  const { rolloutRows } = invrl.rollout_rows;
  const { branchTree, pathTo, turnNumber } = invrl.branches;
  const { turnSection } = invrl.conversation;
  const { tokenView, COLOURS } = invrl.tokens;
  const { plainTable } = invrl.table;
  const { number, duration, clock, short, plain } = invrl.format;
  const { endCell, rewardCell } = invrl.rollouts;
  const { copyButton } = invrl.copy;
  const { setPageKeys } = invrl.keys;
  const { onNews } = invrl.events;
  const { empty, failure } = invrl.notice;

  async function showRollout(main, run, route, signal) {
    const session = route.parts[0] || "";
    const path = `runs/${pathOf(run.id)}/rollouts/${pathOf(session)}`;
    let detail = await get(path, {}, signal);
    const body = element("div", {});
    const neighbours = neighbourLinks(run, route, signal);
    let viewing = new AbortController();

    function draw() {
      viewing.abort();
      viewing = new AbortController();
      const { parameters } = currentRoute();
      replaceChildren(body, bodyOf(run, session, detail, parameters, viewing.signal));
      const turn = parameters.get("turn");
      if (turn && parameters.get("view") !== "tokens") document.querySelector(`#turn-${turnNumber(detail.turns, turn)}`)?.scrollIntoView({ block: "nearest" });
    }

    signal.addEventListener("abort", () => viewing.abort());
    replaceChildren(main, head(run, detail, route, neighbours), body);
    draw();
    const turns = detail.turns;
    const moveTurn = (by) => {
      const now = turns.findIndex((turn) => turn.id === (currentRoute().parameters.get("turn") || turns[turns.length - 1]?.id));
      const next = turns[Math.min(turns.length - 1, Math.max(0, now + by))];
      if (next) change({ turn: next.id });
    };
    setPageKeys([
      { keys: ["j", "ArrowRight"], label: "next rollout of the table", run: () => neighbours.move(1) },
      { keys: ["k", "ArrowLeft"], label: "rollout before", run: () => neighbours.move(-1) },
      { keys: ["n"], label: "next turn", run: () => moveTurn(1) },
      { keys: ["p"], label: "turn before", run: () => moveTurn(-1) },
      { keys: ["v"], label: "conversation or tokens", run: () => change({ view: currentRoute().parameters.get("view") === "tokens" ? null : "tokens" }) },
      { keys: ["c"], label: "next colouring of the tokens", run: nextColour },
      { keys: ["u"], label: "back to the table", run: () => go(tableLink(run, currentRoute())) },
    ]);
    onNews(async (news) => {
      if (news.run !== run.id || !news.kinds.includes("rollouts") || !["running", "in_flight"].includes(detail.row.state)) return;
      try {
        const newer = await get(path, {}, signal);
        if (newer.turns.length === detail.turns.length && newer.row.state === detail.row.state) return;
        detail = newer;
        draw();
      } catch (error) {
        // The next news try again.
      }
    }, signal);
    return draw;
  }

  function nextColour() {
    const { parameters } = currentRoute();
    const names = COLOURS.map(([name]) => name);
    const now = names.indexOf(parameters.get("colour") || "logprob");
    change({ view: "tokens", colour: names[(now + 1) % names.length] });
  }

  function tableLink(run, route) {
    return link("rollouts", [], { run: run.id, ...filtersOf(route.parameters) });
  }

  /** Links to the rollouts before and after this one in the table that it was opened from. */
  function neighbourLinks(run, route, signal) {
    const filters = filtersOf(route.parameters);
    const text = route.parameters.get("at");
    const at = text === null ? null : Number(text);
    const place = element("span", { class: "row neighbours" });
    const targets = { "-1": null, 1: null };
    const placed = async () => {
      if (at === null || !Number.isInteger(at)) return;
      const first = Math.max(0, at - 1);
      const { total, rows } = await rolloutRows(run, filters, 3, first, signal);
      const target = (index) => {
        const row = rows[index - first];
        return row && index >= 0 ? link("rollout", [row.session_id], { run: run.id, ...filters, at: index, view: route.parameters.get("view"), colour: route.parameters.get("colour") }) : null;
      };
      targets["-1"] = target(at - 1);
      targets[1] = target(at + 1);
      replaceChildren(place,
        targets["-1"] ? element("a", { class: "button small", href: targets["-1"], rel: "prev", title: "k" }, "← Previous") : null,
        element("span", { class: "quiet" }, `${number(at + 1)} of ${number(total)}`),
        targets[1] ? element("a", { class: "button small", href: targets[1], rel: "next", title: "j" }, "Next →") : null);
    };
    const ready = placed().catch((error) => error.name !== "AbortError" && replaceChildren(place, failure(error)));
    return {
      node: place,
      move: async (by) => {
        await ready;
        if (targets[by]) go(targets[by]);
      },
    };
  }

  function head(run, detail, route, neighbours) {
    const { row } = detail;
    return element(
      "header",
      { class: "rollout-head" },
      element("div", { class: "row" }, element("a", { href: tableLink(run, route) }, "← Rollouts"), element("span", { class: "push" }), neighbours.node),
      element("h1", { class: "title" }, short(row.task || row.task_id || row.session_id, 200)),
      element("div", { class: "row" },
        endCell(row),
        element("span", {}, "reward ", element("b", {}, rewardCell(row.reward))),
        row.step === null ? null : element("a", { href: link("groups", [], { run: run.id, step: row.step }) }, `step ${row.step}`),
        element("span", { class: "quiet" }, row.evaluation ? `evaluation ${row.evaluation}` : row.purpose),
        element("a", { href: link("rollouts", [], { run: run.id, group: row.group_id }) }, `member ${row.index} of its group`),
        element("a", { href: link("tasks", [row.task || row.task_id], { run: run.id }) }, "this task over the steps"),
        copyButton("Copy session id", () => row.session_id),
        copyButton("Copy link", () => window.location.href)),
    );
  }

  function bodyOf(run, session, detail, parameters, signal) {
    const { turns } = detail;
    const wanted = parameters.get("turn");
    const active = turns.some((turn) => turn.id === wanted) ? wanted : turns.length ? turns[turns.length - 1].id : "";
    const isTokens = parameters.get("view") === "tokens";
    const colour = parameters.get("colour") || "logprob";
    const hrefOf = (turn) => link("rollout", [session], { ...Object.fromEntries(currentRoute().parameters), turn: turn.id });
    const main = element("div", { class: "conversation" });
    for (const turn of pathThrough(turns, active)) {
      const reply = isTokens ? tokenView(run, turn, colour, signal) : null;
      main.append(turnSection(turns, turn, detail.tool_lists || [], null, reply));
    }
    if (!turns.length) main.append(empty("Nothing was said yet.", detail.row.detail || ""));
    return [
      (detail.notes || []).map((note) => element("p", { class: "banner" }, note)),
      detail.detail ? element("details", { class: "failure-detail", open: Boolean(detail.row.failure) }, element("summary", {}, short(detail.row.detail, 160) || "Detail"), element("pre", { class: "traceback", tabindex: "0" }, detail.detail)) : null,
      viewSwitch(isTokens, colour, detail),
      element("div", { class: "with-panel" },
        element("aside", { class: "side" }, turns.length ? branchTree(turns, active, hrefOf) : null, factsOf(detail), groupOf(run, detail)),
        element("div", { class: "content" }, main, ledgerOf(detail))),
    ];
  }

  /** The active turn's branch from its root, and on to the end where nothing branches. */
  function pathThrough(turns, active) {
    const path = pathTo(turns, active);
    let last = path[path.length - 1];
    while (last) {
      const next = turns.filter((turn) => turn.parent_id === last.id && !turn.restarts);
      if (next.length !== 1) break;
      path.push(next[0]);
      last = next[0];
    }
    return path;
  }

  function viewSwitch(isTokens, colour, detail) {
    const button = (title, on, apply) => element("button", { class: "button", "aria-pressed": String(on), on: { click: apply } }, title);
    const numbers = [...new Set(detail.turns.flatMap((turn) => Object.keys(turn.numbers || {})))];
    const options = [...COLOURS, ...numbers.map((name) => [`number:${name}`, name])];
    if (!options.some(([name]) => name === colour)) options.push([colour, colour.replace(/^number:/, "")]);
    const select = element("select", { id: "colour", "aria-label": "Colour tokens by", on: { change: () => change({ colour: select.value }) } },
      options.map(([name, title]) => element("option", { value: name, selected: name === colour }, `by ${title}`)));
    return element("div", { class: "controls", role: "group", "aria-label": "View" },
      button("Conversation", !isTokens, () => change({ view: null })),
      button("Tokens", isTokens, () => change({ view: "tokens" })),
      isTokens ? select : null,
      element("span", { class: "push" }),
      isExport() ? null : copyButton("Copy as JSON", () => JSON.stringify(detail, null, 2)));
  }

  function factsOf({ row, numbers, sampling, limits, rewards, children, turns }) {
    const pairs = [
      ["opened", clock(row.opened_at)],
      ["took", duration(row.seconds)],
      ["sampled tokens", number(row.sampled_tokens)],
      ["truncated", row.truncated ? "yes" : "no"],
      ["versions", row.oldest_version === null ? "–" : row.oldest_version === row.newest_version ? number(row.oldest_version) : `${row.oldest_version} to ${row.newest_version}`],
      ["staleness", number(row.staleness)],
      ["advantage", number(row.advantage)],
      ["mean log-prob", number(row.logprob)],
      ["engine–trainer gap", number(row.gap)],
      ["surprise", number(row.surprise, 2)],
      ["attempt", number(row.attempt)],
      ...Object.entries(row.components || {}).map(([name, value]) => [`reward: ${name}`, number(value)]),
      ...Object.entries(numbers || {}).map(([name, value]) => [name, number(value)]),
      ...Object.entries(sampling || {}).map(([name, value]) => [name, plain(value)]),
      ...Object.entries(limits || {}).map(([name, value]) => [`limit: ${name}`, plain(value)]),
      ...(rewards || []).map((reward) => [`reward of ${reward.of} ${turnNumber(turns, reward.turn_id) || ""}`, number(reward.reward)]),
    ];
    return element("section", { "aria-label": "Facts" }, element("h2", {}, "Facts"),
      element("dl", { class: "facts-list" }, pairs.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)))),
      children && children.length ? element("p", { class: "quiet" }, `${children.length} child sessions`) : null);
  }

  function groupOf(run, { group, children, row }) {
    const item = (member, title) => element("li", {}, element("a", { href: link("rollout", [member.session_id], { run: run.id, group: row.group_id }), "aria-current": member.session_id === row.session_id ? "true" : null }, title), " ", rewardCell(member.reward), element("span", { class: "quiet" }, ` ${member.state}`));
    return [
      group && group.length > 1 ? element("section", { "aria-label": "Group" }, element("h2", {}, "Group"), element("ul", { class: "lines" }, group.map((member) => item(member, `${member.index}${member.attempt ? `.${member.attempt}` : ""}`)))) : null,
      children && children.length ? element("section", { "aria-label": "Child sessions" }, element("h2", {}, "Child sessions"), element("ul", { class: "lines" }, children.map((child) => item(child, short(child.session_id, 20))))) : null,
    ];
  }

  function ledgerOf({ ledger }) {
    if (!ledger || !ledger.length) return null;
    const columns = [
      { title: "At", cell: (row) => clock(row.at) },
      { title: "State", cell: (row) => row.state },
      { title: "Why", cell: (row) => row.reason || row.failure || "–" },
      { title: "Step", number: true, cell: (row) => number(row.step) },
      { title: "Life", number: true, hint: "incarnation of the run", cell: (row) => `${row.incarnation}${row.lost ? " (lost)" : ""}` },
      { title: "Detail", grow: true, cell: (row) => (row.detail ? element("details", {}, element("summary", {}, short(row.detail, 60)), element("pre", { class: "traceback" }, row.detail)) : "–") },
    ];
    return element("section", { "aria-label": "Ledger" }, element("h2", {}, "Ledger"), plainTable("What happened to this rollout", columns, ledger));
  }

  return { showRollout };
})();
