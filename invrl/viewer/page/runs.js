// The runs that this page can show, as the server last told them, and which of them the URL names.
"use strict";
invrl.runs = (() => {
  const { get } = invrl.api;
  const { currentRoute } = invrl.route;
  const { kindColour } = invrl.colour;

  let known = [];

  async function loadRuns(signal = undefined) {
    known = (await get("runs", {}, signal)).runs;
    return known;
  }

  function allRuns() {
    return known;
  }

  function putRun(run) {
    known = known.map((old) => (old.id === run.id ? run : old));
  }

  /** The run of the URL's `run`, or the first. */
  function currentRun() {
    const id = currentRoute().parameters.get("run");
    return known.find((run) => run.id === id) || (id ? null : known[0]) || null;
  }

  /** The runs of the URL's `runs`, or all. */
  function chosenRuns() {
    const text = currentRoute().parameters.get("runs");
    if (!text) return known;
    const ids = text.split(",");
    return known.filter((run) => ids.includes(run.id));
  }

  function runColour(id) {
    return kindColour(known.findIndex((run) => run.id === id));
  }

  return { loadRuns, allRuns, putRun, currentRun, chosenRuns, runColour };
})();
