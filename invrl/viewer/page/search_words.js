// The search of an export in what was said: it reads the words that were written beside the page, file by file.
"use strict";
invrl.said = (() => {
  const { get, forget, pathOf } = invrl.api;

  const KEPT_FILES = 64; // About a million characters each; of more than these none stays in memory.
  let last = { key: "", found: null };

  /** {ids, rollouts}: the sessions with a turn that has all of `text`, and of how many rollouts the words are here. */
  function matchingRollouts(run, text, signal) {
    const key = JSON.stringify([run.id, text]);
    if (last.key !== key || !last.found) {
      const found = search(run, termsOf(text), signal);
      last = { key, found };
      found.catch(() => {
        if (last.found === found) last = { key: "", found: null };
      });
    }
    return last.found;
  }

  async function search(run, terms, signal) {
    const path = `runs/${pathOf(run.id)}/said`;
    let about = null;
    try {
      about = await get(path);
    } catch (error) {
      if (error.status === 404) return { ids: new Set(), rollouts: 0 }; // the run has no store
      throw error;
    }
    const ids = new Set();
    for (let file = 0; file < about.files && terms.length; file += 1) {
      if (signal && signal.aborted) throw new DOMException("Another search began.", "AbortError");
      window.dispatchEvent(new CustomEvent("searching", { detail: { done: file, all: about.files } }));
      const name = `${path}/${file}`;
      for (const [session, turns] of await get(name)) {
        if (turns.some((words) => terms.every((term) => words.includes(term)))) ids.add(session);
      }
      if (about.files > KEPT_FILES) forget(name);
    }
    return { ids, rollouts: about.rollouts };
  }

  /** Words as parts of " all words ": a word is a beginning, a single letter and a "quoted phrase" are whole. */
  function termsOf(text) {
    return text.split('"').flatMap((part, at) => {
      if (at % 2 === 1) return [wordsOf(part)];
      return part.split(/\s+/).map((word) => {
        const words = wordsOf(word);
        return [...word].length === 1 ? words : words.slice(0, -1);
      });
    }).filter((term) => term.trim());
  }

  /** As `search_words` of search_words.py writes them. */
  function wordsOf(text) {
    const words = text.toLowerCase().normalize("NFD").replace(/\p{Mn}/gu, "").match(/[\p{L}\p{N}]+/gu);
    return words ? ` ${words.join(" ")} ` : "";
  }

  return { matchingRollouts };
})();
