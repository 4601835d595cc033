// Rows of rollouts by filters, sort and place: from the server, or out of an export.
"use strict";
invrl.rollout_rows = (() => {
  const { get, isExport, pathOf } = invrl.api;
  const { chosenRows, facetsOf } = invrl.query;
  const { matchingRollouts } = invrl.said;

  /** {total, rows, searched} */
  async function rolloutRows(run, filters, limit, offset, signal) {
    const path = `runs/${pathOf(run.id)}/rollouts`;
    if (!isExport()) return get(path, { ...filters, limit, offset }, signal);
    const { rows } = await get(path);
    const said = filters.q ? await matchingRollouts(run, filters.q, signal) : null;
    const chosen = chosenRows(rows, filters, said);
    const searched = said ? { rollouts: said.rollouts, all_rollouts: rows.length } : null;
    return { total: chosen.length, rows: chosen.slice(offset, offset + limit), searched };
  }

  /** Counts for the form of filters. */
  async function rolloutFacets(run, filters, signal) {
    if (!isExport()) return get(`runs/${pathOf(run.id)}/facets`, filters, signal);
    const { rows } = await get(`runs/${pathOf(run.id)}/rollouts`);
    return facetsOf(chosenRows(rows, filters, filters.q ? await matchingRollouts(run, filters.q, signal) : null));
  }

  return { rolloutRows, rolloutFacets };
})();
