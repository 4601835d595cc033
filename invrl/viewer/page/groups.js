// Groups: the rollouts of one task that are compared with each other. A group opens its rollouts.
"use strict";
invrl.groups = (() => {
  const { element, replaceChildren } = invrl.element;
  const { get, isExport, pathOf } = invrl.api;
  const { change, currentRoute, link } = invrl.route;
  const { dataTable } = invrl.table;
  const { number, short } = invrl.format;
  const { setPageKeys } = invrl.keys;
  const { onNews } = invrl.events;
  const { empty, fillFrom, loading } = invrl.notice;
  const { sections } = invrl.sections;

  async function showGroups(main, run, route, signal) {
    const place = element("div", { class: "table-place" }, loading());
    const count = element("p", { class: "count", role: "status" });
    const step = element("input", { type: "number", "aria-label": "Step", placeholder: "Step", value: route.parameters.get("step") || "", on: { change: () => change({ step: step.value || null }) } });
    const task = element("input", { type: "search", "aria-label": "Task", placeholder: "Task (exactly)", value: route.parameters.get("task") || "", on: { change: () => change({ task: task.value || null }) } });
    const purpose = element("select", { "aria-label": "Purpose", on: { change: () => change({ purpose: purpose.value || null }) } }, ["", "train", "eval", "serve"].map((name) => element("option", { value: name, selected: name === (route.parameters.get("purpose") || "") }, name || "any purpose")));
    let table = null;
    const draw = () =>
      fillFrom(place, async () => {
        const { parameters } = currentRoute();
        const asked = { sort: "opened_at", order: "desc" };
        for (const name of ["step", "task", "purpose", "sort", "order"]) if (parameters.get(name)) asked[name] = parameters.get(name);
        const load = (offset, limit) => groupRows(run, asked, limit, offset, signal);
        const first = await load(0, 100);
        count.textContent = `${number(first.total)} ${first.total === 1 ? "group" : "groups"}`;
        if (!first.total) return empty("No such group.");
        table = groupsTable(run, asked, async (offset, limit) => (offset === 0 ? first : await load(offset, limit)).rows);
        table.reset(first.total);
        return table.node;
      });
    replaceChildren(main, element("h1", { class: "sr" }, "Groups"), sections("groups", run, route.parameters), element("div", { class: "controls" }, step, task, purpose, count), place);
    setPageKeys([
      { keys: ["j", "ArrowDown"], label: "next group", run: () => table?.moveBy(1) },
      { keys: ["k", "ArrowUp"], label: "group before", run: () => table?.moveBy(-1) },
      { keys: ["Enter"], label: "open its rollouts", run: () => table?.openSelected() },
    ]);
    await draw();
    onNews((news) => news.run === run.id && news.kinds.includes("rollouts") && !(table && table.node.scrollTop) && draw(), signal);
    return draw;
  }

  async function groupRows(run, asked, limit, offset, signal) {
    const path = `runs/${pathOf(run.id)}/groups`;
    if (!isExport()) return get(path, { ...asked, limit, offset }, signal);
    const { rows } = await get(path);
    const chosen = rows.filter((row) => (!asked.step || String(row.step) === asked.step) && (!asked.task || row.task === asked.task || row.task_id === asked.task) && (!asked.purpose || row.purpose === asked.purpose));
    const sign = asked.order === "asc" ? 1 : -1;
    chosen.sort((a, b) => sign * ((a[asked.sort] ?? -Infinity) < (b[asked.sort] ?? -Infinity) ? -1 : 1));
    return { total: chosen.length, rows: chosen.slice(offset, offset + limit) };
  }

  function groupsTable(run, asked, load) {
    return dataTable({
      label: "Groups",
      sort: asked.sort,
      order: asked.order,
      onSort: (sort, order) => change({ sort, order }),
      columns: [
        { title: "Task", grow: true, sort: "task_id", cell: (row) => element("span", { title: row.task_id }, short(row.task || row.task_id, 60) || "–") },
        { title: "Step", number: true, sort: "step", cell: (row) => number(row.step) },
        { title: "Purpose", cell: (row) => row.evaluation || row.purpose },
        { title: "Rollouts", number: true, sort: "rollouts", cell: (row) => number(row.rollouts) },
        { title: "Trained", number: true, sort: "trained", cell: (row) => number(row.trained) },
        { title: "Dropped", number: true, sort: "dropped", cell: (row) => element("span", { title: (row.reasons || []).join(", ") || null }, number(row.dropped)) },
        { title: "Failed", number: true, sort: "failed", cell: (row) => number(row.failed) },
        { title: "Reward", number: true, sort: "reward_mean", cell: (row) => number(row.reward_mean) },
        { title: "Least", number: true, sort: "reward_min", cell: (row) => number(row.reward_min) },
        { title: "Greatest", number: true, sort: "reward_max", cell: (row) => number(row.reward_max) },
        { title: "Deviation", number: true, sort: "reward_std", cell: (row) => number(row.reward_std) },
        { title: "Tokens", number: true, sort: "sampled_tokens", cell: (row) => number(row.sampled_tokens) },
      ],
      href: (row) => link("rollouts", [], { run: run.id, group: row.group_id }),
      load,
    });
  }

  return { showGroups };
})();
