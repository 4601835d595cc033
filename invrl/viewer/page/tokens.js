// The exact tokens of a turn, coloured by a number of theirs; the one under the cursor tells all of its numbers.
"use strict";
invrl.tokens = (() => {
  const { element, replaceChildren } = invrl.element;
  const { get, pathOf } = invrl.api;
  const { number } = invrl.format;
  const { signColour, amountColour, kindColour } = invrl.colour;
  const { copyButton } = invrl.copy;
  const { failure, loading } = invrl.notice;

  const COLOURS = [
    ["logprob", "engine log-prob"],
    ["advantage", "advantage"],
    ["gap", "engine–trainer gap"],
    ["version", "weight version"],
    ["trained", "trained or masked"],
  ];
  const AT_ONCE = 5000;
  const UNLIKELY = 4; // Nats below which a token is coloured fully: the same in every rollout, to compare them.

  /** Where the tokens of a turn stand. `colour` is a name of COLOURS or "number:NAME". */
  function tokenView(run, turn, colour, signal) {
    const place = element("div", { class: "tokens-place" }, loading("Reading tokens…"));
    get(`runs/${pathOf(run.id)}/turns/${pathOf(turn.id)}/tokens`, {}, signal).then(
      (answer) => replaceChildren(place, tokensOf(answer, colour)),
      (error) => {
        if (error.name !== "AbortError") replaceChildren(place, failure(error));
      },
    );
    return place;
  }

  function tokensOf(answer, colour) {
    const { context, sampled } = answer;
    const scale = scaleOf(sampled, colour);
    const detail = element("div", { class: "token-detail", "aria-live": "polite" }, "Point at a token, or focus one and use ← →.");
    const left = context.total - context.ids.length;
    const contextText = context.ids.map((id, at) => tokenSpan({ id, text: textOf(context, at), index: (context.start || 0) + at, isContext: true }));
    const stream = element("div", { class: "tokens sampled", role: "listbox", "aria-label": "Sampled tokens", "aria-orientation": "horizontal" });
    const more = element("button", { class: "button small" }, "");
    let shown = 0;
    const showMore = () => {
      const end = Math.min(sampled.ids.length, shown + AT_ONCE);
      for (let at = shown; at < end; at += 1) stream.append(sampledSpan(sampled, at, scale));
      shown = end;
      more.hidden = shown >= sampled.ids.length;
      more.textContent = `Show ${number(Math.min(AT_ONCE, sampled.ids.length - shown))} more tokens`;
    };
    more.addEventListener("click", showMore);
    showMore();
    stream.firstElementChild?.setAttribute("tabindex", "0");

    const tell = (target) => {
      const span = target.closest?.("[data-at]");
      if (span) replaceChildren(detail, detailOf(sampled, Number(span.dataset.at), context.total));
    };
    stream.addEventListener("mouseover", (event) => tell(event.target));
    stream.addEventListener("focusin", (event) => tell(event.target));
    stream.addEventListener("click", (event) => event.target.closest?.("[data-at]")?.focus());
    stream.addEventListener("keydown", (event) => {
      const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity }[event.key];
      const span = event.target.closest("[data-at]");
      if (!steps || !span) return;
      event.preventDefault();
      const at = Math.min(shown - 1, Math.max(0, Number(span.dataset.at) + steps));
      span.setAttribute("tabindex", "-1");
      const next = stream.children[at];
      next.setAttribute("tabindex", "0");
      next.focus();
    });
    return [
      (answer.notes || []).map((note) => element("p", { class: "quiet" }, note)),
      legendOf(scale),
      element("details", { class: "context" },
        element("summary", {}, `${number(context.total)} tokens of context`),
        left > 0 ? element("p", { class: "quiet" }, `The first ${number(left)} are left out.`) : null,
        element("div", { class: "tokens" }, contextText)),
      sampled.ids.length ? stream : element("p", { class: "quiet" }, "No token was sampled."),
      more,
      detail,
      element("p", { class: "row" },
        copyButton("Copy sampled ids", () => JSON.stringify(sampled.ids)),
        copyButton("Copy context ids", () => JSON.stringify(context.ids)),
        copyButton("Copy log-probs", () => JSON.stringify(sampled.logprobs))),
    ];
  }

  function textOf(part, at) {
    return part.texts ? part.texts[at] : null;
  }

  function sampledSpan(sampled, at, scale) {
    const span = tokenSpan({ id: sampled.ids[at], text: textOf(sampled, at), index: at, isContext: false });
    span.dataset.at = String(at);
    span.setAttribute("tabindex", "-1");
    span.setAttribute("role", "option");
    span.style.setProperty("background-color", scale.colour(at));
    if (sampled.trained && !sampled.trained[at]) span.classList.add("masked");
    return span;
  }

  function tokenSpan({ id, text, index, isContext }) {
    const shown = text === null || text === undefined ? `${id} ` : text.replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t");
    return element("span", { class: "token", title: isContext ? `${index}: id ${id}` : null }, shown === "" ? "∅" : shown);
  }

  function valuesOf(sampled, colour) {
    if (colour === "advantage") return sampled.advantages;
    if (colour === "logprob") return sampled.logprobs;
    if (colour === "version") return sampled.versions;
    if (colour === "trained") return sampled.trained;
    if (colour === "gap") return sampled.trainer_logprobs ? sampled.trainer_logprobs.map((theirs, at) => (theirs === null || sampled.logprobs[at] === null ? null : sampled.logprobs[at] - theirs)) : null;
    return (sampled.numbers || {})[colour.replace(/^number:/, "")] || null;
  }

  /** {colour(at), items: [{colour, text}], missing} of the sampled tokens. */
  function scaleOf(sampled, colour) {
    const values = valuesOf(sampled, colour);
    const title = (COLOURS.find(([name]) => name === colour) || [colour, colour.replace(/^number:/, "")])[1];
    if (!values) return { colour: () => "transparent", items: [], title, missing: `This run did not record the ${title} of these tokens.` };
    if (colour === "version") {
      const versions = [...new Set(values)].sort((a, b) => a - b);
      const tint = (version) => `${kindColour(versions.indexOf(version))}55`;
      return { title, colour: (at) => tint(values[at]), items: versions.map((version) => ({ colour: tint(version), text: `version ${version}` })) };
    }
    if (colour === "trained") {
      const tint = (is) => (is ? "rgba(0, 114, 178, 0.30)" : "rgba(127, 127, 127, 0.20)");
      return { title, colour: (at) => tint(values[at]), items: [{ colour: tint(true), text: `trained (${number(values.filter(Boolean).length)})` }, { colour: tint(false), text: `masked (${number(values.filter((is) => !is).length)})` }] };
    }
    const known = values.filter((value) => value !== null && value !== undefined);
    if (colour === "logprob") {
      return { title, colour: (at) => (values[at] === null ? "transparent" : amountColour(-values[at], 0, UNLIKELY)), items: [0, -1, -2, -4].map((value) => ({ colour: amountColour(-value, 0, UNLIKELY), text: number(value) })), note: "strong: the engine found it unlikely" };
    }
    const limit = known.slice(0, 20000).reduce((most, value) => Math.max(most, Math.abs(value)), 0);
    return { title, colour: (at) => signColour(values[at], limit), items: [-limit, -limit / 2, 0, limit / 2, limit].map((value) => ({ colour: signColour(value, limit), text: number(value, 4) })) };
  }

  function legendOf(scale) {
    if (scale.missing) return element("p", { class: "quiet" }, scale.missing);
    return element("ul", { class: "legend", "aria-label": `Colours: ${scale.title}` },
      element("li", {}, scale.title),
      scale.items.map((item) => element("li", {}, element("span", { class: "swatch big", style: { "background-color": item.colour } }), item.text)),
      scale.note ? element("li", { class: "quiet" }, scale.note) : null);
  }

  function detailOf(sampled, at, before) {
    const theirs = sampled.trainer_logprobs ? sampled.trainer_logprobs[at] : null;
    const facts = [
      ["token", JSON.stringify(textOf(sampled, at) ?? "–")],
      ["id", sampled.ids[at]],
      ["place", `${at} (${before + at} in all)`],
      ["engine log-prob", sampled.logprobs[at] === null ? "–" : `${number(sampled.logprobs[at], 4)} (p ${number(Math.exp(sampled.logprobs[at]), 3)})`],
      ["trainer log-prob", theirs === null || theirs === undefined ? "–" : number(theirs, 4)],
      ["gap", theirs === null || theirs === undefined ? "–" : number(sampled.logprobs[at] - theirs, 5)],
      ["advantage", sampled.advantages ? number(sampled.advantages[at], 4) : "–"],
      ["version", sampled.versions[at]],
      ["trained", sampled.trained ? (sampled.trained[at] ? "yes" : "masked") : "not recorded"],
      ...Object.entries(sampled.numbers || {}).map(([name, values]) => [name, number(values[at], 4)]),
    ];
    return element("dl", {}, facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, String(value)))));
  }

  return { COLOURS, tokenView };
})();
