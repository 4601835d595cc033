// What stands where there are no data: loading, nothing there, an error with what to do about it.
"use strict";
invrl.notice = (() => {
  const { element, replaceChildren } = invrl.element;
  const { ApiError } = invrl.api;

  function loading(text = "Loading…") {
    return element("p", { class: "notice quiet", role: "status" }, text);
  }

  function empty(text, hint = "") {
    return element("div", { class: "notice" }, element("p", {}, text), hint ? element("p", { class: "quiet" }, hint) : null);
  }

  function failure(error) {
    const fix = error instanceof ApiError ? error.fix : "Reload the page. If it stays, this is a fault of invrl.";
    return element(
      "div",
      { class: "notice error", role: "alert" },
      element("p", {}, error.message || String(error)),
      fix ? element("p", { class: "quiet" }, fix) : null,
    );
  }

  /** Fills a place with what a promise gives; an aborted one leaves it as it is. */
  async function fillFrom(place, work) {
    try {
      replaceChildren(place, await work());
    } catch (error) {
      if (error.name !== "AbortError") replaceChildren(place, failure(error));
    }
  }

  return { loading, empty, failure, fillFrom };
})();
