// Numbers, times and texts as the pages show them. A missing value is a dash.
"use strict";
invrl.format = (() => {
  const DASH = "–";

  function number(value, digits = 3) {
    if (value === null || value === undefined || Number.isNaN(value)) return DASH;
    if (typeof value !== "number") return String(value);
    if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
    if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en-US").replace("-", "−");
    const size = Math.abs(value);
    if (size >= 1e6 || size < 1e-4) return value.toExponential(2).replace("-", "−").replace("e−", "e-");
    const precision = size < 0.01 ? { maximumSignificantDigits: 2 } : { maximumFractionDigits: size >= 100 ? 1 : digits };
    return value.toLocaleString("en-US", precision).replace("-", "−");
  }

  function percent(value) {
    return value === null || value === undefined ? DASH : `${number(value * 100, 1)} %`;
  }

  /** Seconds as "850 ms", "12.3 s", "4 min 05 s", "3 h 20 min". */
  function duration(seconds) {
    if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return DASH;
    if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
    if (seconds < 60) return `${seconds.toFixed(1)} s`;
    if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${String(Math.floor(seconds % 60)).padStart(2, "0")} s`;
    return `${Math.floor(seconds / 3600)} h ${String(Math.floor((seconds % 3600) / 60)).padStart(2, "0")} min`;
  }

  /** A Unix time in the reader's zone. */
  function clock(time) {
    if (!time) return DASH;
    const date = new Date(time * 1000);
    const two = (part) => String(part).padStart(2, "0");
    return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  }

  /** The same without the year, for narrow columns. */
  function shortClock(time) {
    return time ? clock(time).slice(5) : DASH;
  }

  function bytes(size) {
    if (size === null || size === undefined) return DASH;
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    let left = size;
    while (Math.abs(left) >= 1024 && unit < units.length - 1) {
      left /= 1024;
      unit += 1;
    }
    return `${number(left, 1)} ${units[unit]}`;
  }

  /** At most `length` characters, on one line. */
  function short(text, length = 80) {
    const line = String(text ?? "").replace(/\s+/g, " ").trim();
    return line.length <= length ? line : `${line.slice(0, length - 1)}…`;
  }

  /** A value of any kind as text for reading. */
  function plain(value) {
    if (value === null || value === undefined || value === "") return DASH;
    if (typeof value === "number") return number(value);
    if (typeof value === "object") return JSON.stringify(value);
    return String(value);
  }

  return { shortClock, number, percent, duration, clock, bytes, short, plain };
})();
