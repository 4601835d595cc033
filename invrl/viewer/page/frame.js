// What stands above every page: where one can go, the run, whether news arrive, progress of the index, theme, keys.
"use strict";
invrl.frame = (() => {
  const { element, replaceChildren } = invrl.element;
  const { currentRoute, link, go, change } = invrl.route;
  const { allRuns, currentRun } = invrl.runs;
  const { clock } = invrl.format;
  const { themeName, nextTheme } = invrl.theme;
  const { showKeys } = invrl.keys;
  const { isExport } = invrl.api;

  const PAGES = [
    ["overview", "Overview"],
    ["rollouts", "Rollouts"],
    ["processes", "Processes"],
    ["ledger", "Ledger"],
    ["evaluations", "Evaluations"],
    ["weights", "Weights"],
  ];
  const PART_OF = { rollout: "rollouts", tasks: "rollouts", groups: "rollouts", steps: "rollouts" };

  let connection = "";

  function setConnection(state) {
    connection = state;
    const place = document.querySelector("#connection");
    if (place) replaceChildren(place, connectionMark());
  }

  function drawFrame() {
    const header = document.querySelector("#header");
    const route = currentRoute();
    const active = PART_OF[route.page] || route.page;
    const run = currentRun();
    const theme = element("button", { class: "button quiet-button", id: "theme", title: "Colours: system, light, dark", on: { click: toggle } }, themeName());
    function toggle() {
      nextTheme();
      theme.textContent = themeName();
    }
    replaceChildren(
      header,
      element(
        "div",
        { class: "bar" },
        element("a", { class: "brand", href: link("overview") }, "invrl"),
        element(
          "nav",
          { "aria-label": "Pages" },
          PAGES.map(([page, title]) =>
            element("a", { href: link(page, [], { run: run && page !== "overview" ? run.id : null }), "aria-current": page === active ? "page" : null }, title),
          ),
        ),
        element("span", { class: "push" }),
        route.page === "overview" ? null : runPicker(run),
        element("span", { id: "connection" }, connectionMark()),
        theme,
        element("button", { class: "button quiet-button", title: "Keys (?)", "aria-label": "Show keys", on: { click: showKeys } }, "?"),
      ),
      element("div", { id: "progress" }, progressOf(run, route.page)),
    );
  }

  /** Only what changes by itself: the state of the index and of the run. */
  function updateProgress() {
    const place = document.querySelector("#progress");
    if (place) replaceChildren(place, progressOf(currentRun(), currentRoute().page));
  }

  function stateMark(run) {
    return element("span", { class: `mark state-${run.state}` }, run.state);
  }

  function runPicker(run) {
    const picker = element(
      "select",
      { id: "run", "aria-label": "Run", on: { change: () => chooseRun(picker.value) } },
      allRuns().map((each) => element("option", { value: each.id, selected: run !== null && each.id === run.id }, each.name)),
    );
    return picker;
  }

  function chooseRun(id) {
    const route = currentRoute();
    if (route.page === "rollout") go(link("rollouts", [], { run: id }));
    else change({ run: id }, true);
  }

  function connectionMark() {
    if (isExport()) return element("span", { class: "mark", title: `Written ${clock(window.invrlExport.created)}` }, "export");
    if (connection === "live") return element("span", { class: "mark live", title: "The page follows the runs" }, "connected");
    if (connection === "lost") return element("span", { class: "mark lost", title: "The server does not answer; the page tries again" }, "offline");
    return element("span", { class: "mark" }, "…");
  }

  function progressOf(run, page) {
    const runs = page === "overview" ? allRuns() : run ? [run] : [];
    const parts = [];
    for (const each of runs) {
      const index = each.index || {};
      if (index.error) parts.push(element("p", { class: "banner warn" }, `${each.name}: ${index.error}`));
      else if (index.ready === false && !isExport()) {
        const done = index.turns_indexed || 0;
        const all = Math.max(index.turns || 0, done);
        parts.push(
          element(
            "p",
            { class: "banner" },
            `${each.name}: indexing what was said, ${done.toLocaleString("en-US")} of ${all.toLocaleString("en-US")} turns `,
            element("progress", { max: String(all || 1), value: done, "aria-label": "Indexing" }),
          ),
        );
      }
      for (const note of (each.notes || []).filter((text) => text !== index.error)) parts.push(element("p", { class: "banner warn" }, `${each.name}: ${note}`));
    }
    const left = isExport() ? Object.entries(window.invrlExport.left_out || {}).filter(([, count]) => count > 0) : [];
    for (const [id, count] of left) {
      if (runs.some((each) => each.id === id)) parts.push(element("p", { class: "banner" }, `${id}: ${count.toLocaleString("en-US")} rollouts are not in this export, only their rows.`));
    }
    return parts;
  }

  return { setConnection, drawFrame, updateProgress, stateMark };
})();
