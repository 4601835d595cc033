// The name that all files of the page share, and the chosen theme before anything is drawn.
"use strict";
window.invrl = {};
(() => {
  let theme = "";
  try {
    theme = window.localStorage.getItem("invrl-theme") || "";
  } catch (error) {
    theme = ""; // Storage is closed to pages opened from disk in some browsers.
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
