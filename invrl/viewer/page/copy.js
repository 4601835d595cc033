// Buttons that put a text on the clipboard.
"use strict";
invrl.copy = (() => {
  const { element } = invrl.element;

  function copyButton(title, textOf) {
    const button = element("button", { class: "button small", type: "button", on: { click: copy } }, title);
    async function copy() {
      const done = await put(await textOf());
      button.textContent = done ? "Copied" : "Not copied";
      document.querySelector("#status").textContent = done ? `${title}: copied` : "The browser did not allow copying";
      window.setTimeout(() => (button.textContent = title), 1200);
    }
    return button;
  }

  async function put(text) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch (error) {
      const area = element("textarea", { class: "sr", "aria-hidden": "true" });
      area.value = text;
      document.body.append(area);
      area.select();
      const done = document.execCommand("copy"); // Pages opened from disk have no clipboard of their own.
      area.remove();
      return done;
    }
  }

  return { copyButton };
})();
