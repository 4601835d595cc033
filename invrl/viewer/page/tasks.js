// Tasks: how the reward of each moved, and one task's rollouts side by side over the steps.
"use strict";
invrl.tasks = (() => {
  const { element, replaceChildren } = invrl.element;
  const { get, isExport, pathOf } = invrl.api;
  const { change, currentRoute, link } = invrl.route;
  const { rolloutRows } = invrl.rollout_rows;
  const { dataTable } = invrl.table;
  const { number, short } = invrl.format;
  const { setPageKeys } = invrl.keys;
  const { empty, fillFrom, loading } = invrl.notice;
  const { sections } = invrl.sections;
  const { endCell, rewardCell } = invrl.rollouts;

  const CARDS = 60;
  const SHOWN = 240; // Characters of a reply on its card, until more is asked for.

  async function showTasks(main, run, route, signal) {
    if (route.parts.length) return showTask(main, run, route, signal);
    const place = element("div", { class: "table-place" }, loading());
    const count = element("p", { class: "count", role: "status" });
    let timer = 0;
    const search = element("input", { type: "search", "aria-label": "Search tasks", placeholder: "Search tasks…", value: route.parameters.get("q") || "" });
    search.addEventListener("input", () => {
      window.clearTimeout(timer);
      timer = window.setTimeout(() => change({ q: search.value.trim() || null }), 250);
    });
    let table = null;
    const draw = () =>
      fillFrom(place, async () => {
        const { parameters } = currentRoute();
        const asked = { q: parameters.get("q") || "", sort: parameters.get("sort") || "rollouts", order: parameters.get("order") || "desc" };
        const load = (offset, limit) => taskRows(run, asked, limit, offset, signal);
        const first = await load(0, 100);
        count.textContent = `${number(first.total)} ${first.total === 1 ? "task" : "tasks"}`;
        if (!first.total) return empty("No such task.");
        table = tasksTable(run, asked, async (offset, limit) => (offset === 0 ? first : await load(offset, limit)).rows);
        table.reset(first.total);
        return table.node;
      });
    replaceChildren(main, element("h1", { class: "sr" }, "Tasks"), sections("tasks", run, route.parameters), element("div", { class: "controls" }, element("div", { class: "search-box" }, search), count), place);
    setPageKeys([
      { keys: ["j", "ArrowDown"], label: "next task", run: () => table?.moveBy(1) },
      { keys: ["k", "ArrowUp"], label: "task before", run: () => table?.moveBy(-1) },
      { keys: ["Enter"], label: "open the task", run: () => table?.openSelected() },
    ]);
    await draw();
    return draw;
  }

  async function taskRows(run, asked, limit, offset, signal) {
    const path = `runs/${pathOf(run.id)}/tasks`;
    if (!isExport()) return get(path, { ...asked, limit, offset }, signal);
    const { rows } = await get(path);
    const chosen = rows.filter((row) => row.task.toLowerCase().includes(asked.q.toLowerCase()));
    const sign = asked.order === "asc" ? 1 : -1;
    chosen.sort((a, b) => sign * ((a[asked.sort] ?? -Infinity) < (b[asked.sort] ?? -Infinity) ? -1 : 1));
    return { total: chosen.length, rows: chosen.slice(offset, offset + limit) };
  }

  function tasksTable(run, asked, load) {
    return dataTable({
      label: "Tasks",
      sort: asked.sort,
      order: asked.order,
      onSort: (sort, order) => change({ sort, order }),
      columns: [
        { title: "Task", grow: true, sort: "task", cell: (row) => element("span", { title: row.task }, short(row.task, 80) || "–") },
        { title: "Rollouts", number: true, sort: "rollouts", cell: (row) => number(row.rollouts) },
        { title: "Trained", number: true, cell: (row) => number(row.trained) },
        { title: "Failed", number: true, cell: (row) => number(row.failed) },
        { title: "Purpose", cell: (row) => (row.purposes || []).join(", ") },
        { title: "Reward", number: true, sort: "reward_mean", cell: (row) => number(row.reward_mean) },
        { title: "First", number: true, hint: "mean at its first step", cell: (row) => number(row.reward_first) },
        { title: "Last", number: true, hint: "mean at its last step", cell: (row) => number(row.reward_last) },
        { title: "Gain", number: true, sort: "gain", cell: (row) => rewardCell(row.gain) },
        { title: "Steps", number: true, cell: (row) => `${number(row.first_step)} to ${number(row.last_step)}` },
      ],
      href: (row) => link("tasks", [row.task], { run: run.id }),
      load,
    });
  }

  /** One task: a column for each step, its rollouts below each other, the best first. */
  async function showTask(main, run, route, signal) {
    const task = route.parts[0];
    const place = element("div", {}, loading());
    replaceChildren(main, sections("tasks", run, route.parameters), element("h1", { class: "title" }, short(task, 200)), place);
    const draw = () =>
      fillFrom(place, async () => {
        const [{ total, rows }, replies] = await Promise.all([rolloutRows(run, { task, sort: "step", order: "asc" }, 1000, 0, signal), repliesTo(run, task, signal)]);
        if (!rows.length) return empty("This task has no rollouts here.");
        const shown = rows.length < total ? `The first ${number(rows.length)} of ${number(total)}` : number(total);
        return element("div", {},
          element("p", { class: "quiet task-note" }, `${shown} rollouts over the steps, side by side, with what the model said last. `, element("a", { href: link("rollouts", [], { run: run.id, task }) }, "As a table")),
          element("div", { class: "columns", tabindex: "0", role: "region", "aria-label": "Rollouts by step" }, columnsOf(run, task, rows, replies)));
      });
    await draw();
    return null;
  }

  /** By session: {text, characters}. An export has those of the rollouts whose conversations are in it. */
  async function repliesTo(run, task, signal) {
    try {
      return (await get(`runs/${pathOf(run.id)}/replies/${pathOf(task)}`, {}, signal)).replies;
    } catch (error) {
      if (isExport() && error.status === 404) return {};
      throw error;
    }
  }

  function columnsOf(run, task, rows, replies) {
    const bySteps = new Map();
    for (const row of rows) {
      const key = `${row.step === null ? "not trained" : `step ${row.step}`}${row.purpose === "eval" ? ` · ${row.evaluation || "evaluation"}` : ""}`;
      if (!bySteps.has(key)) bySteps.set(key, []);
      bySteps.get(key).push(row);
    }
    return [...bySteps].map(([title, members]) => {
      const rewards = members.map((row) => row.reward).filter((reward) => reward !== null);
      const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
      members.sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
      const hrefOf = (row) => link("rollout", [row.session_id], { run: run.id, task, sort: "step", order: "asc", at: rows.indexOf(row) });
      return element("section", { class: "column", "aria-label": title },
        element("h2", {}, title, element("span", { class: "quiet" }, ` mean ${number(mean)}`)),
        element("ul", {}, members.slice(0, CARDS).map((row) => cardOf(row, hrefOf(row), replies[row.session_id]))),
        members.length > CARDS ? element("p", { class: "quiet" }, `${number(members.length - CARDS)} more`) : null);
    });
  }

  function cardOf(row, href, reply) {
    return element("li", { class: "card" },
      element("a", { class: "card-head", href }, element("b", {}, rewardCell(row.reward)), endCell(row)),
      element("span", { class: "quiet" }, `step ${number(row.step)} · ${number(row.sampled_tokens)} tokens${row.truncated ? ", cut" : ""} · ${number(row.turns)} ${row.turns === 1 ? "turn" : "turns"}`),
      reply ? replyText(reply, href) : element("p", { class: "quiet" }, isExport() ? "Its conversation is not in this export." : row.turns ? "Too much text to show here." : "Nothing was said."));
  }

  /** The beginning of a reply, and a button for more of it; its end is on the rollout's page. */
  function replyText({ text, characters }, href) {
    if (!text) return element("p", { class: "quiet" }, "(empty)");
    const isLong = text.length > SHOWN + 40;
    const place = element("div", { class: "text" }, isLong ? `${text.slice(0, SHOWN)}…` : text);
    const rest = characters > text.length ? element("a", { href }, `all ${number(characters)} characters`) : null;
    if (!isLong) return [place, rest];
    const toggle = element("button", { class: "button small", "aria-expanded": "false", on: { click: () => {
      const isOpen = toggle.getAttribute("aria-expanded") === "true";
      toggle.setAttribute("aria-expanded", String(!isOpen));
      toggle.textContent = isOpen ? "more" : "less";
      replaceChildren(place, isOpen ? `${text.slice(0, SHOWN)}…` : [text, rest ? ["… ", rest] : null]);
    } } }, "more");
    return [place, toggle];
  }

  return { showTasks };
})();
