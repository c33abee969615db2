// Labelling of the selected rows, one at a time, with buttons, keys or a number field. Each label is sent immediately.

import { requestJson, ServiceError } from "./api.js";
import { fill, h, notice, number } from "./dom.js";

const MAX_BUTTONS = 30; // with more classes there is a text field

/** Create the controls that label `rows`; null without previews. `onlabel()` is called after each change. */
export function labelling({ model, output, rows, preview, pool, onlabel }) {
  const hasIds = rows.some((row) => row.id !== String(row.index)); // otherwise an ID is only a position in the pool
  const queue = rows.filter((row) => preview.contents?.has(row.index));
  if (!queue.length || !preview.input) return null;
  const labels = new Map(); // by row, in the order of labelling
  const skipped = new Set();
  let current = null, isSending = false;

  const head = h("p", { class: "labelling-head", role: "status" });
  const bar = h("progress", { max: queue.length, value: 0, "aria-label": "Labelled rows" });
  const place = h("div", { class: "labelling-row" });
  const trouble = h("div");
  const choices = labelChoices(output, addLabel);
  const undo = h("button", { type: "button", onclick: undoLabel }, "Undo ", h("kbd", {}, "←"));
  const skip = h("button", { type: "button", onclick: skipRow }, "Skip ", h("kbd", {}, "→"));
  const revisit = h("button", { type: "button", onclick: () => { skipped.clear(); next(); } }, "Show skipped rows");
  const element = h("section", { class: "labelling", "aria-label": "Label a row", tabindex: -1, onkeydown }, head, bar, place, choices.element, trouble, h("p", { class: "actions" }, undo, skip, revisit));
  next();
  return { element, focus: () => element.focus({ preventScroll: true }) };

  function next(row = queue.find((candidate) => !labels.has(candidate) && !skipped.has(candidate)) ?? null) {
    current = row;
    bar.value = labels.size;
    fill(head, current ? h("strong", {}, `Row ${queue.indexOf(current) + 1} of ${number(queue.length)}`) : h("strong", {}, labels.size < queue.length ? "No more rows" : "All rows are labelled"),
      h("span", { class: "quiet" }, `${number(labels.size)} labelled${skipped.size ? `, ${number(skipped.size)} skipped` : ""}`));
    fill(place, current && enlarge(preview, current), current && hasIds ? h("p", { class: "quiet" }, current.id) : null);
    choices.element.hidden = !current;
    skip.hidden = !current;
    undo.disabled = labels.size === 0;
    revisit.hidden = current !== null || skipped.size === 0;
    choices.show(labels.get(current));
  }

  async function addLabel(value) {
    const row = current;
    await send(async () => {
      const input = pool.isStored ? {} : { input: await preview.input(row.index) };
      const entry = { id: getId(row, input.input), [output.classes ? "label" : "target"]: value, ...input };
      await requestJson("labels", { method: "POST", json: { model, labels: [entry], replace: true } });
      labels.set(row, value);
      row.labelId = entry.id;
      next();
    });
  }

  async function undoLabel() {
    const [row] = [...labels.keys()].slice(-1);
    if (!row) return;
    await send(async () => {
      await requestJson("labels/delete", { method: "POST", json: { model, ids: [row.labelId] } });
      labels.delete(row);
      next(row);
    });
  }

  /** Send one change at a time, so that labels arrive in order. */
  async function send(change) {
    if (isSending) return;
    isSending = true;
    try {
      await change();
      fill(trouble);
      onlabel();
    } catch (error) {
      if (!(error instanceof ServiceError)) throw error;
      fill(trouble, notice(error.message));
    } finally {
      isSending = false;
    }
  }

  function skipRow() {
    skipped.add(current);
    next();
  }

  function onkeydown(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
    if (event.key === "ArrowLeft") undoLabel();
    else if (event.key === "ArrowRight" && current) skipRow();
    else if (current && choices.byKey.has(event.key.toLowerCase())) addLabel(choices.byKey.get(event.key.toLowerCase()));
    else return;
    event.preventDefault();
  }

  function getId(row, input) {
    return hasIds || pool.isStored ? row.id : `row-${hash(JSON.stringify(input))}`;
  }
}

/** Create a button with a key for each class, or a field. */
function labelChoices({ classes, target }, addLabel) {
  if (classes && classes.length <= MAX_BUTTONS) {
    const areKeys = classes.every((name) => [...name].length === 1); // digits and letters are their own keys
    const keys = classes.map((name, i) => (areKeys ? name.toLowerCase() : i < 9 ? String(i + 1) : null));
    const buttons = classes.map((name, i) => h("button", { type: "button", onclick: () => addLabel(name) }, keys[i] && !areKeys ? h("kbd", {}, keys[i]) : null, h("span", {}, name)));
    return {
      element: h("div", { class: "classes", role: "group", "aria-label": "Classes" }, buttons),
      byKey: new Map(keys.map((key, i) => [key, classes[i]]).filter(([key]) => key)),
      show: (value) => buttons.forEach((button, i) => button.classList.toggle("was", classes[i] === value)),
    };
  }
  const field = h("input", classes ? { type: "text", list: "label-classes", spellcheck: "false" } : { type: "number", step: "any" });
  field.id = "label-value";
  const form = h("form", { class: "actions", novalidate: true, onsubmit: (event) => { event.preventDefault(); if (field.value !== "") addLabel(classes ? field.value : Number(field.value)); } },
    h("label", { for: field.id }, classes ? "Class" : target ?? "Target"), field, classes ? h("datalist", { id: "label-classes" }, classes.map((name) => h("option", { value: name }))) : null, h("button", { type: "submit", class: "main" }, "Label"));
  return { element: form, byKey: new Map(), show: (value) => (field.value = value ?? "") };
}

/** Show a row large enough to label it. */
function enlarge({ kind, contents, names }, row) {
  const content = contents.get(row.index);
  if (kind === "texts") return h("blockquote", {}, content);
  if (kind === "columns") return h("dl", { class: "facts" }, names.map((name, i) => [h("dt", {}, name), h("dd", {}, content[i])]));
  const copy = content.cloneNode();
  if (content instanceof HTMLCanvasElement) copy.getContext("2d").drawImage(content, 0, 0);
  return copy;
}

/** Hash a row without an ID to 53 bits, so that equal rows get the same ID (cyrb53). */
function hash(text) {
  let a = 0xdeadbeef, b = 0x41c6ce57;
  for (let i = 0; i < text.length; i++) {
    const letter = text.charCodeAt(i);
    a = Math.imul(a ^ letter, 2654435761);
    b = Math.imul(b ^ letter, 1597334677);
  }
  a = Math.imul(a ^ (a >>> 16), 2246822507) ^ Math.imul(b ^ (b >>> 13), 3266489909);
  b = Math.imul(b ^ (b >>> 16), 2246822507) ^ Math.imul(a ^ (a >>> 13), 3266489909);
  return (4294967296 * (2097151 & b) + (a >>> 0)).toString(36);
}
