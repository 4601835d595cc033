// Steps → groups → rollouts, and tasks: four tables of the same rollouts.
"use strict";
invrl.sections = (() => {
  const { element } = invrl.element;
  const { link } = invrl.route;

  const SECTIONS = [
    ["steps", "Steps"],
    ["groups", "Groups"],
    ["rollouts", "Rollouts"],
    ["tasks", "Tasks"],
  ];

  function sections(active, run, parameters) {
    const kept = { run: run.id };
    for (const name of ["step", "task", "purpose"]) if (parameters.get(name)) kept[name] = parameters.get(name);
    return element(
      "nav",
      { class: "tabs", "aria-label": "Tables of rollouts" },
      SECTIONS.map(([page, title]) => element("a", { href: link(page, [], page === "steps" || page === "tasks" ? { run: run.id } : kept), "aria-current": page === active ? "page" : null }, title)),
    );
  }

  return { sections };
})();
