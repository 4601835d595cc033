// Runs laid over each other: their charts, any metric by search, how their settings differ.
"use strict";
invrl.overview = (() => {
  const { element, replaceChildren } = invrl.element;
  const { get, isExport } = invrl.api;
  const { change, link } = invrl.route;
  const { allRuns, chosenRuns, runColour, loadRuns } = invrl.runs;
  const { readMetrics, metricNames } = invrl.metrics;
  const { lineChart, smoothed } = invrl.chart;
  const { plainTable } = invrl.table;
  const { kindColour } = invrl.colour;
  const { number, clock, duration, plain, short } = invrl.format;
  const { stateMark } = invrl.frame;
  const { empty, failure } = invrl.notice;
  const { onNews } = invrl.events;

  const CHARTS = [
    ["Reward", "rollout/reward_mean", ""],
    ["Loss", "train/loss", ""],
    ["Held-out loss", "eval/loss", ""],
    ["Response length", "rollout/response_length", "tokens"],
    ["Staleness", "rollout/staleness_mean", "versions"],
    ["KL (approximate)", "train/approx_kl", "nats"],
    ["KL to the reference", "train/kl_reference", "nats"],
    ["Clip fraction", "train/clip_fraction", ""],
    ["Log-prob gap, engine and trainer", "train/logprob_gap_mean", "nats"],
    ["Entropy", "train/entropy", "nats"],
    ["Gradient norm", "train/grad_norm", ""],
    ["Rollout speed", "time/rollout_tokens_per_s", "tokens/s"],
    ["Training speed", "time/train_tokens_per_s", "tokens/s"],
  ];
  const PHASES = ["time/rollout_s", "time/assemble_s", "time/teacher_s", "time/train_s", "time/sync_s", "time/checkpoint_s"];
  const SPREAD = ["rollout/reward_std", "rollout/reward_min", "rollout/reward_max"];
  const MEMORY = ["train/peak_memory_gb", "train/estimated_memory_gb"];
  const WHOLE_STEP = "time/step_s"; // Of runs on a file, which have no phases of rollouts.
  const FOUND = 60;

  async function showOverview(main, run, route, signal) {
    const list = element("section", { "aria-label": "Runs" });
    const charts = element("div", { class: "charts" });
    const settings = element("section", { "aria-labelledby": "settings-title" });
    let charting = new AbortController();
    if (!allRuns().length) {
      replaceChildren(main, empty("No run is served here.", "invrl view RUN"));
      return null;
    }

    async function drawCharts() {
      const mine = new AbortController();
      const runs = chosenRuns();
      const names = await chartNames(runs, signal);
      const values = await readMetrics(runs, names.all, signal);
      if (signal.aborted) return;
      charting.abort();
      charting = mine;
      signal.addEventListener("abort", () => mine.abort());
      const figures = figuresOf(runs, names, values, mine.signal);
      replaceChildren(charts, figures.length ? figures : empty("No metrics yet.", "They come with the first step."));
    }

    async function drawSettings() {
      const runs = chosenRuns();
      const answer = await get("config", isExport() ? {} : { runs: runs.map((each) => each.id).join(",") }, signal);
      replaceChildren(settings, settingsOf(runs, answer));
    }

    const draw = async () => {
      replaceChildren(list, outcomes(), runsTable());
      try {
        await Promise.all([drawCharts(), drawSettings()]);
      } catch (error) {
        if (error.name !== "AbortError") replaceChildren(charts, failure(error));
      }
    };
    replaceChildren(main, element("h1", { class: "sr" }, "Overview"), list, controls(signal), charts, settings);
    await draw();
    onNews(async (news) => {
      if (!news.kinds.some((kind) => kind === "metrics" || kind === "state")) return;
      if (charts.matches(":hover") && charts.querySelector("details[open]")) return;
      await loadRuns(signal).catch(() => {});
      draw();
    }, signal);
    return draw;
  }

  function outcomes() {
    return element("div", { class: "outcomes" }, allRuns().map((run) =>
      element("div", {}, element("p", {}, element("strong", {}, run.name), ` ${run.outcome}`),
        run.log_end ? element("details", {}, element("summary", {}, "The end of its log"), element("pre", { class: "traceback", tabindex: "0" }, run.log_end)) : null)));
  }

  function runsTable() {
    const chosen = new Set(chosenRuns().map((run) => run.id));
    const toggle = (id) => {
      if (chosen.has(id)) chosen.delete(id);
      else chosen.add(id);
      const ids = allRuns().map((run) => run.id).filter((each) => chosen.has(each));
      change({ runs: ids.length === allRuns().length ? null : ids.join(",") || "none" });
    };
    const columns = [
      {
        title: "Run",
        cell: (run) =>
          element(
            "label",
            { class: "run-name" },
            element("input", { type: "checkbox", checked: chosen.has(run.id), on: { change: () => toggle(run.id) } }),
            element("span", { class: "swatch", style: { "background-color": runColour(run.id) } }),
            run.name,
          ),
      },
      { title: "State", cell: stateMark },
      { title: "Step", number: true, cell: (run) => `${run.step}${run.num_steps ? ` / ${run.num_steps}` : ""}` },
      { title: "Phase", cell: (run) => (run.state === "running" ? run.phase || "–" : "–") },
      { title: "Started", cell: (run) => clock(run.started_at) },
      { title: "Took", number: true, cell: (run) => (run.last_at && run.started_at ? duration(run.last_at - run.started_at) : "–") },
      { title: "Restarts", number: true, cell: (run) => number(Math.max(0, (run.incarnations || 1) - 1)) },
      { title: "Rollouts", number: true, cell: (run) => element("a", { href: link("rollouts", [], { run: run.id }) }, number(run.index ? run.index.rollouts : 0)) },
      { title: "Folder", grow: true, cell: (run) => element("span", { class: "quiet", title: run.path }, run.path) },
    ];
    return plainTable("Runs", columns, allRuns());
  }

  function controls(signal) {
    const parameters = () => new URLSearchParams(window.location.hash.split("?")[1] || "");
    const chosen = () => (parameters().get("metrics") || "").split(",").filter(Boolean);
    const search = element("input", { type: "search", id: "metric-search", placeholder: "Add a metric…", "aria-label": "Search metrics", autocomplete: "off", "aria-controls": "metric-found" });
    const found = element("ul", { id: "metric-found", class: "found", hidden: true });
    let timer = 0;
    const look = async () => {
      const text = search.value.trim();
      if (!text) {
        found.hidden = true;
        return;
      }
      let names = [];
      try {
        names = await metricNames(chosenRuns(), text, signal);
      } catch (error) {
        if (error.name !== "AbortError") replaceChildren(found, element("li", {}, failure(error)));
        found.hidden = false;
        return;
      }
      const items = names.slice(0, FOUND).map((entry) =>
        element("li", {}, element("button", { on: { click: () => add(entry.name) } }, entry.name, element("span", { class: "quiet" }, number(entry.last)))),
      );
      if (names.length > FOUND) items.push(element("li", { class: "quiet" }, `${number(names.length - FOUND)} more: type more of the name`));
      if (!names.length) items.push(element("li", { class: "quiet" }, "No metric has this in its name."));
      replaceChildren(found, items);
      found.hidden = false;
    };
    const add = (name) => {
      found.hidden = true;
      search.value = "";
      change({ metrics: [...new Set([...chosen(), name])].join(",") });
    };
    search.addEventListener("input", () => {
      window.clearTimeout(timer);
      timer = window.setTimeout(look, 150);
    });
    search.addEventListener("keydown", (event) => {
      if (event.key === "ArrowDown") {
        event.preventDefault();
        found.querySelector("button")?.focus();
      }
      if (event.key === "Enter") found.querySelector("button")?.click();
    });
    found.addEventListener("keydown", (event) => {
      const items = [...found.querySelectorAll("button")];
      const at = items.indexOf(document.activeElement);
      if (event.key === "ArrowDown") items[Math.min(items.length - 1, at + 1)]?.focus();
      else if (event.key === "ArrowUp") (at <= 0 ? search : items[at - 1]).focus();
      else if (event.key === "Escape") {
        found.hidden = true;
        search.focus();
      } else return;
      event.preventDefault();
    });
    const axis = choice("x", "Axis", [["step", "by step"], ["time", "by time"]], parameters().get("x") || "step");
    const smooth = choice("smooth", "Smoothing", [["0", "not smoothed"], ["0.6", "smoothed"], ["0.9", "very smooth"]], parameters().get("smooth") || "0");
    return element("div", { class: "controls" }, element("div", { class: "search-box" }, search, found), axis, smooth);
  }

  function choice(name, label, options, value) {
    const select = element("select", { "aria-label": label, on: { change: () => change({ [name]: select.value === options[0][0] ? null : select.value }) } });
    select.append(...options.map(([key, text]) => element("option", { value: key, selected: key === value }, text)));
    return select;
  }

  async function chartNames(runs, signal) {
    const parameters = new URLSearchParams(window.location.hash.split("?")[1] || "");
    const added = (parameters.get("metrics") || "").split(",").filter(Boolean);
    const scores = runs.length ? (await metricNames(runs, "eval/", signal)).map((entry) => entry.name) : [];
    const held = scores.filter((name) => /^eval\/.+\/reward_mean$/.test(name)).slice(0, 20);
    const all = [...added, ...CHARTS.map((chart) => chart[1]), ...PHASES, WHOLE_STEP, ...SPREAD, ...MEMORY, ...held.flatMap((name) => [name, `${name}_low`, `${name}_high`])];
    return { added, held, all: [...new Set(all)], byTime: parameters.get("x") === "time", weight: Number(parameters.get("smooth") || 0) };
  }

  function figuresOf(runs, names, values, signal) {
    const start = (run) => run.started_at || firstTime(values[run.id]);
    const points = (run, name) => {
      const rows = (values[run.id] || {})[name] || [];
      const placed = rows.filter((row) => !names.byTime || row[1] !== null).map(([step, time, value]) => [names.byTime ? time - start(run) : step, value]);
      return placed.sort((a, b) => a[0] - b[0]);
    };
    const common = { signal, sync: "overview", xName: names.byTime ? "time" : "step", formatX: names.byTime ? duration : number };
    const byRun = (name) => runs.map((run) => ({ label: run.name, colour: runColour(run.id), points: smoothed(points(run, name), names.weight) })).filter((line) => line.points.length);
    const figures = [];
    for (const name of names.added) {
      const figure = lineChart({ ...common, title: name, series: byRun(name) });
      const remove = element("button", { class: "button quiet-button remove", "aria-label": `Remove ${name}`, on: { click: () => change({ metrics: names.added.filter((each) => each !== name).join(",") }) } }, "×");
      figure.querySelector("figcaption").append(remove);
      figures.push(figure);
    }
    const addChart = (title, unit, series) => {
      if (series.length) figures.push(lineChart({ ...common, title, unit, series }));
    };
    const rewards = byRun(CHARTS[0][1]);
    if (runs.length === 1 && rewards.length) Object.assign(rewards[0], rewardBand((name) => points(runs[0], name)));
    addChart(CHARTS[0][0], rewards[0]?.low?.length ? "mean of a step ± standard deviation" : "mean of a step", rewards);
    addChart("Held-out score", "mean, 95 % interval", heldOut(runs, names.held, points));
    for (const [title, name, unit] of CHARTS.slice(1)) addChart(title, unit, byRun(name));
    for (const run of runs.slice(0, 4)) {
      const phaseNames = points(run, "time/train_s").length ? PHASES : [WHOLE_STEP, ...PHASES];
      const phases = phaseNames.map((name, at) => ({ label: name.slice(5, -2), colour: kindColour(at), points: points(run, name) })).filter((line) => line.points.length);
      addChart(runs.length > 1 ? `Seconds per phase · ${run.name}` : "Seconds per phase", "s", phases);
      const memory = MEMORY.map((name, at) => ({ label: ["measured", "estimated"][at], colour: kindColour(at), points: points(run, name) })).filter((line) => line.points.length);
      addChart(runs.length > 1 ? `Trainer memory · ${run.name}` : "Trainer memory", "GB, largest rank", memory);
    }
    return figures;
  }

  /** The mean reward minus and plus the standard deviation, within the lowest and the highest reward of the step. */
  function rewardBand(pointsOf) {
    const [deviations, lowest, highest] = SPREAD.map((name) => new Map(pointsOf(name)));
    const whole = pointsOf(CHARTS[0][1]).filter(([x, mean]) => [mean, deviations.get(x), lowest.get(x), highest.get(x)].every(Number.isFinite));
    return {
      low: whole.map(([x, mean]) => [x, Math.max(lowest.get(x), mean - deviations.get(x))]),
      high: whole.map(([x, mean]) => [x, Math.min(highest.get(x), mean + deviations.get(x))]),
    };
  }

  function heldOut(runs, held, points) {
    const lines = [];
    for (const run of runs) {
      held.forEach((name, at) => {
        const line = points(run, name);
        if (!line.length) return;
        const mode = name.slice(5, -"/reward_mean".length);
        const colour = runs.length === 1 ? kindColour(at) : runColour(run.id);
        const label = runs.length === 1 ? mode : `${run.name} · ${mode}`;
        lines.push({ label, colour, dash: runs.length > 1 && at > 0 ? [4 * at, 3] : undefined, points: line, low: points(run, `${name}_low`), high: points(run, `${name}_high`) });
      });
    }
    return lines;
  }

  function firstTime(values) {
    const times = Object.values(values || {}).flatMap((rows) => (rows.length && rows[0][1] !== null ? [rows[0][1]] : []));
    return times.length ? Math.min(...times) : 0;
  }

  function settingsOf(runs, { runs: all, differences, changed }) {
    const ids = new Set(runs.map((run) => run.id));
    const title = element("h2", { id: "settings-title" }, "Settings");
    const wide = differences.filter((row) => new Set(runs.map((run) => JSON.stringify(row.values[run.id] ?? null))).size > 1);
    const columns = [{ title: "Setting", cell: (row) => element("code", {}, row.key) }].concat(
      runs.map((run) => ({ title: run.name, cell: (row) => element("span", { title: plain(row.values[run.id]) }, short(plain(row.values[run.id]), 60)) })),
    );
    const parts = [title];
    if (runs.length > 1) {
      parts.push(wide.length ? plainTable("Settings that differ", columns, wide) : element("p", { class: "quiet" }, "These runs have the same settings."));
    }
    for (const [id, sections] of Object.entries(all)) {
      if (!ids.has(id)) continue;
      const rows = Object.entries(sections).flatMap(([section, keys]) =>
        keys && typeof keys === "object" && !Array.isArray(keys)
          ? Object.entries(keys).map(([key, value]) => ({ key: `${section}.${key}`, value }))
          : [{ key: section, value: keys }],
      );
      const name = runs.find((run) => run.id === id).name;
      parts.push(
        element("details", { class: "settings", open: runs.length === 1 }, element("summary", {}, `Settings of ${name} that differ from their defaults (${changed[id].length})`),
          plainTable(`Changed settings of ${name}`, [
            { title: "Setting", cell: (row) => element("code", {}, row.key) },
            { title: "Value", cell: (row) => element("code", {}, plain(row.value)) },
            { title: "Default", grow: true, cell: (row) => element("code", {}, plain(row.default)) },
          ], changed[id])),
        element("details", { class: "settings" }, element("summary", {}, `All settings of ${name} (${rows.length})`),
          plainTable(`Settings of ${name}`, [
            { title: "Setting", cell: (row) => element("code", {}, row.key) },
            { title: "Value", grow: true, cell: (row) => element("code", {}, plain(row.value)) },
          ], rows)),
      );
    }
    return parts;
  }

  return { showOverview };
})();
