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

export * from "./format.js";
export { download } from "./components.js";
