// Starts the page: loads the runs, shows the page that the URL names, and again when the URL or a run changes.
"use strict";
invrl.main = (() => {
  const { element, replaceChildren } = invrl.element;
  const { currentRoute, onRoute, link, go } = invrl.route;
  const { loadRuns, currentRun, allRuns } = invrl.runs;
  const { drawFrame, setConnection, updateProgress } = invrl.frame;
  const { connect, onConnection, onNews } = invrl.events;
  const { failure, loading, empty } = invrl.notice;
  const { setCommonKeys, setPageKeys, showKeys } = invrl.keys;
  const { nextTheme } = invrl.theme;
  const { showOverview } = invrl.overview;
  const { showRollouts } = invrl.rollouts;
  const { showRollout } = invrl.rollout;
  const { showTasks } = invrl.tasks;
  const { showGroups } = invrl.groups;
  const { showSteps } = invrl.steps;
  const { showProcesses } = invrl.processes;
  const { showLedger } = invrl.ledger;
  const { showEvaluations } = invrl.evaluations;
  const { showWeights } = invrl.weights;

  const PAGES = {
    overview: showOverview,
    rollouts: showRollouts,
    rollout: showRollout,
    tasks: showTasks,
    groups: showGroups,
    steps: showSteps,
    processes: showProcesses,
    ledger: showLedger,
    evaluations: showEvaluations,
    weights: showWeights,
  };
  const TITLES = {
    overview: "Overview", rollouts: "Rollouts", rollout: "Rollout", tasks: "Tasks", groups: "Groups", steps: "Steps",
    processes: "Processes", ledger: "Ledger", evaluations: "Evaluations", weights: "Weights",
  };

  let ending = new AbortController();
  let shown = "";
  let update = null;

  /** A page is drawn anew when its place or run changes; otherwise it is told that its parameters did. */
  async function show() {
    const route = currentRoute();
    const run = currentRun();
    const key = [route.page, ...route.parts, run ? run.id : ""].join("\n");
    if (key === shown && update) {
      update(route);
      return;
    }
    shown = key;
    update = null;
    ending.abort();
    ending = new AbortController();
    const signal = ending.signal;
    setPageKeys([]);
    drawFrame();
    const main = document.querySelector("#main");
    document.title = `${TITLES[route.page] || "Not found"}${run ? ` · ${run.name}` : ""} · invrl`;
    const page = PAGES[route.page];
    if (!page || (!run && route.page !== "overview")) {
      replaceChildren(main, page ? unknownRun() : unknownPage(route));
      document.body.dataset.ready = key.replaceAll("\n", "/");
      return;
    }
    replaceChildren(main, loading());
    try {
      const after = await page(main, run, route, signal);
      if (!signal.aborted) update = after || null;
    } catch (error) {
      if (error.name !== "AbortError" && !signal.aborted) {
        replaceChildren(main, failure(error));
        shown = "";
      }
    }
    if (!signal.aborted) document.body.dataset.ready = key.replaceAll("\n", "/");
  }

  function unknownPage(route) {
    return [empty(`There is no page “${route.page}”.`), element("p", {}, element("a", { href: link("overview") }, "Overview"))];
  }

  function unknownRun() {
    return empty("This run is not served here.", `Runs: ${allRuns().map((each) => each.name).join(", ") || "none"}`);
  }

  async function start() {
    setCommonKeys([
      { keys: ["?"], label: "these keys", run: showKeys },
      { keys: ["g o"], label: "overview", run: () => go(link("overview")) },
      { keys: ["g r"], label: "rollouts", run: () => goTo("rollouts") },
      { keys: ["g p"], label: "processes", run: () => goTo("processes") },
      { keys: ["g l"], label: "ledger", run: () => goTo("ledger") },
      { keys: ["g e"], label: "evaluations", run: () => goTo("evaluations") },
      { keys: ["g w"], label: "weights", run: () => goTo("weights") },
      { keys: ["/"], label: "search", run: () => document.querySelector("input[type=search]")?.focus() },
      { keys: ["t"], label: "light or dark", run: () => { nextTheme(); drawFrame(); } },
    ]);
    onConnection(setConnection);
    try {
      await loadRuns();
    } catch (error) {
      replaceChildren(document.querySelector("#main"), failure(error));
      document.body.dataset.ready = "error";
      return;
    }
    connect();
    onNews(refreshRuns, new AbortController().signal);
    onRoute(show);
    await show();
  }

  async function refreshRuns() {
    try {
      await loadRuns();
      updateProgress();
    } catch (error) {
      setConnection("lost");
    }
  }

  function goTo(page) {
    const run = currentRun();
    go(link(page, [], { run: run ? run.id : null }));
  }

  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault(); // The hash is the page's state.
    document.querySelector("#main").focus();
  });

  start();

  return {  };
})();
