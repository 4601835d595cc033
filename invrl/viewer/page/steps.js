// What each step trained: rewards, groups, lengths. A step opens its groups.
"use strict";
invrl.steps = (() => {
  const { element, replaceChildren } = invrl.element;
  const { get, pathOf } = invrl.api;
  const { link } = invrl.route;
  const { dataTable } = invrl.table;
  const { number, duration, clock } = invrl.format;
  const { setPageKeys } = invrl.keys;
  const { onNews } = invrl.events;
  const { empty, fillFrom, loading } = invrl.notice;
  const { sections } = invrl.sections;

  async function showSteps(main, run, route, signal) {
    const place = element("div", {}, loading());
    let table = null;
    replaceChildren(main, element("h1", { class: "sr" }, "Steps"), sections("steps", run, route.parameters), place);
    const draw = () =>
      fillFrom(place, async () => {
        const { steps, evaluations } = await get(`runs/${pathOf(run.id)}/steps`, {}, signal);
        if (!steps.length && !evaluations.length) return empty("No step has been trained yet.");
        const rows = [...steps].reverse();
        table = stepsTable(run, rows);
        table.reset(rows.length);
        return [table.node, evaluations.length ? evaluationsList(run, evaluations) : null];
      });
    setPageKeys([
      { keys: ["j", "ArrowDown"], label: "next step", run: () => table?.moveBy(1) },
      { keys: ["k", "ArrowUp"], label: "step before", run: () => table?.moveBy(-1) },
      { keys: ["Enter"], label: "open its groups", run: () => table?.openSelected() },
    ]);
    await draw();
    onNews((news) => news.run === run.id && news.kinds.includes("rollouts") && draw(), signal);
    return draw;
  }

  function stepsTable(run, rows) {
    return dataTable({
      label: "Steps",
      columns: [
        { title: "Step", number: true, cell: (row) => number(row.step) },
        { title: "Groups", number: true, cell: (row) => number(row.groups) },
        { title: "Rollouts", number: true, cell: (row) => element("a", { href: link("rollouts", [], { run: run.id, step: row.step }) }, number(row.rollouts)) },
        { title: "Reward", number: true, hint: "mean", cell: (row) => number(row.reward_mean) },
        { title: "Least", number: true, cell: (row) => number(row.reward_min) },
        { title: "Greatest", number: true, cell: (row) => number(row.reward_max) },
        { title: "Deviation", number: true, cell: (row) => number(row.reward_std) },
        { title: "Tokens", number: true, cell: (row) => number(row.sampled_tokens) },
        { title: "Truncated", number: true, cell: (row) => number(row.truncated) },
        { title: "Staleness", number: true, hint: "greatest", cell: (row) => number(row.staleness_max) },
        { title: "Rollout took", number: true, hint: "mean", cell: (row) => duration(row.seconds_mean) },
        { title: "First opened", wide: true, cell: (row) => clock(row.first_at) },
      ],
      href: (row) => link("groups", [], { run: run.id, step: row.step }),
      load: async (offset, limit) => rows.slice(offset, offset + limit),
    });
  }

  function evaluationsList(run, evaluations) {
    return element(
      "section",
      { "aria-label": "Evaluations" },
      element("h2", {}, "Evaluations"),
      element("ul", { class: "lines" }, evaluations.map((row) =>
        element("li", {},
          element("a", { href: link("rollouts", [], { run: run.id, purpose: "eval", evaluation: row.evaluation, step: row.step }) }, `After step ${row.step ?? "–"}, ${row.evaluation || "evaluation"}`),
          ` ${number(row.rollouts)} rollouts, mean reward ${number(row.reward_mean)}${row.failed ? `, ${number(row.failed)} failed` : ""}`))),
    );
  }

  return { showSteps };
})();
