// Processes over time: lanes, engines, gateway, memory.
"use strict";
invrl.processes = (() => {
  const { element, replaceChildren } = invrl.element;
  const { get, pathOf } = invrl.api;
  const { change, currentRoute } = invrl.route;
  const { laneChart } = invrl.lanes;
  const { lineChart } = invrl.chart;
  const { kindColour } = invrl.colour;
  const { clock, duration } = invrl.format;
  const { setPageKeys } = invrl.keys;
  const { onNews } = invrl.events;
  const { empty } = invrl.notice;

  const GIB = 1024 ** 3;

  async function showProcesses(main, run, route, signal) {
    const place = element("div", {});
    let drawing = new AbortController();
    signal.addEventListener("abort", () => drawing.abort());
    let view = null;

    async function draw() {
      const timeline = await get(`runs/${pathOf(run.id)}/timeline`, {}, signal);
      if (signal.aborted) return;
      drawing.abort();
      drawing = new AbortController();
      view = lanesOf(timeline, drawing.signal);
      replaceChildren(place, view ? view.node : empty("No phase was recorded yet: there is nothing to lay over time."), samplesOf(timeline.samples, drawing.signal));
      view?.redraw();
    }

    replaceChildren(main, element("h1", { class: "sr" }, "Processes"), place);
    setPageKeys([
      { keys: ["+", "="], label: "zoom in", run: () => view?.zoom(0.5) },
      { keys: ["-"], label: "zoom out", run: () => view?.zoom(2) },
      { keys: ["ArrowRight", "j"], label: "later", run: () => view?.move(0.5) },
      { keys: ["ArrowLeft", "k"], label: "earlier", run: () => view?.move(-0.5) },
      { keys: ["0"], label: "all of it", run: () => change({ from: null, to: null }) },
    ]);
    await draw();
    onNews((news) => news.run === run.id && (news.kinds.includes("timeline") || news.kinds.includes("metrics")) && !place.contains(document.activeElement) && draw().catch(() => {}), signal);
    return () => view?.redraw();
  }

  function lanesOf(timeline, signal) {
    const spans = timeline.spans.filter((span) => span.end > span.start);
    if (!spans.length) return null;
    const first = Math.min(...ends(spans.map((span) => span.start), Math.min));
    const last = Math.max(...ends(spans.map((span) => span.end), Math.max));
    const chart = laneChart(spans, timeline.starts);
    const range = () => {
      const { parameters } = currentRoute();
      const from = first + Number(parameters.get("from") || 0);
      const to = parameters.get("to") ? first + Number(parameters.get("to")) : last;
      return from < to ? [from, to] : [first, last];
    };
    const set = (from, to) => {
      const low = Math.max(first, from);
      const high = Math.min(last, to);
      const all = low <= first && high >= last;
      change({ from: all ? null : (low - first).toFixed(2), to: all ? null : (high - first).toFixed(2) });
    };
    const zoom = (factor) => {
      const [from, to] = range();
      const middle = (from + to) / 2;
      const half = Math.max(0.05, ((to - from) / 2) * factor);
      set(middle - half, middle + half);
    };
    const move = (share) => {
      const [from, to] = range();
      const by = (to - from) * share;
      if (by > 0 ? to < last : from > first) set(from + by, to + by);
    };
    const shown = element("span", { class: "quiet" });
    const redraw = () => {
      const [from, to] = range();
      shown.textContent = `${clock(from)} and ${duration(to - from)} on`;
      chart.draw(from, to);
    };
    const lastSteps = () => {
      const steps = [...new Set(spans.map((span) => span.step))].sort((a, b) => a - b).slice(-3);
      const members = spans.filter((span) => steps.includes(span.step));
      set(Math.min(...members.map((span) => span.start)), last);
    };
    const observer = new ResizeObserver(redraw);
    observer.observe(chart.place);
    signal.addEventListener("abort", () => observer.disconnect());
    const button = (title, spoken, apply) => element("button", { class: "button small", "aria-label": spoken, title: spoken, on: { click: apply } }, title);
    const now = timeline.now && timeline.now.phase ? `now: ${timeline.now.phase}, step ${timeline.now.step}` : "";
    const node = element("section", { "aria-labelledby": "lanes-title" },
      element("h2", { id: "lanes-title" }, "Lanes"),
      element("div", { class: "controls" }, button("−", "Zoom out", () => zoom(2)), button("+", "Zoom in", () => zoom(0.5)), button("←", "Earlier", () => move(-0.5)), button("→", "Later", () => move(0.5)), button("Last 3 steps", "Last 3 steps", lastSteps), button("All", "All of it", () => change({ from: null, to: null })), shown, element("span", { class: "quiet" }, now)),
      chart.node,
      element("details", { class: "values" }, element("summary", {}, "As a table"), chart.table()));
    return { node, redraw, zoom, move };
  }

  function ends(values, pick) {
    const parts = [];
    for (let at = 0; at < values.length; at += 10000) parts.push(pick(...values.slice(at, at + 10000)));
    return parts;
  }

  function samplesOf(samples, signal) {
    if (!samples.length) return element("section", {}, element("h2", {}, "Engines, gateway, memory"), empty("No samples of them are recorded."));
    const start = samples[0].time;
    const common = { signal, sync: "processes", xName: "time", formatX: duration };
    const figures = [];
    const add = (title, unit, series) => {
      const some = series.filter((line) => line.points.some((point) => point[1] !== null));
      if (some.length) figures.push(lineChart({ ...common, title, unit, series: some }));
    };
    const engines = [...new Set(samples.flatMap((sample) => (sample.engines || []).map((engine) => engine.name)))];
    const ofEngines = (key, scale = 1) => engines.map((name, at) => ({
      label: name, colour: kindColour(at),
      points: samples.map((sample) => [sample.time - start, scaled((sample.engines || []).find((engine) => engine.name === name)?.[key], scale)]),
    }));
    const ofGateway = (keys) => keys.map(([key, label], at) => ({ label, colour: kindColour(at), points: samples.map((sample) => [sample.time - start, sample.gateway ? sample.gateway[key] ?? null : null]) }));
    add("Running requests", "per engine", ofEngines("running"));
    add("Waiting requests", "per engine", ofEngines("waiting"));
    add("KV use", "%", ofEngines("kv_use", 100));
    add("Cache hit rate", "%", ofEngines("cache_hit_rate", 100));
    add("Engine speed", "tokens/s", ofEngines("tokens_per_s"));
    add("Gateway latency", "s", ofGateway([["latency_p50_s", "median"], ["latency_p95_s", "95 %"]]));
    add("Gateway loop lag", "s", ofGateway([["loop_lag_s", "greatest"]]));
    add("Gateway requests", "since the sample before", ofGateway([["requests", "requests"]]));
    const processes = [...new Set(samples.flatMap((sample) => Object.keys(sample.memory || {})))];
    add("Memory", "GiB", processes.map((name, at) => ({ label: name, colour: kindColour(at), points: samples.map((sample) => [sample.time - start, scaled((sample.memory || {})[name], 1 / GIB)]) })));
    return element("section", {}, element("h2", {}, "Engines, gateway, memory"), element("div", { class: "charts" }, figures));
  }

  function scaled(value, scale) {
    return value === null || value === undefined ? null : value * scale;
  }

  return { showProcesses };
})();
