// Where every rollout ended, by reason, down to the traceback.
"use strict";
invrl.ledger = (() => {
  const { element, replaceChildren } = invrl.element;
  const { get, pathOf } = invrl.api;
  const { link } = invrl.route;
  const { plainTable } = invrl.table;
  const { number, clock, short } = invrl.format;
  const { onNews } = invrl.events;
  const { empty, fillFrom } = invrl.notice;

  async function showLedger(main, run, route, signal) {
    const place = element("div", {});
    replaceChildren(main, element("h1", { class: "sr" }, "Ledger"), place);
    const draw = () => fillFrom(place, async () => ledgerOf(run, await get(`runs/${pathOf(run.id)}/ledger`, {}, signal)));
    await draw();
    onNews((news) => news.run === run.id && news.kinds.includes("rollouts") && !place.querySelector("details[open]") && draw(), signal);
    return draw;
  }

  function ledgerOf(run, { incarnations, counts, lineage, failures }) {
    if (!counts.length) return empty("No rollout has been given out yet.");
    const total = counts.reduce((sum, row) => sum + row.count, 0);
    const rows = [...counts].sort((a, b) => b.count - a.count);
    const filters = (row) => ({ run: run.id, purpose: null, state: row.state, drop: row.reason, failure: row.failure });
    return [
      lineage && lineage !== "ok" ? element("p", { class: "banner warn" }, `The ledger's lineage is broken: ${lineage}`) : null,
      element("section", { "aria-labelledby": "ends-title" },
        element("h2", { id: "ends-title" }, `Where ${number(total)} rollouts of the training ended`),
        plainTable("Where every rollout ended", [
          { title: "State", cell: (row) => element("a", { href: link("rollouts", [], filters(row)) }, row.state) },
          { title: "Why", cell: (row) => row.reason || row.failure || "–" },
          { title: "Rollouts", number: true, cell: (row) => number(row.count) },
          { title: "Share", number: true, cell: (row) => `${number((row.count / total) * 100, 1)} %` },
          { title: "", grow: true, cell: (row) => element("span", { class: "share", "aria-hidden": "true" }, element("span", { class: `fill end-${row.state}`, style: { width: `${(row.count / total) * 100}%` } })) },
        ], rows)),
      element("section", { "aria-labelledby": "failures-title" },
        element("h2", { id: "failures-title" }, "Failures"),
        failures.length ? failures.map((failure) => failureBlock(run, failure)) : element("p", { class: "quiet" }, "No rollout failed.")),
      element("section", { "aria-labelledby": "lives-title" },
        element("h2", { id: "lives-title" }, "Lives of the run"),
        livesTable(incarnations)),
    ];
  }

  function livesTable(incarnations) {
    return plainTable("Lives of the run", [
      { title: "Life", number: true, cell: (row) => number(row.number) },
      { title: "Continues", number: true, cell: (row) => (row.parent <= 0 ? "–" : number(row.parent)) },
      { title: "Started", cell: (row) => clock(row.started_at) },
      { title: "From step", number: true, cell: (row) => number(row.step) },
      { title: "Entries lost", number: true, hint: "written after the checkpoint that the next life continued from", cell: (row) => number(row.lost) },
    ], incarnations);
  }

  function failureBlock(run, failure) {
    return element("details", { class: "failure" },
      element("summary", {}, element("b", {}, number(failure.count)), " ", element("span", { class: "mark bad" }, failure.failure), " ", element("code", {}, short(failure.line, 140) || "(no text)")),
      element("pre", { class: "traceback", tabindex: "0" }, failure.detail || "(no detail)"),
      element("p", { class: "row" }, "Rollouts: ", failure.session_ids.map((id) => element("a", { href: link("rollout", [id], { run: run.id }) }, short(id, 16))), element("a", { href: link("rollouts", [], { run: run.id, failure: failure.failure }) }, "all with this reason")));
  }

  return { showLedger };
})();
