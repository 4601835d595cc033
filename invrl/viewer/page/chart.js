// Line charts: several series over one axis, intervals as bands, values under the cursor, the same as a table.
"use strict";
invrl.chart = (() => {
  const { element, replaceChildren } = invrl.element;
  const { number } = invrl.format;
  const { onTheme } = invrl.theme;

  const HEIGHT = 168;

  /**
   * A figure with its title, chart and legend.
   * `series`: [{label, colour, points: [[x, y|null], …], low, high, dash}] with points sorted by x; `low` and `high` are
   * points of an interval. `xName` says what x is ("step", "time"). `sync`: charts of one name share their cursor.
   */
  function lineChart({ title, series, signal, xName = "step", formatX = number, sync = "", height = HEIGHT, unit = "" }) {
    const place = element("div", { class: "plot", "aria-hidden": "true" });
    const legend = element("ul", { class: "legend" });
    const figure = element(
      "figure",
      { class: "chart", "aria-label": `${title}: ${summary(series)}` },
      element("figcaption", {}, element("span", { class: "chart-title" }, title), unit ? element("span", { class: "quiet" }, ` ${unit}`) : null),
      place,
      legend,
      valuesTable(title, series, xName, formatX),
    );
    const drawn = series.filter((line) => line.points.some((point) => point[1] !== null));
    if (!drawn.length) {
      replaceChildren(place, element("p", { class: "quiet" }, "No values."));
      place.removeAttribute("aria-hidden");
      return figure;
    }
    const { data, options } = plotOf(drawn, { xName, formatX, sync, height, legend });
    let plot = null;
    const draw = () => {
      if (!place.isConnected || place.clientWidth === 0) return;
      if (plot) plot.destroy();
      plot = new window.uPlot({ ...options(), width: place.clientWidth, height }, data, place);
    };
    const observer = new ResizeObserver(() => {
      if (plot) plot.setSize({ width: place.clientWidth, height });
      else draw();
    });
    observer.observe(place);
    onTheme(draw, signal);
    signal.addEventListener("abort", () => {
      observer.disconnect();
      if (plot) plot.destroy();
    });
    return figure;
  }

  /** A moving average with this weight (0: none) of what came before. */
  function smoothed(points, weight) {
    if (!weight) return points;
    let mean = null;
    return points.map(([x, y]) => {
      if (y === null) return [x, y];
      mean = mean === null ? y : weight * mean + (1 - weight) * y;
      return [x, mean];
    });
  }

  function plotOf(series, { xName, formatX, sync, height, legend }) {
    const xs = [...new Set(series.flatMap((line) => [line.points, line.low || [], line.high || []].flat().map((point) => point[0])))];
    xs.sort((a, b) => a - b);
    const column = (points) => {
      const byX = new Map(points);
      return xs.map((x) => (byX.has(x) ? byX.get(x) : null));
    };
    const data = [xs];
    const lines = [{ label: xName }];
    const bands = [];
    for (const line of series) {
      data.push(column(line.points));
      const few = line.points.length <= 40;
      lines.push({ label: line.label, stroke: line.colour, width: 1.5, dash: line.dash, spanGaps: true, points: { show: few, size: 5, fill: line.colour, stroke: line.colour } });
      if (line.low && line.high && line.low.length) {
        data.push(column(line.high), column(line.low));
        const edge = { stroke: `${line.colour}55`, width: 1, spanGaps: true, points: { show: few, size: 3, fill: line.colour, stroke: line.colour } };
        lines.push({ ...edge, label: `${line.label} high` }, { ...edge, label: `${line.label} low` });
        bands.push({ series: [lines.length - 2, lines.length - 1], fill: `${line.colour}26` });
      }
    }
    const shown = (at) => {
      const items = series.map((line, index) => {
        const column = data[positionOf(series, index)];
        const value = at === null ? lastOf(column) : column[at];
        return element(
          "li",
          {},
          element("span", line.dash ? { class: "swatch dashed", style: { color: line.colour } } : { class: "swatch", style: { "background-color": line.colour } }),
          element("span", { class: "legend-name" }, line.label),
          element("b", {}, number(value)),
        );
      });
      const where = at === null ? "last" : `${xName} ${formatX(xs[at])}`;
      replaceChildren(legend, element("li", { class: "quiet" }, where), items);
    };
    shown(null);
    const options = () => {
      const style = getComputedStyle(document.documentElement);
      const grid = { stroke: style.getPropertyValue("--line").trim(), width: 1 };
      const ink = style.getPropertyValue("--quiet").trim();
      const font = "11px system-ui, sans-serif";
      return {
        legend: { show: false },
        padding: [8, 8, 0, 0],
        cursor: { y: false, drag: { x: true, y: false }, points: { size: 6 }, ...(sync ? { sync: { key: sync } } : {}) },
        scales: { x: { time: false }, y: { range: rangeOfValues } },
        bands,
        series: lines,
        axes: [
          { stroke: ink, grid: { show: false }, ticks: grid, font, size: 28, space: xName === "time" ? 88 : 50, values: (plot, ticks) => ticks.map((tick) => (Number.isInteger(tick) || xName !== "step" ? formatX(tick) : "")) },
          { stroke: ink, grid, ticks: { show: false }, font, size: 52, values: (plot, ticks) => ticks.map((tick) => compact(tick)) },
        ],
        hooks: { setCursor: [(plot) => shown(plot.cursor.idx ?? null)] },
      };
    };
    return { data, options };
  }

  function positionOf(series, index) {
    let at = 1;
    for (let before = 0; before < index; before += 1) {
      const line = series[before];
      at += line.low && line.high && line.low.length ? 3 : 1;
    }
    return at;
  }

  function rangeOfValues(plot, low, high) {
    if (low === null) return [0, 1];
    if (low === 0 && high === 0) return [0, 1];
    if (low === high) return [low - (Math.abs(low) * 0.1 || 1), high + (Math.abs(high) * 0.1 || 1)];
    const room = (high - low) * 0.06;
    return [low >= 0 && low < room * 4 ? Math.min(0, low) : low - room, high + room];
  }

  function compact(tick) {
    const size = Math.abs(tick);
    if (size >= 1e4 || (size > 0 && size < 1e-3)) return tick.toExponential(1).replace("e+", "e").replace(".0e", "e");
    return String(Number(tick.toPrecision(4)));
  }

  function lastOf(column) {
    for (let at = column.length - 1; at >= 0; at -= 1) if (column[at] !== null && column[at] !== undefined) return column[at];
    return null;
  }

  function summary(series) {
    return series
      .map((line) => {
        const values = line.points.map((point) => point[1]).filter((value) => value !== null);
        if (!values.length) return `${line.label} has no values`;
        return `${line.label} from ${number(values[0])} to ${number(values[values.length - 1])}, least ${number(Math.min(...values.slice(-5000)))}, greatest ${number(Math.max(...values.slice(-5000)))}`;
      })
      .join("; ");
  }

  function valuesTable(title, series, xName, formatX) {
    const details = element("details", { class: "values" }, element("summary", {}, "Values"));
    details.addEventListener("toggle", () => {
      if (!details.open || details.childElementCount > 1) return;
      const xs = [...new Set(series.flatMap((line) => line.points.map((point) => point[0])))].sort((a, b) => a - b).slice(-200);
      const maps = series.map((line) => new Map(line.points));
      details.append(
        element(
          "div",
          { class: "scroll", tabindex: "0", role: "region", "aria-label": `Values of ${title}` },
          element(
            "table",
            { class: "plain" },
            element("thead", {}, element("tr", {}, element("th", { scope: "col" }, xName), series.map((line) => element("th", { scope: "col" }, line.label)))),
            element("tbody", {}, xs.map((x) => element("tr", {}, element("th", { scope: "row" }, formatX(x)), maps.map((map) => element("td", { class: "num" }, number(map.get(x))))))),
          ),
        ),
      );
    });
    return details;
  }

  return { lineChart, smoothed };
})();
