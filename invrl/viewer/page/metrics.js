// Metrics of several runs: their names by search, their values by name.
"use strict";
invrl.metrics = (() => {
  const { get, isExport } = invrl.api;

  /** [{name, runs, last}] whose names have this text, for these runs. */
  async function metricNames(runs, text, signal) {
    const ids = runs.map((run) => run.id);
    if (!isExport()) return (await get("metric-names", { runs: ids.join(","), q: text }, signal)).names;
    const { names } = await get("metric-names");
    const wanted = text.toLowerCase();
    return names.filter((entry) => entry.name.toLowerCase().includes(wanted) && entry.runs.some((run) => ids.includes(run)));
  }

  /** {run: {name: [[step, time, value], …]}} */
  async function readMetrics(runs, names, signal) {
    const ids = runs.map((run) => run.id);
    if (!ids.length || !names.length) return {};
    if (isExport()) return (await get("metrics")).runs;
    const merged = {};
    for (let at = 0; at < names.length; at += 200) {
      const { runs: part } = await get("metrics", { runs: ids.join(","), name: names.slice(at, at + 200) }, signal);
      for (const [id, values] of Object.entries(part)) merged[id] = { ...merged[id], ...values };
    }
    return merged;
  }

  return { metricNames, readMetrics };
})();
