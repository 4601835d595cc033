// News of running runs by server-sent events. Pages ask again for what they show; a page that ends stops listening.
"use strict";
invrl.events = (() => {
  const { isExport } = invrl.api;

  const listeners = new Set();
  const states = new Set();
  let source = null;

  /** Calls back with {run, kinds, step} until the signal is aborted. Calls come at most twice a second. */
  function onNews(listener, signal) {
    let timer = 0;
    const pending = new Map();
    const later = (news) => {
      const kinds = pending.get(news.run) || new Set();
      (news.kinds || []).forEach((kind) => kinds.add(kind));
      pending.set(news.run, kinds);
      if (timer) return;
      timer = window.setTimeout(() => {
        timer = 0;
        for (const [run, all] of pending) listener({ run, kinds: [...all] });
        pending.clear();
      }, 500);
    };
    listeners.add(later);
    signal.addEventListener("abort", () => {
      listeners.delete(later);
      window.clearTimeout(timer);
    });
  }

  /** Calls back with "live", "lost" or "export" whenever the connection changes. */
  function onConnection(listener) {
    states.add(listener);
  }

  function connect() {
    if (isExport()) {
      states.forEach((listener) => listener("export"));
      return;
    }
    source = new EventSource("api/events");
    source.onopen = () => states.forEach((listener) => listener("live"));
    source.onerror = () => states.forEach((listener) => listener("lost"));
    source.addEventListener("change", (event) => {
      try {
        const news = JSON.parse(event.data);
        listeners.forEach((listener) => listener(news));
      } catch (error) {
        // A torn event says nothing; the next one comes.
      }
    });
  }

  return { onNews, onConnection, connect };
})();
