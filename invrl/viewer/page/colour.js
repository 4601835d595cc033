// Scales that people with any colour vision can read: Okabe and Ito's palette for kinds, blue to orange for signs.
"use strict";
invrl.colour = (() => {
  const KINDS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f", "#8c6d31"];

  function kindColour(index) {
    return KINDS[((index % KINDS.length) + KINDS.length) % KINDS.length];
  }

  /** The line of the kind: dashed from where colours repeat. */
  function kindLine(index) {
    return { colour: kindColour(index), dash: index >= KINDS.length ? [4, 3] : undefined };
  }

  /** Of a number between −limit and limit: orange below 0, blue above, clear at 0. */
  function signColour(value, limit) {
    if (value === null || value === undefined || Number.isNaN(value)) return "transparent";
    const strength = Math.min(1, Math.abs(value) / (limit || 1));
    const mixed = (0.08 + 0.62 * strength).toFixed(3);
    if (value === 0) return "transparent";
    return value > 0 ? `rgba(0, 114, 178, ${mixed})` : `rgba(213, 94, 0, ${mixed})`;
  }

  /** Of a number between low and high: clear at low, strong at high. */
  function amountColour(value, low, high) {
    if (value === null || value === undefined || Number.isNaN(value)) return "transparent";
    const share = high > low ? Math.min(1, Math.max(0, (value - low) / (high - low))) : 0;
    return `rgba(213, 94, 0, ${(0.7 * share).toFixed(3)})`;
  }

  return { KINDS, kindColour, kindLine, signColour, amountColour };
})();
