// Where the reader is: a page and its parameters, all of it in the URL's hash, so that every state can be shared.
"use strict";
invrl.route = (() => {
  const listeners = new Set();

  /** {page: "rollouts", parts: [...], parameters: URLSearchParams} of the hash. */
  function currentRoute() {
    const hash = window.location.hash.replace(/^#\/?/, "");
    const [path, query] = splitOnce(hash, "?");
    const parts = path.split("/").map(decode);
    return { page: parts[0] || "overview", parts: parts.slice(1), parameters: new URLSearchParams(query) };
  }

  /** The hash of a page. Parameters that are null, undefined or "" are left out. */
  function link(page, parts = [], parameters = {}) {
    const query = new URLSearchParams();
    for (const [name, value] of Object.entries(parameters)) {
      if (value !== null && value !== undefined && value !== "") query.set(name, String(value));
    }
    const path = [page, ...parts.map((part) => encodeURIComponent(part))].join("/");
    const text = query.toString();
    return `#/${path}${text ? `?${text}` : ""}`;
  }

  /** Goes to another page; the browser's back button returns. */
  function go(hash) {
    if (hash !== window.location.hash) window.location.hash = hash;
  }

  /** The same page with some parameters changed. `push` makes a new entry of the history. */
  function change(parameters, push = false) {
    const route = currentRoute();
    const merged = Object.fromEntries(route.parameters);
    const hash = link(route.page, route.parts, { ...merged, ...parameters });
    if (hash === window.location.hash) return;
    if (push) {
      window.location.hash = hash;
      return;
    }
    try {
      window.history.replaceState(null, "", hash);
    } catch (error) {
      window.location.replace(hash); // Pages opened from disk, in some browsers. The event follows by itself.
      return;
    }
    listeners.forEach((listener) => listener());
  }

  function onRoute(listener) {
    listeners.add(listener);
  }

  window.addEventListener("hashchange", () => listeners.forEach((listener) => listener()));

  function splitOnce(text, separator) {
    const at = text.indexOf(separator);
    return at < 0 ? [text, ""] : [text.slice(0, at), text.slice(at + 1)];
  }

  function decode(text) {
    try {
      return decodeURIComponent(text);
    } catch (error) {
      return text; // A hand-written % that is no escape.
    }
  }

  return { currentRoute, link, go, change, onRoute };
})();
