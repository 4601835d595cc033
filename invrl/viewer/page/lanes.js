// Lanes over time: what each part of the run did, and what the driver waited for.
"use strict";
invrl.lanes = (() => {
  const { element, drawing, replaceChildren } = invrl.element;
  const { kindColour } = invrl.colour;
  const { duration, clock, number } = invrl.format;
  const { plainTable } = invrl.table;

  const LANE = 28;
  const LABEL = 88;
  const KNOWN = ["starting", "rollout", "assemble", "train", "sync", "checkpoint", "evaluating", "record", "teacher", "gpu_turn"];

  /** {node, draw(from, to)}: `spans` as the timeline has them; times are Unix seconds. */
  function laneChart(spans, starts) {
    const lanes = [...new Set(spans.map((span) => span.lane))];
    const names = [...new Set(spans.map((span) => span.name))];
    const colours = new Map(names.map((name, at) => [name, kindColour(KNOWN.includes(name) ? KNOWN.indexOf(name) : KNOWN.length + at)]));
    const place = element("div", { class: "lanes" });
    const told = element("p", { class: "lane-detail quiet", "aria-live": "polite" }, "Point at a span, or focus one.");
    const legend = element("ul", { class: "legend" }, names.slice(0, 12).map((name) => element("li", {}, element("span", { class: "swatch", style: { "background-color": colours.get(name) } }), name)), element("li", {}, element("span", { class: "swatch waits" }), "the driver waits"));

    function draw(from, to) {
      const width = Math.max(280, place.clientWidth || 800);
      const height = lanes.length * LANE + 24;
      const x = (time) => LABEL + ((time - from) / (to - from || 1)) * (width - LABEL - 8);
      const svg = drawing("svg", { viewBox: `0 0 ${width} ${height}`, width: String(width), height: String(height), role: "group", "aria-label": `Lanes from ${clock(from)} for ${duration(to - from)}` });
      lanes.forEach((lane, at) => {
        svg.append(drawing("text", { x: "0", y: String(at * LANE + 18), class: "lane-name" }, lane));
        svg.append(drawing("line", { x1: String(LABEL), x2: String(width - 8), y1: String((at + 1) * LANE), y2: String((at + 1) * LANE), class: "lane-line" }));
      });
      for (const tick of ticksOf(from, to, Math.max(2, Math.floor((width - LABEL) / 96)))) {
        svg.append(drawing("line", { x1: String(x(tick)), x2: String(x(tick)), y1: "0", y2: String(height - 20), class: "lane-line" }));
        svg.append(drawing("text", { x: String(x(tick)), y: String(height - 6), class: "lane-tick", "text-anchor": "middle" }, duration(tick - from)));
      }
      for (const start of starts || []) {
        if (start.time < from || start.time > to || !start.restart) continue;
        svg.append(drawing("line", { x1: String(x(start.time)), x2: String(x(start.time)), y1: "0", y2: String(height - 20), class: "lane-restart" }, drawing("title", {}, "restart")));
      }
      const seen = spans.filter((span) => span.end >= from && span.start <= to);
      // Spans thinner than a pixel are joined with their neighbour, so that a long run draws as fast as a short one.
      const lastX = new Map();
      for (const span of seen) {
        const left = Math.max(LABEL, x(span.start));
        const right = Math.min(width - 8, x(span.end));
        const key = `${span.lane}\n${span.name}`;
        if (right - left < 1 && lastX.has(key) && left - lastX.get(key) < 1) continue;
        lastX.set(key, right);
        svg.append(spanRect(span, lanes.indexOf(span.lane), left, Math.max(1.5, right - left)));
      }
      replaceChildren(place, svg);
    }

    function spanRect(span, lane, left, width) {
      const text = spanText(span);
      const rect = drawing("rect", { x: left.toFixed(1), y: String(lane * LANE + 5), width: width.toFixed(1), height: String(LANE - 10), rx: "2", class: span.waits_for ? "span waits" : "span", fill: colours.get(span.name), tabindex: "0", role: "img", "aria-label": text }, drawing("title", {}, text));
      const tell = () => (told.textContent = text);
      rect.addEventListener("mouseenter", tell);
      rect.addEventListener("focus", tell);
      return rect;
    }

    return { node: element("div", {}, place, legend, told), place, draw, table: () => totals(spans) };
  }

  function spanText(span) {
    const parts = Object.entries(span.parts || {}).map(([name, seconds]) => `${name} ${duration(seconds)}`);
    return [`${span.lane}: ${span.name}`, span.step === null ? null : `step ${span.step}`, duration(span.end - span.start), span.waits_for ? `waits for ${span.waits_for}` : null, parts.length ? parts.join(", ") : null].filter(Boolean).join(" · ");
  }

  function ticksOf(from, to, most) {
    const steps = [0.1, 0.5, 1, 5, 10, 30, 60, 300, 600, 1800, 3600, 7200, 21600, 86400, 604800];
    const step = steps.find((size) => (to - from) / size <= most) || 604800;
    const ticks = [];
    for (let time = from; time <= to; time += step) ticks.push(time);
    return ticks;
  }

  /** The same as a table: seconds of each lane and name, and of what was waited for. */
  function totals(spans) {
    const sums = new Map();
    for (const span of spans) {
      const key = JSON.stringify([span.lane, span.name, span.waits_for || ""]);
      const sum = sums.get(key) || { count: 0, seconds: 0 };
      sum.count += 1;
      sum.seconds += span.end - span.start;
      sums.set(key, sum);
    }
    const rows = [...sums].map(([key, sum]) => ({ key: JSON.parse(key), ...sum })).sort((a, b) => b.seconds - a.seconds);
    return plainTable("Seconds by lane", [
      { title: "Lane", cell: (row) => row.key[0] },
      { title: "What", cell: (row) => row.key[1] },
      { title: "Waits for", cell: (row) => row.key[2] || "–" },
      { title: "Spans", number: true, cell: (row) => number(row.count) },
      { title: "In all", number: true, cell: (row) => duration(row.seconds) },
      { title: "Mean", number: true, cell: (row) => duration(row.seconds / row.count) },
    ], rows);
  }

  return { laneChart };
})();
