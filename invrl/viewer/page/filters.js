// Filters of rollouts: which there are, the form that sets them, the words that say which are set.
"use strict";
invrl.filters = (() => {
  const { element, replaceChildren } = invrl.element;
  const { number } = invrl.format;
  const { change } = invrl.route;

  const CHOICES = [
    ["purpose", "Purpose"],
    ["evaluation", "Evaluation"],
    ["state", "Ended as"],
    ["drop", "Dropped because"],
    ["failure", "Failed with"],
    ["fork", "Forked because"],
    ["trained", "Trained"],
    ["truncated", "Truncated"],
  ];
  const TEXTS = [
    ["step", "Step"],
    ["task", "Task"],
    ["group", "Group"],
  ];
  const RANGES = [
    ["reward", "Reward"],
    ["tokens", "Sampled tokens"],
    ["turns", "Turns"],
    ["staleness", "Staleness"],
    ["forks", "Forks"],
    ["seconds", "Seconds"],
    ["advantage", "Advantage"],
    ["logprob", "Mean log-prob"],
    ["gap", "Engine–trainer gap"],
    ["surprise", "Surprise"],
  ];
  const YES_NO = { 0: "no", 1: "yes" };

  const FILTERS = [
    "q", ...CHOICES.map(([name]) => name), ...TEXTS.map(([name]) => name), "session", "ended",
    ...RANGES.flatMap(([name]) => [`min_${name}`, `max_${name}`]), "component", "min_component", "max_component",
  ];

  /** The filters, sort and order that are set in these parameters. */
  function filtersOf(parameters) {
    const set = {};
    for (const name of [...FILTERS, "sort", "order"]) {
      const value = parameters.get(name);
      if (value !== null && value !== "") set[name] = value;
    }
    return set;
  }

  /** The form. `update(facets, parameters)` puts counts and values in; fields that have the focus stay as they are. */
  function filterForm() {
    const fields = {};
    const set = (values) => change({ ...values, at: null });
    const form = element("form", { class: "filters", "aria-label": "Filters", on: { submit: (event) => event.preventDefault() } });

    function field(name, title, node) {
      fields[name] = node;
      return element("label", { class: "field" }, element("span", {}, title), node);
    }

    function typed(properties, name) {
      const input = element("input", { ...properties, autocomplete: "off" });
      let timer = 0;
      const apply = () => set({ [name]: input.value.trim() || null });
      input.addEventListener("input", () => {
        window.clearTimeout(timer);
        timer = window.setTimeout(apply, 300);
      });
      input.addEventListener("change", apply);
      return input;
    }

    for (const [name, title] of CHOICES) {
      const select = element("select", { name, on: { change: () => set({ [name]: select.value || null }) } }, element("option", { value: "" }, "any"));
      form.append(field(name, title, select));
    }
    for (const [name, title] of TEXTS) form.append(field(name, title, typed({ type: name === "step" ? "number" : "text", name }, name)));
    for (const [name, title] of RANGES) form.append(range(name, title, title));
    const component = element("select", { name: "component", on: { change: () => set({ component: component.value || null }) } }, element("option", { value: "" }, "none"));
    const ofComponent = element("div", { class: "of-component" }, field("component", "Component of the reward", component), range("component", "Its value", "Component"));
    form.append(ofComponent, element("button", { type: "button", class: "button", on: { click: clear } }, "Clear all filters"));

    function range(name, title, spoken) {
      const low = typed({ type: "number", step: "any", name: `min_${name}`, placeholder: "from", "aria-label": `${spoken} from` }, `min_${name}`);
      const high = typed({ type: "number", step: "any", name: `max_${name}`, placeholder: "to", "aria-label": `${spoken} to` }, `max_${name}`);
      fields[`min_${name}`] = low;
      fields[`max_${name}`] = high;
      return element("fieldset", { class: "field range" }, element("legend", {}, title), low, high);
    }

    function clear() {
      set(Object.fromEntries(FILTERS.map((name) => [name, null])));
    }

    function update(facets, parameters) {
      for (const [name] of CHOICES) options(fields[name], facets ? facets[name] : null, parameters.get(name) || "", name === "trained" || name === "truncated" ? YES_NO : {});
      if (facets) {
        const names = facets.components || [];
        ofComponent.hidden = !names.length && !parameters.get("component");
        options(component, Object.fromEntries(names.map((name) => [name, null])), parameters.get("component") || "", {});
        for (const [name, bounds] of Object.entries(facets.ranges || {})) {
          if (!bounds || !fields[`min_${name}`]) continue;
          fields[`min_${name}`].placeholder = number(bounds[0]);
          fields[`max_${name}`].placeholder = number(bounds[1]);
        }
      }
      for (const name of Object.keys(fields)) {
        const node = fields[name];
        if (node instanceof HTMLInputElement && node !== document.activeElement) node.value = parameters.get(name) || "";
      }
    }

    return { node: form, update, clear };
  }

  /** One button for each filter that is set: it takes the filter away. */
  function chips(parameters) {
    const titles = Object.fromEntries([...CHOICES, ...TEXTS, ...RANGES, ["component", "Component"], ["session", "Session"], ["q", "Said"], ["ended", "Ended"]]);
    return FILTERS.filter((name) => parameters.get(name)).map((name) => {
      const value = parameters.get(name);
      const [bound, rest] = /^(min|max)_/.test(name) ? [name.slice(0, 3), name.slice(4)] : ["", name];
      const sign = { min: " ≥ ", max: " ≤ " }[bound] || ": ";
      const shown = name === "trained" || name === "truncated" || name === "ended" ? YES_NO[value] || value : value;
      return element(
        "button",
        { class: "chip", title: "Take this filter away", on: { click: () => change({ [name]: null, at: null }) } },
        `${titles[rest] || rest}${sign}${shown}`,
        element("span", { "aria-hidden": "true" }, " ×"),
      );
    });
  }

  function options(select, counts, value, names) {
    const first = select.options[0];
    const entries = Object.entries(counts || {}).filter(([key]) => key !== "").sort((a, b) => (b[1] || 0) - (a[1] || 0));
    if (value && !entries.some(([key]) => key === value)) entries.push([value, counts ? 0 : null]);
    replaceChildren(
      select,
      first,
      entries.map(([key, count]) => element("option", { value: key }, `${names[key] || key}${count === null ? "" : ` (${number(count)})`}`)),
    );
    select.value = value;
    select.closest(".field").classList.toggle("set", Boolean(value));
  }

  return { FILTERS, filtersOf, filterForm, chips };
})();
