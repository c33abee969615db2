// Helpers that build elements. Text stays text: nothing from the service or from a file becomes markup.

/** Create an element with attributes, listeners (`onclick: f`) and children (elements, text, lists or null). */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  add(element, children);
  return element;
}

/** Replace the children of an element. */
export function fill(element, ...children) {
  element.replaceChildren();
  add(element, children);
  return element;
}

function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
}

/** Call `handle` with files dropped on an element, or pasted anywhere while it is visible. */
export function onFiles(element, handle) {
  element.addEventListener("dragover", (event) => event.preventDefault());
  element.addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer.files.length) handle(event.dataTransfer.files);
  });
  document.addEventListener("paste", function onPaste(event) {
    if (!element.isConnected) document.removeEventListener("paste", onPaste);
    else if (element.checkVisibility() && event.clipboardData.files.length) {
      event.preventDefault();
      handle(event.clipboardData.files);
    }
  });
}

let idCount = 0;

/** Create a labelled control with an optional hint, linked for screen readers. */
export function field(text, control, hint = null) {
  control.id ||= `control-${++idCount}`;
  const description = hint === null ? null : h("span", { class: "quiet", id: `${control.id}-hint` }, hint);
  if (description) control.setAttribute("aria-describedby", description.id);
  return h("p", { class: "field" }, h("label", { for: control.id }, text), control, description);
}

/** Create a slider with its value next to it; `toValue` maps its position to the value. */
export function slider(text, { min, max, step, value, toValue = (x) => x, format = String, onchange }) {
  const output = h("output");
  const control = h("input", { type: "range", min, max, step, value });
  const update = () => {
    output.textContent = format(toValue(Number(control.value)));
    control.setAttribute("aria-valuetext", output.textContent);
  };
  update();
  control.addEventListener("input", () => {
    update();
    onchange();
  });
  control.id = `control-${++idCount}`;
  output.htmlFor = control.id;
  return {
    element: h("p", { class: "field slider" }, h("label", { for: control.id }, text), control, output),
    get value() {
      return toValue(Number(control.value));
    },
    set position(position) {
      control.value = position;
      update();
    },
  };
}

/** Create tabs from `panels`, [name, element]; arrow keys move between them. */
export function tabs(label, panels, onchange = () => {}) {
  const bar = h("div", { role: "tablist", "aria-label": label, class: "tabs" });
  const buttons = panels.map(([name, panel], i) => {
    panel.id ||= `panel-${++idCount}`;
    panel.setAttribute("role", "tabpanel");
    const button = h("button", { type: "button", role: "tab", id: `${panel.id}-tab`, "aria-controls": panel.id }, name);
    panel.setAttribute("aria-labelledby", button.id);
    button.addEventListener("click", () => choose(i));
    button.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) {
        choose((i + step + panels.length) % panels.length);
        buttons[(i + step + panels.length) % panels.length].focus();
      }
    });
    bar.append(button);
    return button;
  });
  let selected = -1;
  function choose(index) {
    if (index === selected) return;
    selected = index;
    panels.forEach(([, panel], i) => {
      panel.hidden = i !== index;
      buttons[i].setAttribute("aria-selected", String(i === index));
      buttons[i].tabIndex = i === index ? 0 : -1;
    });
    onchange(index);
  }
  choose(0);
  const element = h("div", {}, panels.length > 1 ? bar : null, panels.map(([, panel]) => panel));
  return { element, choose, get selected() { return selected; } };
}

/** Create a table; cells are text or elements, and `numeric` lists the columns to align as numbers. */
export function table(caption, heads, rows, numeric = []) {
  const alignment = (i) => (numeric.includes(i) ? "number" : null);
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h(
      "table",
      {},
      h("caption", {}, caption),
      h("thead", {}, h("tr", {}, heads.map((head, i) => h("th", { scope: "col", class: alignment(i) }, head)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, i) => h("td", { class: alignment(i) }, cell))))),
    ),
  );
}

/** Create a notice, which screen readers announce. */
export function notice(text, kind = "bad") {
  return h("p", { class: `notice ${kind}`, role: kind === "bad" ? "alert" : "status" }, text);
}

/** Show a view's content while no model can be served. */
export function noModel(title, { models }) {
  return [
    h("h1", {}, title),
    h("section", { class: "card" },
      h("h2", {}, models.length ? "No model can be served" : "No model is published yet"),
      models.length ? h("p", {}, h("a", { href: "#/models" }, "Models"), " explains why the published models cannot be served.")
        : [h("p", {}, "Fit one on your own table, or on the bundled handwritten digits:"), h("pre", {}, "dubito fit --data csv:FILE --target COLUMN\ndubito fit recipes/digits.toml")],
      h("p", { class: "actions" }, h("button", { type: "button", class: "main", onclick: () => dispatchEvent(new HashChangeEvent("hashchange")) }, "Check again"))),
  ];
}

/** Save bytes or text as a file. */
export function download(name, content, type) {
  const link = h("a", { href: URL.createObjectURL(new Blob([content], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Format a number with about three digits: 1,234 or 0.0012, with an exponent only below 0.0001. */
export function number(x, digits = 3) {
  if (x === null || x === undefined) return "–";
  if (typeof x === "string") return x; // a report file may hold "NaN"
  if (x !== 0 && Math.abs(x) < 1e-4) return x.toExponential(1);
  return x.toLocaleString("en", Math.abs(x) >= 1000 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: digits });
}

/** Format a share as a percentage, with enough digits to tell it from 0 and 100: 95 %, 99.4 %, 99.97 %. */
export function percent(x) {
  if (x === null || x === undefined) return "–";
  const value = 100 * x;
  for (const digits of [0, 1, 2, 3]) {
    const text = value.toFixed(digits);
    if (Math.abs(Number(text) - value) <= 0.05 * Math.min(value, 100 - value) + 1e-9) return `${text} %`;
  }
  return x < 0.5 ? "< 0.001 %" : "> 99.999 %";
}

/** Format a duration in seconds. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${number(1000 * seconds, 2)} ms`;
  if (seconds < 90) return `${number(seconds, 2)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${number(seconds / 3600, 2)} h`;
}

/** Format a size in bytes. */
export function bytes(size) {
  if (size === null || size === undefined) return "–";
  const power = size < 1000 ? 0 : Math.min(4, Math.floor(Math.log10(size) / 3));
  return `${number(size / 1000 ** power)} ${["bytes", "kB", "MB", "GB", "TB"][power]}`;
}

/** Format a time (ISO 8601 or seconds since 1970) in the reader's time zone: 2026-11-22 16:51. */
export function moment(time) {
  if (time === null || time === undefined) return "–";
  const date = new Date(typeof time === "number" ? 1000 * time : time);
  if (Number.isNaN(date.getTime())) return String(time);
  const two = (x) => String(x).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}`;
}
