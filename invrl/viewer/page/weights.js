// Weight updates: time per phase, canary gaps, bytes, engines.
"use strict";
invrl.weights = (() => {
  const { element, replaceChildren } = invrl.element;
  const { get, pathOf } = invrl.api;
  const { plainTable } = invrl.table;
  const { lineChart } = invrl.chart;
  const { kindColour, kindLine } = invrl.colour;
  const { bytes, clock, duration, number } = invrl.format;
  const { onNews } = invrl.events;
  const { empty } = invrl.notice;

  async function showWeights(main, run, route, signal) {
    let drawing = new AbortController();
    signal.addEventListener("abort", () => drawing.abort());

    async function draw() {
      const answer = await get(`runs/${pathOf(run.id)}/weights`, {}, signal);
      if (signal.aborted) return;
      drawing.abort();
      drawing = new AbortController();
      replaceChildren(main, element("h1", { class: "sr" }, "Weights"), bodyOf(answer, drawing.signal));
    }

    await draw();
    onNews((news) => news.run === run.id && news.kinds.includes("metrics") && !main.querySelector("details[open]") && draw().catch(() => {}), signal);
    return null;
  }

  function bodyOf({ updates, engines }, signal) {
    if (!updates.length) return [empty("No weights were sent to engines yet.")];
    const phases = [...new Set(updates.flatMap((row) => Object.keys(row.seconds || {})))];
    const points = (value) => updates.map((row) => [row.step, value(row) ?? null]);
    const figures = [
      lineChart({ title: "Seconds per phase", unit: "s", signal, sync: "weights", series: phases.map((phase, at) => ({ label: phase.replace(/_s$/, ""), ...kindLine(at), points: points((row) => row.seconds[phase]) })) }),
      lineChart({ title: "Canary gap, engine and trainer", unit: "nats", signal, sync: "weights", series: [
        { label: "greatest", colour: kindColour(1), points: points((row) => row.canary_max_gap) },
        { label: "mean", colour: kindColour(0), points: points((row) => row.canary_mean_gap) },
      ] }),
      ...Object.entries(engines || {}).map(([name, rows]) => lineChart({ title: name, signal, sync: "weights", series: [{ label: name, colour: kindColour(0), points: rows.map((row) => [row[0], row[2]]) }] })),
    ];
    return [
      element("div", { class: "charts" }, figures),
      element("h2", {}, "Updates"),
      plainTable("Weight updates", [
        { title: "Step", number: true, cell: (row) => number(row.step) },
        { title: "Version", number: true, cell: (row) => number(row.version) },
        { title: "At", cell: (row) => clock(row.time) },
        { title: "Size", number: true, cell: (row) => bytes(row.bytes) },
        ...phases.map((phase) => ({ title: phase.replace(/_s$/, ""), number: true, cell: (row) => duration(row.seconds[phase] ?? null) })),
        { title: "Canary gap", number: true, hint: "greatest, in nats", cell: (row) => number(row.canary_max_gap, 5) },
      ], [...updates].reverse()),
    ];
  }

  return { showWeights };
})();
