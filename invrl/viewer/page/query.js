// The filters and sorts of rollouts as the server has them, over the rows of an export.
"use strict";
invrl.query = (() => {
  const EXACT = { group: "group_id", session: "session_id", purpose: "purpose", evaluation: "evaluation", state: "state", drop: "reason", failure: "failure" };
  const RANGES = { tokens: "sampled_tokens" };
  const RANGED = ["reward", "tokens", "turns", "staleness", "seconds", "forks", "advantage", "logprob", "gap", "surprise"];
  const FIXED = { best: ["reward", -1], worst: ["reward", 1], surprising: ["surprise", -1] };

  /** The rows that pass, in order. */
  function chosenRows(rows, parameters) {
    const passed = rows.filter((row) => passes(row, parameters));
    return sortedRows(passed, parameters.sort || "opened_at", parameters.order || "desc");
  }

  /** Counts of each value among the rows, as `/facets` answers. */
  function facetsOf(rows) {
    const facets = { total: rows.length, components: [...new Set(rows.flatMap((row) => Object.keys(row.components || {})))].sort(), ranges: {} };
    const counted = { purpose: "purpose", evaluation: "evaluation", state: "state", drop: "reason", failure: "failure" };
    for (const [name, key] of Object.entries(counted)) facets[name] = countsOf(rows.map((row) => row[key]));
    facets.fork = countsOf(rows.flatMap((row) => Object.keys(row.fork_reasons || {})));
    facets.truncated = countsOf(rows.map((row) => (row.truncated ? "1" : "0")));
    facets.trained = countsOf(rows.map((row) => (row.state === "trained" ? "1" : "0")));
    return facets;
  }

  function countsOf(values) {
    const counts = {};
    for (const value of values) if (value !== null && value !== undefined && value !== "") counts[value] = (counts[value] || 0) + 1;
    return counts;
  }

  function passes(row, parameters) {
    for (const [name, key] of Object.entries(EXACT)) if (parameters[name] && row[key] !== parameters[name]) return false;
    if (parameters.step && String(row.step) !== parameters.step) return false;
    if (parameters.task && row.task_id !== parameters.task && row.task !== parameters.task) return false;
    if (parameters.fork && !(parameters.fork in (row.fork_reasons || {}))) return false;
    if (parameters.truncated && row.truncated !== (parameters.truncated === "1")) return false;
    if (parameters.trained && (row.state === "trained") !== (parameters.trained === "1")) return false;
    if (parameters.ended && ["running", "in_flight"].includes(row.state) === (parameters.ended === "1")) return false;
    for (const name of RANGED) if (!within(row[RANGES[name] || name], parameters[`min_${name}`], parameters[`max_${name}`])) return false;
    if (parameters.component && !within((row.components || {})[parameters.component], parameters.min_component, parameters.max_component)) return false;
    if (parameters.q) {
      const text = `${row.task_id} ${row.session_id} ${row.detail || ""}`.toLowerCase();
      if (!parameters.q.toLowerCase().split(/\s+/).every((word) => text.includes(word.replaceAll('"', "")))) return false;
    }
    return true;
  }

  function within(value, low, high) {
    if (!low && !high) return true;
    if (value === null || value === undefined) return false;
    return (!low || value >= Number(low)) && (!high || value <= Number(high));
  }

  function sortedRows(rows, sort, order) {
    const [key, sign] = FIXED[sort] || [{ tokens: "sampled_tokens" }[sort] || sort, order === "asc" ? 1 : -1];
    return [...rows].sort((a, b) => {
      const left = a[key] ?? null;
      const right = b[key] ?? null;
      if (left === null || right === null) return (left === null) - (right === null);
      if (left === right) return 0;
      return (left < right ? -1 : 1) * sign;
    });
  }

  return { chosenRows, facetsOf };
})();
