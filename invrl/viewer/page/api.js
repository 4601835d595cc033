// What the server answers, or what an export wrote beside the page: the same values by the same paths.
"use strict";
invrl.api = (() => {
  const written = new Map();
  const loads = new Map();

  /** An error with what the reader can do about it. */
  class ApiError extends Error {
    constructor(message, fix = "", status = 0) {
      super(message);
      this.fix = fix;
      this.status = status;
    }
  }

  /** True where the page was written by `--export` and has no server. */
  function isExport() {
    return Boolean(window.invrlExport);
  }

  /**
   * The value at a path ("runs", "runs/RUN/steps"), with query parameters; an array repeats its parameter.
   * An export has one value for each path; the parameters are then the caller's to apply.
   */
  async function get(path, parameters = {}, signal = undefined) {
    if (isExport()) return fromScript(path);
    const query = new URLSearchParams();
    for (const [name, value] of Object.entries(parameters)) {
      for (const part of Array.isArray(value) ? value : [value]) {
        if (part !== null && part !== undefined && part !== "") query.append(name, String(part));
      }
    }
    const text = query.toString();
    let answer;
    try {
      answer = await fetch(`api/${path}${text ? `?${text}` : ""}`, { signal, credentials: "same-origin" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server does not answer.", "Is `invrl view` still running? Start it again and use its new URL.");
    }
    let value = null;
    try {
      value = await answer.json();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(`The server answered ${answer.status} without data.`, "", answer.status);
    }
    if (!answer.ok) {
      const told = value && value.error ? value.error : {};
      throw new ApiError(told.message || `The server answered ${answer.status}.`, told.fix || "", answer.status);
    }
    return value;
  }

  /** The path of a value: each segment escaped, as the server and the export name it. */
  function pathOf(...segments) {
    return segments.map((segment) => encodeURIComponent(segment)).join("/");
  }

  window.invrlData = (path, value) => written.set(path, value);

  /** Each file is loaded once, however many ask for it. */
  function fromScript(escaped) {
    const path = escaped.split("/").map(decodeURIComponent).join("/");
    if (!loads.has(path)) loads.set(path, load(path));
    return loads.get(path);
  }

  /** Frees what an export's file held; asked for again, it is read again. */
  function forget(escaped) {
    const path = escaped.split("/").map(decodeURIComponent).join("/");
    written.delete(path);
    loads.delete(path);
  }

  async function load(path) {
    const file = (window.invrlExport.files || {})[path];
    if (!file) {
      throw new ApiError("This is not in this export.", "Export more rollouts (`--export-rollouts N`), or use `invrl view` on the run.", 404);
    }
    await new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = file;
      script.onload = () => {
        script.remove();
        resolve();
      };
      script.onerror = () => reject(new ApiError(`${file} of this export is missing.`, "Copy the export's whole folder, or export again."));
      document.head.append(script);
    });
    if (!written.has(path)) throw new ApiError(`${file} of this export is damaged.`, "Export again.");
    return written.get(path);
  }

  return { ApiError, isExport, get, forget, pathOf };
})();
