// Elements made from values. Text is only ever set as text: what a model wrote cannot become markup.
"use strict";
invrl.element = (() => {
  /**
   * An element with properties and children.
   * `properties`: `class`, `on` ({event: listener}), `data` ({name: value}), `style` ({property: value}), any
   * attribute; null, undefined and false are left out. Children: elements, text, numbers, arrays of them, null.
   */
  function element(tag, properties = {}, ...children) {
    const made = document.createElement(tag);
    fill(made, properties, children);
    return made;
  }

  /** The same in the SVG namespace. */
  function drawing(tag, properties = {}, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    fill(made, properties, children);
    return made;
  }

  /** Puts these children in place of all that the element has. */
  function replaceChildren(parent, ...children) {
    parent.replaceChildren(...flat(children));
  }

  function fill(made, properties, children) {
    for (const [name, value] of Object.entries(properties || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name === "on") {
        for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
      } else if (name === "data") {
        for (const [key, text] of Object.entries(value)) made.dataset[key] = String(text);
      } else if (name === "style") {
        for (const [key, text] of Object.entries(value)) made.style.setProperty(key, text);
      } else if (name === "class") {
        made.setAttribute("class", value);
      } else if (name === "value" || name === "checked" || name === "selected") {
        made[name] = value;
      } else {
        made.setAttribute(name, value === true ? "" : String(value));
      }
    }
    made.append(...flat(children));
  }

  function flat(children) {
    return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false)
      .map((child) => (typeof child === "number" ? String(child) : child));
  }

  return { element, drawing, replaceChildren };
})();
