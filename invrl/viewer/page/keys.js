// Keys: each page says which it has, `?` shows them. Keys typed into a field are the field's.
"use strict";
invrl.keys = (() => {
  const { element, replaceChildren } = invrl.element;

  let pageKeys = [];
  let commonKeys = [];
  let dialog = null;

  /** [{keys: ["j", "ArrowDown"], label: "next rollout", run: () => …}] of the page that is shown. */
  function setPageKeys(keys) {
    pageKeys = keys;
  }

  function setCommonKeys(keys) {
    commonKeys = keys;
  }

  function showKeys() {
    if (dialog && dialog.open) {
      dialog.close();
      return;
    }
    if (!dialog) {
      dialog = element("dialog", { class: "keys", "aria-labelledby": "keys-title" });
      document.body.append(dialog);
    }
    const rows = [...pageKeys, ...commonKeys].map((key) =>
      element("tr", {}, element("td", {}, key.keys.map((name) => element("kbd", {}, shown(name)))), element("td", {}, key.label)),
    );
    replaceChildren(
      dialog,
      element("h2", { id: "keys-title" }, "Keys"),
      element("table", {}, element("tbody", {}, rows)),
      element("form", { method: "dialog" }, element("button", { class: "button" }, "Close")),
    );
    dialog.showModal();
  }

  function shown(name) {
    return { ArrowDown: "↓", ArrowUp: "↑", ArrowLeft: "←", ArrowRight: "→" }[name] || name;
  }

  let prefix = "";

  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    const target = event.target;
    if (target instanceof HTMLElement && target.matches("input, textarea, select, [contenteditable]")) {
      if (event.key === "Escape") target.blur();
      return;
    }
    if (dialog && dialog.open && event.key !== "?") return;
    const pressed = prefix ? `${prefix} ${event.key}` : event.key;
    const all = [...pageKeys, ...commonKeys];
    const found = all.find((key) => key.keys.includes(pressed));
    const begins = !prefix && all.some((key) => key.keys.some((name) => name.startsWith(`${event.key} `)));
    prefix = "";
    if (found) {
      event.preventDefault();
      found.run();
    } else if (begins) {
      prefix = event.key;
      window.setTimeout(() => (prefix = ""), 1000);
    }
  });

  return { setPageKeys, setCommonKeys, showKeys };
})();
