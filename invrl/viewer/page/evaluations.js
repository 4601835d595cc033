// Held-out scores with their intervals, pass@k, and each task before and after.
"use strict";
invrl.evaluations = (() => {
  const { element, replaceChildren } = invrl.element;
  const { get, isExport, pathOf } = invrl.api;
  const { link } = invrl.route;
  const { dataTable, plainTable } = invrl.table;
  const { lineChart } = invrl.chart;
  const { kindColour, signColour } = invrl.colour;
  const { number, short } = invrl.format;
  const { setPageKeys } = invrl.keys;
  const { onNews } = invrl.events;
  const { empty } = invrl.notice;
  const { rewardCell } = invrl.rollouts;

  async function showEvaluations(main, run, route, signal) {
    let drawing = new AbortController();
    signal.addEventListener("abort", () => drawing.abort());
    let table = null;

    async function draw() {
      const first = await page(run, 100, 0, signal);
      if (signal.aborted) return;
      drawing.abort();
      drawing = new AbortController();
      if (!first.scores.length && !first.tasks.total) {
        replaceChildren(main, element("h1", { class: "sr" }, "Evaluations"), empty("This run has no evaluation.", "Give it held-out tasks: `evaluation.*` in its configuration, or `invrl eval`."));
        return;
      }
      table = first.tasks.total ? tasksTable(run, first, signal) : null;
      replaceChildren(main, element("h1", { class: "sr" }, "Evaluations"), charts(first.scores, drawing.signal), gainsTable(first.gains), scoresTable(first.scores),
        table ? element("section", { "aria-labelledby": "tasks-title" }, element("h2", { id: "tasks-title" }, "Per task, before and after"), element("p", { class: "quiet" }, "The largest change first. Each square is one sample's reward."), table.node) : null);
      table?.reset(first.tasks.total);
    }

    setPageKeys([
      { keys: ["j", "ArrowDown"], label: "next task", run: () => table?.moveBy(1) },
      { keys: ["k", "ArrowUp"], label: "task before", run: () => table?.moveBy(-1) },
      { keys: ["Enter"], label: "open its rollouts", run: () => table?.openSelected() },
    ]);
    await draw();
    onNews((news) => news.run === run.id && news.kinds.includes("metrics") && !(table && table.node.scrollTop) && draw().catch(() => {}), signal);
    return null;
  }

  async function page(run, limit, offset, signal) {
    const path = `runs/${pathOf(run.id)}/evaluations`;
    if (!isExport()) return get(path, { limit, offset }, signal);
    const all = await get(path);
    return { ...all, tasks: { total: all.tasks.total, rows: all.tasks.rows.slice(offset, offset + limit) } };
  }

  function charts(scores, signal) {
    const names = [...new Set(scores.map((row) => row.name))];
    const line = (name, at, key) => {
      const rows = scores.filter((row) => row.name === name && row[key] !== null && row[key] !== undefined);
      const points = (field) => rows.filter((row) => row[field] !== null && row[field] !== undefined).map((row) => [row.step, row[field]]);
      return { label: name, colour: kindColour(at), points: points(key), low: points(`${key}_low`), high: points(`${key}_high`) };
    };
    const figures = [];
    for (const [key, title] of [["reward_mean", "Reward"], ["accuracy", "Accuracy"]]) {
      const series = names.map((name, at) => line(name, at, key)).filter((each) => each.points.length);
      if (series.length) figures.push(lineChart({ title, unit: "mean, 95 % interval", series, signal, height: 200 }));
    }
    const curves = passCurves(scores, names);
    if (curves.some((line) => line.points.length > 1)) figures.push(lineChart({ title: "pass@k", unit: "first and last evaluation", series: curves, signal, xName: "k", height: 200 }));
    return element("div", { class: "charts" }, figures);
  }

  /** Of each name: the share of tasks that are solved in k samples, at its first and at its last step. */
  function passCurves(scores, names) {
    const curves = [];
    names.forEach((name) => {
      const rows = scores.filter((row) => row.name === name && Object.keys(row.pass_at || {}).length).sort((a, b) => a.step - b.step);
      const ends = rows.length > 1 ? [rows[0], rows[rows.length - 1]] : rows;
      for (const row of ends) {
        const ks = Object.keys(row.pass_at).map(Number).sort((a, b) => a - b);
        const points = (at) => ks.filter((k) => row.pass_at[k][at] !== null && row.pass_at[k][at] !== undefined).map((k) => [k, row.pass_at[k][at]]);
        curves.push({ label: `${name} · step ${row.step}`, colour: kindColour(curves.length), points: points(0), low: points(1), high: points(2) });
      }
    });
    return curves;
  }

  function between(row, key) {
    if (row[key] === null || row[key] === undefined) return "–";
    const [low, high] = [row[`${key}_low`], row[`${key}_high`]];
    return low === null || low === undefined ? number(row[key]) : `${number(row[key])} [${number(low)}, ${number(high)}]`;
  }

  function gainsTable(gains) {
    if (!gains.length) return null;
    return plainTable("Gains", [
      { title: "Evaluation", cell: (row) => row.name },
      { title: "First accuracy [95 %]", number: true, cell: (row) => `${between(row.first, "accuracy")} (step ${row.first.step})` },
      { title: "Last accuracy [95 %]", number: true, cell: (row) => `${between(row.last, "accuracy")} (step ${row.last.step})` },
      { title: "Gain [95 %, same tasks]", number: true, cell: (row) => between(row, "gain") },
      { title: "Tasks", number: true, grow: true, cell: (row) => number(row.tasks) },
    ], gains);
  }

  function scoresTable(scores) {
    return plainTable("Scores", [
      { title: "Step", number: true, cell: (row) => number(row.step) },
      { title: "Evaluation", cell: (row) => row.name },
      { title: "Samples", number: true, cell: (row) => number(row.samples) },
      { title: "Failed", number: true, cell: (row) => number(row.failed) },
      { title: "Reward [95 %]", number: true, cell: (row) => between(row, "reward_mean") },
      { title: "Accuracy [95 %]", number: true, cell: (row) => between(row, "accuracy") },
      { title: "pass@k", grow: true, cell: (row) => Object.entries(row.pass_at || {}).map(([k, value]) => `@${k} ${number(value[0])}`).join("  ") || "–" },
    ], scores);
  }

  function tasksTable(run, first, signal) {
    const steps = [...new Set(first.tasks.rows.flatMap((row) => Object.keys(row.by_step)))].map(Number).sort((a, b) => a - b);
    const shown = steps.length > 6 ? [steps[0], ...steps.slice(-5)] : steps;
    const limit = Math.max(1e-9, ...first.tasks.rows.flatMap((row) => Object.values(row.by_step).flat().map((reward) => Math.abs(reward ?? 0))));
    const squares = (rewards) => element("span", { class: "squares", title: rewards.map((reward) => number(reward)).join(", ") },
      rewards.slice(0, 16).map((reward) => element("span", { class: reward === null ? "square failed" : "square", style: { "background-color": reward === null ? "transparent" : signColour(reward, limit) } })),
      element("span", {}, number(mean(rewards))));
    return dataTable({
      label: "Tasks before and after",
      columns: [
        { title: "Task", grow: true, cell: (row) => element("span", { title: row.task_id }, short(row.task_id, 60)) },
        { title: "Evaluation", cell: (row) => row.name },
        ...shown.map((step) => ({ title: `Step ${step}`, cell: (row) => (row.by_step[step] ? squares(row.by_step[step]) : "–") })),
        { title: "Gain", number: true, cell: (row) => rewardCell(row.gain) },
      ],
      href: (row) => link("tasks", [row.task_id.replace(/@\d+$/, "")], { run: run.id }),
      load: async (offset, count) => (offset === 0 ? first.tasks.rows : (await page(run, count, offset, signal)).tasks.rows),
    });
  }

  function mean(rewards) {
    const known = rewards.filter((reward) => reward !== null);
    return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  }

  return { showEvaluations };
})();
