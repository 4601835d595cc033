// The table of rollouts: filtered, searched and sorted; a row opens the rollout, which knows its place in the table.
"use strict";
invrl.rollouts = (() => {
  const { element, replaceChildren } = invrl.element;
  const { change, currentRoute, link } = invrl.route;
  const { filtersOf, filterForm, chips } = invrl.filters;
  const { rolloutRows, rolloutFacets } = invrl.rollout_rows;
  const { dataTable } = invrl.table;
  const { number, duration, shortClock, short } = invrl.format;
  const { setPageKeys } = invrl.keys;
  const { onNews } = invrl.events;
  const { failure, loading, empty } = invrl.notice;
  const { sections } = invrl.sections;

  const SORTS = [
    ["opened_at", "newest first"], ["best", "best first"], ["worst", "worst first"], ["surprising", "most surprising first"],
    ["step", "by step"], ["reward", "by reward"], ["tokens", "by length"], ["turns", "by turns"], ["forks", "by forks"],
    ["staleness", "by staleness"], ["seconds", "by duration"], ["advantage", "by advantage"], ["logprob", "by log-prob"],
    ["gap", "by engine–trainer gap"], ["task", "by task"], ["state", "by end"],
  ];

  async function showRollouts(main, run, route, signal) {
    const count = element("p", { class: "count", role: "status" });
    const chosen = element("div", { class: "chips" });
    const place = element("div", { class: "table-place" }, loading());
    const form = filterForm();
    const search = searchField(route.parameters);
    const sorting = element("select", { id: "sort", "aria-label": "Sort", on: { change: () => change({ sort: sorting.value, order: null, at: null }) } });
    const panel = element("details", { class: "filter-panel" }, element("summary", {}, "Filters"), form.node);
    panel.open = window.matchMedia("(min-width: 900px)").matches;
    let table = null;
    let asked = 0;
    let asking = new AbortController();

    async function draw() {
      const { parameters } = currentRoute();
      const filters = filtersOf(parameters);
      const mine = ++asked;
      asking.abort();
      asking = new AbortController();
      const stop = asking.signal;
      replaceChildren(chosen, chips(parameters));
      if (search.input !== document.activeElement) search.input.value = parameters.get("q") || "";
      fillSorts(sorting, parameters.get("sort") || "opened_at");
      form.update(null, parameters);
      place.setAttribute("aria-busy", "true");
      try {
        const [first, facets] = await Promise.all([rolloutRows(run, filters, 100, 0, stop), rolloutFacets(run, withoutSort(filters), stop)]);
        if (mine !== asked || signal.aborted) return;
        form.update(facets, currentRoute().parameters);
        count.textContent = countText(first, run);
        table = tableOf(run, filters, first, stop);
        replaceChildren(place, first.total ? table.node : empty("No rollout passes these filters.", "Take a filter away, or wait: a running run may still bring some."));
        table.reset(first.total);
      } catch (error) {
        if (error.name !== "AbortError" && mine === asked) replaceChildren(place, failure(error));
      } finally {
        if (mine === asked) place.removeAttribute("aria-busy");
      }
    }

    signal.addEventListener("abort", () => asking.abort());
    window.addEventListener("searching", ({ detail }) => {
      if (place.hasAttribute("aria-busy")) count.textContent = `Searching what was said: ${number(detail.done)} of ${number(detail.all)} files`;
    }, { signal });
    replaceChildren(
      main,
      element("h1", { class: "sr" }, "Rollouts"),
      sections("rollouts", run, route.parameters),
      element("div", { class: "with-panel" }, panel,
        element("div", { class: "content" }, element("div", { class: "controls" }, search.node, sorting, count), chosen, place)),
    );
    setPageKeys([
      { keys: ["j", "ArrowDown"], label: "next row", run: () => table?.moveBy(1) },
      { keys: ["k", "ArrowUp"], label: "row before", run: () => table?.moveBy(-1) },
      { keys: ["PageDown"], label: "twenty rows on", run: () => table?.moveBy(20) },
      { keys: ["PageUp"], label: "twenty rows back", run: () => table?.moveBy(-20) },
      { keys: ["Enter"], label: "open the rollout", run: () => table?.openSelected() },
      { keys: ["x"], label: "clear all filters", run: form.clear },
    ]);
    await draw();
    let last = Date.now();
    onNews((news) => {
      if (news.run !== run.id || !news.kinds.some((kind) => kind === "rollouts" || kind === "index")) return;
      const isReading = table && table.node.scrollTop > 0;
      if (isReading || Date.now() - last < 1500) return;
      last = Date.now();
      draw();
    }, signal);
    return draw;
  }

  function searchField(parameters) {
    const input = element("input", { type: "search", id: "q", value: parameters.get("q") || "", placeholder: "Search what was said…  (words, \"a phrase\")", "aria-label": "Search what was said" });
    let timer = 0;
    input.addEventListener("input", () => {
      window.clearTimeout(timer);
      timer = window.setTimeout(() => change({ q: input.value.trim() || null, at: null }), 250);
    });
    return { input, node: element("div", { class: "search-box" }, input) };
  }

  function fillSorts(select, value) {
    const known = SORTS.some(([key]) => key === value) ? SORTS : [...SORTS, [value, `by ${value}`]];
    replaceChildren(select, known.map(([key, title]) => element("option", { value: key, selected: key === value }, title)));
  }

  function withoutSort(filters) {
    const { sort, order, ...rest } = filters;
    return rest;
  }

  function countText({ total, searched }, run) {
    const found = `${number(total)} ${total === 1 ? "rollout" : "rollouts"}`;
    if (searched && searched.rollouts < searched.all_rollouts) return `${found}; what was said is here of ${number(searched.rollouts)} of ${number(searched.all_rollouts)}, ids of all`;
    if (searched && searched.turns_indexed < searched.turns) return `${found} so far: ${number(searched.turns_indexed)} of ${number(searched.turns)} turns are indexed`;
    return run.index && run.index.ready === false ? `${found} so far` : found;
  }

  function rewardCell(value) {
    if (value === null || value === undefined) return "–";
    return element("span", { class: value > 0 ? "good" : value < 0 ? "bad" : "zero" }, number(value));
  }

  function endCell(row) {
    const why = row.reason || row.failure;
    return element("span", { class: `mark end-${row.state}`, title: row.detail || null }, why ? `${row.state}: ${short(why, 28)}` : row.state.replace("_", " "));
  }

  function tableOf(run, filters, first, stop) {
    const columns = [
      { title: "Task", grow: true, sort: "task", cell: (row) => element("span", { title: row.task_id }, short(row.task || row.task_id, 60) || "–") },
      { title: "Step", number: true, sort: "step", cell: (row) => number(row.step) },
      { title: "Ended as", sort: "state", cell: endCell },
      { title: "Reward", number: true, sort: "reward", cell: (row) => rewardCell(row.reward) },
      { title: "Surprise", number: true, wide: true, sort: "surprise", hint: "distance from the mean of its group or task, in standard deviations", cell: (row) => number(row.surprise, 2) },
      { title: "Advantage", number: true, wide: true, sort: "advantage", cell: (row) => number(row.advantage, 2) },
      { title: "Tokens", number: true, sort: "tokens", cell: (row) => element("span", { title: row.truncated ? "truncated" : null }, number(row.sampled_tokens), row.truncated ? " ✂" : "") },
      { title: "Turns", number: true, sort: "turns", cell: (row) => number(row.turns) },
      { title: "Forks", number: true, wide: true, sort: "forks", hint: "branches of the conversation", cell: (row) => element("span", { title: Object.entries(row.fork_reasons || {}).map(([reason, n]) => `${reason}: ${n}`).join(", ") || null }, number(row.forks)) },
      { title: "Stale", number: true, sort: "staleness", hint: "versions between its oldest token and the weights it trained", cell: (row) => number(row.staleness) },
      { title: "Log-prob", number: true, wide: true, widest: true, sort: "logprob", hint: "mean of the engine's, in nats", cell: (row) => number(row.logprob, 2) },
      { title: "Gap", number: true, wide: true, sort: "gap", hint: "mean |engine − trainer|, in nats", cell: (row) => number(row.gap) },
      { title: "Took", number: true, sort: "seconds", cell: (row) => duration(row.seconds) },
      { title: "Opened", wide: true, sort: "opened_at", cell: (row) => shortClock(row.opened_at) },
    ];
    const named = { best: ["reward", "desc"], worst: ["reward", "asc"], surprising: ["surprise", "desc"] }[filters.sort];
    return dataTable({
      label: "Rollouts",
      columns,
      sort: named ? named[0] : filters.sort || "opened_at",
      order: named ? named[1] : filters.order || "desc",
      onSort: (sort, order) => change({ sort, order, at: null }),
      href: (row, index) => link("rollout", [row.session_id], { run: run.id, ...filters, at: index }),
      load: async (offset, limit) => (offset === 0 ? first.rows : (await rolloutRows(run, filters, limit, offset, stop)).rows),
    });
  }

  return { showRollouts, rewardCell, endCell };
})();
