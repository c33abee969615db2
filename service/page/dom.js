// Elements, made of what they hold. Text is always text: nothing that the service or a file says becomes markup.

/** Make an element: attributes, listeners (`onclick: f`), and children, which may be elements, text, lists or null. */
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

/** Put children into an element in place of what is there. */
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

/** Hand over files that are dropped on an element, or pasted anywhere while it is shown. */
export function whenGiven(element, take) {
  element.addEventListener("dragover", (event) => event.preventDefault());
  element.addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer.files.length) take(event.dataTransfer.files);
  });
  document.addEventListener("paste", function pasted(event) {
    if (!element.isConnected) document.removeEventListener("paste", pasted); // its view was left
    else if (element.checkVisibility() && event.clipboardData.files.length) {
      event.preventDefault();
      take(event.clipboardData.files);
    }
  });
}

let made = 0;

/** A label and its control, which belong together for screen readers too. */
export function field(text, control, hint = null) {
  control.id ||= `control-${++made}`;
  const told = hint === null ? null : h("span", { class: "quiet", id: `${control.id}-hint` }, hint);
  if (told) control.setAttribute("aria-describedby", told.id);
  return h("p", { class: "field" }, h("label", { for: control.id }, text), control, told);
}

/** A slider whose value is shown next to it; `write` makes the value of its position, `read` the reverse. */
export function slider(text, { min, max, step, value, write = (x) => x, say = String, onchange }) {
  const shown = h("output", {}, say(write(value)));
  const control = h("input", { type: "range", min, max, step, value, "aria-valuetext": say(write(value)) });
  control.addEventListener("input", () => {
    const now = say(write(Number(control.value)));
    shown.textContent = now;
    control.setAttribute("aria-valuetext", now);
    onchange();
  });
  control.id = `control-${++made}`;
  shown.htmlFor = control.id;
  const row = h("p", { class: "field slider" }, h("label", { for: control.id }, text), control, shown);
  return {
    element: row,
    get value() {
      return write(Number(control.value));
    },
    set position(position) {
      control.value = position;
      shown.textContent = say(write(Number(control.value)));
      control.setAttribute("aria-valuetext", shown.textContent);
    },
  };
}

/** Tabs: one of several panels is shown. `panels` are [name, element]; arrow keys move between them. */
export function tabs(label, panels, onchange = () => {}) {
  const bar = h("div", { role: "tablist", "aria-label": label, class: "tabs" });
  const buttons = panels.map(([name, panel], i) => {
    panel.id ||= `panel-${++made}`;
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
  let chosen = -1;
  function choose(index) {
    if (index === chosen) return;
    chosen = index;
    panels.forEach(([, panel], i) => {
      panel.hidden = i !== index;
      buttons[i].setAttribute("aria-selected", String(i === index));
      buttons[i].tabIndex = i === index ? 0 : -1;
    });
    onchange(index);
  }
  choose(0);
  const element = h("div", {}, panels.length > 1 ? bar : null, panels.map(([, panel]) => panel));
  return { element, choose, get chosen() { return chosen; } };
}

/** A table with a head; cells may be text or elements. Numbers are aligned where `numeric` names their columns. */
export function table(caption, heads, rows, numeric = []) {
  const of = (tag, i, cell) => h(tag, { class: numeric.includes(i) ? "number" : null }, cell);
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h(
      "table",
      {},
      h("caption", {}, caption),
      h("thead", {}, h("tr", {}, heads.map((head, i) => h("th", { scope: "col", class: numeric.includes(i) ? "number" : null }, head)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, i) => of("td", i, cell))))),
    ),
  );
}

/** A notice of what went wrong, or of what one should know; screen readers say it at once. */
export function notice(text, kind = "bad") {
  return h("p", { class: `notice ${kind}`, role: kind === "bad" ? "alert" : "status" }, text);
}

/** What a view shows while there is no model: how one comes, and a look whether it has come. */
export function unpublished(title, { models }) {
  return [
    h("h1", {}, title),
    h("section", { class: "card" },
      h("h2", {}, models.length ? "No model can be served" : "No model is published yet"),
      models.length ? h("p", {}, h("a", { href: "#/models" }, "Models"), " says what is wrong with those that are published.")
        : [h("p", {}, "Fit one on a table of your own, or on the handwritten digits that come along:"), h("pre", {}, "dubito fit --data csv:FILE --target COLUMN\ndubito fit recipes/digits.toml")],
      h("p", { class: "actions" }, h("button", { type: "button", class: "main", onclick: () => dispatchEvent(new HashChangeEvent("hashchange")) }, "Look again"))),
  ];
}

/** Offer bytes or text as a file. */
export function download(name, content, type) {
  const link = h("a", { href: URL.createObjectURL(new Blob([content], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** A number as people read it: about three digits, 1,234 and 0.0012, never 1.2e-3 unless it is very small. */
export function number(x, digits = 3) {
  if (x === null || x === undefined) return "–";
  if (typeof x === "string") return x; // as orjson never writes, but a file may
  if (x !== 0 && Math.abs(x) < 1e-4) return x.toExponential(1);
  return x.toLocaleString("en", Math.abs(x) >= 1000 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: digits });
}

/** A share as a percentage, with as many digits as tell it from 0 and 100: 95 %, 99.4 %, 99.97 %. */
export function percent(x) {
  if (x === null || x === undefined) return "–";
  const value = 100 * x;
  for (const digits of [0, 1, 2, 3]) {
    const text = value.toFixed(digits);
    if (Math.abs(Number(text) - value) <= 0.05 * Math.min(value, 100 - value) + 1e-9) return `${text} %`;
  }
  return x < 0.5 ? "< 0.001 %" : "> 99.999 %";
}

/** A time in seconds as people read it. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${number(1000 * seconds, 2)} ms`;
  if (seconds < 90) return `${number(seconds, 2)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${number(seconds / 3600, 2)} h`;
}

/** A size in bytes as people read it. */
export function bytes(size) {
  if (size === null || size === undefined) return "–";
  const power = size < 1000 ? 0 : Math.min(4, Math.floor(Math.log10(size) / 3));
  return `${number(size / 1000 ** power)} ${["bytes", "kB", "MB", "GB", "TB"][power]}`;
}

/** A moment, of ISO 8601 or in seconds since 1970, as the reader's clock has it: 2026-11-22 16:51. */
export function moment(time) {
  if (time === null || time === undefined) return "–";
  const date = new Date(typeof time === "number" ? 1000 * time : time);
  if (Number.isNaN(date.getTime())) return String(time);
  const two = (x) => String(x).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}`;
}
