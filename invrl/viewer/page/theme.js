// Light, dark, or as the system says; kept for the next visit where the browser allows it.
"use strict";
invrl.theme = (() => {
  const ORDER = ["", "light", "dark"];
  const NAMES = { "": "System", light: "Light", dark: "Dark" };

  function themeName() {
    return NAMES[document.documentElement.dataset.theme || ""];
  }

  function isDark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : window.matchMedia("(prefers-color-scheme: dark)").matches;
  }

  function nextTheme() {
    const now = document.documentElement.dataset.theme || "";
    const next = ORDER[(ORDER.indexOf(now) + 1) % ORDER.length];
    if (next) document.documentElement.dataset.theme = next;
    else delete document.documentElement.dataset.theme;
    try {
      window.localStorage.setItem("invrl-theme", next);
    } catch (error) {
      // The choice lasts for this page only.
    }
    window.dispatchEvent(new Event("themechange"));
  }

  /** Calls back when the colours change, until the signal is aborted. */
  function onTheme(listener, signal) {
    window.addEventListener("themechange", listener, { signal });
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", listener, { signal });
  }

  return { themeName, isDark, nextTheme, onTheme };
})();
