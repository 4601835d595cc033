// A table of any number of rows: only those in sight are elements, and pages of rows are asked for as they come in sight.
"use strict";
invrl.table = (() => {
  const { element, replaceChildren } = invrl.element;

  const ROW = 32;
  const PAGE = 100;
  const SPARE = 12;

  /**
   * `columns`: [{title, cell(row) → text or element, number, sort, hint, wide, widest, grow}]: `sort` is the name
   * that `onSort` gets, `number` sets to the right, `wide` and `widest` are left out where there is no room.
   * `load(offset, limit)` → rows. `href(row, index)` makes the row a link. `reset(total)` draws it for the first time.
   */
  function dataTable({ label, columns, load, href, sort, order, onSort, height = null }) {
    let total = 0;
    let generation = 0;
    let selected = -1;
    let pages = new Map();
    const body = element("tbody");
    const heads = columns.map((column) => headOf(column));
    const table = element(
      "table",
      { class: "data", "aria-label": label },
      element("thead", {}, element("tr", {}, heads)),
      body,
    );
    const node = element("div", { class: "table", tabindex: "0", role: "region", "aria-label": `${label}: scroll with the arrow keys` }, table);
    if (height) node.style.setProperty("max-height", height);

    function headOf(column) {
      const properties = { scope: "col", class: classesOf(column), title: column.hint };
      if (!column.sort || !onSort) return element("th", properties, column.title);
      const isSorted = sort === column.sort;
      const arrow = isSorted ? (order === "asc" ? " ↑" : " ↓") : "";
      return element(
        "th",
        { ...properties, "aria-sort": isSorted ? (order === "asc" ? "ascending" : "descending") : "none" },
        element(
          "button",
          { class: "sort", on: { click: () => onSort(column.sort, isSorted && order === "desc" ? "asc" : "desc") } },
          column.title,
          element("span", { "aria-hidden": "true" }, arrow),
        ),
      );
    }

    function need(page) {
      if (pages.has(page)) return;
      pages.set(page, null);
      const asked = generation;
      load(page * PAGE, PAGE).then(
        (rows) => {
          if (asked !== generation) return;
          pages.set(page, rows);
          paint();
        },
        (error) => {
          if (asked !== generation || error.name === "AbortError") return;
          pages.delete(page);
          node.dispatchEvent(new CustomEvent("loadfailed", { detail: error }));
        },
      );
    }

    function rowAt(index) {
      const page = pages.get(Math.floor(index / PAGE));
      return page ? page[index % PAGE] : null;
    }

    function paint() {
      const inSight = Math.ceil((node.clientHeight || 600) / ROW);
      const first = Math.max(0, Math.floor(node.scrollTop / ROW) - SPARE);
      const end = Math.min(total, first + inSight + 2 * SPARE);
      for (let page = Math.floor(first / PAGE); page * PAGE < end; page += 1) need(page);
      const rows = [];
      if (first > 0) rows.push(spacer(first * ROW));
      for (let index = first; index < end; index += 1) rows.push(rowOf(index));
      if (end < total) rows.push(spacer((total - end) * ROW));
      const focused = document.activeElement && body.contains(document.activeElement) ? document.activeElement.closest("tr")?.getAttribute("aria-rowindex") : null;
      replaceChildren(body, rows);
      table.setAttribute("aria-rowcount", String(total + 1));
      if (focused) body.querySelector(`tr[aria-rowindex="${focused}"] a`)?.focus({ preventScroll: true });
    }

    function spacer(height) {
      return element("tr", { class: "spacer", "aria-hidden": "true", style: { height: `${height}px` } }, element("td", { colspan: String(columns.length) }));
    }

    function rowOf(index) {
      const row = rowAt(index);
      const properties = { "aria-rowindex": String(index + 2), class: index === selected ? "selected" : null };
      if (!row) return element("tr", { ...properties, class: "unloaded" }, columns.map(() => element("td", {}, "…")));
      const target = href ? href(row, index) : null;
      const cells = columns.map((column, at) => {
        const inner = column.cell(row);
        return element("td", { class: classesOf(column) }, at === 0 && target ? element("a", { href: target }, inner) : inner);
      });
      const made = element("tr", properties, cells);
      if (target) {
        made.classList.add("link");
        made.addEventListener("click", (event) => {
          if (event.target.closest("a, button") || String(window.getSelection())) return;
          window.location.hash = target;
        });
      }
      return made;
    }

    function moveBy(rows) {
      if (!total) return;
      selected = Math.min(total - 1, Math.max(0, selected + rows));
      const top = selected * ROW;
      if (top < node.scrollTop + ROW) node.scrollTop = Math.max(0, top - ROW);
      else if (top + 2 * ROW > node.scrollTop + node.clientHeight) node.scrollTop = top + 3 * ROW - node.clientHeight;
      paint();
      body.querySelector("tr.selected a")?.focus({ preventScroll: true });
    }

    function openSelected() {
      const row = selected < 0 ? null : rowAt(selected);
      if (row && href) window.location.hash = href(row, selected);
    }

    function reset(count) {
      generation += 1;
      total = count;
      pages = new Map();
      selected = Math.min(selected, count - 1);
      paint();
    }

    let waiting = false;
    node.addEventListener("scroll", () => {
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(() => {
        waiting = false;
        paint();
      });
    });
    new ResizeObserver(() => paint()).observe(node);
    return { node, reset, moveBy, openSelected };
  }

  /** A table of few rows, all of them elements. */
  function plainTable(label, columns, rows) {
    return element(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
      element(
        "table",
        { class: "plain", "aria-label": label },
        element("thead", {}, element("tr", {}, columns.map((column) => element("th", { scope: "col", class: classesOf(column), title: column.hint }, column.title)))),
        element("tbody", {}, rows.map((row) => element("tr", {}, columns.map((column) => element("td", { class: classesOf(column) }, column.cell(row)))))),
      ),
    );
  }

  function classesOf(column) {
    return [column.number ? "num" : "", column.wide ? "wide" : "", column.widest ? "widest" : "", column.grow ? "grow" : ""].filter(Boolean).join(" ") || null;
  }

  return { dataTable, plainTable };
})();
